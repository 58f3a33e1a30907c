"""Who holds what, in row numbers: the whole federation before a single pixel is copied."""

from dataclasses import dataclass

import numpy as np

from cfl_ray.config import Data, Partition
from cfl_ray.core.errors import DataError
from cfl_ray.core.rng import stream
from cfl_ray.data import partition
from cfl_ray.data.images import Images
from cfl_ray.data.shifts import Group, Variant, make_groups


@dataclass(frozen=True)
class Client:
    """One client's rows of one data set, under one transformation."""

    name: str
    group: int  # true group; -1 where no truth is known
    variant: Variant
    train: np.ndarray  # int64 rows of the training part, ascending
    held_out: np.ndarray  # the same; empty unless the view is hold-out
    test_set: int  # -1 under hold-out


@dataclass(frozen=True)
class TestSet:
    """Rows of a test part, under one transformation."""

    variant: Variant
    rows: np.ndarray

    def labels(self) -> np.ndarray:
        """int16 labels as the group sees them."""
        return self.variant.labels(self.variant.images.test_y[self.rows])


@dataclass(frozen=True)
class Plan:
    """A federation that is decided but not written."""

    view: str
    clients: list[Client]
    test_sets: list[TestSet]
    labels_NC: np.ndarray | None  # bool: the labels each client is tested on (label view)

    @property
    def images(self) -> Images:
        """A data set of the federation; all of them have its shape, scale and classes."""
        return self.clients[0].variant.images


def make_plan(images: Images, other: Images | None, data: Data, seed: int) -> Plan:
    """Divides the data sets as `data` says. Raises DataError where the data do not suffice for it."""
    view = data.test.view
    if data.test.pool:
        images, other = _pooled(images, data.source), None if other is None else _pooled(other, data.shift.other)
    if view != "holdout" and (images.test_y is None or (other is not None and other.test_y is None)):
        raise DataError(f"data.test.view: {view} needs a test part, which {data.source!r} does not have; set data.test.view: holdout (or name data.test_files)")
    by_writer = data.partition.kind == "writer"
    groups = make_groups(images, other, data.shift, natural=not by_writer and data.partition.groups is None)
    owned = _by_writer(groups, data, seed) if by_writer else _divided(groups, data, seed)
    test_sets, test_set_of = ([], {}) if view == "holdout" else _test_sets(groups, owned, data, seed)
    clients, kept = [], _kept_shares(len(owned), data.partition, seed)
    for number, (name, group, truth, rows) in enumerate(owned):
        train, held_out = _split(rows, number, name, kept[number], data, seed)
        clients.append(Client(name, truth, groups[group].variant, train, held_out, test_set_of.get((group, truth), -1)))
    labels_NC = _tested_labels(clients, test_sets, images.num_classes) if view == "label" else None
    return Plan(view, clients, test_sets, labels_NC)


Owned = tuple[str, int, int, np.ndarray]  # name, index of its group, true group, rows


def _pooled(images: Images, source: str) -> Images:
    if images.test_y is None:
        raise DataError(f"data.test.pool needs a test part, which {source!r} does not have; set data.test.pool: false (or name data.test_files)")
    return images.pooled()


def _divided(groups: list[Group], data: Data, seed: int) -> list[Owned]:
    if data.partition.clients is None:
        raise DataError(f"data.partition.clients: null is for kind writer; {data.partition.kind} needs a number")
    least = max(data.partition.min_samples, 2 if data.test.view == "holdout" else 1)
    shares = partition.even_shares(data.partition.clients, len(groups))
    owned: list[Owned] = []
    for index, (group, share) in enumerate(zip(groups, shares)):
        rng = stream(seed, -1, -1, index, "data/partition of group")
        try:
            parts = partition.divide(group.variant.images.train_y[group.rows], share, _of_group(data.partition, shares, index), least, rng)
        except DataError as error:
            raise DataError(f"group {index} of {len(groups)}: {error}" if len(groups) > 1 else str(error)) from None
        truths = _truths(data.partition, index if len(groups) > 1 else -1, share)
        first = len(owned)
        owned += [(str(first + position), index, truth, group.rows[part]) for position, (part, truth) in enumerate(zip(parts, truths))]
    return owned


def _of_group(whole: Partition, shares: list[int], index: int) -> Partition:
    """The partition of one group's clients."""
    if whole.sizes is None:
        return whole
    first = sum(shares[:index])
    return whole.model_copy(update={"sizes": whole.sizes[first : first + shares[index]]})


def _truths(whole: Partition, truth: int, clients: int) -> list[int]:
    """The true group of each client: the group of the shift, or the one that the partition itself makes."""
    if whole.groups is None:
        return [truth] * clients
    return np.repeat(np.arange(whole.groups), partition.even_shares(clients, whole.groups)).tolist()


def _by_writer(groups: list[Group], data: Data, seed: int) -> list[Owned]:
    """Natural clients. Without a shift their true group is the one their data came with; under a shift every group has its own."""
    wanted = data.partition.clients
    shares = [None] * len(groups) if wanted is None else partition.even_shares(wanted, len(groups))
    owned: list[Owned] = []
    for index, (group, share) in enumerate(zip(groups, shares)):
        images, rng = group.variant.images, stream(seed, -1, -1, index, "data/writers of group")
        ids = None if images.client is None else images.client[group.rows]
        for name, part in partition.writers(ids, data.partition.model_copy(update={"clients": share}), data.source, rng):
            rows = group.rows[part]
            if len(groups) > 1:
                owned.append((f"{name}/{index}", index, index, rows))
            else:
                owned.append((name, 0, _natural_group(images, rows, name), rows))
    return owned


def _natural_group(images: Images, rows: np.ndarray, name: str) -> int:
    if images.group is None:
        return -1
    found = np.unique(images.group[rows])
    if len(found) > 1:
        raise DataError(f"client {name!r} has samples of groups {found[0]} and {found[1]}; a client belongs to one (data.columns.group)")
    return int(found[0])


def _kept_shares(clients: int, whole: Partition, seed: int) -> np.ndarray:
    """float64 (N,): the share of its training samples that each client keeps, 1.0 where no cut takes it."""
    kept, wanted = np.ones(clients), sum(cut.clients for cut in whole.cut)
    if wanted > clients:
        raise DataError(f"data.partition.cut takes {wanted} clients, but the federation has {clients}; at most {clients}")
    taken = stream(seed, -1, -1, -1, "data/cut clients").choice(clients, wanted, replace=False)
    kept[taken] = np.repeat([cut.keep for cut in whole.cut], [cut.clients for cut in whole.cut])
    return kept


def _split(rows: np.ndarray, client: int, name: str, keep: float, data: Data, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's training and held-out rows, at least one of each under hold-out."""
    held_out = rows[:0]
    if data.test.view == "holdout":
        rows, held_out = split_rows(rows, data.test.fraction, client, name, seed)
    limit = len(rows) if data.partition.samples is None else min(data.partition.samples, len(rows))
    limit = max(round(keep * limit), 1)
    if len(rows) > limit:
        rng = stream(seed, -1, -1, client, "data/sample cap")
        rows = np.sort(rng.choice(rows, limit, replace=False))
    return rows, held_out


def split_rows(rows: np.ndarray, fraction: float, client: int, name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out rows of one client, ascending. Raises DataError where there are fewer than two."""
    if len(rows) < 2:
        raise DataError(f"client {name!r} has {len(rows)} sample; holding out a part needs 2: set data.partition.min_samples: 2")
    count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
    shuffled = stream(seed, -1, -1, client, "data/holdout").permutation(rows)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def _test_sets(groups: list[Group], owned: list[Owned], data: Data, seed: int) -> tuple[list[TestSet], dict[tuple[int, int], int]]:
    """The distinct shared test sets, and which one measures the clients of (group, true group)."""
    test_sets: list[TestSet] = []
    number_of: dict = {}
    measured_by = {}
    for group, truth in dict.fromkeys((group, truth) for _, group, truth, _ in owned):
        rows, variant = _test_rows(groups[group], truth, data, seed), groups[group].variant
        if len(rows) == 0:
            raise DataError(f"no test image for group {max(truth, group)}; set data.test.view: holdout, or change data.shift")
        key = (id(variant.images), variant.turns, variant.offset, rows.tobytes())
        if key not in number_of:
            number_of[key] = len(test_sets)
            test_sets.append(TestSet(variant, rows))
        measured_by[group, truth] = number_of[key]
    return test_sets, measured_by


def _test_rows(group: Group, truth: int, data: Data, seed: int) -> np.ndarray:
    images = group.variant.images
    if data.test.view == "label":  # the client's labels choose from all images
        rows = np.arange(len(images.test_y))
    elif data.partition.kind == "writer" and data.shift.kind == "none" and images.test_group is not None:
        rows = np.flatnonzero(images.test_group == truth)
    else:
        rows = group.test_rows
    if data.test.max_images is not None and len(rows) > data.test.max_images:
        rows = np.sort(stream(seed, -1, -1, -1, "data/test images").choice(rows, data.test.max_images, replace=False))
    return rows


def _tested_labels(clients: list[Client], test_sets: list[TestSet], num_classes: int) -> np.ndarray:
    """bool (N, C): labels of a client's training samples. Raises DataError for a client none of whose labels is tested."""
    present_SC = np.array([np.bincount(one.labels(), minlength=num_classes) > 0 for one in test_sets])
    labels_NC = np.zeros((len(clients), num_classes), bool)
    for number, client in enumerate(clients):
        labels_NC[number, client.variant.labels(client.variant.images.train_y[client.train])] = True
        if not (labels_NC[number] & present_SC[client.test_set]).any():
            held = np.flatnonzero(labels_NC[number])
            raise DataError(f"client {client.name!r} has labels {held.tolist()}, none of which is in the test set; set data.test.view: holdout")
    return labels_NC
