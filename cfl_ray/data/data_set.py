"""Data sets before their division among clients: inputs, labels and, if known, the client of each sample.

Arrays of samples may be larger than memory.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from cfl_ray.config import DataConfig
from cfl_ray.config.data import FilesDataConfig, MedMnistConfig
from cfl_ray.data.federation import DataShape
from cfl_ray.data.raw_files import RawFiles
from cfl_ray.errors import DataError
from cfl_ray.system.mapped import mapped_array

Progress = Callable[[str, int, int], None]  # (name of the task, number done, number in all)


@dataclass(frozen=True, eq=False)  # compared by identity
class DataSet:
    """A data set in memory. If pixels are not needed, as in a summary, the inputs are a broadcast 0 of their shape."""

    train_x: np.ndarray  # (n, *input): uint8 with values 0..scale, e.g. (n, C, H, W); float32; int32 for token ids
    train_y: np.ndarray  # int16 (n,) for classes; for other targets (n, *) in the type of `core.tasks`
    test_x: np.ndarray | None  # like train_x, (n_test, *input); None: no test part
    test_y: np.ndarray | None  # like train_y; None: no test part
    num_classes: int
    scale: int = 255  # the pixel value that means 1.0
    client: np.ndarray | None = None  # str or int (n,): client (writer) of each training sample; None: not known
    group: np.ndarray | None = None  # int32 (n,), 0..G-1: true group of each training sample; None: not known
    test_group: np.ndarray | None = None  # int32 (n_test,): true group of each test sample; None: not known
    num_validation: int = 0  # rows at the end of the test part that are the validation part
    validation_client: np.ndarray | None = None  # like client, of each validation sample; None: not known
    time: np.ndarray | None = None  # int64 (n,): rank of each training sample in time; None: the order of the rows
    vocabulary: int | None = None  # token ids are 0 .. vocabulary - 1; None: the inputs are not tokens
    targets: str = "class"  # kind of the targets (`core.tasks`)
    class_names: tuple[str, ...] = ()  # by label, if the source names its classes
    notes: tuple[str, ...] = ()  # lines on what was read
    warnings: tuple[str, ...] = ()  # lines on what was left out, or probably not meant to be as it is
    decoding: int | None = None  # `Decoder.version` of its images; None: without images, or equal in all versions

    def __post_init__(self) -> None:
        """Raises DataError if samples and targets, or both parts, do not fit each other."""
        for part, x, y in (("training", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if x is not None and y is not None and len(x) != len(y):
                raise DataError(
                    f"the {part} part has {len(x)} inputs and {len(y)} targets; each input needs one target"
                )
        test, train = self.test_x, self.train_x
        if test is not None and (test.shape[1:], test.dtype) != (train.shape[1:], train.dtype):
            raise DataError(
                f"training inputs are {train.dtype} of shape {train.shape[1:]}, test inputs are {test.dtype} of shape "
                f"{test.shape[1:]}; give both the same shape and type"
            )

    @property
    def with_test_part(self) -> "DataSet":
        """This data set without its validation part."""
        return self._tested_on(0, -self.num_validation) if self.num_validation else self

    @property
    def with_validation_part(self) -> "DataSet | None":
        """This data set with the validation part in place of the test part; None without a validation part."""
        return self._tested_on(-self.num_validation, None) if self.num_validation else None

    def _tested_on(self, first: int, last: int | None) -> "DataSet":
        assert self.test_x is not None and self.test_y is not None  # which has the validation part
        rows = slice(first, last)
        x, y, group = self.test_x[rows], self.test_y[rows], None if self.test_group is None else self.test_group[rows]
        parts = {"test_x": x, "test_y": y} if len(y) else {"test_x": None, "test_y": None}
        return replace(self, **parts, test_group=group if len(y) else None, num_validation=0)

    @property
    def data_shape(self) -> DataShape:
        """The shapes of inputs and targets in the federation of these samples."""
        shape_of_target = self.train_y.shape[1:]
        return DataShape(self.shape, self.num_classes, self.vocabulary, self.targets, shape_of_target, self.class_names)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample, e.g. (C, H, W) for an image."""
        return self.train_x.shape[1:]

    def pooled(self, source: str) -> "DataSet":
        """A data set whose training part has all samples, those of the test part last; it has no test part.

        It has no clients, since the clients of test samples are not known. Raises DataError without a test part, and if
        only the training part has true groups. source: name of the data set.
        """
        if self.test_x is None or self.test_y is None:
            raise DataError(
                f"data.test.pool needs a test part, which {source!r} does not have; "
                "set data.test.pool: false (or name data.test_files)"
            )
        if self.time is not None:
            raise DataError(
                "data.test.pool: data.columns.time orders the training samples only; leave out one of the two"
            )
        group = None
        if self.group is not None:
            if self.test_group is None:
                raise DataError(
                    "data.test.pool: the training files name a true group, the test files do not; "
                    "set data.columns.group: null"
                )
            group = np.concatenate([self.group, self.test_group])
        y = np.concatenate([self.train_y, self.test_y])
        if any(self.train_x.strides):
            x = mapped_array((len(y), *self.shape), self.train_x.dtype)
            x[: len(self.train_x)], x[len(self.train_x) :] = self.train_x, self.test_x
        else:  # a summary, without pixels
            x = np.broadcast_to(self.train_x[:1], (len(y), *self.shape))
        return replace(self, train_x=x, train_y=y, test_x=None, test_y=None, client=None, group=group, test_group=None)


@dataclass(frozen=True)
class Source:
    """A data set whose files exist but are not read yet."""

    files: tuple[Path, ...]  # empty with `digested`, and if the data come with a library or from a function
    read: Callable[[bool, Progress | None], DataSet]  # (whether to read pixels, progress)
    digest: str | None = None  # hash of the data; None: that of the files
    digested: RawFiles | None = None  # the files, if `read` takes their digests; None: their digests are taken before
    decodes: bool = False  # whether `read` decodes files of images

    @cached_property
    def raw(self) -> RawFiles | None:
        """The files with their digests; None without files."""
        return self.digested or (RawFiles.of(self.files) if self.files else None)


def roots(data: DataConfig) -> list[Path]:
    """The folders in which a data set is searched, in this order.

    The working directory is among them only if `data.train_files` is set. Raises DataError if `data.root` is a file.
    """
    if data.root is not None:
        root = Path(data.root).expanduser()
        if root.is_file():
            advice = f"write root: {root.parent}"
            if re.search(r"\.(tar|tgz|zip|7z)(\.\w+)?$", root.name):
                advice = "unpack it, and name the folder with its content"
            elif isinstance(data, MedMnistConfig) and data.train_files is None:
                advice += f" and train_files: {root.name}"
            raise DataError(f"data.root: {root} is a file, expected a folder; {advice}")
        return [root]
    named = os.environ.get("CFL_RAY_DATA")
    here = [Path()] if isinstance(data, FilesDataConfig) and data.train_files else []
    return ([Path(named).expanduser()] if named else []) + [Path("data")] + here


def find(data: DataConfig, subfolders: list[str], patterns: list[str], name: str, get: str) -> tuple[Path, list[Path]]:
    """The first folder in which a glob pattern matches files, and these files, sorted.

    Raises DataError with every folder searched, followed by `get`, which says how to obtain the data.
    """
    if outside := [pattern for pattern in patterns if Path(pattern).is_absolute()]:
        raise DataError(f"{outside[0]!r} must be a pattern below data.root, not an absolute path")
    folders = [root / sub for root in roots(data) for sub in subfolders]
    for folder in folders:
        for pattern in patterns:
            if files := sorted(path for path in folder.glob(pattern) if path.is_file()):
                return folder, files
    places = ", ".join(str(folder.absolute()) for folder in folders)
    tables = _tables_in(Path(data.root).expanduser()) if data.root is not None else []
    there = f", which has {', '.join(tables[:3])}{' ...' * (len(tables) > 3)}" if tables else ""
    raise DataError(f"data set {name!r} not found: no {' or '.join(patterns)} in {places}{there}; to get it: {get}")


def _tables_in(folder: Path) -> list[str]:
    """The parquet and CSV files of a folder and of two levels of folders in it, below it."""
    globs = (f"{level}*.{suffix}" for level in ("", "*/", "*/*/") for suffix in ("parquet", "csv"))
    return [str(path.relative_to(folder)) for pattern in globs for path in sorted(folder.glob(pattern))]
