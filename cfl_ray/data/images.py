"""What a base data set is, before anybody holds any of it: images, labels and, where known, who made them."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cfl_ray.config import Data
from cfl_ray.core.errors import DataError

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, out of how many


@dataclass(frozen=True)
class Images:
    """A data set in memory. Where only a summary is wanted, the pixels are a broadcast zero of the right shape."""

    train_x: np.ndarray  # uint8 (n, C, H, W), values 0..scale
    train_y: np.ndarray  # int16 (n,)
    test_x: np.ndarray | None  # uint8 (n_test, C, H, W); None where the data set has no test part
    test_y: np.ndarray | None
    num_classes: int
    scale: int = 255  # the pixel value that means 1.0
    client: np.ndarray | None = None  # str or int (n,): who made each training sample
    group: np.ndarray | None = None  # int32 (n,), 0..G-1: true group of that client
    test_group: np.ndarray | None = None  # int32 (n_test,)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image."""
        return self.train_x.shape[1:]

    def pooled(self) -> "Images":
        """Everything as one training part, the test part last; the makers are forgotten, as the test part's are not known."""
        if self.group is not None and self.test_group is None:
            raise DataError("data.test.pool: the training files name a true group, the test files do not; set data.columns.group: null")
        x, y = self._joined(self.train_x, self.test_x), np.concatenate([self.train_y, self.test_y])
        group = None if self.group is None else np.concatenate([self.group, self.test_group])
        return Images(x, y, None, None, self.num_classes, self.scale, group=group)

    def _joined(self, train: np.ndarray, test: np.ndarray) -> np.ndarray:
        if any(train.strides):
            return np.concatenate([train, test])
        return np.broadcast_to(train[:1], (len(train) + len(test), *self.shape))  # pixels that nobody wanted


@dataclass(frozen=True)
class Source:
    """A data set that was found, not yet read."""

    name: str
    files: tuple[Path, ...]  # every file it is made of; empty for data that come with a library
    read: Callable[[bool, Progress | None], Images]  # (pixels wanted, progress)


def roots(data: Data) -> list[Path]:
    """The folders in which data sets are looked for, most wanted first."""
    if data.root is not None:
        return [Path(data.root).expanduser()]
    named = os.environ.get("CFL_RAY_DATA")
    return ([Path(named).expanduser()] if named else []) + [Path("data")]


def find(data: Data, subfolders: Iterable[str], patterns: Iterable[str], name: str, get: str) -> tuple[Path, list[Path]]:
    """The first folder in which one of the glob patterns matches, and the sorted matches.

    Raises DataError with every place looked at, followed by `get`: how to obtain the data.
    """
    subfolders, patterns = list(subfolders), list(patterns)
    if outside := [pattern for pattern in patterns if Path(pattern).is_absolute()]:
        raise DataError(f"{outside[0]!r} must be a pattern below data.root, not an absolute path")
    looked = [root / sub for root in roots(data) for sub in subfolders]
    for folder in looked:
        for pattern in patterns:
            if files := sorted(path for path in folder.glob(pattern) if path.is_file()):
                return folder, files
    places = "".join(f"\n  {folder.absolute()}" for folder in looked)
    raise DataError(f"data set {name!r} not found. Looked for {' or '.join(patterns)} in:{places}\nTo get it: {get}")
