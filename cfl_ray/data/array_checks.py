"""Arrays that a user gives: converted to the types that are stored, and refused if they are no samples, targets or ids.

All functions raise DataError. `name`, in most, is what the user calls the array.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cfl_ray.core.tasks import IGNORED, TARGETS
from cfl_ray.data.reading import reading
from cfl_ray.errors import DataError, did_you_mean

Array = np.ndarray | torch.Tensor | Sequence[Any]
DENSE = "data.labels: dense numbers the labels that occur 0, 1, ..."


def as_array(name: str, values: Array) -> np.ndarray:
    """The values as a NumPy array, of any shape and type."""
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


def inputs_of(name: str, values: Array, vocabulary: int | None) -> np.ndarray:
    """Inputs (n, *input), n >= 1: uint8, float32, or int32 with a vocabulary."""
    x = as_array(name, values)
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
    y = as_array(name, values)
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


def _missing(y_n: np.ndarray) -> np.ndarray:
    """Whether each label is none: NaN or infinity; among objects, also None, and NA and NaT of pandas."""
    if y_n.dtype.kind == "f":
        return ~np.isfinite(y_n)
    if y_n.dtype.kind == "O":
        return np.array([not isinstance(y, str) and f"{y}" in ("None", "nan", "<NA>", "NaT") for y in y_n], bool)
    return np.zeros(len(y_n), bool)


def _first(rows: np.ndarray) -> int | None:
    """The first row that is true."""
    return int(rows.argmax()) if rows.any() else None


_REAL = "set task: regression to learn numbers (federation_from_arrays: and targets='real')"


def _remedy_of_labels(name: str, y: np.ndarray) -> str:
    if y.ndim == 1 and (row := _first(_missing(y))) is not None:
        return f"it is {y[row]} in row {row}: leave samples without a label out"
    if y.dtype.kind == "f" and y.ndim == 1 and (row := _first(y != np.floor(y))) is not None:
        return f"it is {y[row]} in row {row}: {_REAL}"
    if y.dtype.kind in "USO" and y.ndim == 1:
        return "numpy.unique(..., return_inverse=True)[1] numbers words"
    if y.ndim == 2 and y.shape[1] == 1:
        return f"write {name}[:, 0]"
    if y.ndim == 2:
        return f"{name}.argmax(1) makes labels of one-hot rows; task multi_label learns several labels per sample"
    return f"convert them, e.g. {name}.astype(int), or {_REAL}"


def targets_of(name: str, values: Array, targets: str) -> np.ndarray:
    """`values` as an array of the type in which targets of this kind are stored (`core.tasks`).

    Raises DataError if the kind is unknown or the values do not fit it.
    """
    if targets not in TARGETS:
        raise DataError(f"unknown targets {targets!r}{did_you_mean(targets, TARGETS)}")
    if targets == "class":
        return _labels(name, values)
    y = as_array(name, values)
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


def label_warnings(name: str, y: np.ndarray, num_classes: int) -> list[str]:
    """A warning if not every class has a training sample; otherwise empty."""
    labels = np.unique(y)
    if len(labels) == num_classes:
        return []
    shown = ", ".join(map(str, labels[:_SHOWN].tolist())) + (f", ... {labels[-1]}" if len(labels) > _SHOWN else "")
    return [
        f"{name}: {len(labels)} of {num_classes} classes have training samples (labels {shown}), the model has an "
        f"output for each of 0 .. {num_classes - 1}; {DENSE}"
    ]


def copied_tokens(name: str, x: np.ndarray, y: np.ndarray, targets: str) -> list[str]:
    """A warning if all target tokens that are learned equal the input tokens at their places; otherwise empty."""
    if targets != "tokens" or x.shape != y.shape or not ((x == y) | (y == IGNORED)).all():
        return []
    return [
        f"{name}: the target tokens equal the input tokens at the same places, so a model learns to copy; labels of "
        "transformers are so, whose models shift them: next_token needs the next tokens, x[:, :-1] and y[:, 1:]"
    ]


def ids_of(name: str, values: Array) -> np.ndarray:
    """Ids (n,) of clients or groups, integers or strings."""
    ids = as_array(name, values)
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


def check_lengths(n: int, reference: str = "x", **arrays: np.ndarray) -> None:
    """Raises DataError for an array, by its name, that has not n entries, as `reference` has."""
    for name, values in arrays.items():
        if len(values) != n:
            raise DataError(f"{name} has {len(values)} entries, {reference} has {n}; each sample needs an entry")
