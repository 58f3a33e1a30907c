"""The interface of an engine. Its module has an `ENGINE`, and its name is the file's."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from cfl_ray.engine.chunks import limited_size
from cfl_ray.engine.rule import Facts
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.nn.network import Network


class NotTrained(Exception):
    """Reason, a line, why an engine cannot train a client, known only in its steps: `sequential` trains it."""


class TrainedBatch(Protocol):
    """Clients that were trained together, without a row for each of them."""

    @property
    def tasks(self) -> Sequence[TrainingTask]:
        """Their tasks, in order."""

    @property
    def losses(self) -> Sequence[float]:
        """Their train losses."""

    def invalid_reason(self, index: int) -> str | None:
        """Reason why the update of a client is not valid; None if it is."""

    def change(self, weights: Mapping[int, float]) -> Tensor:
        """The weighted sum (P,) of the changes of these clients, by their positions."""


@dataclass(frozen=True)
class Engine:
    """The functions of an engine. By default, clients are trained one at a time."""

    # reason, a line, why the engine cannot train the network or, with tasks, these clients together on its loss
    why_not: Callable[[Network, Sequence[TrainingTask]], str | None]
    train: Callable[[Network, Iterable[TrainingTask]], Iterator[TrainingResult]]  # each from its own start, in order
    cost: Callable[[Facts, int], float]  # of a local step, given the clients that are trained at once (`engine.rule`)
    # whether the clients of a chunk are trained together, on a GPU the clients of several chunks
    together: bool = False
    # trains clients without computing their models; yields the number of the first client of a batch, and the batch.
    # None: not supported
    train_sums: Callable[[Network, Iterable[TrainingTask]], Iterator[tuple[int, TrainedBatch]]] | None = None
    # Gradient (trained columns,) of the mean loss of samples at a row, in evaluation mode; it returns None for one that
    # PyTorch computes. None: PyTorch computes all
    gradient: Callable[[Network, Tensor, Tensor, Tensor], Tensor | None] | None = None
    # Steps with which it is tried before it is chosen, because it may fail on operations of a network, such as those
    # that vmap does not support, or on a machine; 0: it does not fail
    tried_steps: int = 0
    # reason, a line, why `train` leaves a client without others to the sequential engine; empty: it does not
    not_alone: str = ""
    chunk_size: Callable[[int], int] = partial(limited_size, chunks=128, most=8)  # clients of a chunk, for a cohort
