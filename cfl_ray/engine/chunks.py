"""Division of an exchange into chunks of clients, and assembly of their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cfl_ray.core.work import AverageDeferred, ChunkResult, CombineColumns, Exclusion, Outcome, Train, Work
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


def limited_size(num_clients: int, chunks: int, most: int) -> int:
    """Clients per chunk, at most `most`, such that a large cohort has at least `chunks` chunks, enough for many hosts.

    The limits are exceeded only if there would be more chunks than the terms that an exact sum can have.
    """
    return max(-(-num_clients // exact.MAX_TERMS), min(max(1, num_clients // chunks), most))


def gather(chunks: Sequence[ChunkResult], size: int) -> dict[str, np.ndarray]:
    """Per-client arrays (M, ...) from the arrays of the chunks, which may be in any order."""
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


def fallbacks_of(chunks: Sequence[ChunkResult]) -> frozenset[str]:
    """Reasons why clients were not trained by the chosen engine, each a line."""
    return frozenset().union(*(chunk.fallbacks for chunk in chunks))


def outcome_of(work: Work, chunks: Sequence[ChunkResult], changes: Mapping[int, Tensor]) -> Outcome:
    """The outcome of an exchange: the merged arrays of its chunks, and weighted means from the sums of changes."""
    arrays = gather(chunks, len(work.ids_M))
    excluded, fallbacks = exclusions_of(chunks), fallbacks_of(chunks)
    if not isinstance(work, Train | AverageDeferred) or work.averaging is None:
        return Outcome(arrays, excluded=excluded, fallbacks=fallbacks)
    counted_M = arrays["valid" if work.secure is None else "reported"] if chunks else np.zeros(0, bool)
    if work.secure is None:
        means = weighted_means(work, changes, counted_M)
    else:
        means = secure_means(work, unmasked(work.secure, work.address, work.ids_M, counted_M, changes))
    return Outcome(arrays, *means, excluded=excluded, fallbacks=fallbacks)
