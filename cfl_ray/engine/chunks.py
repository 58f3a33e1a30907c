"""Division of an exchange into chunks of some clients each, and assembly of their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cfl_ray.core.work import AverageDeferred, ChunkResult, CombineColumns, Exclusion, Outcome, Train, Work
from cfl_ray.engine import exact
from cfl_ray.engine.reduce import weighted_means


@dataclass(frozen=True)
class Chunk:
    """Some clients of an exchange, which one host works on."""

    index_m: np.ndarray  # their positions among the M clients of the work
    row: int = 0  # the output row that its first client is averaged into
    cost: float = 1.0  # relative to other chunks of the exchange
    alone: bool = False  # cut from a chunk that took too long


def chunks_of(work: Work, size: int, num_samples_M: np.ndarray | None = None) -> list[Chunk]:
    """The clients, `size` at a time, sorted by the output row that they are averaged into.

    Depends on the work alone and not on hosts, because sums are rounded within a chunk.
    num_samples_M: training samples of each client, for the costs; None: the chunks cost the same.
    """
    count = len(work.ids_M)
    out_M, order_M, averaging = np.zeros(count, np.int64), np.arange(count), work.averaging
    if averaging is not None and not work.chained:
        out_M[averaging.client_E] = averaging.out_E
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


# by engine: chunks of a large cohort, enough for a hundred hosts, and the most clients of one
_CHUNKS = {"sequential": (128, 8), "span": (60, 24)}


def chunk_size(num_clients: int, engine: str, one_by_one: bool = False) -> int:
    """Number of clients of a chunk.

    The vectorised and span engines take larger ones, because the clients of a chunk share operations.
    one_by_one: one client per chunk, for runs whose hosts serve few clients each (`runtime.clients_per_host`).
    """
    if one_by_one:
        return 1
    if engine == "vectorised":
        return min(max(num_clients // 16, min(-(-num_clients // 4), 8)), 64)
    least = -(-num_clients // exact.MAX_TERMS)
    chunks, most = _CHUNKS.get(engine, _CHUNKS["sequential"])
    return max(least, min(max(1, num_clients // chunks), most))


def gather(chunks: Sequence[ChunkResult], size: int) -> dict[str, np.ndarray]:
    """Per-client arrays (M, ...) from those of the chunks, in any order."""
    if not chunks:
        return {}
    arrays: dict[str, np.ndarray] = {}
    for name, first in chunks[0].arrays.items():
        # features may have different lengths
        shape = np.max([chunk.arrays[name].shape[1:] for chunk in chunks], axis=0).astype(int)
        whole = np.zeros((size, *shape), first.dtype)
        for chunk in chunks:
            array = chunk.arrays[name]
            index: tuple[np.ndarray | slice, ...] = (chunk.index_m, *map(slice, array.shape[1:]))
            whole[index] = array
        arrays[name] = whole
    return arrays


def exclusions_of(chunks: Sequence[ChunkResult]) -> dict[int, Exclusion]:
    """Excluded clients, by position among the M clients."""
    return {int(chunk.index_m[i]): exclusion for chunk in chunks for i, exclusion in chunk.excluded.items()}


def outcome_of(work: Work, chunks: Sequence[ChunkResult], changes: Mapping[int, Tensor]) -> Outcome:
    """The outcome of an exchange: its chunks' arrays in one, and weighted means from the sums of changes."""
    arrays = gather(chunks, len(work.ids_M))
    excluded = exclusions_of(chunks)
    if not isinstance(work, Train | AverageDeferred) or work.averaging is None:
        return Outcome(arrays, excluded=excluded)
    valid_M = arrays["valid"] if chunks else np.zeros(0, bool)
    return Outcome(arrays, *weighted_means(work, changes, valid_M), excluded=excluded)
