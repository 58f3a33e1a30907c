"""Images in a folder per class, as torchvision's ImageFolder reads them, with the client of each image if known."""

import os
from pathlib import Path

import numpy as np
import pyarrow.csv

from cfl_ray.data.columns import decode
from cfl_ray.data.images import Images, Progress
from cfl_ray.data.mapped import mapped_array
from cfl_ray.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg")
CLIENTS_FILE = "clients.csv"


def files_of(folder: Path) -> list[Path]:
    """The images below the class folders of `folder`, sorted. Raises DataError if there are none."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder.absolute()}; set data.root to a folder with a folder per class")
    for inner in (folder, *(path for path in folder.glob("*") if path.is_dir())):
        if not os.access(inner, os.R_OK | os.X_OK):  # glob leaves out what it may not read
            raise DataError(f"{inner.absolute()} cannot be read: permission denied")
    files = sorted(file for file in folder.glob("*/**/*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise DataError(
            f"{folder.absolute()} has no {', '.join(SUFFIXES)} file in a folder per class, e.g. {folder.name}/cat/1.png"
        )
    return files


def read(train: Path, test: Path | None, pixels: bool, progress: Progress | None) -> Images:
    """The images in a folder that has a folder for each class, numbered in sorted order of the folders' names.

    A test folder in the training folder is not a class. `clients.csv` in the training folder, with columns file (path
    below the folder) and client, names the client of each image.
    """
    files = files_of(train)
    if test is not None and test.is_relative_to(train):
        files = [file for file in files if not file.is_relative_to(test)]
    if not files:
        raise DataError(f"{train.absolute()} has no image in a folder per class, except in the test folder")
    classes = sorted({file.relative_to(train).parts[0] for file in files})
    shape = decode(files[0], str(files[0])).shape
    train_x, train_y = _part(files, train, classes, shape, pixels, progress)
    test_x = test_y = None
    if test is not None:
        test_x, test_y = _part(files_of(test), test, classes, shape, pixels, progress)
    return Images(
        train_x, train_y, test_x, test_y, len(classes), client=_clients(train, files), class_names=tuple(classes)
    )


def _part(
    files: list[Path],
    folder: Path,
    classes: list[str],
    shape: tuple[int, ...],
    pixels: bool,
    progress: Progress | None,
) -> tuple[np.ndarray, np.ndarray]:
    names = [file.relative_to(folder).parts[0] for file in files]
    if unknown := sorted(set(names) - set(classes)):
        raise DataError(f"{folder}: class {unknown[0]!r} has no training image; the classes are {', '.join(classes)}")
    y = np.array([classes.index(name) for name in names], np.int16)
    if not pixels:
        return np.broadcast_to(np.uint8(0), (len(files), *shape)), y
    x = mapped_array((len(files), *shape))
    for row, file in enumerate(files):
        x[row] = decode(file, str(file), shape)
        if progress and (row + 1) % 1000 == 0:
            progress("decoding images", row + 1, len(files))
    return x, y


def _clients(folder: Path, files: list[Path]) -> np.ndarray | None:
    """The client of each image as strings; None without a `clients.csv`."""
    clients_file = folder / CLIENTS_FILE
    if not clients_file.is_file():
        return None
    try:
        table = pyarrow.csv.read_csv(clients_file)
        client_of = {str(row["file"]): str(row["client"]) for row in table.select(["file", "client"]).to_pylist()}
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        raise DataError(f"{clients_file} must be a CSV file with columns file and client: {error}") from error
    names = [file.relative_to(folder).as_posix() for file in files]
    if missing := [name for name in names if name not in client_of]:
        raise DataError(f"{clients_file} names no client for {missing[0]} ({len(missing)} of {len(names)} images)")
    return np.array([client_of[name] for name in names], np.str_)
