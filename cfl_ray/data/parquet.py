"""Parquet files of images as on Hugging Face: each row has the PNG or JPEG bytes of an image, and its label."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cfl_ray.config import ColumnsConfig
from cfl_ray.data.columns import Named, column_of, decode_row, groups_of, ids_of, integer_labels
from cfl_ray.data.images import Images, Progress
from cfl_ray.data.mapped import mapped_array
from cfl_ray.errors import DataError, did_you_mean

BATCH_ROWS = 2048  # encoded images in memory at a time


def read(
    train: list[Path],
    test: list[Path],
    columns: ColumnsConfig,
    num_classes: int | None,
    pixels: bool,
    progress: Progress | None,
) -> Images:
    """Returns the images of these files in file order. Raises DataError naming the file and row of unusable data.

    num_classes: None for the largest label + 1. pixels: False decodes only the first image, for its shape.
    """
    parts = [part for part in (train, test) if part]
    if not isinstance(columns.label, str):
        raise DataError(f"data.columns.label names {len(columns.label)} columns, a class has 1; name a single column")
    labels = [np.concatenate([_labels(file, columns.label) for file in part]) for part in parts]
    limit = num_classes if num_classes is not None else max(int(y.max(initial=0)) for y in labels) + 1
    for y, part in zip(labels, parts, strict=True):
        names = ", ".join(map(str, part))
        if len(y) == 0:
            raise DataError(f"{names} hold no row")
        if y.max() >= limit:
            raise DataError(
                f"{names} hold label {y.max()} in column {columns.label!r}; labels run from 0 to {limit - 1}"
            )
    first = next(_encoded(train[0], columns.image, 1))[0].as_py()
    shape = decode_row(first, str(train[0]), 0).shape
    train_x = _pixels(train, columns.image, shape, len(labels[0]), pixels, progress)
    test_x = _pixels(test, columns.image, shape, len(labels[1]), pixels, progress) if test else None
    client = _ids(train, columns.client, "client") if columns.client else None
    group, test_group = _groups(train, test, columns.group) if columns.group else (None, None)
    return Images(
        train_x,
        labels[0],
        test_x,
        labels[1] if test else None,
        limit,
        client=client,
        group=group,
        test_group=test_group,
    )


def _open(file: Path, column: str) -> pq.ParquetFile:
    try:
        opened = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable parquet file: {error}") from error
    if column not in opened.schema_arrow.names:
        raise DataError(
            f"{file} has no column {column!r}{did_you_mean(column, opened.schema_arrow.names)}; set data.columns"
        )
    return opened


def _part(file: Path, name: str) -> Named:
    with _open(file, name) as opened:
        return str(file), opened.read(columns=[name])


def _labels(file: Path, name: str) -> np.ndarray:
    part = _part(file, name)
    if not pa.types.is_integer(kind := column_of(part, name).type):
        raise DataError(f"{file}: label column {name!r} must hold integers, it holds {kind}; set data.columns.label")
    return integer_labels(part, name)


def _ids(files: list[Path], name: str, what: str) -> np.ndarray:
    return np.concatenate([ids_of(_part(file, name), name, what) for file in files])


def _groups(train: list[Path], test: list[Path], name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the groups of both parts; None for the test part if a test file has no such column."""
    has_groups = test and all(name in pq.read_schema(file).names for file in test)
    return groups_of(_ids(train, name, "group"), _ids(test, name, "group") if has_groups else None, f"column {name!r}")


# --- pixels ------------------------------------------------------------------------------------


def _encoded(file: Path, name: str, batch_rows: int) -> Iterator[pa.Array]:
    """Yields the column's encoded images, batch by batch, as Arrow binary arrays."""
    with _open(file, name) as opened:
        kind = opened.schema_arrow.field(name).type
        is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        if not (is_struct or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise DataError(
                f"{file}: image column {name!r} must be bytes or a struct of bytes and path, it is {kind}; "
                "set data.columns.image"
            )
        for batch in opened.iter_batches(batch_rows, columns=[name]):
            yield batch.column(0).field("bytes") if is_struct else batch.column(0)


def _pixels(
    files: list[Path], name: str, shape: tuple[int, ...], rows: int, wanted: bool, progress: Progress | None
) -> np.ndarray:
    """Returns uint8 (rows, *shape); a broadcast 0 if pixels are not wanted."""
    if not wanted:
        return np.broadcast_to(np.uint8(0), (rows, *shape))
    x = mapped_array((rows, *shape))
    done = 0
    for file in files:
        row = 0
        for batch in _encoded(file, name, BATCH_ROWS):
            for value in batch:
                x[done] = decode_row(value.as_py(), str(file), row, shape)
                row, done = row + 1, done + 1
            if progress:
                progress("decoding images", done, rows)
    return x
