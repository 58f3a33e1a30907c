"""How the samples of one group are divided among its clients."""

import numpy as np

from cfl_ray.config import Partition
from cfl_ray.core.errors import DataError

MAX_REDRAWS = 1000


def divide(y: np.ndarray, clients: int, partition: Partition, min_samples: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Positions in `y` of each client's samples, ascending; no position has two owners.

    Raises DataError where a client would hold fewer than `min_samples`.
    """
    if min_samples * clients > len(y):
        raise DataError(f"{clients} clients cannot hold at least {min_samples} samples each of {len(y)} samples; lower data.partition.clients "
                        "(or min_samples)")
    parts = {"iid": _iid, "dirichlet": _dirichlet, "classes": _classes}[partition.kind](y, clients, partition, min_samples, rng)
    sizes = np.array([len(part) for part in parts])
    if sizes.min() < min_samples:
        raise DataError(f"client {sizes.argmin()} of its group got {sizes.min()} samples, each needs {min_samples}; lower data.partition.clients "
                        "(or min_samples), or raise classes_per_client")
    return [np.sort(part) for part in parts]


def writers(client: np.ndarray | None, partition: Partition, source: str, rng: np.random.Generator) -> list[tuple[str, np.ndarray]]:
    """The name and ascending positions of everyone who made at least `min_samples` samples, in order of the names.

    `partition.clients` draws that many of them. Raises DataError where nobody, or too few, are left.
    """
    if client is None:
        raise DataError(f"data.partition.kind: writer needs to know who made each sample, which {source!r} does not say; use femnist, "
                        "femnist_leaf, mnist_by_writer, or images with data.columns.client")
    names, code, counts = np.unique(client, return_inverse=True, return_counts=True)
    kept = np.flatnonzero(counts >= partition.min_samples)
    wanted = partition.clients
    if len(kept) == 0 or (wanted or 0) > len(kept):
        raise DataError(f"data.partition.clients is {wanted or 'null (all)'}, but {len(kept)} of {len(names)} writers have at least "
                        f"{partition.min_samples} samples (the largest has {counts.max(initial=0)}); lower clients or min_samples")
    if wanted is not None:
        kept = np.sort(rng.choice(kept, wanted, replace=False))
    by_writer = np.split(np.argsort(code, kind="stable"), np.cumsum(counts)[:-1])
    return [(str(names[writer]), by_writer[writer]) for writer in kept]


def _iid(y, clients, partition, min_samples, rng) -> list[np.ndarray]:
    """Sizes differ by one at most."""
    return np.array_split(rng.permutation(len(y)), clients)


def _dirichlet(y, clients, partition, min_samples, rng) -> list[np.ndarray]:
    """NIID-Bench's rule: per class p ~ Dir(alpha) over the clients; who holds n/N samples already gets none of further classes."""
    rows_C = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    for _ in range(MAX_REDRAWS):
        counts_CN = _dirichlet_counts([len(rows) for rows in rows_C], clients, partition.alpha, rng)
        sizes = counts_CN.sum(0)
        if sizes.min() >= min_samples:
            parts_CN = [np.split(rows, np.cumsum(counts)[:-1]) for rows, counts in zip(rows_C, counts_CN)]
            return [np.concatenate(parts) for parts in zip(*parts_CN)]
    raise DataError(f"dirichlet: in {MAX_REDRAWS} draws some client always got too few samples; in the last one client {sizes.argmin()} of "
                    f"{clients} got {sizes.min()} of {len(y)}, each needs {min_samples}. Raise data.partition.alpha (now {partition.alpha:g}), "
                    "lower clients, or lower min_samples")


def _dirichlet_counts(class_sizes: list[int], clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """int64 (C, N): samples of each class that each client gets in one draw; every row sums to its class size."""
    fair = sum(class_sizes) / clients
    counts_CN = np.zeros((len(class_sizes), clients), np.int64)
    for label, size in enumerate(class_sizes):
        still_open = counts_CN.sum(0) < fair
        p = rng.dirichlet(np.full(clients, alpha)) * still_open
        if p.sum() == 0:  # a tiny alpha gave everything to clients that are full
            p = still_open / still_open.sum()
        ends = np.floor(np.cumsum(p / p.sum()) * size).astype(np.int64)
        ends[np.flatnonzero(p)[-1]:] = size  # rounding must not lose a sample, nor give one to a closed client
        counts_CN[label] = np.diff(ends, prepend=0)
    return counts_CN


def _classes(y, clients, partition, min_samples, rng) -> list[np.ndarray]:
    """NIID-Bench's rule: client i owns class i mod C and n-1 distinct others; each class is split evenly among its owners."""
    labels, n = np.unique(y), partition.classes_per_client
    if n > len(labels):
        raise DataError(f"data.partition.classes_per_client is {n}, but the samples of this group have {len(labels)} classes")
    owners: list[list[int]] = [[] for _ in labels]
    for client in range(clients):
        first = client % len(labels)
        others = np.delete(np.arange(len(labels)), first)
        for label in (first, *rng.choice(others, n - 1, replace=False)):
            owners[label].append(client)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, owning in zip(labels, owners):
        if owning:
            rows = rng.permutation(np.flatnonzero(y == label))
            for client, part in zip(owning, np.array_split(rows, len(owning))):
                parts[client].append(part)
    return [np.concatenate(part) for part in parts]
