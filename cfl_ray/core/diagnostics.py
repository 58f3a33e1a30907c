"""Diagnostics: named numbers, vectors and matrices that a method reports in addition to metrics.

Large arrays are cut to a random sample of the clients, the same in all rounds, and to the first clusters.
"""

import math
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cfl_ray.core.reported import Diagnostic
from cfl_ray.core.rng import stream
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import call_plugin, described, is_user_file

CLIENTS, CLUSTERS = "clients", "clusters"  # axes whose entries have labels: client ids, numbers of clusters
MIXTURE_WEIGHTS = "mixture_weights"  # of clients by clusters, drawn in the report
MOST_PAIRED = 1_000  # clients of a matrix whose other axis is clients or clusters too
MOST_PAIRED_CLUSTERS = 256  # clusters of such a matrix: it may change in every round
MOST_LABELLED = 10_000  # clients or clusters otherwise
MOST_VALUES = 1_000_000  # of one array, 4 MB

_CORE = Path(__file__).parent
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SPREAD = "_std"  # ends the name that marks the first metric of a task (`tracking.record.primary_of`)


def _reported_in() -> str:
    """Function, file and line that reported a diagnostic, for messages; empty unless they are the user's."""
    frames = (frame for frame in reversed(traceback.extract_stack()) if Path(frame.filename).parent != _CORE)
    frame = next(frames, None)
    if frame is None or not is_user_file(Path(frame.filename)):
        return ""
    return f" ({frame.name}, {frame.filename}, line {frame.lineno})"


@dataclass
class Diagnostics:
    """The diagnostics of a round; a second report of a name replaces the first.

    label: of the method, for messages. taken: names of metrics, which diagnostics cannot have.
    """

    label: str = "the method"
    taken: frozenset[str] = frozenset()
    seed: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    _arrays: dict[str, Diagnostic | Callable[[], Diagnostic]] = field(default_factory=dict)

    def add(self, name: str, value: Any, axes: Sequence[str], ids: np.ndarray) -> None:
        """Adds a value (see `Clients.record`). Raises RunError with the names of method and diagnostic."""
        self._check_name(name)
        if callable(value) or len(axes):
            self._check_axes(name, tuple(axes))
            array = partial(self._array, name, value, tuple(axes), np.asarray(ids, np.int64))
            self._arrays[name] = array if callable(value) else array()
            return
        number = self._numbers(name, value)
        if number.ndim:
            self._fail(name, f"is {described(value)} without `axes`; name each axis: clients, clusters or another word")
        self._check_finite(name, number)
        self.numbers[name] = float(number)

    @property
    def names(self) -> list[str]:
        """Names of the arrays."""
        return list(self._arrays)

    def array(self, name: str) -> Diagnostic:
        """An array, cut to its limits; calls the function if a function was reported."""
        array = self._arrays[name]
        return array if isinstance(array, Diagnostic) else array()

    # ---- parts

    def _fail(self, name: str, what: str) -> NoReturn:
        raise RunError(f"{self.label}: the diagnostic {name!r} {what}{_reported_in()}")

    def _check_name(self, name: Any) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self._fail(name, "has no valid name: it consists of a-z, 0-9 and _, and begins with a letter")
        if name in self.taken or name.endswith(_SPREAD):
            self._fail(name, "has the name of a metric (docs/metrics.md); give it another one")

    def _check_axes(self, name: str, axes: tuple[str, ...]) -> None:
        wrong = [axis for axis in axes if not isinstance(axis, str) or not _NAME.fullmatch(axis)]
        if wrong or not 1 <= len(axes) <= 2:
            self._fail(name, f"has the axes {axes!r}, expected one or two words of a-z, 0-9 and _, such as 'clients'")

    def _numbers(self, name: str, value: Any) -> np.ndarray:
        try:
            array = np.asarray(value)
            if array.dtype.kind in "fiub":
                return array.astype(np.float64) if array.dtype.kind != "f" else array
        except (TypeError, ValueError, RuntimeError):
            pass
        self._fail(name, f"is {described(value)}, expected a number, or an array of numbers with one or two axes")

    def _check_finite(self, name: str, array: np.ndarray) -> None:
        if np.isinf(array).any():
            self._fail(name, "has values that are infinite, or beyond float32; NaN stands for what is not defined")

    def _array(self, name: str, given: Any, axes: tuple[str, ...], ids: np.ndarray) -> Diagnostic:
        """The array of the arguments of `add`, cut to its limits."""
        if callable(given):
            given = call_plugin("function", given, where=f" of the diagnostic {name!r} of {self.label}")
        value = self._numbers(name, given)
        condensed, shape = value.ndim == 1 and len(axes) == 2, value.shape
        if condensed:
            size = len(ids) if axes[0] == CLIENTS else (1 + math.isqrt(1 + 8 * len(value))) // 2
            shape = (size, size)
            if axes[0] != axes[1] or len(value) != math.comb(size, 2):
                self._fail(
                    name,
                    f"is {described(value)} with the axes {axes}; the pairs of {size} {axes[0]} are "
                    f"{math.comb(size, 2)} values with twice the same axis",
                )
        elif value.ndim != len(axes):
            self._fail(name, f"is {described(value)} with the axes {axes}, expected one axis for each")
        labels = tuple(self._labels(name, ids, axis, size) for axis, size in zip(axes, shape, strict=True))
        positions = [self._kept(axes, axis, label) for axis, label in zip(axes, labels, strict=True)]
        bounded = _square(value, shape[0], positions[0]) if condensed else value[np.ix_(*positions)]
        if bounded.size > MOST_VALUES:
            self._fail(name, f"has {bounded.size:,} values, more than {MOST_VALUES:,}; report fewer")
        with np.errstate(over="ignore"):
            bounded = np.ascontiguousarray(bounded, np.float32)
        self._check_finite(name, bounded)
        return Diagnostic(bounded, axes, tuple(map(np.take, labels, positions)))

    def _labels(self, name: str, ids: np.ndarray, axis: str, size: int) -> np.ndarray:
        if axis != CLIENTS:
            return np.arange(size)
        if len(ids) != size:
            self._fail(
                name,
                f"has {size} entries on its axis {CLIENTS!r}, but there are {len(ids)} client ids; name the "
                "clients of the axis: clients.record(..., ids=...)",
            )
        return ids

    def _kept(self, axes: tuple[str, ...], axis: str, labels: np.ndarray) -> np.ndarray:
        """Positions of the entries of an axis that are kept."""
        if axis not in (CLIENTS, CLUSTERS):
            return np.arange(len(labels))
        most = MOST_LABELLED
        if len(axes) == 2 and {*axes} <= {CLIENTS, CLUSTERS}:
            most = MOST_PAIRED if axis == CLIENTS else MOST_PAIRED_CLUSTERS
        return sample_of(labels, most, self.seed) if axis == CLIENTS else np.arange(min(len(labels), most))


def sample_of(ids: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Positions, ascending, of at most `most` of the clients `ids`.

    Each client has a fixed random number, and the clients with the lowest numbers are taken: the same in all rounds.
    """
    if len(ids) <= most:
        return np.arange(len(ids))
    chance_N = stream(seed, 0, 0, -1, "diagnostics").random(int(ids.max()) + 1)
    return np.sort(np.argpartition(chance_N[ids], most)[:most])


def _square(condensed: np.ndarray, count: int, at: np.ndarray) -> np.ndarray:
    """Rows and columns `at`, ascending, of the symmetric matrix (count, count) with these condensed values."""
    matrix = np.zeros((len(at), len(at)))
    i, j = np.triu_indices(len(at), 1)
    a, b = at[i], at[j]
    matrix[i, j] = matrix[j, i] = condensed[count * a - a * (a + 1) // 2 + b - a - 1]
    return matrix
