"""A federation from the user's own arrays, held in memory."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from cfl_ray.core.errors import DataError
from cfl_ray.data.federation import Federation, Shape
from cfl_ray.data.indexed import Index, IndexedFederation, Samples, Scaling
from cfl_ray.data.plan import split_rows

Array = np.ndarray | torch.Tensor | Sequence


def federation_from_arrays(x: Array, y: Array, clients: Array, *, x_test: Array | None = None, y_test: Array | None = None,
                           test_clients: Array | None = None, groups: Mapping | Array | None = None, num_classes: int | None = None,
                           holdout: float = 0.2, seed: int = 0, view: str | None = None,
                           normalize: list[list[float]] | None = None) -> Federation:
    """The federation in which sample r, (x[r], y[r]), belongs to clients[r]; clients are numbered in sorted order of their ids.

    x: (n, *input), uint8 (divided by 255) or float (taken as it is). y: integers 0..C-1. clients: integers or strings.
    Tested on: with `test_clients`, each client's own part of x_test; with x_test alone, all of x_test (`view="label"`: its images of
    the client's labels); with neither, the share `holdout` of each client's own samples.
    groups: the true group of each client ({client: group}) or of each sample. Raises DataError naming what is wrong, and where.
    """
    x, y, ids = _inputs("x", x), _labels("y", y), _ids("clients", clients)
    _same_length(len(x), y=y, clients=ids)
    names, client = np.unique(ids, return_inverse=True)
    if (x_test is None) != (y_test is None):
        raise DataError("x_test and y_test belong together; give both or neither")
    test = None if x_test is None else (_inputs("x_test", x_test), _labels("y_test", y_test))
    if test is not None:
        _same_length(len(test[0]), "x_test", y_test=test[1])
        if test[0].shape[1:] != x.shape[1:] or test[0].dtype != x.dtype:
            raise DataError(f"x_test holds {test[0].dtype} {test[0].shape[1:]}, x holds {x.dtype} {x.shape[1:]}; they must agree")
    classes = _num_classes(num_classes, y, None if test is None else test[1])
    view = _view(view, test is not None, test_clients is not None)
    group_N = _groups(groups, names, client)
    recipe = {"source": "arrays", "clients": len(names), "view": view, "holdout": holdout, "seed": seed, "normalize": normalize,
              "sha256": _digest(x, y, client, group_N, *(test or ()))}
    if view == "holdout":
        (x, y), index = _held_out(x, y, names, client, group_N, test, test_clients, holdout, seed)
        test = None
    else:
        (x, y), index = _shared_test(x, y, client, group_N, classes if view == "label" else None)
    scaling = Scaling(255.0 if x.dtype == np.uint8 else 1.0, normalize).check(x.shape[1:])
    return ArrayFederation(Shape(x.shape[1:], classes), view, recipe, index, scaling, (x, y), test, [str(name) for name in names])


class ArrayFederation(IndexedFederation):
    """Pickles with its arrays."""

    def __init__(self, shape: Shape, view: str, recipe: dict, index: Index, scaling: Scaling,
                 samples: Samples, test: Samples | None, names: list[str]):
        super().__init__(shape, view, recipe, index, scaling)
        self._samples, self._test, self._names = samples, test, names

    def client_name(self, client: int) -> str:
        return self._names[client]

    def num_test_sets(self) -> int:
        return 0 if self._test is None else 1

    def _file(self, number: int) -> Samples:
        return self._samples

    def _test_file(self, number: int) -> Samples:
        return self._test


# --- layout -------------------------------------------------------------------------------------------------------------------------


def _index(train_N: np.ndarray, held_out_N: np.ndarray, group_N: np.ndarray, test_set: int, labels_NC: np.ndarray | None) -> Index:
    total_N = train_N + held_out_N
    n = len(train_N)
    return Index(np.zeros(n, np.int32), np.cumsum(total_N) - total_N, train_N, held_out_N, group_N, np.full(n, test_set, np.int32), labels_NC)


def _shared_test(x, y, client, group_N, classes: int | None) -> tuple[Samples, Index]:
    """Samples sorted by client; `classes` in label view, None otherwise."""
    order = np.argsort(client, kind="stable")
    train_N = np.bincount(client).astype(np.int64)
    labels_NC = None
    if classes is not None:
        labels_NC = np.zeros((len(train_N), classes), bool)
        labels_NC[client, y] = True
    return (x[order], y[order]), _index(train_N, np.zeros_like(train_N), group_N, 0, labels_NC)


def _held_out(x, y, names, client, group_N, test: Samples | None, test_clients, fraction: float, seed: int) -> tuple[Samples, Index]:
    """Samples sorted by client, of each first the training samples, then the held-out ones."""
    rows_N = _rows_by_client(client, len(names))
    if test_clients is None:
        if not 0 < fraction < 1:
            raise DataError(f"holdout is a share between 0 and 1, got {fraction}")
        pairs = [split_rows(rows, fraction, number, str(names[number]), seed) for number, rows in enumerate(rows_N)]
    else:
        held_N = _rows_by_client(_test_owner(test_clients, names, len(test[0])), len(names))
        pairs = [(rows, held + len(x)) for rows, held in zip(rows_N, held_N)]
        x, y = np.concatenate([x, test[0]]), np.concatenate([y, test[1]])
    order = np.concatenate([rows for pair in pairs for rows in pair])
    train_N, held_out_N = (np.array([len(pair[part]) for pair in pairs], np.int64) for part in (0, 1))
    return (x[order], y[order]), _index(train_N, held_out_N, group_N, -1, None)


def _rows_by_client(client: np.ndarray, count: int) -> list[np.ndarray]:
    return np.split(np.argsort(client, kind="stable"), np.cumsum(np.bincount(client, minlength=count))[:-1])


def _test_owner(test_clients, names: np.ndarray, n_test: int) -> np.ndarray:
    ids = _ids("test_clients", test_clients)
    _same_length(n_test, "x_test", test_clients=ids)
    if unknown := sorted(set(ids.tolist()) - set(names.tolist()), key=str):
        raise DataError(f"test_clients: client {unknown[0]!r} has no training sample; leave its test samples out")
    if empty := sorted(set(names.tolist()) - set(ids.tolist()), key=str):
        raise DataError(f"test_clients: client {empty[0]!r} has no test sample; leave out test_clients to hold a part out instead")
    return np.searchsorted(names, ids)


# --- checks -------------------------------------------------------------------------------------------------------------------------


def _numpy(name: str, values) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError as error:
        raise DataError(f"{name} is not an array: {error}") from error


def _inputs(name: str, values) -> np.ndarray:
    x = _numpy(name, values)
    if x.ndim < 2 or len(x) == 0 or 0 in x.shape:
        raise DataError(f"{name} must be (n, *input) with n >= 1, got shape {x.shape}")
    if x.dtype == np.uint8:
        return x
    if not np.issubdtype(x.dtype, np.floating):
        raise DataError(f"{name} must be uint8 or float, got {x.dtype}; convert it, e.g. {name}.astype('float32')")
    x = x.astype(np.float32, copy=False)
    finite = np.isfinite(x.reshape(len(x), -1)).all(1)
    if not finite.all():
        raise DataError(f"{name} has NaN or infinity as float32 in {(~finite).sum()} of {len(x)} rows, first in row {finite.argmin()}")
    return x


def _labels(name: str, values) -> np.ndarray:
    y = _numpy(name, values)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{name} must be integers of shape (n,), got {y.dtype} of shape {y.shape}")
    if len(y) and y.min() < 0:
        raise DataError(f"{name} has the negative label {y.min()} in row {y.argmin()}; labels run from 0")
    return y.astype(np.int64, copy=False)


def _ids(name: str, values) -> np.ndarray:
    ids = _numpy(name, values)
    if ids.dtype == object:
        kinds = {str if isinstance(one, str) else int if isinstance(one, (int, np.integer)) and not isinstance(one, bool) else type(one)
                 for one in ids.ravel()}
        if kinds not in ({str}, {int}):
            raise DataError(f"{name} must be all integers or all strings, found {', '.join(sorted(kind.__name__ for kind in kinds))}")
        ids = ids.astype(np.str_ if kinds == {str} else np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iuU":
        raise DataError(f"{name} must be integers or strings of shape (n,), got {ids.dtype} of shape {ids.shape}")
    return ids


def _same_length(n: int, reference: str = "x", **arrays: np.ndarray) -> None:
    for name, values in arrays.items():
        if len(values) != n:
            raise DataError(f"{name} has {len(values)} entries, {reference} has {n}; each sample needs one")


def _num_classes(num_classes: int | None, y: np.ndarray, y_test: np.ndarray | None) -> int:
    largest = max(int(y.max()), -1 if y_test is None else int(y_test.max(initial=-1)))
    if num_classes is not None and largest >= num_classes:
        raise DataError(f"label {largest} does not fit num_classes {num_classes}; labels run from 0 to {num_classes - 1}")
    return largest + 1 if num_classes is None else num_classes


def _view(view: str | None, has_test: bool, has_owners: bool) -> str:
    if has_owners and not has_test:
        raise DataError("test_clients says who owns x_test, which is not given")
    possible = ("cluster", "label") if has_test and not has_owners else ("holdout",)
    if view is not None and view not in possible:
        raise DataError(f"the test view {view} does not fit these arrays, {' or '.join(possible)} does: cluster and label need x_test without "
                        "test_clients; set data.test.view")
    return view or possible[0]


def _groups(groups, names: np.ndarray, client: np.ndarray) -> np.ndarray:
    """int32 (N,): groups numbered 0.. in sorted order, -1 where none are given."""
    if groups is None:
        return np.full(len(names), -1, np.int32)
    if isinstance(groups, Mapping):
        if missing := [name for name in names.tolist() if name not in groups]:
            raise DataError(f"groups names no group for client {missing[0]!r} ({len(missing)} of {len(names)} clients are missing)")
        of_client = _ids("groups", [groups[name] for name in names.tolist()])
    else:
        of_sample = _ids("groups", groups)
        _same_length(len(client), groups=of_sample)
        of_client = of_sample[np.unique(client, return_index=True)[1]]
        if len(mixed := np.flatnonzero(of_sample != of_client[client])):
            owner = client[mixed[0]]
            raise DataError(f"groups: client {names[owner]!s} is in groups {of_client[owner]} and {of_sample[mixed[0]]} "
                            f"(row {mixed[0]}); it belongs to one")
    return np.unique(of_client, return_inverse=True)[1].astype(np.int32)


def _digest(*arrays: np.ndarray) -> str:
    summary = hashlib.sha256()
    for array in arrays:
        summary.update(f"{array.dtype.str}{array.shape}".encode())
        summary.update(np.ascontiguousarray(array).view(np.uint8).data)
    return summary.hexdigest()
