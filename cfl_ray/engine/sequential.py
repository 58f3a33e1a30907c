"""The sequential engine: one client after another.

It is the definition of local training; the tests compare the other engines with it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from cfl_ray.core.local_sgd import LocalSGD, LocalStep
from cfl_ray.engine.task import BatchIndex, ProximalTask, TrainingResult, TrainingTask
from cfl_ray.nn.network import Network


def why_not(network: Network, tasks: Sequence[TrainingTask]) -> str | None:
    """None: it trains every network."""
    return None


def train(network: Network, tasks: Iterable[TrainingTask]) -> Iterator[TrainingResult]:
    """Trains each task in turn, from its own start."""
    for index, task in enumerate(tasks):
        frozen_BC = frozen_logits(network, task)
        network.load(task.start_P)
        proximal = [ProximalGradient(network, term) for term in task.proximal]
        update: LocalUpdate
        if task.local.optimizer is None:
            update = SGDUpdate(task.local, _initial_velocity(network, task))
        else:
            update = OptimizerUpdate(task.local, network.params)
        loss = _train_loaded(network, task, update, proximal, frozen_BC)
        row_P, velocity = network.row(), None
        anchor_P = next((term.moved(row_P) for term in proximal if term.term.follow), None)
        if task.local.persist and isinstance(update, SGDUpdate) and update.velocity is not None:
            velocity = torch.cat([v.reshape(-1) for v in update.velocity])
        yield TrainingResult(index, row_P, loss, anchor_P, velocity)


def frozen_logits(network: Network, task: TrainingTask) -> Tensor | None:
    """Logits (n, C) of the frozen model, which do not change during training; None without one."""
    return None if task.frozen_P is None else network.logits_of(task.frozen_P, task.x)


def _initial_velocity(network: Network, task: TrainingTask) -> list[Tensor] | None:
    """The stored momentum buffer, tensor by tensor; None without one."""
    if task.velocity is None:
        return None
    return [v.clone() for v in network.views(task.velocity.to(network.device))]


def _train_loaded(
    network: Network,
    task: TrainingTask,
    update: "LocalUpdate",
    proximal: list["ProximalGradient"],
    frozen_BC: Tensor | None,
) -> float:
    """Local steps on the loaded row. Returns the mean loss over the last local epoch."""
    params = network.params
    gradient = _Gradient(network, task, frozen_BC)
    network.module.train()
    batches = task.batches_on(network.device)
    for number in range(task.steps):
        gradient.begin([next(batches) for _ in range(task.batches_per_step)])
        step = gradient.of_batch(0) if task.local_step is None else gradient.direction_of(task.local_step)
        with torch.no_grad():
            if task.local.clips:  # decay is part of the optimiser's step, and proximal terms of the gradient
                for term in proximal:
                    term.add_to(step)
                clip_(step, task.local)
                update.decay(step, params)
            else:
                update.decay(step, params)
                for term in proximal:
                    term.add_to(step)
            update.apply(params, step, task.local.lr_at(number, task.steps))
            for term in proximal:
                if term.term.moves_after(number, task.steps):
                    term.move()
    return torch.stack(gradient.losses[-task.tail :]).mean().item()


class _Gradient:
    """Gradients of one client's loss on the batches of the current step."""

    def __init__(self, network: Network, task: TrainingTask, frozen_BC: Tensor | None):
        self.network, self.frozen_BC = network, frozen_BC
        self.x, self.y = network.input(task.x), task.y.to(network.device)
        self.noise = task.noise() if network.dropouts or network.random_forward else None
        self.losses: list[Tensor] = []  # one per step
        self.batches: list[BatchIndex] = []  # of the current step
        self.masks: dict[int, list[Tensor]] = {}  # dropout masks of the current step, by batch and layer
        self.seeds: dict[int, int] = {}  # seeds of further random draws in the current step, by batch

    def begin(self, batches: list[BatchIndex]) -> None:
        """Begins a step that uses these batches."""
        self.batches, self.masks, self.seeds = batches, {}, {}

    def of_batch(self, batch: int) -> list[Tensor]:
        """Gradient at the loaded row, tensor by tensor, on one batch of the step."""
        index_B = self.batches[batch]
        x_B, y_B, frozen_BC = self.x, self.y, self.frozen_BC
        if index_B is not None:
            x_B, y_B = x_B[index_B], y_B[index_B]
            frozen_BC = None if frozen_BC is None else frozen_BC[index_B]
        if self.noise is not None:
            self._set_dropout_masks(batch, len(y_B), self.noise)
        draws = self.network.draws_from(self._seed(batch)) if self.network.random_forward else nullcontext()
        with draws, self.network.autocast():
            logits_BC = self.network.module(x_B).float()
        loss = self.network.task.mean_loss(logits_BC if frozen_BC is None else logits_BC + frozen_BC, y_B)
        grads = list(torch.autograd.grad(loss, self.network.params, materialize_grads=True))
        self.losses.append(loss.detach())
        return grads

    def _set_dropout_masks(self, batch: int, size: int, generator: torch.Generator) -> None:
        """Sets the masks of this batch: the same in all its gradients of a step, so that these are of one function."""
        layers = self.network.dropouts.values()
        if batch not in self.masks:
            self.network.draw_dropout_masks(size, generator)
            self.masks[batch] = [layer.mask for layer in layers]
        for layer, mask in zip(layers, self.masks[batch], strict=True):
            layer.mask = mask

    def _seed(self, batch: int) -> int:
        """Seed of the forward passes on this batch: as with masks, the same in all its gradients of a step."""
        if batch not in self.seeds:
            self.seeds[batch] = int(torch.randint(2**62, (), generator=self.noise))
        return self.seeds[batch]

    def direction_of(self, local_step: LocalStep) -> list[Tensor]:
        """The direction of a local step, tensor by tensor. The loss of the step is that of its first gradient."""
        w, past = self.network.row()[: self.network.spec.trained].clone(), len(self.losses)

        def gradient(row: Tensor, batch: int) -> Tensor:
            self.network.load_trained(row)
            return torch.cat([g.reshape(-1) for g in self.of_batch(batch)])

        direction = local_step(gradient, w)
        del self.losses[past + 1 :]
        self.network.load_trained(w)
        return self.network.views(direction)


def clip_(step: list[Tensor], local: LocalSGD) -> None:
    """Scales a gradient down to `local.clip_norm`, in place, as `torch.nn.utils.clip_grad_norm_` does."""
    assert local.clip_norm is not None
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in step]))
    torch._foreach_mul_(step, (local.clip_norm / (norm + 1e-6)).clamp(max=1.0))


class LocalUpdate(Protocol):
    """The steps of a local optimiser."""

    def decay(self, step: list[Tensor], params: list[Tensor]) -> None:
        """Adds weight decay to the gradients, in place."""

    def apply(self, params: list[Tensor], step: list[Tensor], lr: float) -> None:
        """Moves the parameters, in place."""


class OptimizerUpdate:
    """Steps of a `torch.optim` optimiser on these parameters. Weight decay is among its own options."""

    def __init__(self, local: LocalSGD, params: list[Tensor]):
        assert local.optimizer is not None
        self.optimizer = local.optimizer(params, local.lr)

    def decay(self, step: list[Tensor], params: list[Tensor]) -> None:
        """No effect."""

    def apply(self, params: list[Tensor], step: list[Tensor], lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(params, step, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for parameter in params:
            parameter.grad = None


class SGDUpdate:
    """SGD with momentum and weight decay over lists of tensors, as `torch.optim.SGD` computes it.

    velocity: initial momentum buffer; None: an empty one.
    """

    def __init__(self, local: LocalSGD, velocity: list[Tensor] | None = None):
        self.local, self.velocity = local, velocity

    def decay(self, step: list[Tensor], params: list[Tensor], skip: int | None = None) -> None:
        """Adds weight decay to the gradients, in place, except to that of tensor `skip`."""
        if self.local.weight_decay:
            chosen = [index for index in range(len(params)) if index != skip]
            torch._foreach_add_([step[i] for i in chosen], [params[i] for i in chosen], alpha=self.local.weight_decay)

    def apply(self, params: list[Tensor], step: list[Tensor], lr: float | None = None) -> None:
        """Moves the parameters, in place. lr: None for that of `local`."""
        if self.local.momentum:
            if self.velocity is None:
                self.velocity = step
            else:
                torch._foreach_mul_(self.velocity, self.local.momentum)
                torch._foreach_add_(self.velocity, step)
            step = self.velocity
        torch._foreach_add_(params, step, alpha=-(self.local.lr if lr is None else lr))


class ProximalGradient:
    """Gradient of (weight / 2) ||w - anchor||^2, tensor by tensor."""

    def __init__(self, network: Network, term: ProximalTask):
        self.term, self.weight = term, term.weight
        self.inside, self.trained = network.tensors_in(term.columns), network.spec.trained  # indices of tensors
        self.params = [network.params[i].detach() for i in self.inside]
        self.anchor_P = term.anchor_P.to(network.device, copy=term.follow > 0)
        self.anchors = network.views(self.anchor_P, term.columns)

    def anchor_of(self, tensor: int) -> Tensor:
        """The part of the anchor that belongs to this tensor."""
        return self.anchors[self.inside.index(tensor)]

    def add_to(self, step: list[Tensor], skip: int | None = None) -> None:
        """Adds the gradient to `step`, in place, except to that of tensor `skip`."""
        chosen = [at for at, tensor in enumerate(self.inside) if tensor != skip]
        parts = [step[self.inside[at]] for at in chosen]
        torch._foreach_add_(parts, [self.params[at] for at in chosen], alpha=self.weight)
        torch._foreach_sub_(parts, [self.anchors[at] for at in chosen], alpha=self.weight)

    def move(self) -> None:
        """Moves the anchor: anchor <- anchor - follow * weight * (anchor - w)."""
        torch._foreach_lerp_(self.anchors, self.params, self.term.follow * self.weight)

    def moved(self, row_P: Tensor) -> Tensor:
        """The present anchor (P,), with the buffers of `row_P`."""
        return torch.cat([self.anchor_P[: self.trained], row_P[self.trained :]])
