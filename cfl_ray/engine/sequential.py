"""One client after another: the definition of local training, against which every faster way is tested."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cfl_ray.engine.network import Network
from cfl_ray.engine.task import Task, Trained


def train(network: Network, tasks: Sequence[Task], relay: bool = False) -> Iterator[Trained]:
    """Trains each task in turn; with `relay`, every task but the first starts from the result before it."""
    for index, task in enumerate(tasks):
        if not (relay and index):
            network.load(task.start_P)
        loss = _train_loaded(network, task)
        yield Trained(index, network.flat, loss)


def _train_loaded(network: Network, task: Task) -> float:
    """SGD on the loaded row. Returns the mean loss over the last local epoch."""
    local, params = task.local, network.params
    x, y = network.input(task.x), task.y.to(network.device)
    pulls = [_Pull(network, pull) for pull in task.pulls]
    noise = task.noise() if network.dropouts else None
    velocity: list[Tensor] | None = None
    losses = []
    network.module.train()
    for batch in task.batches():
        x_B, y_B = (x, y) if batch is None else (x[batch], y[batch])
        if noise is not None:
            network.set_noise(len(y_B), noise)
        loss = cross_entropy(network.module(x_B), y_B)
        step = list(torch.autograd.grad(loss, params))
        losses.append(loss.detach())
        with torch.no_grad():
            if local.weight_decay:
                torch._foreach_add_(step, params, alpha=local.weight_decay)
            for pull in pulls:
                pull.add_to(step)
            if local.momentum:
                if velocity is None:
                    velocity = step
                else:
                    torch._foreach_mul_(velocity, local.momentum)
                    torch._foreach_add_(velocity, step)
                step = velocity
            torch._foreach_add_(params, step, alpha=-local.lr)
    return torch.stack(losses[-task.tail :]).mean().item()


class _Pull:
    """Gradient of one proximal term, tensor by tensor."""

    def __init__(self, network: Network, pull):
        self.weight = pull.weight
        self.inside = network.tensors_in(pull.columns)
        self.params = [network.params[i].detach() for i in self.inside]
        self.anchors = network.views(pull.anchor_P.to(network.device), pull.columns)

    def add_to(self, step: list[Tensor]) -> None:
        mine = [step[i] for i in self.inside]
        torch._foreach_add_(mine, self.params, alpha=self.weight)
        torch._foreach_sub_(mine, self.anchors, alpha=self.weight)
