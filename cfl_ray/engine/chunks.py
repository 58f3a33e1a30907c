"""Division of an exchange into chunks of clients, and assembly of their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from cfl_ray.core.work import AverageDeferred, ChunkResult, CombineColumns, Outcome, Train, Work
from cfl_ray.engine import exact
from cfl_ray.engine.reduce import weighted_means
from cfl_ray.engine.secure_sums import secure_means, unmasked


@dataclass(frozen=True)
class Chunk:
    """Clients of an exchange that are processed together on one host."""

    index_m: np.ndarray  # their positions among the M clients of the work
    row: int = 0  # the output row that its first client is averaged into
    cost: float = 1.0  # relative to other chunks of the exchange
    alone: bool = False  # cut from a chunk that took too long


def chunks_of(work: Work, size: int, num_samples_M: np.ndarray | None = None) -> list[Chunk]:
    """Chunks of `size` clients, sorted by the output row that they are averaged into.

    All models of a client are in the same chunk.
    The chunks depend only on the work, not on the hosts, because sums are rounded within a chunk.
    num_samples_M: training samples of each client, for the costs; None: equal costs.
    """
    count = len(work.ids_M)
    out_M, order_M, averaging = np.zeros(count, np.int64), np.arange(count), work.averaging
    size *= work.models_per_client
    if averaging is not None and not work.chained and work.models_per_client == 1:
        models = averaging.subset(averaging.out_E < averaging.num_models)
        out_M[models.client_E] = models.out_E
        order_M = np.argsort(out_M, kind="stable")
    if work.chained or not count:
        size = max(count, 1)
    elif isinstance(work, CombineColumns):
        size = 1
    firsts = np.arange(0, count, size) if count else np.zeros(1, np.int64)
    costs = np.ones(len(firsts))
    if num_samples_M is not None and count:
        costs = np.add.reduceat(work.cost_M(num_samples_M)[order_M], firsts)
    rows = out_M[order_M[firsts]] if count else firsts
    parts = zip(firsts.tolist(), rows.tolist(), costs.tolist(), strict=True)
    return [Chunk(order_M[first : first + size], row, cost) for first, row, cost in parts]


def limited_size(num_clients: int, chunks: int, most: int) -> int:
    """Clients per chunk, at most `most`, such that a large cohort has at least `chunks` chunks, enough for many hosts.

    The limits are exceeded only if there would be more chunks than the terms that an exact sum can have.
    """
    return max(-(-num_clients // exact.MAX_TERMS), min(max(1, num_clients // chunks), most))


def merged(chunks: Sequence[ChunkResult], index_M: np.ndarray) -> ChunkResult:
    """The result of these clients from the results of their chunks, which may be in any order."""
    size, arrays = len(index_M), dict[str, np.ndarray]()
    for name, first in chunks[0].arrays.items() if chunks else ():
        # features may have different lengths
        shape = np.max([chunk.arrays[name].shape[1:] for chunk in chunks], axis=0).astype(int)
        whole = np.zeros((size, *shape), first.dtype)
        for chunk in chunks:
            array = chunk.arrays[name]
            index: tuple[np.ndarray | slice, ...] = (chunk.index_m, *map(slice, array.shape[1:]))
            whole[index] = array
        arrays[name] = whole
    excluded = {int(chunk.index_m[i]): exclusion for chunk in chunks for i, exclusion in chunk.excluded.items()}
    return ChunkResult(index_M, arrays, excluded, fallbacks=frozenset().union(*(chunk.fallbacks for chunk in chunks)))


def outcome_of(work: Work, chunks: Sequence[ChunkResult], changes: Mapping[int, Tensor]) -> Outcome:
    """The outcome of an exchange: the merged arrays of its chunks, and weighted means from the sums of changes."""
    whole = merged(chunks, np.arange(len(work.ids_M)))
    outcome = Outcome(whole.arrays, excluded=whole.excluded, fallbacks=whole.fallbacks)
    if not isinstance(work, Train | AverageDeferred) or work.averaging is None:
        return outcome
    counted_M = whole.arrays["valid" if work.secure is None else "reported"] if chunks else np.zeros(0, bool)
    if work.secure is None:
        means, arrived_R = weighted_means(work, changes, counted_M)
    else:
        sums = unmasked(work.secure, work.address, work.ids_M, counted_M, changes)
        means, arrived_R = secure_means(work, sums)
    return replace(outcome, means=means, arrived_R=arrived_R)
