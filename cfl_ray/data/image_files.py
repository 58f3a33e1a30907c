"""Files of PNG and JPEG images: parquet files as on Hugging Face, and a folder per class."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from cfl_ray.config import ColumnsConfig
from cfl_ray.data.images import Encoded, Images, Progress, decode, decoded
from cfl_ray.data.tables import Named, column_of, concatenated, images_of, label_names
from cfl_ray.errors import DataError, did_you_mean

BATCH_ROWS = 2048  # encoded images in memory at a time
SUFFIXES = (".png", ".jpg", ".jpeg")
CLIENTS_FILE = "clients.csv"


# ---- parquet files: each row has the bytes of an image, and its label


def read_parquet(
    train: list[Path],
    test: list[Path],
    columns: ColumnsConfig,
    num_classes: int | None,
    pixels: bool,
    progress: Progress | None,
) -> Images:
    """The images of these files in file order. Raises DataError naming the file and row of unusable data.

    num_classes: None for the largest label + 1. pixels: False decodes only the first image, for its shape.
    """
    labels, others = label_names(columns.label), [name for name in (columns.client, columns.group) if name]
    parts = [_columns_of(train, [*labels, *others])]
    if test:
        group = columns.group or ""
        has_groups = group and all(group in _open(file, labels).schema_arrow.names for file in test)
        parts.append(_columns_of(test, [*labels, group] if has_groups else labels))
    shape = decode(*next(_encoded(train, columns.image))).shape  # a training part has a row
    inputs = (
        decoded(_encoded(files, columns.image), table.num_rows, shape, pixels, progress)
        for files, (_, table) in zip((train, test), parts, strict=False)
    )
    return images_of(parts, inputs, columns, num_classes=num_classes)


def _columns_of(files: list[Path], names: list[str]) -> Named:
    """These columns of all files."""
    tables = []
    for file in files:
        with _open(file, names) as opened:
            tables.append(opened.read(columns=list(dict.fromkeys(names))))
        for name in names:
            column_of((str(file), tables[-1]), name)  # an error names the file, and the row in it
    return concatenated(files, tables)


def _open(file: Path, names: list[str]) -> pq.ParquetFile:
    try:
        opened = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable parquet file: {error}") from error
    known = opened.schema_arrow.names
    if missing := [name for name in names if name not in known]:
        raise DataError(f"{file} has no column {missing[0]!r}{did_you_mean(missing[0], known)}; set data.columns")
    return opened


def _encoded(files: list[Path], name: str) -> Iterator[tuple[Encoded, str]]:
    """Yields the images in a column, encoded, with their names for messages."""
    for file in files:
        with _open(file, [name]) as opened:
            kind, row = opened.schema_arrow.field(name).type, 0
            is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            if not (is_struct or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
                raise DataError(
                    f"{file}: image column {name!r} must be bytes or a struct of bytes and path, it is {kind}; "
                    "set data.columns.image"
                )
            for batch in opened.iter_batches(BATCH_ROWS, columns=[name]):
                for value in batch.column(0).field("bytes") if is_struct else batch.column(0):
                    yield value.as_py(), f"{file}: the image in row {row}"
                    row += 1


# ---- a folder per class, as torchvision's ImageFolder reads it, with the client of each image if known


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


def read_folders(train: Path, test: Path | None, pixels: bool, progress: Progress | None) -> Images:
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

    def part(files: list[Path], folder: Path) -> tuple[np.ndarray, np.ndarray]:
        names = [file.relative_to(folder).parts[0] for file in files]
        if unknown := sorted(set(names) - set(classes)):
            known = ", ".join(classes)
            raise DataError(f"{folder}: class {unknown[0]!r} has no training image; the classes are {known}")
        x = decoded(((file, str(file)) for file in files), len(files), shape, pixels, progress)
        return x, np.array([classes.index(name) for name in names], np.int16)

    x, y = part(files, train)
    test_x, test_y = (None, None) if test is None else part(files_of(test), test)
    return Images(x, y, test_x, test_y, len(classes), client=_clients(train, files), class_names=tuple(classes))


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
