"""The manual engine: mini-batch SGD with forward and backward passes written out (`nn.operations`), on a CPU.

Most of the time of a step on a small network is spent between the operations: PyTorch needs 3 to 8 microseconds per
call, records a graph, allocates, and updates one tensor after another. Here the network's operations, recorded once
(`nn.graph`), compute in NumPy on arrays that are allocated once, and the parameters and their gradients are two
flat rows, so that an update is one operation. Clients are trained one at a time, because the arrays of several clients
would not fit into the cache. The result equals that of `sequential` up to rounding.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from cfl_ray.core.client_program import Need
from cfl_ray.engine import rule, sequential
from cfl_ray.engine.engine import Engine
from cfl_ray.engine.local_steps import RowGradient, train_row
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
            result = train_row(_Gradient(network, passes, task, frozen_BC), index)
        yield result


class _Gradient(RowGradient):
    """Gradients by the written-out passes."""

    def __init__(self, network: Network, passes: Passes, task: TrainingTask, frozen_BC: Tensor | None):
        super().__init__(network, task, passes.row_P, passes.w_P)
        self.passes = passes
        self.x, self.y = passes.arranged(task.x), task.y.numpy()
        self.frozen = None if frozen_BC is None else frozen_BC.numpy()
        self.weight_n = None if task.held.weight_n is None else task.held.weight_n.numpy()

    def of_batch(self, batch: int) -> list[Tensor]:
        index_B = self.batches[batch]
        assert not isinstance(index_B, Tensor), "batches of a CPU are arrays"
        y_B = self.y if index_B is None else self.y[index_B]
        frozen_BC = self.frozen if index_B is None or self.frozen is None else self.frozen[index_B]
        weight_B = self.weight_n if index_B is None or self.weight_n is None else self.weight_n[index_B]
        masks = [mask.numpy() for mask in self.masks(batch, len(y_B))]
        self.losses.append(self.passes.run(self.x, index_B, y_B, frozen_BC, masks, weight_B))
        return self.parts_of(self.passes.g_P)


ENGINE = Engine(why_not, train, rule.manual)
