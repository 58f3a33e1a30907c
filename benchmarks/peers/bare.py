"""The bare PyTorch loop: one process of one thread per core, and nothing that the training does not need.

Each process keeps one module and the tensors of its clients in memory, trains with torch.optim.SGD without a DataLoader
and sums n_i * W_i; the parent averages. It has no evaluation, clusters, fault tolerance or tracking.
"""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.models import MODELS
from benchmarks.peers.common import CORES, Trained, run
from benchmarks.workloads import Workload, first_model, samples_of


def module_of(work: Workload) -> nn.Module:
    """A new module of the workload's model."""
    return MODELS[work.model](work.classes, **work.options)


@torch.no_grad()
def load(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies values into parameters."""
    for p, value in zip(params, values):
        p.copy_(value)


def mean_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean cross entropy of logits (B, C), or (B, T, C) for tokens (B, T)."""
    return cross_entropy(outputs.mT if y.ndim == 2 else outputs, y)


def train_client(module: nn.Module, params: list[nn.Parameter], x: Tensor, y: Tensor, work: Workload) -> None:
    """Local training of one client from the module's present parameters."""
    optimiser = torch.optim.SGD(params, lr=work.lr)
    batch = work.batch or len(y)
    for _ in range(work.epochs):
        order = torch.randperm(len(y), device=y.device) if work.shuffle and batch < len(y) else None
        for at in range(0, len(y), batch):
            batch_B = slice(at, at + batch) if order is None else order[at : at + batch]
            x_B, y_B = x[batch_B], y[batch_B]
            optimiser.zero_grad(set_to_none=True)
            mean_loss(module(x_B), y_B).backward()
            optimiser.step()


def _process(pipe: Connection, work: Workload, clients: range) -> None:
    """Trains `clients` from each model that arrives, and sends back the sum of n_i * W_i, until None arrives."""
    torch.set_num_threads(1)
    x, y, _ = samples_of(work)
    rows = slice(clients.start * work.samples, clients.stop * work.samples)
    x = torch.from_numpy(x[rows]).float().div_(255).split(work.samples)
    y = torch.from_numpy(y[rows]).split(work.samples)
    module = module_of(work)
    params = list(module.parameters())
    while (start := pipe.recv()) is not None:
        total = [torch.zeros_like(p) for p in params]
        for x_i, y_i in zip(x, y):
            load(params, start)
            train_client(module, params, x_i, y_i, work)
            with torch.no_grad():
                for accumulated, p in zip(total, params):
                    accumulated.add_(p, alpha=work.samples)
        pipe.send([t.detach() for t in total])


class Bare:
    """The bare loop, in one process per core."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.start = [torch.from_numpy(array) for array in first_model(work)]
        context = multiprocessing.get_context("spawn")
        cuts = np.linspace(0, work.clients, CORES + 1).astype(int)
        self.pipes, self.processes = [], []
        for begin, end in zip(cuts, cuts[1:]):
            pipe, worker_pipe = context.Pipe()
            process = context.Process(target=_process, args=(worker_pipe, work, range(begin, end)), daemon=True)
            process.start()
            self.pipes.append(pipe)
            self.processes.append(process)

    def round(self) -> float:
        """Runs one round and returns its seconds."""
        began = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(self.start)
        totals = [pipe.recv() for pipe in self.pipes]
        self.start = [sum(parts) / (self.work.clients * self.work.samples) for parts in zip(*totals)]
        return time.perf_counter() - began

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            pipe.send(None)
            process.join()


def train(work: Workload, rounds: int) -> Trained:
    bare = Bare(work)
    seconds = [bare.round() for _ in range(rounds)]
    bare.close()
    return Trained(seconds, [tensor.numpy() for tensor in bare.start])


if __name__ == "__main__":
    run("bare", train, ["torch", "numpy"])
