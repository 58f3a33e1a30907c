"""Plain PyTorch loops for turns: as it is, with `torch.compile` of the module, and of the whole step.

The whole step is a function of (parameters, batch): forward pass, loss, gradients by `torch.func` and the update. The
compiler makes a program for each size of a batch, since one for all sizes is slower.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from benchmarks.peers.bare import load, mean_loss, module_of, train_client
from benchmarks.peers.turns import Model, NextRound, run
from benchmarks.workloads import Workload, samples_by_client

# trains a client from the parameters of the module, and leaves the result there
Client = Callable[[Tensor, Tensor], None]


def plain(module: nn.Module, work: Workload) -> Client:
    """The loop of `benchmarks.peers.bare`."""
    params = list(module.parameters())
    return lambda x, y: train_client(module, params, x, y, work)


def compiled_module(module: nn.Module, work: Workload) -> Client:
    """The same loop with a compiled module."""
    return plain(torch.compile(module, dynamic=False), work)


def compiled_step(module: nn.Module, work: Workload) -> Client:
    """A loop over compiled steps."""

    def loss(params: dict[str, Tensor], x_B: Tensor, y_B: Tensor) -> Tensor:
        return mean_loss(functional_call(module, params, (x_B,)), y_B)

    @partial(torch.compile, dynamic=False)
    def step(params: dict[str, Tensor], x_B: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        grads = grad(loss)(params, x_B, y_B)
        return {name: p - work.lr * grads[name] for name, p in params.items()}

    @torch.no_grad()
    def client(x: Tensor, y: Tensor) -> None:
        params = {name: p.detach().clone() for name, p in module.named_parameters()}
        for _ in range(work.epochs):
            order = torch.randperm(len(y)) if work.shuffle else torch.arange(len(y))
            for batch_B in order.split(work.batch or len(y)):
                params = step(params, x[batch_B], y[batch_B])
        load(list(module.parameters()), list(params.values()))

    return client


def train(make: Callable[[nn.Module, Workload], Client], work: Workload, first: Model, next_round: NextRound) -> Model:
    torch.set_num_threads(1)
    x, y = (torch.from_numpy(array) for array in samples_by_client(work))
    module = module_of(work)
    params = dict(module.named_parameters())
    start, client = [torch.from_numpy(first[name]) for name in params], make(module, work)
    while next_round():
        totals = [torch.zeros_like(value) for value in start]
        for x_i, y_i in zip(x, y, strict=True):
            load(list(params.values()), start)
            client(x_i, y_i)
            for total, p in zip(totals, params.values(), strict=True):
                total += p.detach()
        start = [total / work.clients for total in totals]
    return {name: value.numpy() for name, value in zip(params, start, strict=True)}


if __name__ == "__main__":
    loops = {"plain": plain, "compiled_module": compiled_module, "compiled_step": compiled_step}
    run({name: partial(train, make) for name, make in loops.items()}, ["torch", "numpy"])
