"""The division of a group's samples among its clients, or first among true groups that the partition makes."""

import numpy as np

from cfl_ray.config import PartitionConfig
from cfl_ray.config.partition import (
    PARTITION_KINDS,
    ClassesConfig,
    DirichletConfig,
    IidConfig,
    PluginPartitionConfig,
)
from cfl_ray.errors import DataError, counted
from cfl_ray.plugins.calling import call_plugin, described, place_of, with_options

MAX_REDRAWS = 1000
ARGUMENTS = ("labels", "clients", "draw")  # positional arguments of a partition function


def even_shares(clients: int, groups: int) -> list[int]:
    """The number of clients of each group; the first groups have one more client if N / G is not whole."""
    if clients < groups:
        raise DataError(f"data.partition.clients is {clients}, but there are {groups} groups and each needs a client")
    return [clients // groups + (group < clients % groups) for group in range(groups)]


def divide(
    y: np.ndarray, clients: int, partition: PartitionConfig, min_samples: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """The positions in `y` of each client's samples, ascending; no position belongs to two clients.

    With `partition.true_groups`, the clients of a group follow one another. Raises DataError if a client would get
    fewer than `min_samples`.
    """
    if min_samples * clients > len(y):
        raise DataError(
            f"{counted(clients, 'client')} cannot hold at least {counted(min_samples, 'sample')} each of "
            f"{counted(len(y), 'sample')}; "
            "lower data.partition.clients (or min_samples)"
        )
    parts: list[np.ndarray] = PARTITION_KINDS.code_of(partition)(y, clients, partition, min_samples, rng)
    sizes = np.array([len(part) for part in parts])
    if sizes.min() < min_samples:
        raise DataError(
            f"client {sizes.argmin()} of {clients} got {counted(sizes.min(), 'sample')}, each needs {min_samples}; "
            "lower data.partition.clients (or min_samples)"
            + (", or raise classes_per_client" if partition.kind == "classes" else "")
        )
    return [np.sort(part) for part in parts]


# --- the kinds of partitions, as `PARTITION_KINDS` names them: functions of the arguments of `divide`, and `writers`


def own(
    y: np.ndarray, clients: int, partition: PluginPartitionConfig, min_samples: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """The parts that a user's function (labels, clients, draw) makes. Raises DataError for a wrong result."""
    function = with_options(PARTITION_KINDS.resolve(partition.kind), partition.options, "data.partition", ARGUMENTS)
    result = call_plugin("data.partition", function, y.astype(np.int64), clients, rng, error=DataError)
    returned = f"data.partition {place_of(function)} returned"
    if not isinstance(result, list | tuple) or len(result) != clients:
        raise DataError(
            f"{returned} {described(result)}, expected a list of {clients} arrays of positions, one per client"
        )
    parts = []
    for client, part in enumerate(map(np.asarray, result)):
        if part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
            raise DataError(f"{returned} {described(part)} for client {client}, expected integers of shape (n,)")
        parts.append(part.astype(np.int64))
    positions = np.concatenate(parts)
    owner = np.repeat(np.arange(clients), [len(part) for part in parts])
    if len(bad := np.flatnonzero((positions < 0) | (positions >= len(y)))):
        raise DataError(
            f"{returned} position {positions[bad[0]]} for client {owner[bad[0]]}; there are {len(y)} samples, "
            f"0..{len(y) - 1}"
        )
    order = np.argsort(positions, kind="stable")
    if len(twice := np.flatnonzero(np.diff(positions[order]) == 0)):
        first, second = owner[order[twice[0]]], owner[order[twice[0] + 1]]
        raise DataError(
            f"{returned} position {positions[order[twice[0]]]} for client {first} and for client {second}; "
            f"a sample belongs to one client, {len(twice)} of {len(positions)} positions are repeated"
        )
    return parts


def writers(
    client: np.ndarray | None, partition: PartitionConfig, source: str, rng: np.random.Generator
) -> list[tuple[str, np.ndarray]]:
    """(name, ascending positions) of every writer with at least `min_samples` samples, sorted by name.

    client: writer of each sample, None if not known. If `partition.clients` is a number, so many writers are drawn.
    Raises DataError if there are too few writers.
    """
    if client is None:
        raise DataError(
            f"data.partition.kind: writer needs the writer of each sample, which {source!r} does not name; "
            "set data.columns.client (csv, images, hf_disk), add clients.csv (image_folder), or use femnist, "
            "femnist_leaf or mnist_by_writer"
        )
    names, writer_of_sample, counts = np.unique(client, return_inverse=True, return_counts=True)
    kept = np.flatnonzero(counts >= partition.min_samples)
    wanted = partition.clients
    if len(kept) == 0 or (wanted or 0) > len(kept):
        raise DataError(
            f"data.partition.clients is {wanted or 'null (all)'}, but {len(kept)} of {len(names)} writers have at "
            f"least {counted(partition.min_samples, 'sample')} (the largest has {counts.max(initial=0)}); "
            "lower clients or min_samples"
        )
    if wanted is not None:
        kept = np.sort(rng.choice(kept, wanted, replace=False))
    by_writer = np.split(np.argsort(writer_of_sample, kind="stable"), np.cumsum(counts)[:-1])
    return [(str(names[writer]), by_writer[writer]) for writer in kept]


def iid(
    y: np.ndarray, clients: int, partition: IidConfig, min_samples: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Parts of the sizes in `partition.sizes`, or of random sizes; without both, of sizes that differ by at most 1.

    Random sizes are drawn again until every client has at least `min_samples` samples; after the last draw, `divide`
    raises DataError for a client with too few. So are those of NIID-Bench (`iid-diff-quantity`), with 10 samples.
    """
    rows = rng.permutation(len(y))
    if partition.share_alpha is not None:
        for _ in range(MAX_REDRAWS):
            parts = _shares(rows, clients, partition.share_alpha, rng)
            if min(map(len, parts)) >= min_samples:
                break
        return parts
    if partition.sizes is None:
        return np.array_split(rows, clients)
    if (wanted := sum(partition.sizes)) > len(rows):
        raise DataError(f"data.partition.sizes add up to {wanted}, but there are {len(rows)} samples; lower them")
    return np.split(rows, np.cumsum(partition.sizes))[:-1]


# --- Dirichlet ----------------------------------------------------------------------------------


def dirichlet(
    y: np.ndarray, clients: int, partition: DirichletConfig, min_samples: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """The parts of the first draw in which every client has at least `min_samples` samples."""
    rows_C = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    for _ in range(MAX_REDRAWS):
        counts_CN = _counts(np.array([len(rows) for rows in rows_C]), clients, partition, rng)
        sizes = counts_CN.sum(0)
        if sizes.min() >= min_samples:
            parts_CN = [np.split(rows, np.cumsum(counts)[:-1]) for rows, counts in zip(rows_C, counts_CN, strict=True)]
            return [np.concatenate(parts) for parts in zip(*parts_CN, strict=True)]
    alphas = f"data.partition.alpha (now {partition.alpha:g})"
    if partition.groups is not None:
        alphas += f" or group_alpha (now {partition.group_alpha:g})"
    raise DataError(
        f"dirichlet: in {MAX_REDRAWS} draws a client always got too few samples; in the last draw client "
        f"{sizes.argmin()} of {clients} got {sizes.min()} of {len(y)}, each needs {min_samples}. "
        f"Raise {alphas}, lower clients, or lower min_samples"
    )


def _counts(sizes_C: np.ndarray, clients: int, partition: DirichletConfig, rng: np.random.Generator) -> np.ndarray:
    """Draws the number of samples of each class for each client, int64 (C, N), directly or first for each group."""
    if partition.groups is None:
        return _dirichlet_counts(sizes_C, clients, partition.alpha, partition.capped, rng)
    counts_CG = _dirichlet_counts(sizes_C, partition.groups, partition.group_alpha, partition.capped, rng)
    shares = even_shares(clients, partition.groups)
    counts_by_group = [
        _dirichlet_counts(group_sizes_C, share, partition.alpha, partition.capped, rng)
        for group_sizes_C, share in zip(counts_CG.T, shares, strict=True)
    ]
    return np.hstack(counts_by_group)


def _dirichlet_counts(
    sizes_C: np.ndarray, clients: int, alpha: float, capped: bool, rng: np.random.Generator
) -> np.ndarray:
    """Draws the number of samples of each class for each client, int64 (C, N); row c has the sum sizes_C[c].

    The shares of each class follow Dir(alpha) over the clients. capped: NIID-Bench's rule, by which a client that has
    n / N samples gets no samples of the remaining classes.
    """
    even_share = sizes_C.sum() / clients
    counts_CN = np.zeros((len(sizes_C), clients), np.int64)
    for label, size in enumerate(sizes_C):
        if size == 0:
            continue
        still_open = counts_CN.sum(0) < even_share if capped else np.ones(clients, bool)
        p = rng.dirichlet(np.full(clients, alpha)) * still_open
        if p.sum() == 0:  # with a tiny alpha, all shares can belong to clients that are full
            p = still_open / still_open.sum()
        ends = np.floor(np.cumsum(p / p.sum()) * size).astype(np.int64)
        ends[np.flatnonzero(p)[-1] :] = size  # so that rounding neither loses samples nor gives them to a full client
        counts_CN[label] = np.diff(ends, prepend=0)
    return counts_CN


# --- n classes per client -----------------------------------------------------------------------


def classes(
    y: np.ndarray, clients: int, partition: ClassesConfig, min_samples: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Parts in which each class is split among its owners: evenly, up to one sample, or in random shares.

    Random shares are drawn again until every client has at least `min_samples` samples; after the last draw,
    `divide` raises DataError for a client with too few.
    """
    labels = np.unique(y)
    owners = _owners(len(labels), clients, partition, rng)
    for _ in range(1 if partition.share_alpha is None else MAX_REDRAWS):
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for label, owners_of_label in zip(labels, owners, strict=True):
            if owners_of_label:
                rows = rng.permutation(np.flatnonzero(y == label))
                shares = _shares(rows, len(owners_of_label), partition.share_alpha, rng)
                for client, part in zip(owners_of_label, shares, strict=True):
                    parts[client].append(part)
        if min(sum(map(len, part)) for part in parts) >= min_samples:
            break
    return [np.concatenate(part) for part in parts]


def _shares(rows: np.ndarray, owners: int, alpha: float | None, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows of each owner; with an alpha, one row each and Dirichlet shares of the other rows."""
    if alpha is None:
        return np.array_split(rows, owners)
    others = max(len(rows) - owners, 0)
    ends = np.floor(np.cumsum(rng.dirichlet(np.full(owners, alpha))) * others).astype(np.int64)
    return np.split(rows, (ends + np.arange(1, owners + 1))[:-1])


def _owners(classes: int, clients: int, partition: ClassesConfig, rng: np.random.Generator) -> list[list[int]]:
    """The clients that own each class.

    NIID-Bench's rule: client i of a group owns class i mod C of the group's C classes, and n - 1 other classes.
    """
    n, per_group = partition.classes_per_client, partition.classes_per_group
    key, wanted = ("classes_per_client", n) if partition.groups is None else ("classes_per_group", per_group)
    if wanted > classes:
        raise DataError(
            f"data.partition.{key} is {wanted}, but the samples of this group have "
            f"{counted(classes, 'class', 'classes')}"
        )
    if partition.groups is None:
        classes_of_group = [np.arange(classes)]
    else:
        classes_of_group = _deal_classes(classes, partition.groups, per_group, rng)
    owners: list[list[int]] = [[] for _ in range(classes)]
    client = 0
    for labels, share in zip(classes_of_group, even_shares(clients, len(classes_of_group)), strict=True):
        for position in range(share):
            first = position % len(labels)
            for label in (labels[first], *rng.choice(np.delete(labels, first), n - 1, replace=False)):
                owners[label].append(client)
            client += 1
    return owners


def _deal_classes(classes: int, groups: int, per_group: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The classes of each group, dealt like cards from shuffled decks of all classes.

    A group's classes are distinct. The numbers of groups that two classes belong to differ by at most 1.
    """
    deck: list[int] = []
    classes_of_group = []
    for _ in range(groups):
        hand: list[int] = []
        while len(hand) < per_group:
            deck = deck or rng.permutation(classes).tolist()
            hand.append(deck.pop(next(place for place, drawn in enumerate(deck) if drawn not in hand)))
        classes_of_group.append(np.array(hand))
    return classes_of_group
