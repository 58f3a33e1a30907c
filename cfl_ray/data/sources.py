"""The base data sets by name: where each is looked for and how it is read."""

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cfl_ray.config import Columns, Data
from cfl_ray.core.errors import DataError, nearest
from cfl_ray.core.rng import stream
from cfl_ray.data import leaf, parquet
from cfl_ray.data.images import Images, Progress, Source, find, roots


def locate(name: str, data: Data) -> Source:
    """The named data set, found on disk. Raises DataError with the places looked at and the ways to get it."""
    if name not in _LOCATE:
        raise DataError(f"data set {name!r} has no images to divide{nearest(name, _LOCATE)}")
    return _LOCATE[name](data)


# --- digits: 1,797 images of 8x8 that come with scikit-learn ------------------------------------------------------------------------


def _digits(data: Data) -> Source:
    return Source("digits", (), _read_digits)


def _read_digits(pixels: bool, progress: Progress | None) -> Images:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    x, y = loaded.images.astype(np.uint8)[:, None], loaded.target.astype(np.int16)
    rng = stream(0, -1, -1, -1, "data/digits-split")  # seed 0 always: the test set belongs to the data set, not to the experiment
    per_class = [rng.permutation(np.flatnonzero(y == label)) for label in range(10)]
    test = np.sort(np.concatenate([rows[: round(0.2 * len(rows))] for rows in per_class]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return Images(x[train], y[train], x[test], y[test], num_classes=10, scale=16)


# --- torchvision --------------------------------------------------------------------------------------------------------------------

_TORCHVISION = {  # our name: (torchvision's class, files below its root)
    "mnist": ("MNIST", "MNIST/raw/*-ubyte"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST/raw/*-ubyte"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py/*_batch*"),
}


def _torchvision(name: str) -> Callable[[Data], Source]:
    def locate_one(data: Data) -> Source:
        kind, pattern = _TORCHVISION[name]
        get = f"set data.download: true, or point data.root at a folder where torchvision.datasets.{kind} has put it"
        if name == "cifar10":
            get += "; for the parquet files of uoft-cs/cifar10 use data.source: images with data.columns: {image: img, label: label}"
        try:
            root, files = find(data, ["", "torchvision"], [pattern], name, get)
        except DataError:
            if not data.download:
                raise
            _open_torchvision(name, roots(data)[0], train=True, download=True)
            root, files = find(data, ["", "torchvision"], [pattern], name, get)
        return Source(name, tuple(files), lambda pixels, progress: _read_torchvision(name, root))

    return locate_one


def _open_torchvision(name: str, root: Path, train: bool, download: bool = False):
    from torchvision import datasets

    try:
        return getattr(datasets, _TORCHVISION[name][0])(str(root), train=train, download=download)
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        doing = "downloaded to" if download else "read from"
        raise DataError(f"data set {name!r} could not be {doing} {root.absolute()}: {error}") from error


def _read_torchvision(name: str, root: Path) -> Images:
    def part(train: bool) -> tuple[np.ndarray, np.ndarray]:
        loaded = _open_torchvision(name, root, train)
        x = np.asarray(loaded.data)
        x = x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        return x, np.asarray(loaded.targets, np.int16)

    with warnings.catch_warnings():  # numpy's remark about the layout of torchvision's CIFAR files is no concern of the user
        warnings.simplefilter("ignore")
        return Images(*part(train=True), *part(train=False), num_classes=10)


# --- MNIST with the names of its writers --------------------------------------------------------------------------------------------


def _mnist_by_writer(data: Data) -> Source:
    mnist = _torchvision("mnist")(data)
    _, files = find(data, ["", "torchvision", "mnist"], ["mnist_writers.parquet"], "mnist_by_writer",
                    "write mnist_writers.parquet (columns split, row, writer, hsf) from QMNIST's extended labels")
    return Source("mnist_by_writer", (*mnist.files, files[0]), lambda pixels, progress: _join_writers(mnist.read(True, None), files[0]))


def _join_writers(images: Images, file: Path) -> Images:
    try:
        table = pq.read_table(file, columns=["split", "row", "writer", "hsf"])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as a parquet file with columns split, row, writer, hsf: {error}") from error
    split, row, writer, hsf = (table[name].to_numpy() for name in table.column_names)
    _, group = np.unique(hsf, return_inverse=True)

    def of(part: str, values: np.ndarray, expected: int) -> np.ndarray:
        mask = split == part
        order = np.argsort(row[mask])
        if not np.array_equal(row[mask][order], np.arange(expected)):
            raise DataError(f"{file}: split {part!r} must name each of MNIST's rows 0..{expected - 1} once, it has {mask.sum()} entries")
        return values[mask][order]

    n, n_test = len(images.train_y), len(images.test_y)
    group = group.astype(np.int32)
    return Images(images.train_x, images.train_y, images.test_x, images.test_y, images.num_classes,
                  client=of("train", writer, n), group=of("train", group, n), test_group=of("test", group, n_test))


# --- parquet and LEAF ---------------------------------------------------------------------------------------------------------------


def _images(data: Data) -> Source:
    get = "set data.root and data.train_files (a glob below root), e.g. train_files: 'data/train-*.parquet'"
    patterns = [data.train_files] if data.train_files else ["train-*.parquet", "data/train-*.parquet", "plain_text/train-*.parquet"]
    return _parquet("images", data, [""], patterns, data.columns, None, get)


def _femnist(data: Data) -> Source:
    get = "download the data set flwrlabs/femnist from Hugging Face and point data.root at it, or use source femnist_leaf for LEAF's JSON"
    patterns = [data.train_files] if data.train_files else ["hf/femnist/data/*.parquet", "data/*.parquet", "*.parquet"]
    columns = Columns(**{"label": "character", "client": "writer_id", **data.columns.model_dump(exclude_unset=True)})
    return _parquet("femnist", data, ["", "femnist"], patterns, columns, 62, get)


def _parquet(name: str, data: Data, subfolders: list[str], patterns: list[str], columns: Columns, num_classes: int | None, get: str) -> Source:
    folder, train = find(data, subfolders, patterns, name, get)
    test = sorted(path for path in folder.glob(data.test_files) if path.is_file()) if data.test_files else []
    if data.test_files and not test:
        raise DataError(f"data.test_files: no file matches {data.test_files!r} in {folder.absolute()}")
    train = [path for path in train if path not in test]
    if not train:
        raise DataError(f"data.train_files and data.test_files name the same files in {folder.absolute()}: {', '.join(p.name for p in test)}")
    return Source(name, (*train, *test), lambda pixels, progress: parquet.read(train, test, columns, num_classes, pixels, progress))


def _femnist_leaf(data: Data) -> Source:
    get = ("run LEAF's data/femnist/preprocess.sh and point data.root at LEAF's data/femnist/data (the folder that holds train/*.json), "
           "or use source femnist for the parquet files of flwrlabs/femnist")
    subfolders = [data.train_files] if data.train_files else ["", "femnist/data", "data/femnist/data", "leaf/data/femnist/data"]
    folder, train = find(data, subfolders, ["train/*.json"], "femnist_leaf", get)
    test = sorted(folder.glob("test/*.json"))
    return Source("femnist_leaf", (*train, *test), lambda pixels, progress: leaf.read(train, test, progress))


_LOCATE: dict[str, Callable[[Data], Source]] = {
    "digits": _digits,
    **{name: _torchvision(name) for name in _TORCHVISION},
    "mnist_by_writer": _mnist_by_writer,
    "images": _images,
    "femnist": _femnist,
    "femnist_leaf": _femnist_leaf,
}
