"""The engines: implementations of local training on a host.

An engine is a module of this package with the functions that `Engine` lists, and an entry of `ENGINES`. All results
equal those of the sequential engine up to rounding. Clients that an engine cannot train are trained sequentially.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from cfl_ray.engine import manual, sequential, span, vectorised
from cfl_ray.engine.chunks import limited_size
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.nn.network import Network


@dataclass(frozen=True)
class Engine:
    """The functions of an engine. By default, clients are trained one at a time."""

    # reason, a line, why the engine cannot train the network or, with tasks, these clients together on its loss
    cannot: Callable[[Network, Sequence[TrainingTask]], str | None]
    train: Callable[[Network, Iterable[TrainingTask]], Iterator[TrainingResult]]  # each from its own start, in order
    # whether the clients of a chunk are trained together, on a GPU the clients of several chunks
    together: bool = False
    # trains clients without computing their models; yields the number of the first client of a batch, and the batch.
    # None: not supported
    train_sums: Callable[[Network, Iterable[TrainingTask]], Iterator[tuple[int, span.SpanBatch]]] | None = None
    # reason why it cannot beat an engine with these seconds per step, given the clients of a chunk; an engine with this
    # function is measured last, and only without a reason. None: it is measured with the others
    no_gain: Callable[[Network, float, int], str | None] | None = None
    chunk_size: Callable[[int], int] = partial(limited_size, chunks=128, most=8)  # clients of a chunk, for a cohort

    def why_not(self, network: Network, tasks: Sequence[TrainingTask]) -> str | None:
        """Reason, a line, why the engine cannot train the network or these clients together; None if it can."""
        return self.cannot(network, tasks)


SEQUENTIAL = "sequential"  # the definition of local training, which can train everything
ENGINES = {
    SEQUENTIAL: Engine(sequential.why_not, sequential.train),
    "span": Engine(
        span.why_not,
        span.train,
        together=True,
        train_sums=span.batches,
        chunk_size=partial(limited_size, chunks=60, most=24),
    ),
    "manual": Engine(manual.why_not, manual.train),
    "vectorised": Engine(
        vectorised.why_not,
        vectorised.train,
        together=True,
        no_gain=vectorised.no_gain,
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
