"""The data sets that `SOURCE_KINDS` names: in which folders their files are searched, and how they are read.

A data set is a function of its section that returns a `Source`, of the section and the task's targets if it
`has_targets`.

Well-known image data sets are read in the layouts of torchvision, of the Hugging Face hub and of the medmnist package.
"""

import glob
import itertools
import os
import re
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from cfl_ray.config import ColumnsConfig, DataConfig
from cfl_ray.config.data import (
    SOURCE_KINDS,
    CsvConfig,
    FilesDataConfig,
    HfDiskConfig,
    ImagesDataConfig,
    ImageTablesConfig,
    PartsDataConfig,
    Sent140LeafConfig,
)
from cfl_ray.config.unused import USES_OF_TESTS
from cfl_ray.core.rng import stream
from cfl_ray.data import image_files, leaf, tables
from cfl_ray.data.array_checks import label_warnings
from cfl_ray.data.columns import MAX_LABEL, numbered
from cfl_ray.data.data_set import DataSet, Progress, Source, find, roots
from cfl_ray.data.decoding import drawing_of
from cfl_ray.data.hf_disk import saved_dataset
from cfl_ray.data.raw_files import RawFiles
from cfl_ray.data.reading import reading, reason
from cfl_ray.data.tables import read_npz
from cfl_ray.errors import DataError, did_you_mean
from cfl_ray.system.files import sha256_once

_SILENCE_SECONDS = 60.0  # of a server from which a data set is downloaded; torchvision waits without limit


@dataclass(frozen=True)
class _Hub:
    """A data set of the Hugging Face hub: the parquet files of a configuration."""

    repository: str
    folder: str  # folder of its parquet files, which is the configuration's name
    image: str  # column of the images
    label: str  # column of the labels


@dataclass(frozen=True)
class Torchvision:
    """A data set of torchvision, and the same data set on the hub; called with a section, it locates the files."""

    kind: str  # name of torchvision's class
    files: str  # glob pattern of its files, below the data root
    num_classes: int = 10
    by_split: bool = False  # the class takes split="train" instead of train=True
    hub: _Hub | None = None

    def __call__(self, data: DataConfig) -> Source:
        """The data set, downloaded if it is missing and `data.download` is true."""
        try:
            return self._find(data)
        except DataError:
            if not data.download:
                raise
        for train in (True, False):  # the parts of SVHN are separate files
            self._open(data.source, roots(data)[0], train, download=True)
        return self._find(data)

    def _find(self, data: DataConfig) -> Source:
        """The data set in torchvision's files, or in the hub's. Raises DataError with all folders searched."""
        name, hub = data.source, self.hub
        get = (
            "set data.download: true, or point data.root at a folder with the files of "
            f"torchvision.datasets.{self.kind}"
        )
        patterns, subfolders = [self.files], ["", "torchvision"]
        if hub is not None:
            get += f", or at a folder with {hub.folder}/*.parquet of the Hugging Face data set {hub.repository}"
            patterns.append(f"{hub.folder}/train-*.parquet")
            subfolders.append(f"hf/{name}")
        root, files = find(data, subfolders, patterns, name, get)
        if hub is not None and files[0].suffix == ".parquet":
            return _of_hub(name, hub, root, files, self.num_classes)
        return Source(tuple(files), lambda pixels, progress: self._read(name, root))

    def _open(self, name: str, root: Path, train: bool, download: bool = False) -> Any:
        from torchvision import datasets

        part: dict[str, Any] = {"split": "train" if train else "test"} if self.by_split else {"train": train}
        before = socket.getdefaulttimeout()
        try:
            if download:
                socket.setdefaulttimeout(_SILENCE_SECONDS)
            return getattr(datasets, self.kind)(str(root), **part, download=download)
        except Exception as error:  # of torchvision, pickle, zlib, scipy and numpy
            where = root.absolute()
            if not download:
                raise DataError(
                    f"data set {name!r} could not be read from {where}: {reason(error)}; delete its files there and "
                    "download them again (data.download: true)"
                ) from error
            raise DataError(
                f"data set {name!r} could not be downloaded to {where}: {reason(error)} (a server is given up if it "
                f"sends nothing for {_SILENCE_SECONDS:g} s); try again, or put the files of "
                f"torchvision.datasets.{self.kind} there"
            ) from error
        finally:
            socket.setdefaulttimeout(before)

    def _read(self, name: str, root: Path) -> DataSet:
        def part(train: bool) -> tuple[np.ndarray, np.ndarray]:
            loaded = self._open(name, root, train)
            x = np.asarray(loaded.data)
            if x.ndim == 3:
                x = x[:, None]
            elif x.shape[-1] == 3:  # channels last; SVHN has them first
                x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
            labels = loaded.labels if self.by_split else loaded.targets
            return np.ascontiguousarray(x), np.asarray(labels, np.int16)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about the pickled arrays of CIFAR
            return DataSet(*part(train=True), *part(train=False), num_classes=self.num_classes)


mnist = Torchvision("MNIST", "MNIST/raw/*-ubyte")
fashion_mnist = Torchvision("FashionMNIST", "FashionMNIST/raw/*-ubyte")
cifar10 = Torchvision(
    "CIFAR10", "cifar-10-batches-py/*_batch*", hub=_Hub("uoft-cs/cifar10", "plain_text", "img", "label")
)
cifar100 = Torchvision(
    "CIFAR100",
    "cifar-100-python/t*",
    num_classes=100,
    hub=_Hub("uoft-cs/cifar100", "cifar100", "img", "fine_label"),
)
svhn = Torchvision(
    "SVHN",
    "t*_32x32.mat",
    by_split=True,
    hub=_Hub("ufldl-stanford/svhn", "cropped_digits", "image", "label"),
)


# --- Hugging Face -------------------------------------------------------------------------------


def _of_hub(name: str, hub: _Hub, root: Path, train: list[Path], num_classes: int) -> Source:
    """A data set of the hub, in parquet files. Its images may have another order than torchvision's."""
    test = sorted(path for path in root.glob(f"{hub.folder}/test-*.parquet") if path.is_file())
    if not test:
        raise DataError(
            f"data set {name!r}: {(root / hub.folder).absolute()} has {train[0].name}, but no test-*.parquet; "
            f"get all files of {hub.repository}/{hub.folder}"
        )
    columns = ColumnsConfig(image=hub.image, label=hub.label)
    read = partial(image_files.read_parquet, train, test, columns, num_classes)
    return Source((*train, *test), read, decodes=True)


# --- MedMNIST -----------------------------------------------------------------------------------


def medmnist(data: FilesDataConfig) -> Source:
    """The 2-D data set of medmnist that `data.train_files` names; with its validation part for `data.validation`."""
    get = (
        "name one data set by its file, e.g. data.train_files: pathmnist.npz, and put it there: "
        "medmnist.PathMNIST('train', root='data', download=True) of the package medmnist does it"
    )
    pattern = data.train_files or "*mnist*.npz"
    root, files = find(data, ["", "medmnist"], [pattern], "medmnist", get)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise DataError(f"data.train_files: {root.absolute()} holds {len(files)} data sets, name one of: {names}")
    named = ("train", "test", "val") if data.validation is not None else ("train", "test")
    return Source(tuple(files), lambda pixels, progress: _read_medmnist(files[0], named, data.labels == "dense"))


def _read_medmnist(file: Path, named: Sequence[str], dense: bool) -> DataSet:
    names = [f"{part}_{kind}" for part in named for kind in ("images", "labels")]
    with reading(str(file), "an .npz file of medmnist", "download it again"):
        arrays = read_npz(file, names, None, f"a file of medmnist has {', '.join(names)}")
    parts = [_medmnist_part(file, name, arrays[f"{name}_images"], arrays[f"{name}_labels"]) for name in named]
    for name, (x, _) in zip(named, parts, strict=True):
        if x.shape[1:] != (shape := parts[0][0].shape[1:]):
            raise DataError(
                f"{file}: {name}_images are of shape {x.shape[1:]}, train_images of {shape}; they must agree"
            )
    labels: list[np.ndarray] = [y for _, y in parts]
    class_names: tuple[str, ...] = ()
    if dense:
        labels, class_names = numbered([(f"{file}: {name}_labels", y) for name, y in zip(named, labels, strict=True)])
    num_classes = len(class_names) or max(int(y.max()) for y in labels) + 1
    warnings = label_warnings(f"{file}: train_labels", labels[0], num_classes)
    return DataSet(
        parts[0][0],
        labels[0],
        np.concatenate([x for x, _ in parts[1:]]),
        np.concatenate(labels[1:]),
        num_classes,
        class_names=class_names,
        warnings=tuple(warnings),
        num_validation=sum(map(len, labels[2:])),
    )


def _medmnist_part(file: Path, part: str, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if x.dtype != np.uint8 or not (x.ndim == 3 or (x.ndim == 4 and x.shape[-1] == 3)):
        raise DataError(
            f"{file}: {part}_images is {x.dtype} of shape {x.shape}, expected uint8 (n, height, width) or "
            "(n, height, width, 3); the 3-D data sets of medmnist are not supported"
        )
    if 0 in x.shape:
        raise DataError(f"{file}: {part}_images has no pixel, its shape is {x.shape}; put images into both parts")
    if y.ndim == 0:
        raise DataError(f"{file}: {part}_labels is one number, expected a label for each of {len(x)} images")
    if y.ndim == 2 and y.shape[1] != 1:
        raise DataError(
            f"{file}: {part}_labels has {y.shape[1]} labels per image, expected 1; for data sets with several labels "
            "(chestmnist) use source arrays and task multi_label"
        )
    if len(x) != len(y):
        raise DataError(f"{file} has {len(x)} {part}_images and {len(y)} {part}_labels, expected as many")
    if y.dtype.kind not in "iu" or (len(y) and not 0 <= y.min() <= y.max() <= MAX_LABEL):
        found = f"{y.min()}..{y.max()}" if y.dtype.kind in "iuf" and len(y) else str(y.dtype)
        raise DataError(f"{file}: {part}_labels must be integers in 0..{MAX_LABEL}, got {found}")
    x = x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x, y.reshape(len(y)).astype(np.int16)


def locate(name: str, data: DataConfig, targets: str = "class") -> Source:
    """The named data set with its files. Raises DataError with the folders searched and how to obtain it."""
    sections = {source: kind.section for source, kind in SOURCE_KINDS.builtin.items() if not kind.section.has_clients}
    if name not in sections:
        raise DataError(f"data set {name!r} has no samples to divide{did_you_mean(name, sections)}")
    data = data.of_source(name)
    code: Callable[..., Source] = SOURCE_KINDS.code_of(data)
    if sections[name].has_targets:
        return code(data, targets)
    if targets != "class":
        tables = ", ".join(source for source, section in sections.items() if section.has_targets)
        raise DataError(
            f"data set {name!r} has classes, the task needs targets {targets!r}, which {tables}, arrays and my.py:load "
            "can have"
        )
    return code(data)


# --- digits: 1,797 images of 8x8 that come with scikit-learn ------------------------------------


def digits(data: DataConfig) -> Source:
    """Scikit-learn's digits, with a fifth of the images of each digit as the test part."""
    return Source((), _read_digits)


def _read_digits(pixels: bool, progress: Progress | None) -> DataSet:
    table = _digits_table()
    x, y = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8), table[:, -1].astype(np.int16)
    # seed 0 for every experiment, since the test set belongs to the data set
    rng = stream(0, -1, -1, -1, "data/digits-split")
    per_class = [rng.permutation(np.flatnonzero(y == label)) for label in range(10)]
    test = np.sort(np.concatenate([rows[: round(0.2 * len(rows))] for rows in per_class]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return DataSet(x[train], y[train], x[test], y[test], num_classes=10, scale=16)


def _digits_table() -> np.ndarray:
    """The 64 pixels and the label of each image, in the order of `sklearn.datasets.load_digits`."""
    package = find_spec("sklearn")
    file = Path(package and package.origin or "").parent / "datasets/data/digits.csv.gz"
    if file.exists():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # takes more than a second to import

    loaded = load_digits()
    return np.column_stack([loaded.data, loaded.target])


# --- MNIST with its writers ---------------------------------------------------------------------


def mnist_by_writer(data: DataConfig) -> Source:
    """MNIST with the writer of each image."""
    base = mnist(data.of_source("mnist"))
    _, files = find(
        data,
        ["", "torchvision", "mnist"],
        ["mnist_writers.parquet"],
        "mnist_by_writer",
        "write mnist_writers.parquet (columns split, row, writer, hsf) from QMNIST's extended labels",
    )
    return Source((*base.files, files[0]), lambda pixels, progress: _join_writers(base.read(True, None), files[0]))


def _join_writers(data_set: DataSet, file: Path) -> DataSet:
    """MNIST with the writer of each image as its client, and the writer's NIST partition (hsf) as its group."""
    with reading(str(file), "a parquet file with columns split, row, writer, hsf"):
        table = pq.read_table(file, columns=["split", "row", "writer", "hsf"])
        split, row, writer, hsf = (table[name].to_numpy() for name in table.column_names)
    group = np.unique(hsf, return_inverse=True)[1].astype(np.int32)

    def in_row_order(part: str, values: np.ndarray, expected: int) -> np.ndarray:
        mask = split == part
        order = np.argsort(row[mask])
        if not np.array_equal(row[mask][order], np.arange(expected)):
            raise DataError(
                f"{file}: split {part!r} must name each of MNIST's rows 0..{expected - 1} once, "
                f"it has {mask.sum()} entries"
            )
        return values[mask][order]

    assert data_set.test_y is not None  # MNIST has a test part
    n, n_test = len(data_set.train_y), len(data_set.test_y)
    return replace(
        data_set,
        client=in_row_order("train", writer, n),
        group=in_row_order("train", group, n),
        test_group=in_row_order("test", group, n_test),
    )


# --- parquet and LEAF ---------------------------------------------------------------------------


def images(data: ImageTablesConfig) -> Source:
    """Images in the user's Parquet files."""
    get = "set data.root and data.train_files (a glob below root), e.g. train_files: 'data/train-*.parquet'"
    usual = ["train-*.parquet", "data/train-*.parquet", "plain_text/train-*.parquet"]
    train, test, validation = _parts(data, [""], usual, "images", get)
    parquet = partial(_parquet(data), validation=validation)
    read = _warned(partial(parquet, train, test, data.columns, None), _held_out(train))
    return Source((*train, *test, *validation), read, decodes=True)


def _parquet(data: ImageTablesConfig) -> Callable[..., DataSet]:
    """Reads the images of Parquet files as `data` says."""
    dense = data.labels == "dense"
    return partial(image_files.read_parquet, drawing=drawing_of(data), dense=dense, names_unread=True)


def femnist(data: ImageTablesConfig) -> Source:
    """FEMNIST in the Parquet files of flwrlabs/femnist."""
    get = (
        "download the data set flwrlabs/femnist from Hugging Face and point data.root at it, "
        "or use source femnist_leaf for LEAF's JSON"
    )
    usual = ["hf/femnist/data/*.parquet", "data/*.parquet", "*.parquet"]
    train, test, validation = _parts(data, ["", "femnist"], usual, "femnist", get)
    names = {"label": "character", "client": "writer_id", **data.columns.model_dump(exclude_unset=True)}
    read = partial(_parquet(data), train, test, ColumnsConfig(**names), leaf.CLASSES, validation=validation)
    return Source((*train, *test, *validation), read, decodes=True)


def _parts(
    data: PartsDataConfig, subfolders: list[str], usual: list[str], name: str, get: str
) -> tuple[list[Path], list[Path], list[Path]]:
    """The training files that are of no other part, the test files and the validation files.

    usual: glob patterns of the training files if `data.train_files` is null. get: as in `find`. If `data.root` is a
    file, it is the training file.
    """
    file = Path(data.root or "").expanduser()
    if not file.exists():
        raise DataError(f"data.root: there is no file or folder {file.absolute()}; to get it: {get}")
    if data.root is not None and file.is_file() and data.train_files is None:
        data = data.model_copy(update={"root": str(file.parent), "train_files": glob.escape(file.name)})
    folder, train = find(data, subfolders, [data.train_files] if data.train_files else usual, name, get)
    test, validation = (_matching(key, getattr(data, key), folder) for key in ("test_files", "validation_files"))
    if both := [path for path in validation if path in test]:
        raise DataError(f"data.test_files and data.validation_files both name {both[0]}; name each file once")
    train = [path for path in train if path not in (*test, *validation)]
    if not train:
        names = ", ".join(path.name for path in (*test, *validation))
        keys = " and ".join(f"data.{key}" for key in ("test_files", "validation_files") if getattr(data, key))
        raise DataError(f"data.train_files and {keys} name the same files in {folder.absolute()}: {names}")
    return train, test, validation


def _matching(key: str, pattern: str | None, folder: Path) -> list[Path]:
    """The files of a part, sorted; empty without a pattern. Raises DataError if none matches."""
    files = sorted(path for path in folder.glob(pattern) if path.is_file()) if pattern else []
    if pattern and not files:
        raise DataError(f"data.{key}: no file matches {pattern!r} in {folder.absolute()}")
    return files


def _held_out(files: list[Path]) -> list[str]:
    """A warning if some training files have the names of parts that are usually not trained on; otherwise empty."""
    common = Path(os.path.commonpath([file.parent for file in files]))
    held_out = [file for file in files if _HELD_OUT.search(file.relative_to(common).as_posix())]
    if not held_out or len(held_out) == len(files):
        return []
    return [
        f"{held_out[0]} is a training file by data.train_files, as are {len(files) - 1} others; if it is a test part, "
        "name it in data.test_files; name the training files alone in data.train_files"
    ]


def _copied(files: Sequence[Path], digests: list[str]) -> list[str]:
    """A warning if two files have the same content; otherwise empty. digests: of each file."""
    # rows of client=1 and client=2 differ by the names of their folders
    contents = [
        (digest, *(part for part in file.parts[:-1] if "=" in part))
        for file, digest in zip(files, digests, strict=True)
    ]
    first = dict(zip(reversed(contents), reversed(files), strict=True))
    for file, content in zip(files, contents, strict=True):
        if first[content] != file:
            return [f"{file} has the same content as {first[content]}: its rows are read twice; leave one out"]
    return []


def _warned(read: Callable[..., DataSet], lines: list[str]) -> Callable[..., DataSet]:
    """`read`, with more warnings."""

    def with_warning(pixels: bool, progress: Progress | None) -> DataSet:
        data_set = read(pixels, progress)
        return replace(data_set, warnings=(*lines, *data_set.warnings))

    return with_warning


_HELD_OUT = re.compile(r"(?<![a-z])(test|val|valid|validation|dev|eval|holdout)(?![a-z])", re.IGNORECASE)


def femnist_leaf(data: FilesDataConfig) -> Source:
    """FEMNIST in LEAF's JSON files."""
    get = (
        "run LEAF's data/femnist/preprocess.sh and point data.root at LEAF's data/femnist/data (the folder that holds "
        "train/*.json), or use source femnist for the parquet files of flwrlabs/femnist"
    )
    return _leaf(
        "femnist", data, partial(leaf.read, convert=leaf.handwriting, num_classes=leaf.CLASSES, vocabulary=None), get
    )


def _leaf(name: str, data: FilesDataConfig, read: Callable[..., DataSet], get: str = "") -> Source:
    """The data set in LEAF's folder data/NAME. get: how to obtain it, if there is more to say."""
    get = get or f"run LEAF's data/{name}/preprocess.sh and point data.root at LEAF's data/{name}/data"
    usual = ["", f"{name}/data", f"data/{name}/data", f"leaf/data/{name}/data"]
    subfolders = [data.train_files] if data.train_files else usual
    root, train = find(data, subfolders, ["train/*.json"], f"{name}_leaf", get)
    test = sorted(root.glob("test/*.json"))
    raw, dense = RawFiles.of([*train, *test]), data.labels == "dense"
    unused = test and data.test.view == "holdout" and not data.test.pool
    lines = [f"the samples in {root / 'test'} have no effect: data.test.view is holdout; {USES_OF_TESTS}"]

    def read_parts(pixels: bool, progress: Progress | None) -> DataSet:
        return read(train, test, content=raw.read, dense=dense, progress=progress)

    return Source((), _warned(read_parts, lines if unused else []), digested=raw)


def shakespeare_leaf(data: FilesDataConfig) -> Source:
    """LEAF's Shakespeare: the character after 80 characters; each role of a play is a client."""
    tokens = len(leaf.ALPHABET) + 1
    read = partial(leaf.read, convert=leaf.characters, num_classes=tokens, vocabulary=tokens)
    return _leaf("shakespeare", data, read)


def sent140_leaf(data: Sent140LeafConfig) -> Source:
    """LEAF's Sentiment140: two classes of tweets; each user is a client."""
    return _leaf("sent140", data, partial(leaf.read_tweets, vocabulary=data.vocabulary or leaf.VOCABULARY))


# --- the user's own files -----------------------------------------------------------------------


def csv(data: CsvConfig, targets: str = "class") -> Source:
    """The samples of CSV or Parquet files."""
    get = "set data.root and data.train_files (a glob below root), e.g. train_files: 'train*.parquet'"
    train, test, validation = _parts(data, [""], ["*.csv"], "csv", get)
    files = (*train, *test, *validation)
    digests = [sha256_once(file) for file in files]  # an edited table may have the same size

    def read(pixels: bool, progress: Progress | None) -> DataSet:
        return tables.read_csv(train, test, validation, data, targets)

    return Source(files, _warned(read, [*_held_out(train), *_copied(files, digests)]), " ".join(digests))


def image_folder(data: ImagesDataConfig) -> Source:
    """Images in a folder for each class."""
    folders = {key: folder for key, folder in _folders(data).items() if folder is not None}
    for (key, folder), (other_key, other) in itertools.combinations(folders.items(), 2):
        if folder.is_dir() and other.is_dir() and folder.samefile(other):
            raise DataError(f"data.{key} and data.{other_key} name the same folder, {folder.absolute()}")
    without = [folder for key, folder in folders.items() if key != "train_files"]
    train = image_files.listed(folders["train_files"], without=without)
    test, validation = (
        image_files.listed(folders[key]) if key in folders else None for key in ("test_files", "validation_files")
    )
    parts = [listing for listing in (train, test, validation) if listing is not None]
    raw = image_files.raw_files(roots(data)[0], parts)
    read = partial(image_files.read_folders, train, test, validation, raw, drawing_of(data))
    return Source((), read, digested=raw, decodes=True)


def hf_disk(data: HfDiskConfig, targets: str = "class") -> Source:
    """A data set that Hugging Face's `save_to_disk` has written."""
    folders = _folders(data)
    for key, folder in folders.items():
        if folder is not None and not folder.is_dir():
            key = "root or data.train_files" if key == "train_files" else key
            raise DataError(f"data.{key}: there is no folder {folder.absolute()} of Dataset.save_to_disk")
    train, test, validation = folders.values()
    assert train is not None
    parts = [saved_dataset(folder) for folder in (train, test, validation) if folder is not None]
    files = [file for part in parts for file in (*part.files, *part.descriptions)]
    return Source(
        tuple(files),
        lambda pixels, progress: tables.read_hf(train, test, validation, data, targets),
        decodes=True,
    )


def _folders(data: PartsDataConfig) -> dict[str, Path | None]:
    """The folders of the training, test and validation part, by their keys; None: there is no such part."""
    root = roots(data)[0]
    others = {"test_files": data.test_files, "validation_files": data.validation_files}
    named = {key: None if name is None else root / name for key, name in others.items()}
    return {"train_files": root / (data.train_files or ""), **named}
