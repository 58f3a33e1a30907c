"""A federation from the user's own arrays, or from a torch Dataset, held in memory."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from cfl_ray.core.tasks import IGNORED, TARGETS
from cfl_ray.data.data_set import DataSet
from cfl_ray.data.federation import DataShape, Federation, Index, IndexedFederation, Scaling, StoredSamples, tested_on
from cfl_ray.data.plan import split_rows
from cfl_ray.data.reading import reading
from cfl_ray.errors import DataError, did_you_mean
from cfl_ray.system.mapped import mapped_array

Array = np.ndarray | torch.Tensor | Sequence[Any]
DENSE = "data.labels: dense numbers the labels that occur 0, 1, ..."


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
    x_, y_, ids = _inputs("x", x, vocabulary), targets_of("y", y, targets), _ids("clients", clients)
    _check_lengths(len(x_), y=y_, clients=ids)
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
    }
    recipe |= {key: value for key, value in optional.items() if value is not None}
    validated_N = None  # the validation rows of each client
    if validation is not None:
        validator = np.zeros(0, np.int64)
        if validation_clients is not None:
            validator = _owner("validation", validation_clients, names, len(validation[0]))
            validated_N = _rows_by_client(validator, len(names))
        recipe["validation"] = digest(*validation, validator)
    rows_N, labels_NC = _rows_by_client(client, len(names)), None
    parts_N: list[tuple[np.ndarray, ...]] = [(rows, rows[:0]) for rows in rows_N]
    if view == "label":
        labels_NC = np.zeros((len(names), classes), bool)
        labels_NC[client, y_] = True
    elif view == "holdout" and test is not None and owner is not None:
        parts_N = [(rows,) for rows in rows_N]
        (x_, y_), parts_N = _appended((x_, y_), parts_N, test, _rows_by_client(owner, len(names)))
        test = None
    elif view == "holdout":
        parts_N = _held_out(rows_N, names, holdout, order, seed)
        recipe |= {} if order == "random" else {"order": order}
    if validation is not None and validated_N is not None:
        (x_, y_), parts_N = _appended((x_, y_), parts_N, validation, validated_N)
    samples, index = _by_client(x_, y_, parts_N, group_N, labels_NC, -1 if view == "holdout" else 0)
    if validation is not None and validated_N is None:
        index = replace(index, validation_set_N=np.zeros(len(names), np.int32))
    scaling = Scaling(255.0 if x_.dtype == np.uint8 else 1.0, normalize, vocabulary is not None).check(x_.shape[1:])
    shape = DataShape(x_.shape[1:], classes, vocabulary, targets, y_.shape[1:], names_C)
    federation = ArrayFederation(shape, view, recipe, index, scaling, samples, test, [str(name) for name in names])
    federation.of_labels, federation.has_test_samples = warnings, owner is not None
    if validation is not None:
        own = validated_N is not None
        federation.validation_view = "holdout" if own else "cluster" if view == "holdout" else view
        federation.validation_samples_of_all = None if own else validation
        federation.validation_sizes = [] if own else [len(validation[1])]
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
    x_, y_ = _inputs("x", x, vocabulary), targets_of("y", y, targets)
    _check_lengths(len(x_), y=y_)
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
        of_sample = _ids("groups", groups)
        _check_lengths(len(x_), groups=of_sample)
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
    ids = _ids(f"{part}_clients", clients)
    _check_lengths(count, f"x_{part}", **{f"{part}_clients": ids})
    if unknown := sorted(set(ids.tolist()) - set(names.tolist()), key=str):
        raise DataError(f"{part}_clients: client {unknown[0]!r} has no training sample; leave its {part} samples out")
    return np.searchsorted(names, ids)


# --- checks -------------------------------------------------------------------------------------


def _numpy(name: str, values: Array) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise DataError(
            f"{name} has {np.ma.count_masked(values)} masked values; fill them ({name}.filled(...)) or leave them out"
        )
    if isinstance(values, list | tuple) and len(lengths := {len(row) for row in values if _is_row(row)}) > 1:
        raise DataError(
            f"{name} has rows of {min(lengths)} to {max(lengths)} entries; fill all up to {max(lengths)}: inputs with "
            f"a token id that is used for nothing else, target tokens with {IGNORED}, which is not learned"
        )
    with reading(name, "an array", "convert it to a NumPy array or a dense tensor of float32 or integers"):
        return np.asarray(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray | torch.Tensor) and np.ndim(value) > 0


def _inputs(name: str, values: Array, vocabulary: int | None) -> np.ndarray:
    x = _numpy(name, values)
    if x.ndim < 2 or len(x) == 0 or 0 in x.shape:
        raise DataError(f"{name} must be (n, *input) with n >= 1, got shape {x.shape}")
    if vocabulary is not None:
        return tokens(name, x, vocabulary)
    if x.dtype == np.uint8:
        return x
    if not np.issubdtype(x.dtype, np.floating):
        raise DataError(
            f"{name} must be uint8 or float, got {x.dtype}; convert it, e.g. {name}.astype('float32'), "
            "or give `vocabulary` for token ids"
        )
    return numbers(name, x)


def numbers(name: str, x: np.ndarray) -> np.ndarray:
    """Returns the numbers (n, ...) as float32. Raises DataError with the first row that is not finite."""
    with np.errstate(over="ignore"):  # infinity is the error below
        x = x.astype(np.float32, copy=False)
    _check_rows(name, np.isfinite(x), "NaN or infinity as float32")
    return x


def _check_rows(name: str, valid: np.ndarray, what: str) -> None:
    """Raises DataError with the first row that is not valid. valid: bool (n, ...). what: its invalid values."""
    if not (valid_n := valid.reshape(len(valid), -1).all(1)).all():
        raise DataError(
            f"{name} has {what} in {(~valid_n).sum()} of {len(valid)} rows, first in row {valid_n.argmin()}"
        )


def check_count(name: str, value: object) -> None:
    """Raises DataError for a value that is no whole number of at least 1."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise DataError(f"{name} must be a whole number of at least 1, got {value!r}")


def tokens(name: str, x: np.ndarray, vocabulary: int) -> np.ndarray:
    """Returns token ids (n, ...) as int32. Raises DataError for other values than 0 .. vocabulary - 1."""
    check_count("vocabulary", vocabulary)
    if not np.issubdtype(x.dtype, np.integer):
        raise DataError(f"{name} must be integers if `vocabulary` is given ({vocabulary}), got {x.dtype}")
    low, high = int(x.min()), int(x.max())
    if low < 0 or high >= vocabulary:
        raise DataError(f"{name} has tokens {low} .. {high}, expected 0 .. {vocabulary - 1} (vocabulary {vocabulary})")
    return x.astype(np.int32, copy=False)


def _labels(name: str, values: Array) -> np.ndarray:
    y = _numpy(name, values)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        number = f"; {_remedy_of_labels(name, y)}"
        raise DataError(f"{name} must be integers of shape (n,), got {y.dtype} of shape {y.shape}{number}")
    if len(y) and y.min() < 0:
        raise DataError(f"{name} has the negative label {y.min()} in row {y.argmin()}; labels run from 0")
    if len(y) and y.max() > np.iinfo(np.int64).max:  # of uint64
        raise DataError(
            f"{name} has the label {y.max()} in row {y.argmax()}, too large for a class; number the classes"
        )
    return y.astype(np.int64, copy=False)


def _remedy_of_labels(name: str, y: np.ndarray) -> str:
    if y.dtype.kind in "USO" and y.ndim == 1:
        return "numpy.unique(..., return_inverse=True)[1] numbers words"
    if y.ndim == 2 and y.shape[1] == 1:
        return f"write {name}[:, 0]"
    if y.ndim == 2:
        return f"{name}.argmax(1) makes labels of one-hot rows; task multi_label learns several labels per sample"
    return f"convert them, e.g. {name}.astype(int), or set task: regression to learn numbers"


def targets_of(name: str, values: Array, targets: str) -> np.ndarray:
    """`values` as an array of the type in which targets of this kind are stored (`core.tasks`).

    Raises DataError if the kind is unknown or the values do not fit it.
    """
    if targets not in TARGETS:
        raise DataError(f"unknown targets {targets!r}{did_you_mean(targets, TARGETS)}")
    if targets == "class":
        return _labels(name, values)
    y = _numpy(name, values)
    if y.dtype.kind not in "iufb":
        raise DataError(f"{name} must be numbers, got {y.dtype}")
    if targets == "tokens":
        if y.ndim != 2 or y.dtype.kind not in "iu" or 0 in y.shape:
            raise DataError(f"{name} must be token ids from 0, integers (n, T), got {y.dtype} of shape {y.shape}")
        y = y.astype(np.int64, copy=False)
        _check_rows(name, (y >= 0) | (y == IGNORED), f"negative token ids other than {IGNORED}, which is not learned,")
        if not (counts_n := (y != IGNORED).any(1)).all():
            raise DataError(
                f"{name}: every target in row {counts_n.argmin()} is {IGNORED}, which is not learned "
                f"({(~counts_n).sum()} of {len(y)} rows); leave these samples out"
            )
        return y
    if y.ndim not in ((1, 2) if targets == "real" else (2,)) or 0 in y.shape:
        expected = "(n,) or (n, d)" if targets == "real" else "(n, C)"
        raise DataError(f"{name} must have shape {expected} for targets {targets!r}, got {y.shape}")
    if targets == "real":
        numbers(name, y)
    else:
        _check_rows(name, (y == 0) | (y == 1), "values other than 0 and 1")
    return y.astype(TARGETS[targets].stored, copy=False)


def num_outputs(
    num_classes: int | None, parts: Sequence[tuple[str, np.ndarray | None]], targets: str, vocabulary: int | None
) -> int:
    """C; for real and binary targets the columns of y, for tokens the vocabulary if no number is given.

    parts: (name for messages, targets) of the training part and the test part; targets None: no test part. Raises
    DataError for a label that is not below `num_classes`, and for another number of columns.
    """
    given = [(name, y) for name, y in parts if y is not None]
    if num_classes is not None:
        check_count("num_classes", num_classes)
    if targets in ("class", "tokens"):
        num_classes = vocabulary if num_classes is None and targets == "tokens" else num_classes
        largest = [(int(y.max()), name) for name, y in given]
        for label, name in largest:
            if num_classes is not None and label >= num_classes:
                raise DataError(
                    f"{name}: label {label} does not fit num_classes {num_classes}; labels run from 0 to "
                    f"{num_classes - 1}"
                )
        return max(largest)[0] + 1 if num_classes is None else num_classes
    y = given[0][1]
    columns = y.shape[1] if y.ndim == 2 else 1
    if num_classes not in (None, columns):
        raise DataError(
            f"num_classes is {num_classes}, but y of targets {targets!r} has {columns} columns; leave it out"
        )
    return columns


def dense_labels(parts: Sequence[tuple[str, np.ndarray]]) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Labels numbered 0.. in ascending order of those in the first part, and the original labels as names.

    parts: (name for messages, integers) of the training part and, if there is one, the test part. Raises DataError for
    a label that only the test part has.
    """
    known = np.unique(parts[0][1])
    for name, y in parts:
        if not (is_known := np.isin(y, known)).all():
            raise DataError(
                f"{name}: label {y[~is_known][0]} has no training sample, so labels cannot be numbered densely; leave "
                "its samples out, or number the labels yourself"
            )
    return [np.searchsorted(known, y) for _, y in parts], tuple(str(label) for label in known.tolist())


_SHOWN = 10  # labels that a message lists


def label_warnings(name: str, y: np.ndarray, num_classes: int, remedy: str) -> list[str]:
    """A warning if not every class has a training sample; otherwise empty. remedy: of unused labels."""
    labels = np.unique(y)
    if len(labels) == num_classes:
        return []
    shown = ", ".join(map(str, labels[:_SHOWN].tolist())) + (f", ... {labels[-1]}" if len(labels) > _SHOWN else "")
    return [
        f"{name}: {len(labels)} of {num_classes} classes have training samples (labels {shown}), the model has an "
        f"output for each of 0 .. {num_classes - 1}; {remedy}"
    ]


def copied_tokens(name: str, x: np.ndarray, y: np.ndarray, targets: str) -> list[str]:
    """A warning if all target tokens that are learned equal the input tokens at their places; otherwise empty."""
    if targets != "tokens" or x.shape != y.shape or not ((x == y) | (y == IGNORED)).all():
        return []
    return [
        f"{name}: the target tokens equal the input tokens at the same places, so a model learns to copy; labels of "
        "transformers are so, whose models shift them: next_token needs the next tokens, x[:, :-1] and y[:, 1:]"
    ]


def _ids(name: str, values: Array) -> np.ndarray:
    ids = _numpy(name, values)
    if ids.dtype == object:
        kinds = {_kind_of_id(value) for value in ids.ravel()}
        if kinds not in ({str}, {int}):
            types = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise DataError(f"{name} must be all integers or all strings, got {types}")
        ids = ids.astype(np.str_ if kinds == {str} else np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iuU":
        raise DataError(f"{name} must be integers or strings of shape (n,), got {ids.dtype} of shape {ids.shape}")
    return ids


def _kind_of_id(value: object) -> type:
    """The type of an id: str or int if it is valid."""
    if isinstance(value, str):
        return str
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int
    return type(value)


def _check_lengths(n: int, reference: str = "x", **arrays: np.ndarray) -> None:
    for name, values in arrays.items():
        if len(values) != n:
            raise DataError(f"{name} has {len(values)} entries, {reference} has {n}; each sample needs an entry")


def _other_samples(
    part: str, x: Array | None, y: Array | None, train: StoredSamples, vocabulary: int | None, targets: str
) -> StoredSamples | None:
    """The checked samples of the test or validation part; None if none are given. train: of equal shapes and types."""
    if x is None and y is None:
        return None
    if x is None or y is None:
        raise DataError(f"x_{part} and y_{part} belong together; give both or neither")
    samples = _inputs(f"x_{part}", x, vocabulary), targets_of(f"y_{part}", y, targets)
    _check_lengths(len(samples[0]), f"x_{part}", **{f"y_{part}": samples[1]})
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
        of_client = _ids("groups", [groups[name] for name in names.tolist()])
    else:
        of_sample = _ids("groups", groups)
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
    x = _numpy(f"the input of {name}", value)
    if x.dtype == object:
        raise DataError(f"the input of {name} is {type(value).__name__}, expected a tensor, an array or an image")
    if hasattr(value, "getbands"):  # a PIL image: (H, W) or (H, W, C)
        return x[None] if x.ndim == 2 else x.transpose(2, 0, 1)
    return x


def _target(value: Any, name: str, targets: str) -> np.ndarray:
    y = _numpy(f"the target of {name}", value)
    if targets == "class":
        if y.size != 1 or not np.issubdtype(y.dtype, np.integer):
            raise DataError(f"the label of {name} is {y.dtype} of shape {y.shape}, expected one integer")
        return y.reshape(())
    if y.dtype == object:
        raise DataError(f"the target of {name} is {type(value).__name__}, expected numbers")
    return y
