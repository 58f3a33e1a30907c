"""The manual engine: mini-batch SGD with forward and backward passes written out (`nn.operations`), on a CPU.

Most of the time of a step on a small network is spent between the operations: PyTorch needs 3 to 8 microseconds per
call, records a graph, allocates, and updates one tensor after another. Here the network's operations, recorded once
(`nn.graph`), compute in NumPy on arrays that are allocated once, and the parameters and their gradients are two
flat rows, so that an update is one operation. One client is trained at a time, because the arrays of several would not
fit into the cache. The result equals that of `sequential` up to rounding.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.local_sgd import LocalStep
from cfl_ray.engine import sequential
from cfl_ray.engine.task import ProximalTask, TrainingResult, TrainingTask
from cfl_ray.nn.network import Network
from cfl_ray.nn.operations import Array
from cfl_ray.nn.passes import Passes, passes_of, why_no_passes

_MAX_BATCH = 256  # activations of larger batches leave the cache


def why_not(network: Network, tasks: Sequence[TrainingTask]) -> str | None:
    """Reason why this engine cannot train the network or, with tasks, these clients; None if it can."""
    if network.device.type != "cpu":
        return "it computes on a CPU only"
    if network.precision == "bf16":
        return "in bf16, PyTorch's autocast decides what is computed in which precision"
    for task in tasks:
        if min(int(task.local.batch_of(len(task.y), task.batches_per_step)), len(task.y)) > _MAX_BATCH:
            return f"a batch has more than {_MAX_BATCH} samples"
    return why_no_passes(network)


def train(network: Network, tasks: Iterable[TrainingTask]) -> Iterator[TrainingResult]:
    """Trains each task in turn, from its own start. `why_not` must be None for them."""
    for index, task in enumerate(tasks):
        frozen_BC = sequential.frozen_logits(network, task)
        passes = passes_of(network)
        with np.errstate(all="ignore"):  # the worker excludes updates that are not finite
            result = _train_one(network, passes, index, task, frozen_BC)
        yield result


def _train_one(
    network: Network, passes: Passes, index: int, task: TrainingTask, frozen_BC: Tensor | None
) -> TrainingResult:
    """Trains one client."""
    w_P = passes.w_P
    passes.row_P.copy_(task.start_P)
    gradient = _Gradient(network, passes, task, frozen_BC)
    proximal = [FlatProximalGradient(network, term) for term in task.proximal]
    velocity = torch.zeros_like(w_P) if task.velocity is None else task.velocity.clone()
    params, parts_of = [w_P], _whole
    update: sequential.LocalUpdate = sequential.SGDUpdate(task.local, [velocity])
    if task.local.optimizer is not None:
        if not task.local.optimizer.elementwise:  # it may treat each tensor by itself
            params, parts_of = network.views(w_P), network.views
        update = sequential.OptimizerUpdate(task.local, params)
    batches = task.batches()
    for number in range(task.steps):
        gradient.begin([next(batches) for _ in range(task.batches_per_step)])
        step_P = gradient.of_batch(0) if task.local_step is None else gradient.direction_of(task.local_step)
        step = parts_of(step_P)
        if task.local.clips:  # in the order of `sequential`
            for term in proximal:
                term.add_to(step_P, w_P)
            sequential.clip_(step, task.local)
            update.decay(step, params)
        else:
            update.decay(step, params)
            for term in proximal:
                term.add_to(step_P, w_P)
        update.apply(params, step, task.local.lr_at(number, task.steps))
        for term in proximal:
            if term.term.moves_after(number, task.steps):
                term.move(w_P)
    loss = float(np.mean(gradient.losses[-task.tail :]))
    anchor_P = next((term.moved(passes.row_P) for term in proximal if term.term.follow), None)
    persists = task.local.persist and task.local.momentum and task.local.optimizer is None
    return TrainingResult(index, passes.row_P, loss, anchor_P, velocity if persists else None)


def _whole(row_P: Tensor) -> list[Tensor]:
    return [row_P]


class FlatProximalGradient:
    """Gradient of (weight / 2) ||w - anchor||^2 on flat rows.

    first: first column of the rows that are passed; tensors before it are left out.
    """

    def __init__(self, network: Network, term: ProximalTask, first: int = 0):
        starts = (0, *network.spec.ends)
        self.term, self.weight, self.trained = term, term.weight, network.spec.trained
        self.anchor_P = (term.anchor_P.clone() if term.follow else term.anchor_P)[first:]
        self.ranges: list[slice] = []  # neighbouring tensors are joined
        for tensor in network.tensors_in(term.columns):
            start, stop = starts[tensor] - first, starts[tensor + 1] - first
            if start < 0:
                continue
            joined = self.ranges.pop().start if self.ranges and self.ranges[-1].stop == start else start
            self.ranges.append(slice(joined, stop))

    def add_to(self, step_P: Tensor, w_P: Tensor) -> None:
        """Adds the gradient to `step_P`, in place."""
        for part in self.ranges:
            step_P[part].add_(w_P[part], alpha=self.weight).sub_(self.anchor_P[part], alpha=self.weight)

    def moved(self, row_P: Tensor) -> Tensor:
        """The present anchor (P,), with the buffers of `row_P`."""
        return torch.cat([self.anchor_P[: self.trained], row_P[self.trained :]])

    def move(self, w_P: Tensor) -> None:
        """Moves the anchor: anchor <- anchor - follow * weight * (anchor - w)."""
        for part in self.ranges:
            self.anchor_P[part].lerp_(w_P[part], self.term.follow * self.weight)


class _Gradient:
    """Gradients of one client's loss on the batches of the current step."""

    def __init__(self, network: Network, passes: Passes, task: TrainingTask, frozen_BC: Tensor | None):
        self.network, self.passes = network, passes
        self.x, self.y = passes.arranged(task.x), task.y.numpy()
        self.frozen = None if frozen_BC is None else frozen_BC.numpy()
        self.noise = task.noise() if network.dropouts or network.random_forward else None
        self.losses: list[np.floating] = []  # one per step
        self.batches: list[Array | None] = []  # of the current step
        self.masks: dict[int, list[Array]] = {}  # dropout masks of the current step, by batch and layer
        self.seeds: dict[int, int] = {}  # seeds of further random draws in the current step, by batch

    def begin(self, batches: list[Array | None]) -> None:
        """Begins a step that uses these batches."""
        self.batches, self.masks, self.seeds = batches, {}, {}

    def of_batch(self, batch: int) -> Tensor:
        """Gradient (P,) at the present row on one batch of the step. The next gradient reuses its memory."""
        index_B = self.batches[batch]
        y_B = self.y if index_B is None else self.y[index_B]
        frozen_BC = self.frozen if index_B is None or self.frozen is None else self.frozen[index_B]
        if self.noise is not None and batch not in self.masks:  # the same in all gradients of a batch in a step
            draws = [layer.draw(len(y_B), self.noise) for layer in self.network.dropouts.values()]
            self.masks[batch] = [draw.numpy() for draw in draws]
        with self._draws(batch):
            self.losses.append(self.passes.run(self.x, index_B, y_B, frozen_BC, self.masks.get(batch, [])))
        return self.passes.g_P

    def _draws(self, batch: int) -> AbstractContextManager[object]:
        """Context in which functions draw random numbers: the same in all gradients of a batch in a step."""
        if self.noise is None or not self.network.random_forward:
            return nullcontext()
        if batch not in self.seeds:
            self.seeds[batch] = int(torch.randint(2**62, (), generator=self.noise))
        return self.network.draws_from(self.seeds[batch])

    def direction_of(self, local_step: LocalStep) -> Tensor:
        """The direction (P,) of a local step. The loss of the step is that of its first gradient."""
        w_P, past = self.passes.w_P.clone(), len(self.losses)

        def gradient(row_P: Tensor, batch: int) -> Tensor:
            self.passes.w_P.copy_(row_P)
            return self.of_batch(batch).clone()

        direction_P = local_step(gradient, w_P)
        del self.losses[past + 1 :]
        self.passes.w_P.copy_(w_P)
        return direction_P
