"""The manual engine: mini-batch SGD with forward and backward passes written out (`nn.operations`), on a CPU.

Most of the time of a step on a small network is spent between the operations: PyTorch needs 3 to 8 microseconds per
call, records a graph, allocates, and updates one tensor after another. Here the network's operations, recorded once
(`nn.graph`), compute in NumPy on arrays that are allocated once, and the parameters and their gradients are two
flat rows, so that an update is one operation. Clients are trained one at a time, because the arrays of several clients
would not fit into the cache. The result equals that of `sequential` up to rounding.

A client program's own loss is a function of the features, the outputs and the mean loss of a batch (`engine.own_loss`),
at which it is differentiated; the written-out passes go on from there.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.client_program import Forward, Need
from cfl_ray.engine import rule, sequential
from cfl_ray.engine.engine import Engine
from cfl_ray.engine.local_steps import RowGradient, check_batch, train_row
from cfl_ray.engine.own_loss import OwnLoss
from cfl_ray.engine.task import TrainingResult, TrainingTask, lacking
from cfl_ray.nn.network import Network
from cfl_ray.nn.passes import (
    Passes,
    are_passes_in_evaluation,
    passes_of,
    why_no_features,
    why_no_passes,
)

_DOES = frozenset(Need) - {Need.EXAMPLES}
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
        if int(task.local.batch_of(task.size, task.batches_per_step)) > _MAX_BATCH:
            return f"a batch has more than {_MAX_BATCH} samples"
    if reason := why_no_passes(network):
        return reason
    return why_no_features(network) if any(Need.LOSS in task.needs for task in tasks) else None


def train(network: Network, tasks: Iterable[TrainingTask]) -> Iterator[TrainingResult]:
    """Trains each task in turn, from its own start. `why_not` must be None for them."""
    for index, task in enumerate(tasks):
        frozen_BC = sequential.frozen_logits(network, task)
        passes = passes_of(network)
        with np.errstate(all="ignore"):  # the worker excludes updates that are not finite
            result = train_row(_Gradient(network, passes, task, frozen_BC), index)
        yield result


def gradient(network: Network, row_P: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    """Gradient (trained columns,) of the mean loss of samples in evaluation mode; None: its pass is not written out."""
    if why_not(network, []) or len(y) > _MAX_BATCH or not are_passes_in_evaluation(network):
        return None
    passes = passes_of(network)
    passes.row_P.copy_(row_P)
    with np.errstate(all="ignore"):
        passes.backward(passes.forward(passes.arranged(x), None, []), y.numpy(), None)
    return passes.g_P.clone()


class _Gradient(RowGradient):
    """Gradients by the written-out passes."""

    def __init__(self, network: Network, passes: Passes, task: TrainingTask, frozen_BC: Tensor | None):
        super().__init__(network, task, passes.row_P, passes.w_P)
        self.passes = passes
        self.x, self.y = passes.arranged(task.x), task.y.numpy()
        self.frozen = None if frozen_BC is None else frozen_BC.numpy()
        self.weight_n = None if task.held.weight_n is None else task.held.weight_n.numpy()
        program = task.program
        self.own_loss = OwnLoss(self, passes.trains_features) if program.overrides("loss") else None
        # programs with steps alone keep PyTorch's pass, and so their last bits
        self.evaluates = self.own_loss is not None and program.overrides("step") and are_passes_in_evaluation(network)
        # number of the batch whose activations are those at the row `_at_P`; they are used once
        self._latest, self._at_P = -1, torch.empty_like(passes.w_P) if self.evaluates else passes.w_P
        self._values: list[Any] = []

    def of_batch(self, batch: int) -> list[Tensor]:
        index_B = self.batches[batch]
        assert not isinstance(index_B, Tensor), "batches of a CPU are arrays"
        y_B = self.y if index_B is None else self.y[index_B]
        frozen_BC = self.frozen if index_B is None or self.frozen is None else self.frozen[index_B]
        weight_B = self.weight_n if index_B is None or self.weight_n is None else self.weight_n[index_B]
        if self._latest != self.first + batch or not torch.equal(self._at_P, self.trained):
            masks = [mask.numpy() for mask in self.masks(batch, len(y_B))]
            self._values = self.passes.forward(self.x, index_B, masks)
        self._latest = -1
        own = None if self.own_loss is None else partial(self.own_loss.at, batch, y_B=torch.from_numpy(y_B))
        self.losses.append(self.passes.backward(self._values, y_B, frozen_BC, weight_B, own))
        return self.parts_of(self.passes.g_P)

    def forward(self, w: Tensor | str, batch: int) -> Forward:
        """As `core.client_program.Gradient`: of a row, a written-out pass, which its gradient uses, too."""
        if not self.evaluates or isinstance(w, str):
            return super().forward(w, batch)
        check_batch(self.task.program, batch)
        self.load(w)
        index_B = self.batches[batch]
        assert not isinstance(index_B, Tensor), "batches of a CPU are arrays"
        self._values, self._latest = self.passes.forward(self.x, index_B, []), self.first + batch
        self._at_P.copy_(self.trained)
        features, outputs = self.passes.features_and_outputs(self._values)
        y_B = self.task.y if index_B is None else self.task.y[index_B]
        return Forward(features, outputs, y_B, torch.ones(len(y_B)))


ENGINE = Engine(why_not, train, rule.manual, gradient=gradient)
