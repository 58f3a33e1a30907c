"""One client after another: the definition of local training, against which every faster way is tested."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cfl_ray.core.local import LocalSGD
from cfl_ray.engine.network import Network
from cfl_ray.engine.task import Pulled, Task, Trained


def train(network: Network, tasks: Sequence[Task]) -> Iterator[Trained]:
    """Trains each task in turn, from its own start."""
    for index, task in enumerate(tasks):
        network.load(task.start_P)
        loss = _train_loaded(network, task)
        yield Trained(index, network.row(), loss)


def _train_loaded(network: Network, task: Task) -> float:
    """SGD on the loaded row. Returns the mean loss over the last local epoch."""
    params, update = network.params, Update(task.local)
    x, y = network.input(task.x), task.y.to(network.device)
    pulls = [ProximalTerm(network, pull) for pull in task.pulls]
    noise = task.noise() if network.dropouts else None
    losses = []
    network.module.train()
    for batch in task.batches():
        x_B, y_B = (x, y) if batch is None else (x[batch], y[batch])
        if noise is not None:
            network.set_noise(len(y_B), noise)
        loss = cross_entropy(network.module(x_B), y_B)
        step = list(torch.autograd.grad(loss, params, materialize_grads=True))
        losses.append(loss.detach())
        with torch.no_grad():
            update.decay(step, params)
            for pull in pulls:
                pull.add_to(step)
            update.apply(params, step)
    return torch.stack(losses[-task.tail :]).mean().item()


class Update:
    """SGD with momentum and weight decay, from a fresh momentum buffer: PyTorch's rule, over lists of tensors."""

    def __init__(self, local: LocalSGD):
        self.local = local
        self.velocity: list[Tensor] | None = None

    def decay(self, step: list[Tensor], params: list[Tensor], leave_out: int | None = None) -> None:
        """Adds weight decay to the gradients, in place; not to that of tensor `leave_out`."""
        if self.local.weight_decay:
            kept = [index for index in range(len(params)) if index != leave_out]
            torch._foreach_add_([step[i] for i in kept], [params[i] for i in kept], alpha=self.local.weight_decay)

    def apply(self, params: list[Tensor], step: list[Tensor]) -> None:
        """Moves the parameters, in place."""
        if self.local.momentum:
            if self.velocity is None:
                self.velocity = step
            else:
                torch._foreach_mul_(self.velocity, self.local.momentum)
                torch._foreach_add_(self.velocity, step)
            step = self.velocity
        torch._foreach_add_(params, step, alpha=-self.local.lr)


class ProximalTerm:
    """Gradient of (weight / 2) * ||w - anchor||^2, tensor by tensor."""

    def __init__(self, network: Network, pull: Pulled):
        self.weight = pull.weight
        self.inside = network.tensors_in(pull.columns)
        self.params = [network.params[i].detach() for i in self.inside]
        self.anchors = network.views(pull.anchor_P.to(network.device), pull.columns)

    def anchor_of(self, tensor: int) -> Tensor:
        return self.anchors[self.inside.index(tensor)]

    def add_to(self, step: list[Tensor], leave_out: int | None = None) -> None:
        """Adds the gradient to `step`, in place; not to that of tensor `leave_out`."""
        kept = [at for at, tensor in enumerate(self.inside) if tensor != leave_out]
        mine = [step[self.inside[at]] for at in kept]
        torch._foreach_add_(mine, [self.params[at] for at in kept], alpha=self.weight)
        torch._foreach_sub_(mine, [self.anchors[at] for at in kept], alpha=self.weight)
