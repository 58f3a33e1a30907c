"""A federation, or a data set to divide, from the user's own arrays; a federation is held in memory."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cfl_ray.core.tasks import TARGETS
from cfl_ray.data.array_checks import (
    Array,
    check_lengths,
    copied_tokens,
    dense_labels,
    ids_of,
    inputs_of,
    label_warnings,
    num_outputs,
    targets_of,
)
from cfl_ray.data.data_set import DataSet
from cfl_ray.data.federation import DataShape, Federation, tested_on
from cfl_ray.data.indexed import Index, IndexedFederation, Scaling, StoredSamples
from cfl_ray.data.plan import split_rows
from cfl_ray.errors import DataError


def federation_from_arrays(
    x: Array,
    y: Array,
    clients: Array,
    *,
    x_test: Array | None = None,
    y_test: Array | None = None,
    test_clients: Array | None = None,
    groups: Mapping[Any, Any] | Array | None = None,
    num_classes: int | None = None,
    vocabulary: int | None = None,
    holdout: float = 0.2,
    seed: int = 0,
    view: str | None = None,
    normalize: list[list[float]] | None = None,
    targets: str = "class",
    labels: str = "given",
    order: str = "random",
    x_validation: Array | None = None,
    y_validation: Array | None = None,
    validation_clients: Array | None = None,
    class_names: Sequence[str] | None = None,
) -> Federation:
    """A federation in which sample (x[r], y[r]) belongs to client clients[r]. Raises DataError for wrong input.

    Clients are numbered in the sorted order of their ids. The test data of a client are
        with x_test and test_clients: its own samples of x_test;
        with x_test only: all samples of x_test, or with view="label" those whose labels the client has;
        without x_test: the share `holdout` of its own samples, which are excluded from training.

    x_validation, y_validation: validation data, of all clients or of those that `validation_clients` names.
    x: (n, *input), uint8 (divided by 255) or float (unchanged); with `vocabulary`, token ids: integers below it.
    y: integers 0..C-1, or as `targets` says. clients: integers or strings.
    groups: the true group of each client ({client: group}) or of each sample.
    normalize: [means, standard deviations] per channel.
    targets: kind of y: "class"; "real": floats (n,) or (n, d); "binary": 0 or 1 (n, C); "tokens": integers (n, T) below
        num_classes.
    order: "random": random samples are held out; "last": the last ones of each client.
    labels: "given": C is the largest label + 1, or `num_classes`; "dense": labels are numbered 0.. in ascending order.
    class_names: the name of each class by its label in y; there are as many classes.
    """
    given = _checked(
        x, y, (x_test, y_test), (x_validation, y_validation), num_classes, vocabulary, targets, labels, class_names
    )
    owners = _owners_of(given, clients, test_clients, validation_clients)
    group_N = _groups(groups, owners.names, owners.train)
    view = _view(view, given.test is not None, owners.test is not None, targets)
    own_test = () if owners.test is None else (owners.test,)
    recipe = {
        "source": "arrays",
        "clients": len(owners.names),
        "view": view,
        "holdout": holdout,
        "seed": seed,
        "normalize": normalize,
        "sha256": digest(*given.train, owners.train, group_N, *(given.test or ()), *own_test),
    }
    optional = {
        "vocabulary": vocabulary,
        "targets": None if targets == "class" else targets,
        "num_classes": None if given.num_classes == given.least_classes else given.num_classes,
        "labels": list(given.numbered) or None,
        "class_names": None if class_names is None else list(given.class_names),
        "order": order if order != "random" and view == "holdout" and not own_test else None,
    }
    recipe |= {key: value for key, value in optional.items() if value is not None}
    if given.validation is not None:
        of_samples = np.zeros(0, np.int64) if owners.validation is None else owners.validation
        recipe["validation"] = digest(*given.validation, of_samples)
    samples, index = _laid_out(given, owners, group_N, view, holdout, order, seed)
    inputs, outputs = (part.shape[1:] for part in samples)
    scaling = Scaling(float(given.scale), normalize, vocabulary is not None).check(inputs)
    shape = DataShape(inputs, given.num_classes, vocabulary, targets, outputs, given.class_names)
    shared, names = None if own_test else given.test, [str(name) for name in owners.names]
    federation = ArrayFederation(shape, view, recipe, index, scaling, samples, shared, names)
    federation.of_labels, federation.has_test_samples = given.warnings, bool(own_test)
    if given.validation is not None:
        federation.validate_on(given.validation if owners.validation is None else None)
    return federation


def data_set_from_arrays(
    x: Array,
    y: Array,
    *,
    x_test: Array | None = None,
    y_test: Array | None = None,
    groups: Array | None = None,
    num_classes: int | None = None,
    vocabulary: int | None = None,
    targets: str = "class",
    labels: str = "given",
    x_validation: Array | None = None,
    y_validation: Array | None = None,
    class_names: Sequence[str] | None = None,
) -> DataSet:
    """DataSet without clients, which `data.partition` divides among clients. Raises DataError for wrong input.

    groups: the true group of each sample. Other arguments: as in `federation_from_arrays`.
    """
    given = _checked(
        x, y, (x_test, y_test), (x_validation, y_validation), num_classes, vocabulary, targets, labels, class_names
    )
    if targets == "class" and given.num_classes > np.iinfo(np.int16).max:
        raise DataError(
            f"{given.num_classes} classes, at most {np.iinfo(np.int16).max} can be divided; give `clients` yourself"
        )
    group = None
    if groups is not None:
        of_sample = ids_of("groups", groups)
        check_lengths(len(given.train[0]), groups=of_sample)
        group = np.unique(of_sample, return_inverse=True)[1].astype(np.int32)
    others = [part for part in (given.test, given.validation) if part is not None]
    test_x, test_y = (np.concatenate(arrays) for arrays in zip(*others, strict=True)) if others else (None, None)
    stored = TARGETS[targets].stored
    return DataSet(
        given.train[0],
        given.train[1].astype(stored),
        test_x,
        None if test_y is None else test_y.astype(stored),
        given.num_classes,
        scale=given.scale,
        group=group,
        vocabulary=vocabulary,
        targets=targets,
        class_names=given.class_names,
        warnings=given.warnings,
        num_validation=0 if given.validation is None else len(given.validation[1]),
    )


# --- checks -------------------------------------------------------------------------------------

MaybeSamples = tuple[Array | None, Array | None]  # x and y as given


@dataclass(frozen=True)
class _Given:
    """The samples of the caller, checked, with their labels as the caller wants them."""

    train: StoredSamples
    test: StoredSamples | None
    validation: StoredSamples | None
    num_classes: int  # C
    least_classes: int  # C if the caller gave no number
    class_names: tuple[str, ...]
    numbered: tuple[str, ...]  # labels that were numbered anew, as texts; empty: none were
    warnings: tuple[str, ...]

    @property
    def scale(self) -> int:
        """By which inputs are divided."""
        return 255 if self.train[0].dtype == np.uint8 else 1


def _checked(
    x: Array,
    y: Array,
    test: MaybeSamples,
    validation: MaybeSamples,
    num_classes: int | None,
    vocabulary: int | None,
    targets: str,
    labels: str,
    class_names: Sequence[str] | None,
) -> _Given:
    """The samples of all parts. Raises DataError, which names the argument."""
    train = inputs_of("x", x, vocabulary), targets_of("y", y, targets)
    check_lengths(len(train[0]), y=train[1])
    parts = {"y": train}  # by the name of their labels in messages
    for name, other in (("test", test), ("validation", validation)):
        if (samples := _other_samples(name, *other, train, vocabulary, targets)) is not None:
            parts[f"y_{name}"] = samples
    parts, numbered = _relabelled(parts, labels, targets)
    num_classes, names_C = _named(class_names, numbered, num_classes, targets)
    y_of = [(name, y_) for name, (_, y_) in parts.items()]
    classes = num_outputs(num_classes, y_of, targets, vocabulary)
    x_, y_ = parts["y"]
    return _Given(
        parts["y"],
        parts.get("y_test"),
        parts.get("y_validation"),
        classes,
        num_outputs(None, y_of, targets, vocabulary),
        names_C,
        numbered,
        (*_unused_labels(y_, classes, num_classes, targets), *copied_tokens("y", x_, y_, targets)),
    )


@dataclass(frozen=True)
class _Owners:
    """The number of the client of each sample."""

    names: np.ndarray  # ids of the clients, by number
    train: np.ndarray
    test: np.ndarray | None  # None: clients do not have test samples of their own
    validation: np.ndarray | None  # likewise


def _owners_of(given: _Given, clients: Array, test_clients: Array | None, validation_clients: Array | None) -> _Owners:
    ids = ids_of("clients", clients)
    check_lengths(len(given.train[0]), clients=ids)
    names, client = np.unique(ids, return_inverse=True)
    test = _owner("test", test_clients, names, given.test)
    if test is not None and len(empty := np.setdiff1d(np.arange(len(names)), test)):
        client_id = names.tolist()[empty[0]]
        raise DataError(
            f"test_clients: client {client_id!r} has no test sample; leave out test_clients to hold a part out instead"
        )
    return _Owners(names, client, test, _owner("validation", validation_clients, names, given.validation))


def _owner(part: str, clients: Array | None, names: np.ndarray, samples: StoredSamples | None) -> np.ndarray | None:
    """The number of the client of each sample of a part; None if `clients` is not given."""
    if clients is None:
        return None
    if samples is None:
        raise DataError(f"{part}_clients names the owners of x_{part}, which is not given")
    ids = ids_of(f"{part}_clients", clients)
    check_lengths(len(samples[0]), f"x_{part}", **{f"{part}_clients": ids})
    if unknown := sorted(set(ids.tolist()) - set(names.tolist()), key=str):
        raise DataError(f"{part}_clients: client {unknown[0]!r} has no training sample; leave its {part} samples out")
    return np.searchsorted(names, ids)


def _relabelled(
    parts: dict[str, StoredSamples], labels: str, targets: str
) -> tuple[dict[str, StoredSamples], tuple[str, ...]]:
    """(the parts with labels as `labels` says, the labels that were numbered anew as texts)."""
    if labels not in ("given", "dense"):
        raise DataError(f"labels must be 'given' or 'dense', got {labels!r}")
    if labels == "given":
        return parts, ()
    if targets != "class":
        raise DataError(f"labels: dense is for classes, the targets are {targets!r}; leave it out")
    numbered, names = dense_labels([(name, y) for name, (_, y) in parts.items()])
    return {name: (x, y) for (name, (x, _)), y in zip(parts.items(), numbered, strict=True)}, names


def _named(
    class_names: Sequence[str] | None, found: tuple[str, ...], num_classes: int | None, targets: str
) -> tuple[int | None, tuple[str, ...]]:
    """(number of classes, names of the classes). found: labels that were numbered anew, as texts; empty: none were."""
    if class_names is None:
        return num_classes, found
    names = tuple(map(str, class_names))
    if isinstance(class_names, str) or targets != "class":
        raise DataError(
            f"class_names is a list of names for targets 'class', got {class_names!r} for targets {targets!r}"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"class_names has {twice[0]!r} twice")
    if num_classes not in (None, len(names)):
        raise DataError(
            f"class_names has {len(names)} names, num_classes is {num_classes}; give one name for each class"
        )
    if not found:
        return len(names), names
    try:
        return num_classes, tuple(names[int(label)] for label in found)
    except (ValueError, IndexError):
        raise DataError(
            f"class_names has {len(names)} names, for labels 0 .. {len(names) - 1}, but y has the labels "
            f"{', '.join(found[:6])}; leave class_names out, or give labels that are places in it"
        ) from None


def _unused_labels(y: np.ndarray, classes: int, num_classes: int | None, targets: str) -> tuple[str, ...]:
    """A warning on labels without a training sample, unless the caller gave the number of classes."""
    if targets != "class" or num_classes is not None:
        return ()
    return tuple(label_warnings("y", y, classes))


def _other_samples(
    part: str, x: Array | None, y: Array | None, train: StoredSamples, vocabulary: int | None, targets: str
) -> StoredSamples | None:
    """The checked samples of the test or validation part; None if none are given. train: of equal shapes and types."""
    if x is None and y is None:
        return None
    if x is None or y is None:
        raise DataError(f"x_{part} and y_{part} belong together; give both or neither")
    samples = inputs_of(f"x_{part}", x, vocabulary), targets_of(f"y_{part}", y, targets)
    check_lengths(len(samples[0]), f"x_{part}", **{f"y_{part}": samples[1]})
    for name, tested, trained in zip(("x", "y"), samples, train, strict=True):
        if (tested.shape[1:], tested.dtype) != (trained.shape[1:], trained.dtype):
            raise DataError(
                f"{name}_{part} holds {tested.dtype} {tested.shape[1:]}, {name} holds {trained.dtype} "
                f"{trained.shape[1:]}; they must agree"
            )
    return samples


def _view(view: str | None, has_test: bool, has_owners: bool, targets: str) -> str:
    if view == "label" and targets != "class":
        raise DataError(f"the test view label needs classes, the targets are {targets!r}; set data.test.view: cluster")
    possible = ("cluster", "label") if has_test and not has_owners else ("holdout",)
    if view is not None and view not in possible:
        raise DataError(
            f"the test view {view} does not fit these arrays, {' or '.join(possible)} does: cluster and label need "
            "x_test without test_clients; set data.test.view"
        )
    return view or possible[0]


def _groups(groups: Mapping[Any, Any] | Array | None, names: np.ndarray, client: np.ndarray) -> np.ndarray:
    """int32 (N,): true groups numbered 0.. in sorted order, -1 if none are given."""
    if groups is None:
        return np.full(len(names), -1, np.int32)
    if isinstance(groups, Mapping):
        if missing := [name for name in names.tolist() if name not in groups]:
            raise DataError(
                f"groups names no group for client {missing[0]!r} ({len(missing)} of {len(names)} clients are missing)"
            )
        of_client = ids_of("groups", [groups[name] for name in names.tolist()])
    else:
        of_sample = ids_of("groups", groups)
        if len(of_sample) != len(client):
            raise DataError(
                f"groups has {len(of_sample)} entries, x has {len(client)}; each sample needs an entry, or give groups "
                "as {client: group}"
            )
        of_client = of_sample[np.unique(client, return_index=True)[1]]
        if len(differing := np.flatnonzero(of_sample != of_client[client])):
            owner = client[differing[0]]
            raise DataError(
                f"groups: client {names[owner]!s} is in groups {of_client[owner]} and {of_sample[differing[0]]} "
                f"(row {differing[0]}); a client belongs to one group"
            )
    return np.unique(of_client, return_inverse=True)[1].astype(np.int32)


class ArrayFederation(IndexedFederation):
    """A federation in memory; its pickle contains the arrays."""

    def __init__(
        self,
        shape: DataShape,
        view: str,
        recipe: dict[str, Any],
        index: Index,
        scaling: Scaling,
        samples: StoredSamples,
        test: StoredSamples | None,
        names: list[str],
    ) -> None:
        super().__init__(shape, view, recipe, index, scaling)
        self.samples, self.test_samples, self._names = samples, test, names
        self.of_labels: tuple[str, ...] = ()  # warnings
        self.has_test_samples = False  # whether each client's test samples are those of x_test that it has
        self.validation_samples_of_all: StoredSamples | None = None  # shared validation set; None: there is none

    def validate_on(self, of_all: StoredSamples | None) -> None:
        """Declares validation data: those of all clients, or those that each has in the index (None)."""
        self.validation_samples_of_all = of_all
        self.validation_view = "holdout" if of_all is None else "cluster" if self.view == "holdout" else self.view
        self.validation_sizes = [] if of_all is None else [len(of_all[1])]
        if of_all is not None:
            self.index = replace(self.index, validation_set_N=np.zeros(self.num_clients, np.int32))

    @property
    def tested_on(self) -> str:
        if self.has_test_samples:
            return "each client is tested on its own samples of x_test (test_clients)"
        return tested_on(self.view, self.num_test_sets())

    @property
    def warnings(self) -> list[str]:
        return [*self.preparation_warnings, *self.of_labels, *super().warnings]

    def client_name(self, client: int) -> str:
        return self._names[client]

    def num_test_sets(self) -> int:
        return 0 if self.test_samples is None else 1

    def _file(self, number: int) -> StoredSamples:
        return self.samples

    def _validation_file(self, number: int) -> StoredSamples:
        assert self.validation_samples_of_all is not None  # validation sets are counted by validation_sizes
        return self.validation_samples_of_all

    def _test_file(self, number: int) -> StoredSamples:
        assert self.test_samples is not None  # test sets are counted by num_test_sets
        return self.test_samples


# --- layout -------------------------------------------------------------------------------------


def _laid_out(
    given: _Given, owners: _Owners, group_N: np.ndarray, view: str, holdout: float, order: str, seed: int
) -> tuple[StoredSamples, Index]:
    """The samples client by client, and the rows of each client: for training, for its test, and for validation."""
    samples, rows_N = given.train, _rows_by_client(owners.train, len(owners.names))
    parts_N: list[tuple[np.ndarray, ...]] = [(rows, rows[:0]) for rows in rows_N]
    if given.test is not None and owners.test is not None:
        samples, parts_N = _appended(samples, [(rows,) for rows in rows_N], given.test, owners.test)
    elif view == "holdout":
        parts_N = _held_out(rows_N, owners.names, holdout, order, seed)
    if given.validation is not None and owners.validation is not None:
        samples, parts_N = _appended(samples, parts_N, given.validation, owners.validation)
    labels_NC = None
    if view == "label":
        labels_NC = np.zeros((len(owners.names), given.num_classes), bool)
        labels_NC[owners.train, given.train[1]] = True
    return _by_client(*samples, parts_N, group_N, labels_NC, -1 if view == "holdout" else 0)


def _appended(
    samples: StoredSamples, parts_N: Sequence[tuple[np.ndarray, ...]], more: StoredSamples, owner: np.ndarray
) -> tuple[StoredSamples, list[tuple[np.ndarray, ...]]]:
    """The samples with those of a further part behind them, and the rows of each client with its own in that part.

    owner: the client of each sample of the part.
    """
    first, (x, y), (x_more, y_more) = len(samples[0]), samples, more
    own_N = _rows_by_client(owner, len(parts_N))
    parts = [(*rows, first + own) for rows, own in zip(parts_N, own_N, strict=True)]
    return (np.concatenate([x, x_more]), np.concatenate([y, y_more])), parts


def _held_out(
    rows_N: Sequence[np.ndarray], names: np.ndarray, holdout: float, order: str, seed: int
) -> list[tuple[np.ndarray, ...]]:
    """Rows for training and for the test of each client. Raises DataError for another share or order."""
    if not 0 < holdout < 1:
        raise DataError(f"holdout is a share between 0 and 1, got {holdout}")
    if order not in ("random", "last"):
        raise DataError(f"order must be 'random' or 'last', got {order!r}")
    remedy = "leave its sample out, or give x_test and y_test"
    return [split_rows(rows, holdout, n, str(names[n]), seed, remedy, order) for n, rows in enumerate(rows_N)]


def _by_client(
    x: np.ndarray,
    y: np.ndarray,
    parts_N: Sequence[tuple[np.ndarray, ...]],
    group_N: np.ndarray,
    labels_NC: np.ndarray | None,
    test_set: int,
) -> tuple[StoredSamples, Index]:
    """The samples client by client, training rows before held-out and validation rows, and their index.

    parts_N: the rows of these parts. test_set: number of the test set of all clients; -1: none.
    """
    order = np.concatenate([rows for parts in parts_N for rows in parts])
    size_NX = np.array([[len(rows) for rows in parts] for parts in parts_N], np.int64)  # X parts
    total_N, zero_N = size_NX.sum(1), np.zeros(len(parts_N), np.int32)
    offset_N = np.cumsum(total_N) - total_N
    train_N, held_out_N = size_NX[:, 0].copy(), size_NX[:, 1].copy()
    index = Index(zero_N, offset_N, train_N, held_out_N, group_N, zero_N + np.int32(test_set), labels_NC)
    if size_NX.shape[1] > 2:
        index = replace(index, validation_N=size_NX[:, 2].copy(), validation_set_N=zero_N - np.int32(1))
    return (x[order], y[order]), index


def _rows_by_client(client: np.ndarray, count: int) -> list[np.ndarray]:
    return np.split(np.argsort(client, kind="stable"), np.cumsum(np.bincount(client, minlength=count))[:-1])


def digest(*arrays: np.ndarray) -> str:
    """The sha256 of these arrays, with their types and shapes."""
    summary = hashlib.sha256()
    for array in arrays:
        summary.update(f"{array.dtype.str}{array.shape}".encode())
        summary.update(np.ascontiguousarray(array).view(np.uint8).data)
    return summary.hexdigest()
