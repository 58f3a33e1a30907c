"""The sequential engine: one client after another.

It defines local training; tests compare the other engines with it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from cfl_ray.core.client_program import Batch, Forward
from cfl_ray.engine import rule
from cfl_ray.engine.engine import Engine
from cfl_ray.engine.example_gradients import ExampleGradient
from cfl_ray.engine.local_steps import (
    LocalGradient,
    LocalUpdate,
    OptimizerUpdate,
    ProximalGradient,
    SGDUpdate,
    forward_of,
    scalar_loss,
    take_steps,
)
from cfl_ray.engine.rows import padded
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.nn.network import Network
from cfl_ray.nn.outputs import outputs_of_row


def why_not(network: Network, tasks: Sequence[TrainingTask]) -> str | None:
    """None: this engine trains every network."""
    return None


def train(network: Network, tasks: Iterable[TrainingTask]) -> Iterator[TrainingResult]:
    """Trains each task in turn, from its own start."""
    for index, task in enumerate(tasks):
        frozen_BC = frozen_logits(network, task)
        network.load(task.start_P)
        network.module.train()
        kind = _Gradient if task.local.examples is None else ExampleGradient
        gradient, update = kind(network, task, frozen_BC), _update(network, task)
        proximal = [ProximalGradient.of_tensors(network, term, network.params) for term in task.held.proximal]
        take_steps(gradient, update, network.params, proximal)
        network.check_trained()
        loss, velocity = torch.stack(gradient.losses[-task.tail :]).mean().item(), None
        if task.local.persist and isinstance(update, SGDUpdate) and update.velocity is not None:
            velocity = torch.cat([v.reshape(-1) for v in update.velocity])
        yield gradient.result(index, network.row(), loss, proximal, velocity)


def frozen_logits(network: Network, task: TrainingTask) -> Tensor | None:
    """Logits (n, C) of the frozen model, which do not change during training; None without a frozen model."""
    frozen_P = task.held.frozen_P
    return None if frozen_P is None else outputs_of_row(network, frozen_P, task.x)


def padded_frozen_logits(network: Network, tasks: Sequence[TrainingTask]) -> Tensor | None:
    """Logits (m, n, C) of the frozen models of several clients on the device; None without frozen models."""
    logits = [logits_nC for task in tasks if (logits_nC := frozen_logits(network, task)) is not None]
    return padded(logits, network.device) if logits else None


def _update(network: Network, task: TrainingTask) -> LocalUpdate:
    if task.local.optimizer is not None:
        return OptimizerUpdate(task.local, network.params)
    velocity = task.held.velocity
    if velocity is None:
        return SGDUpdate(task.local)
    return SGDUpdate(task.local, [v.clone() for v in network.views(velocity.to(network.device))])


class _Gradient(LocalGradient):
    """Gradients by autograd at the loaded row, tensor by tensor."""

    def __init__(self, network: Network, task: TrainingTask, frozen_BC: Tensor | None):
        super().__init__(network, task)
        self.frozen_BC = frozen_BC
        self.x, self.y = network.input(task.x), task.y.to(network.device)
        self.weight_n = None if task.held.weight_n is None else task.held.weight_n.to(network.device)
        self.own_loss = task.program.overrides("loss")

    def of_batch(self, batch: int) -> list[Tensor]:
        index_B = self.batches[batch]
        x_B, y_B, frozen_BC = self.x, self.y, self.frozen_BC
        if index_B is not None:
            x_B, y_B = x_B[index_B], y_B[index_B]
            frozen_BC = None if frozen_BC is None else frozen_BC[index_B]
        for layer, mask in zip(self.network.dropouts.values(), self.masks(batch, len(y_B)), strict=True):
            layer.mask = mask
        kept: AbstractContextManager[list[Tensor]] = nullcontext([])
        if self.own_loss:
            kept = self.network.kept_features()
        with self.draws(batch), kept as features:
            logits_BC = self.network.trained_outputs(x_B)
        logits_BC = logits_BC if frozen_BC is None else logits_BC + frozen_BC
        if self.weight_n is None:
            loss = self.network.task.mean_loss(logits_BC, y_B)
        else:
            weight_B = self.weight_n if index_B is None else self.weight_n[index_B]
            loss = (self.network.task.loss(logits_BC, y_B) * weight_B).mean()
        if self.own_loss:
            real_B = torch.ones(len(y_B), device=y_B.device)

            def passed(model: str) -> Forward:
                return forward_of(self.network, self.whole(model), x_B, y_B)

            seen = Batch(loss, features[-1].float(), logits_BC, y_B, real_B, passed)
            loss = scalar_loss(self.task.program, seen, self.held)
        try:
            grads = list(torch.autograd.grad(loss, self.network.params, materialize_grads=True))
        except RuntimeError:
            self.network.check_trained()
            raise
        self.losses.append(loss.detach())
        return grads


ENGINE = Engine(why_not, train, rule.sequential)
