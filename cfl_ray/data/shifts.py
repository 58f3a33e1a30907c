"""Shifts: each true group sees the data set under its own transformation, or only its own labels.

A shift consists of rows and a transformation; pixels are computed only when a client's samples are written.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cfl_ray.config import ShiftConfig
from cfl_ray.core.errors import DataError
from cfl_ray.data.images import Images

T = TypeVar("T")


@dataclass(frozen=True)
class Variant:
    """A data set under one transformation of its pixels and labels."""

    images: Images
    turns: int = 0  # quarter turns counter-clockwise, 0..3, as np.rot90 and torchvision's rotate turn
    offset: int = 0  # s in y -> (y + s) mod C

    def labels(self, y: np.ndarray) -> np.ndarray:
        """Returns these labels as the group sees them."""
        return (y + self.offset) % self.images.num_classes if self.offset else y

    def train(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns training samples: uint8 (n, C, H, W) and int16 (n,)."""
        return self._rotated(self.images.train_x[rows]), self.labels(self.images.train_y[rows])

    def test(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns test samples, likewise."""
        # test rows exist only with a test part
        assert self.images.test_x is not None and self.images.test_y is not None
        return self._rotated(self.images.test_x[rows]), self.labels(self.images.test_y[rows])

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        return np.rot90(x, self.turns, axes=(-2, -1)) if self.turns else x


@dataclass(frozen=True)
class Group:
    """One true group: the training rows divided among its clients and, in cluster view, the test rows for them."""

    variant: Variant
    rows: np.ndarray  # int64, ascending
    test_rows: np.ndarray | None  # int64, ascending; None where the data set has no test part


def make_groups(images: Images, other: Images | None, shift: ShiftConfig, natural: bool) -> list[Group]:
    """Returns the true groups under `shift`. Groups whose label sets overlap share images.

    other: the second data set of a hybrid. natural: whether an unshifted data set keeps the groups that it came with.
    """
    if shift.kind == "none":
        count = images.group.max() + 1 if natural and images.group is not None else 0
        return [_natural(images, group) for group in range(count)] or [_group(Variant(images))]
    if shift.kind == "rotated":
        return [_group(Variant(images, _turns(angle, images))) for angle in _nonempty(shift.angles, "angles")]
    if shift.kind == "shifted":
        offsets = [offset % images.num_classes for offset in _nonempty(shift.offsets, "offsets")]
        return [_group(Variant(images, offset=offset)) for offset in offsets]
    if shift.kind == "pathological":
        return [_group(Variant(images), labels) for labels in _label_sets(shift, images)]
    if shift.kind == "rotated_labels":
        return [
            _group(Variant(images, _turns(angle, images)), labels)
            for angle in _nonempty(shift.angles, "angles")
            for labels in _label_sets(shift, images)
        ]
    assert other is not None  # a hybrid has two data sets
    return _hybrid(images, other, shift.other)


def _group(variant: Variant, labels: list[int] | None = None) -> Group:
    """Returns the group of all samples with these labels; None: of all samples."""

    def rows(y: np.ndarray) -> np.ndarray:
        return np.arange(len(y)) if labels is None else np.flatnonzero(np.isin(y, labels))

    images = variant.images
    return Group(variant, rows(images.train_y), None if images.test_y is None else rows(images.test_y))


def _natural(images: Images, group: int) -> Group:
    """Returns a group that the data came with; test images without a group measure every group."""
    if images.test_y is None:
        test_rows = None
    elif images.test_group is None:
        test_rows = np.arange(len(images.test_y))
    else:
        test_rows = np.flatnonzero(images.test_group == group)
    return Group(Variant(images), np.flatnonzero(images.group == group), test_rows)


def _hybrid(images: Images, other: Images, name: str) -> list[Group]:
    first, second = ((*one.shape, one.num_classes, one.scale) for one in (images, other))
    if first != second:
        raise DataError(
            "a hybrid needs two data sets of one (channels, height, width, classes, pixel scale): "
            f"data.source is {first}, data.shift.other {name!r} is {second}"
        )
    return [_group(Variant(images)), _group(Variant(other))]


def _turns(angle: int, images: Images) -> int:
    if len(images.shape) != 3:
        raise DataError(
            f"data.shift.angles: {angle} degrees needs images (channels, height, width), these samples have shape "
            f"{images.shape}; use another data.shift.kind"
        )
    _, height, width = images.shape
    if angle % 180 and height != width:
        raise DataError(
            f"data.shift.angles: {angle} degrees needs square images, these are {height}x{width}; use 0 and 180"
        )
    return angle // 90 % 4


def _label_sets(shift: ShiftConfig, images: Images) -> list[list[int]]:
    for labels in _nonempty(shift.label_sets, "label_sets"):
        if bad := [label for label in _nonempty(labels, "label_sets") if not 0 <= label < images.num_classes]:
            raise DataError(
                f"data.shift.label_sets: label {bad[0]} does not exist; the data set has {images.num_classes} classes, "
                f"0..{images.num_classes - 1}"
            )
    return shift.label_sets


def _nonempty(values: list[T], key: str) -> list[T]:
    if not values:
        raise DataError(f"data.shift.{key} has an empty list; give every group its value")
    return values
