"""The manual engine: mini-batch SGD with forward and backward passes written out (`nn.operations`), on a CPU.

Most of the time of a step on a small network is spent between the operations: PyTorch needs 3 to 8 microseconds per
call, records a graph, allocates, and updates one tensor after another. Here the network's operations, recorded once
(`nn.graph`), compute in NumPy on arrays that are allocated once, and the parameters and their gradients are two
flat rows, so that an update is one operation. Clients are trained one at a time, because the arrays of several clients
would not fit into the cache. The result equals that of `sequential` up to rounding.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.client_program import Need
from cfl_ray.engine import sequential
from cfl_ray.engine.local_steps import (
    LocalGradient,
    LocalUpdate,
    OptimizerUpdate,
    ProximalGradient,
    SGDUpdate,
    take_steps,
)
from cfl_ray.engine.task import TrainingResult, TrainingTask, lacking
from cfl_ray.nn.network import Network
from cfl_ray.nn.passes import Passes, passes_of, why_no_passes

_DOES = frozenset(Need) - {Need.LOSS, Need.BRANCHES, Need.EXAMPLES}
_MAX_BATCH = 256  # activations of larger batches do not fit into the cache


def why_not(network: Network, tasks: Sequence[TrainingTask]) -> str | None:
    """Reason why this engine cannot train the network or, with tasks, these clients; None if it can."""
    if network.device.type != "cpu":
        return "it computes on a CPU only"
    if network.precision == "bf16":
        return "in bf16, PyTorch's autocast decides what is computed in which precision"
    if reason := lacking(tasks, _DOES):
        return reason
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
    passes.row_P.copy_(task.start_P)
    gradient, local = _Gradient(network, passes, task, frozen_BC), task.local
    params, velocity = gradient.parts_of(passes.w_P), None
    if gradient.by_tensor:
        proximal = [ProximalGradient.of_tensors(network, term, params) for term in task.held.proximal]
    else:
        proximal = [ProximalGradient.of_row(network, term, passes.w_P) for term in task.held.proximal]
    update: LocalUpdate
    if local.optimizer is not None:
        update = OptimizerUpdate(local, params)
    else:
        kept = task.held.velocity
        velocity = torch.zeros_like(passes.w_P) if kept is None else kept.clone()
        update = SGDUpdate(local, [velocity])
    take_steps(gradient, update, params, proximal)
    loss = float(np.mean(gradient.losses[-task.tail :]))
    return gradient.result(index, passes.row_P, loss, proximal, velocity if local.persist and local.momentum else None)


class _Gradient(LocalGradient):
    """Gradients by the written-out passes, as a single row or tensor by tensor."""

    def __init__(self, network: Network, passes: Passes, task: TrainingTask, frozen_BC: Tensor | None):
        super().__init__(network, task)
        self.passes, optimizer = passes, task.local.optimizer
        self.by_tensor = optimizer is not None and not optimizer.elementwise  # it may treat each tensor separately
        self.x, self.y = passes.arranged(task.x), task.y.numpy()
        self.frozen = None if frozen_BC is None else frozen_BC.numpy()
        self.weight_n = None if task.held.weight_n is None else task.held.weight_n.numpy()

    def w_P(self) -> Tensor:
        return self.passes.w_P

    def row_P(self) -> Tensor:
        return self.passes.row_P

    def load(self, row_P: Tensor) -> None:
        self.passes.w_P.copy_(row_P)

    def parts_of(self, row_P: Tensor) -> list[Tensor]:
        return super().parts_of(row_P) if self.by_tensor else [row_P]

    def of_batch(self, batch: int) -> list[Tensor]:
        index_B = self.batches[batch]
        assert not isinstance(index_B, Tensor), "batches of a CPU are arrays"
        y_B = self.y if index_B is None else self.y[index_B]
        frozen_BC = self.frozen if index_B is None or self.frozen is None else self.frozen[index_B]
        weight_B = self.weight_n if index_B is None or self.weight_n is None else self.weight_n[index_B]
        masks = [mask.numpy() for mask in self.masks(batch, len(y_B))]
        self.losses.append(self.passes.run(self.x, index_B, y_B, frozen_BC, masks, weight_B))
        return self.parts_of(self.passes.g_P)
