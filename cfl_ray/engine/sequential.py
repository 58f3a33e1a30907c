"""One client after another: the definition of local training, against which every faster way is tested."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cfl_ray.core.local import LocalSGD, Rule
from cfl_ray.engine.network import Network
from cfl_ray.engine.task import Pulled, Task, Trained


def train(network: Network, tasks: Sequence[Task]) -> Iterator[Trained]:
    """Trains each task in turn, from its own start."""
    for index, task in enumerate(tasks):
        offset_BC = offsets(network, task)
        network.load(task.start_P)
        pulls = [ProximalTerm(network, pull) for pull in task.pulls]
        update = Update(task.local, None if task.velocity is None else [v.clone() for v in network.views(task.velocity.to(network.device))])
        loss = _train_loaded(network, task, update, pulls, offset_BC)
        row_P = network.row()
        velocity = torch.cat([v.reshape(-1) for v in update.velocity]) if task.local.persist else None
        yield Trained(index, row_P, loss, next((pull.moved(row_P) for pull in pulls if pull.pull.follow), None), velocity)


def offsets(network: Network, task: Task) -> Tensor | None:
    """Logits (n, C) of the frozen model beside the trained one: they do not change during training."""
    return None if task.beside_P is None else network.logits_of(task.beside_P, task.x)


def _train_loaded(network: Network, task: Task, update: "Update", pulls: list["ProximalTerm"], offset_BC: Tensor | None) -> float:
    """SGD on the loaded row. Returns the mean loss over the last local epoch."""
    params = network.params
    gradient = _Gradient(network, task, offset_BC)
    network.module.train()
    batches = task.batches()
    for number in range(task.steps):
        gradient.begin([next(batches) for _ in range(task.parts)])
        step = gradient.tensors(0) if task.rule is None else gradient.by(task.rule)
        with torch.no_grad():
            update.decay(step, params)
            for pull in pulls:
                pull.add_to(step)
            update.apply(params, step)
            for pull in pulls:
                if pull.pull.moves_after(number, task.steps):
                    pull.move()
    return torch.stack(gradient.losses[-task.tail :]).mean().item()


class _Gradient:
    """Gradients of one client's loss on the batches of the present step."""

    def __init__(self, network: Network, task: Task, offset_BC: Tensor | None):
        self.network, self.offset_BC = network, offset_BC
        self.x, self.y = network.input(task.x), task.y.to(network.device)
        self.noise = task.noise() if network.dropouts else None
        self.losses: list[Tensor] = []  # one per step

    def begin(self, batches: list) -> None:
        """The next step uses these batches."""
        self.batches, self.masks = batches, {}

    def tensors(self, batch: int) -> list[Tensor]:
        """At the loaded row, tensor by tensor."""
        chosen = self.batches[batch]
        x_B, y_B, offset_BC = (v if chosen is None or v is None else v[chosen] for v in (self.x, self.y, self.offset_BC))
        if self.noise is not None:
            self._mask(batch, len(y_B))
        logits_BC = self.network.module(x_B)
        loss = cross_entropy(logits_BC if offset_BC is None else logits_BC + offset_BC, y_B)
        grads = list(torch.autograd.grad(loss, self.network.params, materialize_grads=True))
        self.losses.append(loss.detach())
        return grads

    def _mask(self, batch: int, size: int) -> None:
        """One dropout mask per batch and step: gradients of one batch at several points are of one function."""
        layers = self.network.dropouts.values()
        if batch not in self.masks:
            self.network.set_noise(size, self.noise)
            self.masks[batch] = [layer.mask for layer in layers]
        for layer, mask in zip(layers, self.masks[batch]):
            layer.mask = mask

    def by(self, rule: Rule) -> list[Tensor]:
        """The direction that a rule makes of them; the loss noted is that of its first gradient."""
        w, known = self.network.row()[: self.network.spec.trained].clone(), len(self.losses)

        def at(row: Tensor, batch: int) -> Tensor:
            self.network.load_trained(row)
            return torch.cat([g.reshape(-1) for g in self.tensors(batch)])

        direction = rule(at, w)
        del self.losses[known + 1 :]
        self.network.load_trained(w)
        return self.network.views(direction)


class Update:
    """SGD with momentum and weight decay, from a fresh momentum buffer or a given one: PyTorch's rule, over lists of tensors."""

    def __init__(self, local: LocalSGD, velocity: list[Tensor] | None = None):
        self.local, self.velocity = local, velocity

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
        self.pull, self.weight = pull, pull.weight
        self.inside, self.trained = network.tensors_in(pull.columns), network.spec.trained
        self.params = [network.params[i].detach() for i in self.inside]
        self.anchor_P = pull.anchor_P.to(network.device, copy=pull.follow > 0)
        self.anchors = network.views(self.anchor_P, pull.columns)

    def anchor_of(self, tensor: int) -> Tensor:
        return self.anchors[self.inside.index(tensor)]

    def add_to(self, step: list[Tensor], leave_out: int | None = None) -> None:
        """Adds the gradient to `step`, in place; not to that of tensor `leave_out`."""
        kept = [at for at, tensor in enumerate(self.inside) if tensor != leave_out]
        mine = [step[self.inside[at]] for at in kept]
        torch._foreach_add_(mine, [self.params[at] for at in kept], alpha=self.weight)
        torch._foreach_sub_(mine, [self.anchors[at] for at in kept], alpha=self.weight)

    def move(self) -> None:
        """anchor <- anchor - follow * weight * (anchor - w)."""
        torch._foreach_lerp_(self.anchors, self.params, self.pull.follow * self.weight)

    def moved(self, row_P: Tensor) -> Tensor:
        """The anchor as it is now, with the buffers of `row_P`."""
        return torch.cat([self.anchor_P[: self.trained], row_P[self.trained :]])
