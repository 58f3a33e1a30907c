"""How groups differ: each true group sees the data set under its own transformation, or only its own labels.

A shift names rows and a transformation; pixels are made only when a client's samples are taken.
"""

from dataclasses import dataclass

import numpy as np

from cfl_ray.config import Shift
from cfl_ray.core.errors import DataError
from cfl_ray.data.images import Images


@dataclass(frozen=True)
class Variant:
    """A data set under one transformation."""

    images: Images
    turns: int = 0  # quarter turns counter-clockwise, 0..3, as np.rot90 and torchvision's rotate turn
    offset: int = 0  # s in y -> (y + s) mod C

    def labels(self, y: np.ndarray) -> np.ndarray:
        """These labels as the group sees them."""
        return (y + self.offset) % self.images.num_classes if self.offset else y

    def train(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Training samples: uint8 (n, C, H, W) and int16 (n,)."""
        return self._turned(self.images.train_x[rows]), self.labels(self.images.train_y[rows])

    def test(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same of the test part."""
        return self._turned(self.images.test_x[rows]), self.labels(self.images.test_y[rows])

    def _turned(self, x: np.ndarray) -> np.ndarray:
        return np.rot90(x, self.turns, axes=(-2, -1))


@dataclass(frozen=True)
class Group:
    """One true group: the training rows its clients divide and, in cluster view, the test rows that measure them."""

    variant: Variant
    rows: np.ndarray  # int64, ascending
    test_rows: np.ndarray | None  # int64, ascending; None where the data set has no test part


def make_groups(images: Images, other: Images | None, shift: Shift, natural: bool) -> list[Group]:
    """The true groups under `shift`; `other` is the second data set of a hybrid.

    With `natural`, an unshifted data set falls into the groups it came with. Label sets may overlap: then groups share images.
    """
    if shift.kind == "none":
        count = images.group.max() + 1 if natural and images.group is not None else 0
        return [_natural(images, group) for group in range(count)] or [_group(Variant(images))]
    if shift.kind == "rotated":
        return [_group(Variant(images, _turns(angle, images))) for angle in _some(shift.angles, "angles")]
    if shift.kind == "shifted":
        return [_group(Variant(images, offset=offset % images.num_classes)) for offset in _some(shift.offsets, "offsets")]
    if shift.kind == "pathological":
        return [_group(Variant(images), labels) for labels in _label_sets(shift, images)]
    if shift.kind == "rotated_labels":
        return [_group(Variant(images, _turns(angle, images)), labels)
                for angle in _some(shift.angles, "angles") for labels in _label_sets(shift, images)]
    return _hybrid(images, other, shift.other)


def _group(variant: Variant, labels: list[int] | None = None) -> Group:
    images = variant.images

    def rows(y: np.ndarray | None) -> np.ndarray | None:
        if y is None:
            return None
        return np.arange(len(y)) if labels is None else np.flatnonzero(np.isin(y, labels))

    return Group(variant, rows(images.train_y), rows(images.test_y))


def _natural(images: Images, group: int) -> Group:
    """Test images whose group is unknown measure every group."""
    if images.test_y is None:
        test_rows = None
    else:
        test_rows = np.arange(len(images.test_y)) if images.test_group is None else np.flatnonzero(images.test_group == group)
    return Group(Variant(images), np.flatnonzero(images.group == group), test_rows)


def _hybrid(images: Images, other: Images, name: str) -> list[Group]:
    first, second = ((*one.shape, one.num_classes, one.scale) for one in (images, other))
    if first != second:
        raise DataError(f"a hybrid needs two data sets of one (channels, height, width, classes, pixel scale): data.source is {first}, "
                        f"data.shift.other {name!r} is {second}")
    return [_group(Variant(images)), _group(Variant(other))]


def _turns(angle: int, images: Images) -> int:
    _, height, width = images.shape
    if angle % 180 and height != width:
        raise DataError(f"data.shift.angles: {angle} degrees needs square images, these are {height}x{width}; use 0 and 180")
    return angle // 90 % 4


def _label_sets(shift: Shift, images: Images) -> list[list[int]]:
    for labels in _some(shift.label_sets, "label_sets"):
        if bad := [label for label in _some(labels, "label_sets") if not 0 <= label < images.num_classes]:
            raise DataError(f"data.shift.label_sets: label {bad[0]} does not exist; the data set has {images.num_classes} classes, "
                            f"0..{images.num_classes - 1}")
    return shift.label_sets


def _some(values: list, key: str) -> list:
    if not values:
        raise DataError(f"data.shift.{key} has an empty list; give every group its value")
    return values
