"""Well-known image data sets, in the layouts of torchvision, of the Hugging Face hub and of the medmnist package."""

import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cfl_ray.config import ColumnsConfig, DataConfig
from cfl_ray.config.data import FilesDataConfig
from cfl_ray.data import image_files
from cfl_ray.data.images import Images, Source, find, roots
from cfl_ray.data.tables import read_npz
from cfl_ray.errors import DataError

_SILENCE_SECONDS = 60.0  # of a server from which a data set is downloaded; torchvision waits without limit


@dataclass(frozen=True)
class _Hub:
    """A data set of the Hugging Face hub: the parquet files of a configuration."""

    repository: str
    folder: str  # folder of its parquet files, which is the configuration's name
    image: str  # column of the images
    label: str  # column of the labels


@dataclass(frozen=True)
class _Torchvision:
    """A data set of torchvision, and the same data set on the hub."""

    kind: str  # name of torchvision's class
    files: str  # glob pattern of its files, below the data root
    num_classes: int = 10
    by_split: bool = False  # the class takes split="train" instead of train=True
    hub: _Hub | None = None


_TORCHVISION = {
    "mnist": _Torchvision("MNIST", "MNIST/raw/*-ubyte"),
    "fashion_mnist": _Torchvision("FashionMNIST", "FashionMNIST/raw/*-ubyte"),
    "cifar10": _Torchvision(
        "CIFAR10", "cifar-10-batches-py/*_batch*", hub=_Hub("uoft-cs/cifar10", "plain_text", "img", "label")
    ),
    "cifar100": _Torchvision(
        "CIFAR100",
        "cifar-100-python/t*",
        num_classes=100,
        hub=_Hub("uoft-cs/cifar100", "cifar100", "img", "fine_label"),
    ),
    "svhn": _Torchvision(
        "SVHN",
        "t*_32x32.mat",
        by_split=True,
        hub=_Hub("ufldl-stanford/svhn", "cropped_digits", "image", "label"),
    ),
}


def _located(name: str, data: DataConfig) -> Source:
    """A data set by its name, downloaded if it is missing and `data.download` is true."""
    try:
        return _find(name, data)
    except DataError:
        if not data.download:
            raise
    for train in (True, False):  # the parts of SVHN are separate files
        _open_torchvision(name, roots(data)[0], train, download=True)
    return _find(name, data)


def _find(name: str, data: DataConfig) -> Source:
    """The data set in torchvision's files, or in the hub's. Raises DataError with all folders searched."""
    dataset, hub = _TORCHVISION[name], _TORCHVISION[name].hub
    get = (
        f"set data.download: true, or point data.root at a folder with the files of torchvision.datasets.{dataset.kind}"
    )
    patterns, subfolders = [dataset.files], ["", "torchvision"]
    if hub is not None:
        get += f", or at a folder with {hub.folder}/*.parquet of the Hugging Face data set {hub.repository}"
        patterns.append(f"{hub.folder}/train-*.parquet")
        subfolders.append(f"hf/{name}")
    root, files = find(data, subfolders, patterns, name, get)
    if hub is not None and files[0].suffix == ".parquet":
        return _of_hub(name, hub, root, files)
    return Source(tuple(files), lambda pixels, progress: _read_torchvision(name, root))


# --- torchvision --------------------------------------------------------------------------------


def _open_torchvision(name: str, root: Path, train: bool, download: bool = False) -> Any:
    from torchvision import datasets

    dataset = _TORCHVISION[name]
    part: dict[str, Any] = {"split": "train" if train else "test"} if dataset.by_split else {"train": train}
    before = socket.getdefaulttimeout()
    try:
        if download:
            socket.setdefaulttimeout(_SILENCE_SECONDS)
        return getattr(datasets, dataset.kind)(str(root), **part, download=download)
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        where = root.absolute()
        if not download:
            raise DataError(f"data set {name!r} could not be read from {where}: {error}") from error
        raise DataError(
            f"data set {name!r} could not be downloaded to {where}: {error} (a server is given up if it sends nothing "
            f"for {_SILENCE_SECONDS:g} s); try again, or put the files of torchvision.datasets.{dataset.kind} there"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def _read_torchvision(name: str, root: Path) -> Images:
    def part(train: bool) -> tuple[np.ndarray, np.ndarray]:
        loaded = _open_torchvision(name, root, train)
        x = np.asarray(loaded.data)
        if x.ndim == 3:
            x = x[:, None]
        elif x.shape[-1] == 3:  # channels last; SVHN has them first
            x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        labels = loaded.labels if _TORCHVISION[name].by_split else loaded.targets
        return np.ascontiguousarray(x), np.asarray(labels, np.int16)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns about the pickled arrays of CIFAR
        return Images(*part(train=True), *part(train=False), num_classes=_TORCHVISION[name].num_classes)


# --- Hugging Face -------------------------------------------------------------------------------


def _of_hub(name: str, hub: _Hub, root: Path, train: list[Path]) -> Source:
    """A data set of the hub, in parquet files. Its images may have another order than torchvision's."""
    test = sorted(path for path in root.glob(f"{hub.folder}/test-*.parquet") if path.is_file())
    if not test:
        raise DataError(
            f"data set {name!r}: {(root / hub.folder).absolute()} has {train[0].name}, but no test-*.parquet; "
            f"get all files of {hub.repository}/{hub.folder}"
        )
    columns = ColumnsConfig(image=hub.image, label=hub.label)
    read = partial(image_files.read_parquet, train, test, columns, _TORCHVISION[name].num_classes)
    return Source((*train, *test), read)


# --- MedMNIST -----------------------------------------------------------------------------------


def medmnist(data: FilesDataConfig) -> Source:
    """The 2-D data set of medmnist that `data.train_files` names, without its validation part."""
    get = (
        "name one data set by its file, e.g. data.train_files: pathmnist.npz, and put it there: "
        "medmnist.PathMNIST('train', root='data', download=True) of the package medmnist does it"
    )
    pattern = data.train_files or "*mnist*.npz"
    root, files = find(data, ["", "medmnist"], [pattern], "medmnist", get)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise DataError(f"data.train_files: {root.absolute()} holds {len(files)} data sets, name one of: {names}")
    return Source(tuple(files), lambda pixels, progress: _read_medmnist(files[0]))


def _read_medmnist(file: Path) -> Images:
    names = [f"{part}_{kind}" for part in ("train", "test") for kind in ("images", "labels")]
    arrays = read_npz(file, names, None, f"a file of medmnist has {', '.join(names)}")
    parts = [
        _medmnist_part(file, name, arrays[f"{name}_images"], arrays[f"{name}_labels"]) for name in ("train", "test")
    ]
    return Images(*parts[0], *parts[1], num_classes=max(int(y.max()) for _, y in parts) + 1)


def _medmnist_part(file: Path, part: str, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if x.dtype != np.uint8 or not (x.ndim == 3 or (x.ndim == 4 and x.shape[-1] == 3)):
        raise DataError(
            f"{file}: {part}_images is {x.dtype} of shape {x.shape}, expected uint8 (n, height, width) or "
            "(n, height, width, 3); the 3-D data sets of medmnist are not supported"
        )
    if y.ndim == 2 and y.shape[1] != 1:
        raise DataError(
            f"{file}: {part}_labels has {y.shape[1]} labels per image, expected 1; for data sets with several labels "
            "(chestmnist) use source arrays and task multi_label"
        )
    if len(x) != len(y):
        raise DataError(f"{file} has {len(x)} {part}_images and {len(y)} {part}_labels, expected as many")
    x = x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x, y.reshape(len(y)).astype(np.int16)


SETS: dict[str, Callable[[Any], Source]] = {
    **{name: partial(_located, name) for name in _TORCHVISION},
    "medmnist": medmnist,
}
