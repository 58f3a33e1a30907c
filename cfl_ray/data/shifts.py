"""Shifts: each true group has the data set under another transformation, or only some of its labels.

A group consists of row numbers and a transformation; pixels are computed only when a client's samples are written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from cfl_ray.config import ShiftConfig
from cfl_ray.config.shift import (
    SHIFT_KINDS,
    HybridConfig,
    PathologicalConfig,
    PixelsConfig,
    PluginShiftConfig,
    RotatedConfig,
    RotatedLabelsConfig,
    ShiftedConfig,
)
from cfl_ray.core.rng import stream
from cfl_ray.data.data_set import DataSet
from cfl_ray.data.federation import DataShape
from cfl_ray.errors import DataError
from cfl_ray.plugins.calling import call_plugin, described, place_of, with_options

Samples = tuple[np.ndarray, np.ndarray]


# ---- pixel values, `PixelsConfig`, also for drifts: functions (x, y, group, draw, *, amount, scale) -> (x, y)


class Normals(Protocol):
    """A `numpy.random.Generator`, or another source of standard normals."""

    def standard_normal(self, size: tuple[int, ...], /) -> np.ndarray: ...


def with_noise(x: np.ndarray, y: np.ndarray, group: int, draw: Normals, *, amount: float, scale: float) -> Samples:
    """Adds Gaussian noise with standard deviation `amount` times the pixel range."""
    return (_stored(x + amount * scale * draw.standard_normal(x.shape), x, scale), y) if amount else (x, y)


def blurred(x: np.ndarray, y: np.ndarray, group: int, draw: Normals, *, amount: float, scale: float) -> Samples:
    """Blurs images (n, C, H, W) by a Gaussian of `amount` pixels. Outside an image, its edge's values are repeated."""
    from scipy.ndimage import gaussian_filter  # imported here: it takes a second, and other shifts do not need it

    if not amount:
        return x, y
    return _stored(gaussian_filter(x.astype(np.float64), (0, 0, amount, amount), mode="nearest"), x, scale), y


def brightened(x: np.ndarray, y: np.ndarray, group: int, draw: Normals, *, amount: float, scale: float) -> Samples:
    """Multiplies values by `amount`."""
    return _stored(x.astype(np.float64) * amount, x, scale), y


def needed(kind: str, shape: DataShape) -> str | None:
    """Which samples a domain of this kind needs, and which these are; None if it applies to them."""
    if shape.vocabulary is not None:
        return f"{'images' if kind == 'blur' else 'real numbers'}, these samples are token ids"
    if kind == "blur" and len(shape.input) != 3:
        return f"images, these samples are of shape {shape.input}"
    return None


def rotated(x: np.ndarray, y: np.ndarray, group: int, draw: Any, *, amount: float, scale: float) -> Samples:
    """Rotates images (n, C, H, W) by `amount` degrees counter-clockwise about their centre.

    The size stays the same, values are interpolated bilinearly, and corners without image are 0.
    """
    from torchvision.transforms import InterpolationMode, functional

    values = torch.from_numpy(np.ascontiguousarray(x)).float()
    turned = functional.rotate(values, amount, InterpolationMode.BILINEAR)
    return _stored(turned.double().numpy(), x, scale), y


def _stored(values: np.ndarray, x: np.ndarray, scale: float) -> np.ndarray:
    """The values in the type of x. For integer types they are rounded and clipped to 0..scale."""
    if x.dtype.kind == "f":
        return values.astype(x.dtype)
    return np.clip(np.rint(values), 0, scale).astype(x.dtype)


ARGUMENTS = ("x", "y", "group", "draw")  # positional arguments of a shift function


@dataclass(frozen=True)
class Change:
    """A function (x, y, group, draw) -> (x, y) that changes samples of a true group and returns equally many."""

    function: Callable[..., Any]
    group: int
    seed: int
    keeps_labels: bool = False  # whether the function is known not to change y

    def __call__(self, data_set: DataSet, x: np.ndarray, y: np.ndarray, draw_of: str) -> tuple[np.ndarray, np.ndarray]:
        """The changed samples. Raises DataError, naming the function and its line, for a wrong result.

        draw_of: a name of these samples, which is part of the random key.
        """
        draw = stream(self.seed, -1, -1, self.group, f"data/shift of {draw_of}")
        result = call_plugin("data.shift", self.function, x, y.astype(np.int64), self.group, draw, error=DataError)
        name = f"data.shift {place_of(self.function)}"
        if not isinstance(result, tuple) or len(result) != 2:
            raise DataError(f"{name} returned {described(result)}, expected a pair (x, y)")
        new_x, new_y = np.asarray(result[0]), np.asarray(result[1])
        if new_x.shape != x.shape or new_x.dtype != x.dtype:
            raise DataError(
                f"{name} returned x as {described(new_x)}, expected {x.dtype} of shape {x.shape} as it was passed; "
                "round and clip values before they are converted"
            )
        if new_y.shape != y.shape or new_y.dtype.kind not in "iu":
            raise DataError(f"{name} returned y as {described(new_y)}, expected integers of shape {y.shape}")
        if len(bad := np.flatnonzero((new_y < 0) | (new_y >= data_set.num_classes))):
            raise DataError(
                f"{name} returned label {new_y[bad[0]]}; the data set has {data_set.num_classes} classes, "
                f"0..{data_set.num_classes - 1}"
            )
        return new_x, new_y.astype(np.int16)


@dataclass(frozen=True)
class Variant:
    """A data set with a transformation of its pixels and labels."""

    data_set: DataSet
    turns: int = 0  # quarter turns counter-clockwise, 0..3, as in np.rot90 and torchvision's rotate
    offset: int = 0  # s in y -> (y + s) mod C
    change: Change | None = None

    def train_labels(self, rows: np.ndarray) -> np.ndarray:
        """The transformed labels of training samples, int16 (n,)."""
        return self._labels(self.data_set.train_y[rows]) if self._keeps_labels else self.train(rows)[1]

    def test_labels(self, rows: np.ndarray) -> np.ndarray:
        """The transformed labels of test samples, int16 (n,)."""
        assert self.data_set.test_y is not None  # test rows exist only with a test part
        return self._labels(self.data_set.test_y[rows]) if self._keeps_labels else self.test(rows)[1]

    @property
    def _keeps_labels(self) -> bool:
        return self.change is None or self.change.keeps_labels

    def train(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The transformed training samples, e.g. uint8 (n, C, H, W) and int16 (n,)."""
        return self._samples(self.data_set.train_x, self.data_set.train_y, rows, "training")

    def test(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The transformed test samples, in the types of `train`."""
        # test rows exist only with a test part
        assert self.data_set.test_x is not None and self.data_set.test_y is not None
        return self._samples(self.data_set.test_x, self.data_set.test_y, rows, "test")

    def _samples(self, x: np.ndarray, y: np.ndarray, rows: np.ndarray, part: str) -> tuple[np.ndarray, np.ndarray]:
        x, y = x[rows], self._labels(y[rows])
        x = np.rot90(x, self.turns, axes=(-2, -1)) if self.turns else x
        # the first row is part of the random key, since no other client of the group has this row
        return (
            self.change(self.data_set, x, y, f"{part} {rows[0]}") if self.change is not None and len(rows) else (x, y)
        )

    def _labels(self, y: np.ndarray) -> np.ndarray:
        return (y + self.offset) % self.data_set.num_classes if self.offset else y


@dataclass(frozen=True)
class Group:
    """A true group: the training rows that are divided among its clients, and the test rows for its clients."""

    variant: Variant
    rows: np.ndarray  # int64, ascending
    test_rows: np.ndarray | None  # int64, ascending; None if the data set has no test part


class Unshifted(NamedTuple):
    """The samples that a shift changes.

    other: the second data set of a hybrid shift. natural: whether a data set without a shift keeps its own groups.
    seed: seed for the random draws of the shift.
    """

    data_set: DataSet
    other: DataSet | None
    natural: bool
    seed: int = 0


def make_groups(
    data_set: DataSet, other: DataSet | None, shift: ShiftConfig, natural: bool, seed: int = 0
) -> list[Group]:
    """The true groups of `shift`. Groups whose label sets overlap share images. The others: as in `Unshifted`."""
    code, given = SHIFT_KINDS.code_of(shift), Unshifted(data_set, other, natural, seed)
    groups: list[Group] = _of_pixels(code, shift, given) if isinstance(shift, PixelsConfig) else code(shift, given)
    return groups


# ---- the kinds of shifts, as `SHIFT_KINDS` names them: functions (section, Unshifted) -> groups


def natural(shift: ShiftConfig, given: Unshifted) -> list[Group]:
    """The groups that the data set itself names, or one group."""
    group = given.data_set.group
    count = group.max() + 1 if given.natural and group is not None else 0
    return [_natural(given.data_set, group) for group in range(count)] or [_group(Variant(given.data_set))]


def rotations(shift: RotatedConfig, given: Unshifted) -> list[Group]:
    """A group for each angle, or for each angle and label set."""
    variants = [_rotated(given.data_set, angle, given.seed) for angle in _nonempty(shift.angles, "angles")]
    label_sets: Sequence[list[int] | None] = (
        _label_sets(shift, given.data_set) if isinstance(shift, RotatedLabelsConfig) else [None]
    )
    return [_group(variant, labels) for variant in variants for labels in label_sets]


def offsets(shift: ShiftedConfig, given: Unshifted) -> list[Group]:
    """A group for each offset of the labels."""
    return [
        _group(Variant(given.data_set, offset=offset % given.data_set.num_classes))
        for offset in _nonempty(shift.offsets, "offsets")
    ]


def by_labels(shift: PathologicalConfig, given: Unshifted) -> list[Group]:
    """A group for each label set."""
    return [_group(Variant(given.data_set), labels) for labels in _label_sets(shift, given.data_set)]


def two_data_sets(shift: HybridConfig, given: Unshifted) -> list[Group]:
    """A group for each data set."""
    assert given.other is not None  # a hybrid has two data sets
    return _hybrid(given.data_set, given.other, shift.other)


def own(shift: PluginShiftConfig, given: Unshifted) -> list[Group]:
    """The groups of a user's function."""
    function = with_options(SHIFT_KINDS.resolve(shift.kind), shift.options, "data.shift", ARGUMENTS)
    return [
        _group(Variant(given.data_set, change=Change(function, group, given.seed))) for group in range(shift.groups)
    ]


def _group(variant: Variant, labels: list[int] | None = None) -> Group:
    """The group with all samples that have these labels. labels None: with all samples."""

    def rows(y: np.ndarray) -> np.ndarray:
        return np.arange(len(y)) if labels is None else np.flatnonzero(np.isin(y, labels))

    data_set = variant.data_set
    return Group(variant, rows(data_set.train_y), None if data_set.test_y is None else rows(data_set.test_y))


def _natural(data_set: DataSet, group: int) -> Group:
    """A group that the data set itself names. If test images have no groups, every group is tested on all."""
    if data_set.test_y is None:
        test_rows = None
    elif data_set.test_group is None:
        test_rows = np.arange(len(data_set.test_y))
    else:
        test_rows = np.flatnonzero(data_set.test_group == group)
    return Group(Variant(data_set), np.flatnonzero(data_set.group == group), test_rows)


def _hybrid(data_set: DataSet, other: DataSet, name: str) -> list[Group]:
    first, second = ((*part.shape, part.num_classes, part.scale) for part in (data_set, other))
    if first != second:
        raise DataError(
            "a hybrid needs two data sets of equal (channels, height, width, classes, pixel scale): "
            f"data.source is {first}, data.shift.other {name!r} is {second}"
        )
    return [_group(Variant(data_set)), _group(Variant(other))]


def _of_pixels(function: Callable[..., Samples], shift: PixelsConfig, given: Unshifted) -> list[Group]:
    """The groups of a shift of pixel values, one for each amount. function: of the pixels."""
    amounts, data_set = _nonempty(getattr(shift, shift.amounts), shift.amounts), given.data_set
    if lacking := needed(shift.kind, data_set.data_shape):
        raise DataError(f"data.shift.kind: {shift.kind} needs {lacking}; use another kind")
    changes = [
        Change(partial(function, amount=amount, scale=data_set.scale), group, given.seed, keeps_labels=True)
        for group, amount in enumerate(amounts)
    ]
    return [_group(Variant(data_set, change=change)) for change in changes]


def _rotated(data_set: DataSet, angle: float, seed: int) -> Variant:
    """The data set rotated by `angle` degrees: exactly for quarter turns, else with bilinear interpolation."""
    if len(data_set.shape) != 3:
        raise DataError(
            f"data.shift.angles: {angle} degrees needs images (channels, height, width), these samples have shape "
            f"{data_set.shape}; use another data.shift.kind"
        )
    if angle % 90:
        change = Change(partial(rotated, amount=angle, scale=data_set.scale), 0, seed, keeps_labels=True)
        return Variant(data_set, change=change)
    _, height, width = data_set.shape
    if angle % 180 and height != width:
        raise DataError(
            f"data.shift.angles: {angle} degrees needs square images, these are {height}x{width}; use 0 and 180"
        )
    return Variant(data_set, int(angle) // 90 % 4)


def _label_sets(shift: PathologicalConfig, data_set: DataSet) -> list[list[int]]:
    for labels in _nonempty(shift.label_sets, "label_sets"):
        if bad := [label for label in _nonempty(labels, "label_sets") if not 0 <= label < data_set.num_classes]:
            raise DataError(
                f"data.shift.label_sets: label {bad[0]} does not exist; the data set has "
                f"{data_set.num_classes} classes, 0..{data_set.num_classes - 1}"
            )
    return shift.label_sets


def _nonempty(values: list[Any], key: str) -> list[Any]:
    if not values:
        raise DataError(f"data.shift.{key} has an empty list; give every group its value")
    return values
