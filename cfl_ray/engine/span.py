"""An exact shortcut for full-batch training of networks that begin with a linear layer.

The gradient of the first layer's weights is dZ^T X, with the client's n inputs X (n, D) and dZ (n, H) the gradient at the layer's
outputs. So whatever the number of steps, the weights stay in the span of the start, the anchors of proximal terms and X:

    W = sum_j a_j W_j + C^T X           W_0 the start, W_j the anchors; C (n, H)
    Z = sum_j a_j (X W_j^T) + (X X^T) C

Only the scalars a and C change from step to step; X W_j^T and the Gram matrix X X^T are made once. With n much smaller than D a
step then costs H n^2 instead of H n D, and the weights are touched once instead of in every step. Equal to `sequential` up to
rounding; momentum, weight decay and proximal terms are linear in the same terms.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cfl_ray.engine import sequential
from cfl_ray.engine.network import Network
from cfl_ray.engine.task import Task, Trained

_MOST = 0.5  # of n / D up to which the shortcut can pay


def first_linear(network: Network) -> int | None:
    """Position of the linear layer that sees the flattened input, in a Sequential; None where the network does not begin with one."""
    if not isinstance(network.module, nn.Sequential) or network.dropouts or not all(p.requires_grad for p in network.module.parameters()):
        return None
    for position, layer in enumerate(network.module):
        if isinstance(layer, nn.Linear):
            return position
        if not isinstance(layer, nn.Flatten):
            return None
    return None


def applies(network: Network, task: Task) -> bool:
    """Whether this task is full-batch, with few enough samples, on a network that begins with a linear layer."""
    batch = task.local.batch_size or len(task.y)
    inputs = task.x[0].numel()
    if task.rule is not None or task.local.persist or any(pull.follow for pull in task.pulls):
        return False
    return batch >= len(task.y) and len(task.y) <= _MOST * inputs and task.steps > 1 and first_linear(network) is not None


def train_one(engine: str, network: Network, task: Task) -> Trained:
    """Trains one client: by the shortcut where `engine` is "span" and it applies, else by the definition."""
    train_tasks = train if engine == "span" and applies(network, task) else sequential.train
    return next(train_tasks(network, [task]))


def train(network: Network, tasks: Sequence[Task]) -> Iterator[Trained]:
    """Trains each task in turn. Every one of them must satisfy `applies`."""
    for index, task in enumerate(tasks):
        offset_BC = sequential.offsets(network, task)
        network.load(task.start_P)
        loss = _train_loaded(network, task, offset_BC)
        yield Trained(index, network.row(), loss)


class _Span:
    """The first layer's weights of one client, as coefficients of what they are a combination of."""

    def __init__(self, x: Tensor, start: Tensor, anchors: list[tuple[Tensor, float]]):
        self.x, self.start, self.anchors = x, start, anchors
        self.outputs = [x @ weight.T for weight in (start, *(anchor for anchor, _ in anchors))]
        self.gram = x @ x.T
        self.share = torch.tensor([1.0] + [0.0] * len(anchors), device=x.device)  # a
        self.inner = torch.zeros_like(self.outputs[0])  # C

    def z(self) -> Tensor:
        """The layer's outputs (n, H) without bias, a leaf for autograd."""
        z = torch.addmm(self.outputs[0] * self.share[0], self.gram, self.inner)
        for amount, output in zip(self.share[1:], self.outputs[1:]):
            z.add_(output * amount)
        return z.requires_grad_(True)

    def gradient(self, grad_z: Tensor, weight_decay: float) -> list[Tensor]:
        """Gradient as coefficients, like `share` and `inner`, with weight decay and the proximal terms."""
        decay = weight_decay + sum(weight for _, weight in self.anchors)
        share = self.share * decay
        for number, (_, weight) in enumerate(self.anchors, 1):
            share[number] -= weight
        return [share, torch.add(grad_z, self.inner, alpha=decay)]

    def weight(self) -> Tensor:
        """The weights (H, D) themselves."""
        weight = torch.addmm(self.start * self.share[0], self.inner.T, self.x)
        for amount, (anchor, _) in zip(self.share[1:], self.anchors):
            weight.add_(anchor * amount)
        return weight


def _train_loaded(network: Network, task: Task, offset_BC: Tensor | None) -> float:
    """SGD on the loaded row. Returns the loss of the last step, which is the last epoch."""
    position = first_linear(network)
    linear, rest = network.module[position], network.module[position + 1 :]
    network.module.train()
    first = network.params.index(linear.weight)
    x, y = task.x.to(network.device).flatten(1), task.y.to(network.device)
    pulls = [sequential.ProximalTerm(network, pull) for pull in task.pulls]
    with torch.no_grad():
        span = _Span(x, linear.weight, [(pull.anchor_of(first), pull.weight) for pull in pulls if first in pull.inside])
    others = [p for index, p in enumerate(network.params) if index != first]
    update = sequential.Update(task.local)
    for _ in range(task.steps):
        with torch.no_grad():
            z = span.z()
        logits_BC = rest(z if linear.bias is None else z + linear.bias)
        loss = cross_entropy(logits_BC if offset_BC is None else logits_BC + offset_BC, y)
        grad_z, *step = torch.autograd.grad(loss, [z, *others], materialize_grads=True)
        with torch.no_grad():
            step.insert(first, torch.zeros(()))  # the place of the first layer's weights, whose step is in the span
            update.decay(step, network.params, leave_out=first)
            for pull in pulls:
                pull.add_to(step, leave_out=first)
            del step[first]
            update.apply([span.share, span.inner, *others], [*span.gradient(grad_z, task.local.weight_decay), *step])
    with torch.no_grad():
        linear.weight.copy_(span.weight())
    return loss.item()
