"""A federation from the user's own arrays, or from a torch Dataset, held in memory."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from cfl_ray.core.tasks import TARGETS
from cfl_ray.data.array_checks import (
    DENSE,
    Array,
    as_array,
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
from cfl_ray.data.federation import DataShape, Federation, Index, IndexedFederation, Scaling, StoredSamples, tested_on
from cfl_ray.data.plan import split_rows
from cfl_ray.data.reading import reading
from cfl_ray.errors import DataError
from cfl_ray.system.mapped import mapped_array


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
    x_, y_, ids = inputs_of("x", x, vocabulary), targets_of("y", y, targets), ids_of("clients", clients)
    check_lengths(len(x_), y=y_, clients=ids)
    names, client = np.unique(ids, return_inverse=True)
    test = _other_samples("test", x_test, y_test, (x_, y_), vocabulary, targets)
    validation = _other_samples("validation", x_validation, y_validation, (x_, y_), vocabulary, targets)
    if validation is None and validation_clients is not None:
        raise DataError("validation_clients names the owners of x_validation, which is not given")
    y_, (test, validation), found = _relabelled(y_, test, validation, labels=labels, targets=targets)
    num_classes, names_C = _named(class_names, found, num_classes, targets)
    others = {"y_test": test, "y_validation": validation}
    parts = [("y", y_), *((name, None if part is None else part[1]) for name, part in others.items())]
    classes = num_outputs(num_classes, parts, targets, vocabulary)
    warnings = *_unused_labels(y_, classes, num_classes, targets), *copied_tokens("y", x_, y_, targets)
    view = _view(view, test is not None, test_clients is not None, targets)
    owner = None if test is None or test_clients is None else _owner("test", test_clients, names, len(test[0]))
    if owner is not None and len(empty := np.setdiff1d(np.arange(len(names)), owner)):
        client_id = names.tolist()[empty[0]]
        raise DataError(
            f"test_clients: client {client_id!r} has no test sample; leave out test_clients to hold a part out instead"
        )
    group_N = _groups(groups, names, client)
    recipe = {
        "source": "arrays",
        "clients": len(names),
        "view": view,
        "holdout": holdout,
        "seed": seed,
        "normalize": normalize,
        "sha256": digest(x_, y_, client, group_N, *(test or ()), *(() if owner is None else (owner,))),
    }
    optional = {
        "vocabulary": vocabulary,
        "targets": None if targets == "class" else targets,
        "num_classes": None if classes == num_outputs(None, parts, targets, vocabulary) else classes,
        "labels": list(found) if found else None,
        "class_names": None if class_names is None else list(names_C),
        "order": order if order != "random" and view == "holdout" and owner is None else None,
    }
    recipe |= {key: value for key, value in optional.items() if value is not None}
    rows_N, labels_NC = _rows_by_client(client, len(names)), None
    parts_N: list[tuple[np.ndarray, ...]] = [(rows, rows[:0]) for rows in rows_N]
    if view == "label":
        labels_NC = np.zeros((len(names), classes), bool)
        labels_NC[client, y_] = True
    elif test is not None and owner is not None:
        parts_N = [(rows,) for rows in rows_N]
        (x_, y_), parts_N = _appended((x_, y_), parts_N, test, _rows_by_client(owner, len(names)))
        test = None
    elif view == "holdout":
        parts_N = _held_out(rows_N, names, holdout, order, seed)
    validator = np.zeros(0, np.int64)
    if validation is not None:
        if validation_clients is not None:
            validator = _owner("validation", validation_clients, names, len(validation[0]))
            (x_, y_), parts_N = _appended((x_, y_), parts_N, validation, _rows_by_client(validator, len(names)))
        recipe["validation"] = digest(*validation, validator)
    samples, index = _by_client(x_, y_, parts_N, group_N, labels_NC, -1 if view == "holdout" else 0)
    scaling = Scaling(255.0 if x_.dtype == np.uint8 else 1.0, normalize, vocabulary is not None).check(x_.shape[1:])
    shape = DataShape(x_.shape[1:], classes, vocabulary, targets, y_.shape[1:], names_C)
    federation = ArrayFederation(shape, view, recipe, index, scaling, samples, test, [str(name) for name in names])
    federation.of_labels, federation.has_test_samples = warnings, owner is not None
    if validation is not None:
        federation.validate_on(None if validation_clients is not None else validation)
    return federation


def _appended(
    samples: StoredSamples, parts_N: Sequence[tuple[np.ndarray, ...]], more: StoredSamples, own_N: Sequence[np.ndarray]
) -> tuple[StoredSamples, list[tuple[np.ndarray, ...]]]:
    """The samples with those of a further part behind them, and the rows of each client with its own in that part."""
    first, (x, y), (x_more, y_more) = len(samples[0]), samples, more
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
    x_, y_ = inputs_of("x", x, vocabulary), targets_of("y", y, targets)
    check_lengths(len(x_), y=y_)
    test = _other_samples("test", x_test, y_test, (x_, y_), vocabulary, targets)
    validation = _other_samples("validation", x_validation, y_validation, (x_, y_), vocabulary, targets)
    y_, (test, validation), found = _relabelled(y_, test, validation, labels=labels, targets=targets)
    num_classes, names_C = _named(class_names, found, num_classes, targets)
    given = [part for part in (test, validation) if part is not None]
    test_x, test_y = (np.concatenate([part[axis] for part in given]) if given else None for axis in (0, 1))
    classes = num_outputs(num_classes, [("y", y_), ("y_test", test_y)], targets, vocabulary)
    if targets == "class" and classes > np.iinfo(np.int16).max:
        raise DataError(f"{classes} classes, at most {np.iinfo(np.int16).max} can be divided; give `clients` yourself")
    group = None
    if groups is not None:
        of_sample = ids_of("groups", groups)
        check_lengths(len(x_), groups=of_sample)
        group = np.unique(of_sample, return_inverse=True)[1].astype(np.int32)
    return DataSet(
        x_,
        y_.astype(TARGETS[targets].stored),
        test_x,
        None if test_y is None else test_y.astype(TARGETS[targets].stored),
        classes,
        scale=255 if x_.dtype == np.uint8 else 1,
        group=group,
        vocabulary=vocabulary,
        targets=targets,
        class_names=names_C,
        warnings=(*_unused_labels(y_, classes, num_classes, targets), *copied_tokens("y", x_, y_, targets)),
        num_validation=0 if validation is None else len(validation[1]),
    )


def _relabelled(
    y: np.ndarray, test: StoredSamples | None, validation: StoredSamples | None, *, labels: str, targets: str
) -> tuple[np.ndarray, tuple[StoredSamples | None, StoredSamples | None], tuple[str, ...]]:
    """(y, (test samples, validation samples), names of the classes), with labels as `labels` says."""
    if labels not in ("given", "dense"):
        raise DataError(f"labels must be 'given' or 'dense', got {labels!r}")
    if labels == "given":
        return y, (test, validation), ()
    if targets != "class":
        raise DataError(f"labels: dense is for classes, the targets are {targets!r}; leave it out")
    given = {"y_test": test, "y_validation": validation}
    parts = [("y", y), *((name, part[1]) for name, part in given.items() if part is not None)]
    numbered, names = dense_labels(parts)
    y_of = {name: y for (name, _), y in zip(parts, numbered, strict=True)}
    test, validation = (None if part is None else (part[0], y_of[name]) for name, part in given.items())
    return y_of["y"], (test, validation), names


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
    return tuple(label_warnings("y", y, classes, DENSE))


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
        return [*self.said, *self.of_labels, *super().warnings]

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


def _owner(part: str, clients: Array, names: np.ndarray, count: int) -> np.ndarray:
    """The number of the client of each sample of a part."""
    ids = ids_of(f"{part}_clients", clients)
    check_lengths(count, f"x_{part}", **{f"{part}_clients": ids})
    if unknown := sorted(set(ids.tolist()) - set(names.tolist()), key=str):
        raise DataError(f"{part}_clients: client {unknown[0]!r} has no training sample; leave its {part} samples out")
    return np.searchsorted(names, ids)


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
    if has_owners and not has_test:
        raise DataError("test_clients names the owners of x_test, which is not given")
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


def digest(*arrays: np.ndarray) -> str:
    """The sha256 of these arrays, with their types and shapes."""
    summary = hashlib.sha256()
    for array in arrays:
        summary.update(f"{array.dtype.str}{array.shape}".encode())
        summary.update(np.ascontiguousarray(array).view(np.uint8).data)
    return summary.hexdigest()


class PairDataset(Protocol):
    """A map-style Dataset: it has a length, and dataset[number] is a pair (input, label)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def federation_from_dataset(
    dataset: PairDataset,
    clients: Array,
    *,
    test: PairDataset | None = None,
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
    validation: PairDataset | None = None,
    validation_clients: Array | None = None,
    class_names: Sequence[str] | None = None,
) -> Federation:
    """A federation in which sample dataset[r] belongs to client clients[r]; every sample is read once.

    An input is a tensor, an array or a PIL image. test, validation: in place of x_test and y_test, and of x_validation
    and y_validation. Other arguments: as in `federation_from_arrays`.
    Raises DataError naming the sample that does not fit.
    """
    x, y = _arrays(dataset, "dataset", targets)
    x_test, y_test = (None, None) if test is None else _arrays(test, "test", targets)
    x_validation, y_validation = (None, None) if validation is None else _arrays(validation, "validation", targets)
    return federation_from_arrays(
        x,
        y,
        clients,
        x_test=x_test,
        y_test=y_test,
        test_clients=test_clients,
        groups=groups,
        num_classes=num_classes,
        vocabulary=vocabulary,
        holdout=holdout,
        seed=seed,
        view=view,
        normalize=normalize,
        targets=targets,
        labels=labels,
        order=order,
        x_validation=x_validation,
        y_validation=y_validation,
        validation_clients=validation_clients,
        class_names=class_names,
    )


def _arrays(dataset: PairDataset, name: str, targets: str) -> tuple[np.ndarray, np.ndarray]:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(f"{name} must have a length and samples by number, {type(dataset).__name__} does not")
    if len(dataset) == 0:
        raise DataError(f"{name} has 0 samples, expected at least 1")
    x, labels = np.empty(0), []
    for row in range(len(dataset)):
        with reading(f"{name}[{row}]", "a sample", f"correct the dataset ({type(dataset).__name__})"):
            sample = dataset[row]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            columns = ", e.g. [(row['image'], row['label']) for row in dataset]" * isinstance(sample, dict)
            raise DataError(f"{name}[{row}] is {type(sample).__name__}, expected a pair (input, label){columns}")
        one = _input(sample[0], f"{name}[{row}]")
        if row == 0:
            x = mapped_array((len(dataset), *one.shape), one.dtype)
        if (one.shape, one.dtype) != (x.shape[1:], x.dtype):
            raise DataError(
                f"{name}[{row}] is {one.dtype} {one.shape}, {name}[0] is {x.dtype} {x.shape[1:]}; "
                "all samples need one shape and type"
            )
        x[row] = one
        labels.append(_target(sample[1], f"{name}[{row}]", targets))
        if np.shape(labels[-1]) != np.shape(labels[0]):
            raise DataError(
                f"the target of {name}[{row}] has shape {np.shape(labels[-1])}, but {name}[0] has {np.shape(labels[0])}"
            )
    return x, np.array(labels)


def _input(value: Any, name: str) -> np.ndarray:
    if getattr(value, "mode", None) in ("P", "PA") and hasattr(value, "getbands"):
        raise DataError(f"{name} is an image of mode {value.mode}, numbers of colours; write image.convert('RGB')")
    x = as_array(f"the input of {name}", value)
    if x.dtype == object:
        raise DataError(f"the input of {name} is {type(value).__name__}, expected a tensor, an array or an image")
    if hasattr(value, "getbands"):  # a PIL image: (H, W) or (H, W, C)
        return x[None] if x.ndim == 2 else x.transpose(2, 0, 1)
    return x


def _target(value: Any, name: str, targets: str) -> np.ndarray:
    y = as_array(f"the target of {name}", value)
    if targets == "class":
        if y.size != 1 or not np.issubdtype(y.dtype, np.integer):
            raise DataError(f"the label of {name} is {y.dtype} of shape {y.shape}, expected one integer")
        return y.reshape(())
    if y.dtype == object:
        raise DataError(f"the target of {name} is {type(value).__name__}, expected numbers")
    return y
