"""How the samples of one group are divided among its clients, or first among groups that the division itself makes."""

import numpy as np

from cfl_ray.config import Partition
from cfl_ray.core.errors import DataError

MAX_REDRAWS = 1000


def even_shares(clients: int, groups: int) -> list[int]:
    """Clients of each group; the first groups have one more where it does not come out even."""
    if clients < groups:
        raise DataError(f"data.partition.clients is {clients}, but there are {groups} groups and each needs a client")
    return [clients // groups + (group < clients % groups) for group in range(groups)]


def divide(y: np.ndarray, clients: int, partition: Partition, min_samples: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Positions in `y` of each client's samples, ascending; no position has two owners. With `partition.groups`, group by group.

    Raises DataError where a client would hold fewer than `min_samples`.
    """
    if min_samples * clients > len(y):
        raise DataError(f"{clients} clients cannot hold at least {min_samples} samples each of {len(y)} samples; lower data.partition.clients (or min_samples)")
    parts = {"iid": _iid, "dirichlet": _dirichlet, "classes": _classes}[partition.kind](y, clients, partition, min_samples, rng)
    sizes = np.array([len(part) for part in parts])
    if sizes.min() < min_samples:
        raise DataError(
            f"client {sizes.argmin()} of {clients} got {sizes.min()} samples, each needs {min_samples}; lower data.partition.clients (or min_samples), or raise classes_per_client"
        )
    return [np.sort(part) for part in parts]


def writers(client: np.ndarray | None, partition: Partition, source: str, rng: np.random.Generator) -> list[tuple[str, np.ndarray]]:
    """The name and ascending positions of everyone who made at least `min_samples` samples, in order of the names.

    `partition.clients` draws that many of them. Raises DataError where nobody, or too few, are left.
    """
    if client is None:
        raise DataError(
            f"data.partition.kind: writer needs to know who made each sample, which {source!r} does not say; use femnist, "
            "femnist_leaf, mnist_by_writer, or images with data.columns.client"
        )
    names, code, counts = np.unique(client, return_inverse=True, return_counts=True)
    kept = np.flatnonzero(counts >= partition.min_samples)
    wanted = partition.clients
    if len(kept) == 0 or (wanted or 0) > len(kept):
        raise DataError(
            f"data.partition.clients is {wanted or 'null (all)'}, but {len(kept)} of {len(names)} writers have at least "
            f"{partition.min_samples} samples (the largest has {counts.max(initial=0)}); lower clients or min_samples"
        )
    if wanted is not None:
        kept = np.sort(rng.choice(kept, wanted, replace=False))
    by_writer = np.split(np.argsort(code, kind="stable"), np.cumsum(counts)[:-1])
    return [(str(names[writer]), by_writer[writer]) for writer in kept]


def _iid(y, clients, partition, min_samples, rng) -> list[np.ndarray]:
    """Sizes differ by one at most, or are those of `partition.sizes`."""
    rows = rng.permutation(len(y))
    if partition.sizes is None:
        return np.array_split(rows, clients)
    if (wanted := sum(partition.sizes)) > len(rows):
        raise DataError(f"data.partition.sizes add up to {wanted}, but there are {len(rows)} samples; lower them")
    return np.split(rows, np.cumsum(partition.sizes))[:-1]


# --- Dirichlet ----------------------------------------------------------------------------------------------------------------------


def _dirichlet(y, clients, partition, min_samples, rng) -> list[np.ndarray]:
    """Draws until the smallest client has enough."""
    rows_C = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    for _ in range(MAX_REDRAWS):
        counts_CN = _counts(np.array([len(rows) for rows in rows_C]), clients, partition, rng)
        sizes = counts_CN.sum(0)
        if sizes.min() >= min_samples:
            parts_CN = [np.split(rows, np.cumsum(counts)[:-1]) for rows, counts in zip(rows_C, counts_CN)]
            return [np.concatenate(parts) for parts in zip(*parts_CN)]
    alphas = f"data.partition.alpha (now {partition.alpha:g})"
    if partition.groups is not None:
        alphas += f" or group_alpha (now {partition.group_alpha:g})"
    raise DataError(
        f"dirichlet: in {MAX_REDRAWS} draws some client always got too few samples; in the last one client {sizes.argmin()} of "
        f"{clients} got {sizes.min()} of {len(y)}, each needs {min_samples}. Raise {alphas}, lower clients, or lower min_samples"
    )


def _counts(sizes_C: np.ndarray, clients: int, partition: Partition, rng: np.random.Generator) -> np.ndarray:
    """int64 (C, N): samples of each class that each client gets in one draw: directly, or by way of its group."""
    if partition.groups is None:
        return _dirichlet_counts(sizes_C, clients, partition.alpha, partition.capped, rng)
    counts_CG = _dirichlet_counts(sizes_C, partition.groups, partition.group_alpha, partition.capped, rng)
    shares = even_shares(clients, partition.groups)
    return np.hstack([_dirichlet_counts(sizes, share, partition.alpha, partition.capped, rng) for sizes, share in zip(counts_CG.T, shares)])


def _dirichlet_counts(sizes_C: np.ndarray, clients: int, alpha: float, capped: bool, rng: np.random.Generator) -> np.ndarray:
    """int64 (C, N): every row sums to its class size. Per class p ~ Dir(alpha) over the clients.

    `capped` is NIID-Bench's rule: who holds n/N samples already gets none of further classes.
    """
    fair = sizes_C.sum() / clients
    counts_CN = np.zeros((len(sizes_C), clients), np.int64)
    for label, size in enumerate(sizes_C):
        if size == 0:
            continue
        still_open = counts_CN.sum(0) < fair if capped else np.ones(clients, bool)
        p = rng.dirichlet(np.full(clients, alpha)) * still_open
        if p.sum() == 0:  # a tiny alpha gave everything to clients that are full
            p = still_open / still_open.sum()
        ends = np.floor(np.cumsum(p / p.sum()) * size).astype(np.int64)
        ends[np.flatnonzero(p)[-1] :] = size  # rounding must not lose a sample, nor give one to a closed client
        counts_CN[label] = np.diff(ends, prepend=0)
    return counts_CN


# --- n classes per client -----------------------------------------------------------------------------------------------------------


def _classes(y, clients, partition, min_samples, rng) -> list[np.ndarray]:
    """Each class is split evenly among its owners: sizes of one class differ by one at most."""
    labels = np.unique(y)
    owners = _owners(len(labels), clients, partition, rng)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, owning in zip(labels, owners):
        if owning:
            rows = rng.permutation(np.flatnonzero(y == label))
            for client, part in zip(owning, np.array_split(rows, len(owning))):
                parts[client].append(part)
    return [np.concatenate(part) for part in parts]


def _owners(classes: int, clients: int, partition: Partition, rng: np.random.Generator) -> list[list[int]]:
    """The clients that own each class. NIID-Bench's rule: client i of a group has the group's class i mod C and n-1 distinct others."""
    n, per_group = partition.classes_per_client, partition.classes_per_group
    key, wanted = ("classes_per_client", n) if partition.groups is None else ("classes_per_group", per_group)
    if wanted > classes:
        raise DataError(f"data.partition.{key} is {wanted}, but the samples of this group have {classes} classes")
    hands = [np.arange(classes)] if partition.groups is None else _deal(classes, partition.groups, per_group, rng)
    owners: list[list[int]] = [[] for _ in range(classes)]
    client = 0
    for hand, share in zip(hands, even_shares(clients, len(hands))):
        for position in range(share):
            first = position % len(hand)
            for owned in (hand[first], *rng.choice(np.delete(hand, first), n - 1, replace=False)):
                owners[owned].append(client)
            client += 1
    return owners


def _deal(classes: int, groups: int, per_group: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The distinct classes of each group, dealt from shuffled lists of all classes: how often two classes are dealt differs by one at most."""
    deck: list[int] = []
    hands = []
    for _ in range(groups):
        hand: list[int] = []
        while len(hand) < per_group:
            deck = deck or rng.permutation(classes).tolist()
            hand.append(deck.pop(next(place for place, drawn in enumerate(deck) if drawn not in hand)))
        hands.append(np.array(hand))
    return hands
