"""The engines: implementations of local training on a host.

An engine is a module of this package with the functions that `Engine` lists, and an entry of `ENGINES`. All results
equal those of the sequential engine up to rounding. Clients that an engine cannot train are trained sequentially.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from cfl_ray.engine import manual, rule, sequential, span, vectorised
from cfl_ray.engine.chunks import limited_size
from cfl_ray.engine.rule import Facts
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.nn.network import Network

_TOGETHER = 256  # most clients that are counted as trained together if several chunks are


@dataclass(frozen=True)
class Engine:
    """The functions of an engine. By default, clients are trained one at a time."""

    # reason, a line, why the engine cannot train the network or, with tasks, these clients together on its loss
    cannot: Callable[[Network, Sequence[TrainingTask]], str | None]
    train: Callable[[Network, Iterable[TrainingTask]], Iterator[TrainingResult]]  # each from its own start, in order
    cost: Callable[[Facts, int], float]  # of a local step, given the clients that are trained at once (`engine.rule`)
    # whether the clients of a chunk are trained together, on a GPU the clients of several chunks
    together: bool = False
    # trains clients without computing their models; yields the number of the first client of a batch, and the batch.
    # None: not supported
    train_sums: Callable[[Network, Iterable[TrainingTask]], Iterator[tuple[int, span.SpanBatch]]] | None = None
    # whether it may fail on operations of a network, such as those that vmap does not support, and is tried first
    is_tried: bool = False
    chunk_size: Callable[[int], int] = partial(limited_size, chunks=128, most=8)  # clients of a chunk, for a cohort

    def why_not(self, network: Network, tasks: Sequence[TrainingTask]) -> str | None:
        """Reason, a line, why the engine cannot train the network or these clients together; None if it can."""
        if self.train is not sequential.train and any(task.objective is not None for task in tasks):
            return "only sequential has a loss on features"
        if self.train is not sequential.train and any(task.local.examples is not None for task in tasks):
            return "only sequential clips the gradients of single samples"
        return self.cannot(network, tasks)


SEQUENTIAL = "sequential"  # the definition of local training, which can train everything
ENGINES = {
    SEQUENTIAL: Engine(sequential.why_not, sequential.train, rule.sequential),
    "span": Engine(
        span.why_not,
        span.train,
        rule.span,
        together=True,
        train_sums=span.batches,
        chunk_size=partial(limited_size, chunks=60, most=24),
    ),
    "manual": Engine(manual.why_not, manual.train, rule.manual),
    "vectorised": Engine(
        vectorised.why_not,
        vectorised.train,
        rule.vectorised,
        together=True,
        is_tried=True,
        chunk_size=vectorised.chunk_size,
    ),
}


def chunk_size(num_clients: int, engine: str, one_by_one: bool = False) -> int:
    """Number of clients of a chunk.

    one_by_one: one client per chunk, for runs whose hosts serve few clients each (`runtime.clients_per_host`).
    """
    return 1 if one_by_one else ENGINES[engine].chunk_size(num_clients)


def mixes_chunks(engine: str, network: Network) -> bool:
    """Whether clients of several chunks are trained together.

    Not with batch statistics: they need equal batches and steps, which are checked chunk by chunk.
    """
    return ENGINES[engine].together and network.memory.measurable and not network.batch_statistics


@dataclass(frozen=True)
class Division:
    """How the clients of a round are divided into chunks; see `chunk_size`."""

    cohort: int  # clients of a round
    one_by_one: bool = False

    def size(self, engine: str) -> int:
        return chunk_size(self.cohort, engine, self.one_by_one)

    def together(self, engine: str, network: Network) -> int:
        """Number of clients passed to the engine at once: of several chunks on a GPU, otherwise of one chunk."""
        if self.one_by_one or not mixes_chunks(engine, network):
            return self.size(engine)
        return max(self.size(engine), min(self.cohort, _TOGETHER))
