"""The plan of a federation: the row numbers of each client's samples, decided before any pixel is copied."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from cfl_ray.config import DataConfig, PartitionConfig
from cfl_ray.config.partition import PARTITION_KINDS, IidConfig
from cfl_ray.config.shift import HybridConfig
from cfl_ray.core.rng import stream
from cfl_ray.data import partition
from cfl_ray.data.data_set import DataSet
from cfl_ray.data.shifts import Group, Samples, Variant, make_groups
from cfl_ray.errors import DataError, counted, some_of
from cfl_ray.plugins.calling import reference_of


@dataclass(frozen=True)
class PlannedClient:
    """A client's rows of a data set, and their transformation."""

    name: str
    group: int  # true group; -1: not known
    variant: Variant
    train: np.ndarray  # int64 rows of the data set's training part, in the order of time, to train on
    held_out: np.ndarray  # int64 rows of the training part, likewise, to test on; empty unless the view is hold-out
    test_set: int  # number of its shared test set; -1 if the view is hold-out
    # int64 rows of the training part, or of the test part of `validation_of`, that are validation data of the source
    validation: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    validation_of: Variant | None = None
    validation_set: int = -1  # number of its shared validation set; -1: there is none

    @property
    def num_rows(self) -> int:
        """Number of its rows."""
        return len(self.train) + len(self.held_out) + len(self.validation)

    def samples(self) -> list[Samples]:
        """Its transformed samples, in the order in which shards have them."""
        parts = [self.variant.train(self.train), self.variant.train(self.held_out)]
        if len(self.validation):
            of, rows = self.validation_of, self.validation
            parts.append(self.variant.train(rows) if of is None else of.test(rows))
        return parts


@dataclass(frozen=True)
class TestSet:
    """Rows of a data set's test part, and their transformation."""

    variant: Variant
    rows: np.ndarray

    def labels(self) -> np.ndarray:
        """The rows' labels, int16, after the group's transformation."""
        return self.variant.test_labels(self.rows)


@dataclass(frozen=True)
class FederationPlan:
    """A federation that is planned but not written."""

    view: str
    clients: list[PlannedClient]
    test_sets: list[TestSet]
    labels_NC: np.ndarray | None  # bool: labels on which each client is tested; None unless the view is label
    validation_view: str | None = None  # of the source's own validation data; None: it has none
    validation_sets: Sequence[TestSet] = ()
    warnings: tuple[str, ...] = ()  # on the division

    @property
    def data_set(self) -> DataSet:
        """The first client's data set. All data sets of a federation have the same shape, scale and classes."""
        return self.clients[0].variant.data_set


def with_validation_part(plan: FederationPlan, of_validation: FederationPlan, own: bool) -> FederationPlan:
    """The plan with the test sets of another plan of the same clients as its validation sets.

    own: each client has its own samples of the part instead.
    """
    if own:
        writer = of_validation.data_set.validation_client
        assert writer is not None
        names, writer_n = np.unique(writer.astype(np.str_), return_inverse=True)
        order, ends = np.argsort(writer_n, kind="stable"), np.cumsum(np.bincount(writer_n))
        rows_of = dict(zip(names.tolist(), np.split(order, ends[:-1]), strict=True))
        clients = []
        for client, other in zip(plan.clients, of_validation.clients, strict=True):
            rows = rows_of.get(client.name, rows_of.get(client.name.rpartition("/")[0], client.train[:0]))
            clients.append(replace(client, validation=rows, validation_of=other.variant))
        return replace(plan, clients=clients, validation_view="holdout")
    clients = [
        replace(client, validation_set=other.test_set)
        for client, other in zip(plan.clients, of_validation.clients, strict=True)
    ]
    sets, view = of_validation.test_sets, of_validation.view
    return replace(plan, clients=clients, validation_sets=sets, validation_view=view)


class ClientRows(NamedTuple):
    """The rows that a client gets in the division, before rows are held out or cut."""

    name: str
    group: int  # position in the list of groups, which decides the transformation
    true_group: int  # -1: not known
    rows: np.ndarray  # int64 rows of the training part, ascending


def make_plan(data_set: DataSet, other: DataSet | None, data: DataConfig, seed: int) -> FederationPlan:
    """The division that `data` describes. Raises DataError if there are too few samples for it.

    other: the second data set of a hybrid shift; None for other shifts.
    """
    view = data.test.view
    assert view is not None  # the view is null only for arrays, which have clients already
    _check_classes(data_set, data)
    if data.test.pool:
        second = data.shift.other if isinstance(data.shift, HybridConfig) else ""
        data_set, other = data_set.pooled(data.source), None if other is None else other.pooled(second)
    if view != "holdout" and (data_set.test_y is None or (other is not None and other.test_y is None)):
        raise DataError(
            f"data.test.view: {view} needs a test part, which {data.source!r} does not have; "
            "set data.test.view: holdout (or name data.test_files)"
        )
    by_writer = data.partition.kind == "writer"
    groups = make_groups(data_set, other, data.shift, not by_writer and data.partition.true_groups is None, seed)
    divided = _divide_by_writer(groups, data, seed) if by_writer else _divide(groups, data, seed)
    test_sets, test_set_of = ([], {}) if view == "holdout" else _test_sets(groups, divided, data, seed)
    kept_N = _kept_shares(len(divided), data.partition, seed)
    clients = []
    for number, client in enumerate(divided):
        time = groups[client.group].variant.data_set.time
        train, held_out = _split(client, number, kept_N[number], data, seed, time)
        test_set = test_set_of.get((client.group, client.true_group), -1)
        variant = groups[client.group].variant
        clients.append(PlannedClient(client.name, client.true_group, variant, train, held_out, test_set))
    labels_NC = _tested_labels(clients, test_sets, data_set.num_classes) if view == "label" else None
    unused = () if data_set.targets != "class" else _unused_classes(groups, divided, data.partition)
    return FederationPlan(view, clients, test_sets, labels_NC, warnings=unused)


def _check_classes(data_set: DataSet, data: DataConfig) -> None:
    """Raises DataError if `data` divides or changes samples by their classes, but the targets are not classes."""
    needs = {
        "data.partition.kind": (data.partition.kind, data.partition.by_class, "iid or writer"),
        "data.shift.kind": (data.shift.kind, data.shift.by_class, "none, rotated or hybrid"),
        "data.test.view": (data.test.view, data.test.view == "label", "cluster or holdout"),
    }
    for key, (value, by_class, others) in needs.items():
        if data_set.targets != "class" and by_class:
            raise DataError(
                f"{key}: {value} needs classes, the targets of the task are {data_set.targets!r}; set {others}"
            )


def _divide(groups: list[Group], data: DataConfig, seed: int) -> list[ClientRows]:
    if data.partition.clients is None:
        raise DataError(
            f"data.partition.clients: null is for kind writer; {reference_of(data.partition.kind)} needs a number"
        )
    least = max(data.partition.min_samples, 2 if data.test.view == "holdout" else 1)
    shares = partition.even_shares(data.partition.clients, len(groups))
    divided: list[ClientRows] = []
    for index, (group, share) in enumerate(zip(groups, shares, strict=True)):
        y = group.variant.data_set.train_y[group.rows]
        rng = stream(seed, -1, -1, index, "data/partition of group")
        try:
            parts = partition.divide(y, share, _partition_of_group(data.partition, shares, index), least, rng)
        except DataError as error:
            raise DataError(f"group {index} of {len(groups)}: {error}" if len(groups) > 1 else str(error)) from None
        true_groups = _true_groups(data.partition, index if len(groups) > 1 else -1, share)
        for part, true_group in zip(parts, true_groups, strict=True):
            divided.append(ClientRows(str(len(divided)), index, true_group, group.rows[part]))
    return divided


def _unused_classes(groups: list[Group], divided: list[ClientRows], whole: PartitionConfig) -> tuple[str, ...]:
    """A warning for each group in which no client has samples of some classes."""
    warnings = []
    for index, group in enumerate(groups):
        y = group.variant.data_set.train_y
        counts_C = np.bincount(y[group.rows])
        used = np.concatenate([client.rows for client in divided if client.group == index] or [group.rows[:0]])
        unused = np.flatnonzero((counts_C > 0) & (np.bincount(y[used], minlength=len(counts_C)) == 0))
        if len(unused):
            remedy = "; raise data.partition.clients or classes_per_client" if whole.kind == "classes" else ""
            warnings.append(
                f"data.partition.kind {reference_of(whole.kind)}: no client {f'of group {index} ' * (len(groups) > 1)}"
                f"has samples of {counted(len(unused), 'class', 'classes')}, {some_of(unused.tolist(), 5)}: "
                f"{counted(int(counts_C[unused].sum()), 'training sample')} are unused{remedy}"
            )
    return tuple(warnings)


def _partition_of_group(whole: PartitionConfig, shares: list[int], index: int) -> PartitionConfig:
    """The partition section with only the sizes of this group's clients."""
    if not isinstance(whole, IidConfig) or whole.sizes is None:
        return whole
    first = sum(shares[:index])
    return whole.model_copy(update={"sizes": whole.sizes[first : first + shares[index]]})


def _true_groups(whole: PartitionConfig, true_group: int, clients: int) -> list[int]:
    """The true group of each client: its group in the partition if that makes groups, else `true_group`."""
    if whole.true_groups is None:
        return [true_group] * clients
    return np.repeat(np.arange(whole.true_groups), partition.even_shares(clients, whole.true_groups)).tolist()


def _divide_by_writer(groups: list[Group], data: DataConfig, seed: int) -> list[ClientRows]:
    """A client for each writer.

    Without a shift, a client has the true group of its samples in the data. With a shift, every group has other
    clients.
    """
    wanted = data.partition.clients
    shares = [None] * len(groups) if wanted is None else partition.even_shares(wanted, len(groups))
    divided: list[ClientRows] = []
    for index, (group, share) in enumerate(zip(groups, shares, strict=True)):
        data_set, rng = group.variant.data_set, stream(seed, -1, -1, index, "data/writers of group")
        writer_of_row = None if data_set.client is None else data_set.client[group.rows]
        config = data.partition.model_copy(update={"clients": share})
        for name, part in PARTITION_KINDS.code_of(config)(writer_of_row, config, data.source, rng):
            rows = group.rows[part]
            if len(groups) > 1:
                divided.append(ClientRows(f"{name}/{index}", index, index, rows))
            else:
                divided.append(ClientRows(name, 0, _natural_group(data_set, rows, name), rows))
    return divided


def _natural_group(data_set: DataSet, rows: np.ndarray, name: str) -> int:
    if data_set.group is None:
        return -1
    groups = np.unique(data_set.group[rows])
    if len(groups) > 1:
        raise DataError(
            f"client {name!r} has samples of groups {groups[0]} and {groups[1]}; a client belongs to one group "
            "(data.columns.group)"
        )
    return int(groups[0])


def _kept_shares(clients: int, whole: PartitionConfig, seed: int) -> np.ndarray:
    """The share of its training samples that each client keeps, float64 (N,); 1.0 for clients without a cut."""
    kept_N, wanted = np.ones(clients), sum(cut.clients for cut in whole.cut)
    if wanted > clients:
        raise DataError(
            f"data.partition.cut takes {wanted} clients, but the federation has {clients}; at most {clients}"
        )
    cut_clients = stream(seed, -1, -1, -1, "data/cut clients").choice(clients, wanted, replace=False)
    kept_N[cut_clients] = np.repeat([cut.keep for cut in whole.cut], [cut.clients for cut in whole.cut])
    return kept_N


def _split(
    client: ClientRows, number: int, keep: float, data: DataConfig, seed: int, time: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """A client's training and held-out rows, in the order of time; if the view is hold-out, at least one of each."""
    rows, held_out = _in_time(client.rows, time), client.rows[:0]
    if data.test.view == "holdout":
        remedy = "leave it out (data.partition.min_samples: 2)"
        rows, held_out = split_rows(rows, data.test.fraction, number, client.name, seed, remedy, data.test.order)
    limit = len(rows) if data.partition.samples is None else min(data.partition.samples, len(rows))
    limit = max(round(keep * limit), 1)
    if len(rows) > limit:
        rng = stream(seed, -1, -1, number, "data/sample cap")
        rows = rng.choice(rows, limit, replace=False)
    return _in_time(np.sort(rows), time), _in_time(np.sort(held_out), time)


def _in_time(rows: np.ndarray, time: np.ndarray | None) -> np.ndarray:
    """The rows, ascending, in the order of their times; rows of one time, or without times, as they are."""
    return rows if time is None else rows[np.argsort(time[rows], kind="stable")]


def split_rows(
    rows: np.ndarray, fraction: float, client: int, name: str, seed: int, remedy: str, order: str = "random"
) -> tuple[np.ndarray, np.ndarray]:
    """The training and the held-out rows of a client. Raises DataError for fewer than two rows.

    order: "random": ascending rows of which random ones are held out; "last": the last ones are.
    """
    if len(rows) < 2:
        raise DataError(f"client {name!r} has {len(rows)} sample; holding out a part needs 2; {remedy}")
    count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
    if order == "last":
        return rows[:-count], rows[-count:]
    shuffled = stream(seed, -1, -1, client, "data/holdout").permutation(rows)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def _test_sets(
    groups: list[Group], divided: list[ClientRows], data: DataConfig, seed: int
) -> tuple[list[TestSet], dict[tuple[int, int], int]]:
    """The shared test sets, without duplicates, and the test set's number for each (group, true group)."""
    test_sets: list[TestSet] = []
    number_by_content: dict[tuple[Variant, bytes], int] = {}
    number_by_group: dict[tuple[int, int], int] = {}
    for group, true_group in dict.fromkeys((client.group, client.true_group) for client in divided):
        rows, variant = _test_rows(groups[group], true_group, data, seed), groups[group].variant
        if len(rows) == 0:
            raise DataError(
                f"no test image for group {max(true_group, group)}; set data.test.view: holdout, or change data.shift"
            )
        content = variant, rows.tobytes()
        if content not in number_by_content:
            number_by_content[content] = len(test_sets)
            test_sets.append(TestSet(variant, rows))
        number_by_group[group, true_group] = number_by_content[content]
    return test_sets, number_by_group


def _test_rows(group: Group, true_group: int, data: DataConfig, seed: int) -> np.ndarray:
    data_set = group.variant.data_set
    assert data_set.test_y is not None and group.test_rows is not None  # checked for views with shared test sets
    if data.test.view in ("label", "all"):  # label: a client's labels later select among all images
        rows = np.arange(len(data_set.test_y))
    elif data.partition.kind == "writer" and data.shift.kind == "none" and data_set.test_group is not None:
        rows = np.flatnonzero(data_set.test_group == true_group)
    else:
        rows = group.test_rows
    if data.test.max_samples is not None and len(rows) > data.test.max_samples:
        rows = np.sort(stream(seed, -1, -1, -1, "data/test images").choice(rows, data.test.max_samples, replace=False))
    return rows


def _tested_labels(clients: list[PlannedClient], test_sets: list[TestSet], num_classes: int) -> np.ndarray:
    """The labels of each client's training samples, bool (N, C).

    Raises DataError if none of a client's labels is in its test set.
    """
    present_TC = np.array([np.bincount(test_set.labels(), minlength=num_classes) > 0 for test_set in test_sets])
    labels_NC = np.zeros((len(clients), num_classes), bool)
    for number, client in enumerate(clients):
        labels_NC[number, client.variant.train_labels(client.train)] = True
        if not (labels_NC[number] & present_TC[client.test_set]).any():
            own_labels = np.flatnonzero(labels_NC[number])
            raise DataError(
                f"client {client.name!r} has labels {own_labels.tolist()}, none of which is in the test set; "
                "set data.test.view: holdout"
            )
    return labels_NC
