"""Parquet files of images as on Hugging Face: each row has the PNG or JPEG bytes of an image, and its label."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError

from cfl_ray.config import ColumnsConfig
from cfl_ray.data.images import Images, Progress
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
    shape = _first_shape(train[0], columns.image)
    train_x = _pixels(train, columns.image, shape, len(labels[0]), pixels, progress)
    test_x = _pixels(test, columns.image, shape, len(labels[1]), pixels, progress) if test else None
    client = np.concatenate([_client_ids(file, columns.client) for file in train]) if columns.client else None
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


def _column(file: Path, name: str) -> pa.ChunkedArray:
    """Returns a column without nulls. Raises DataError with the first row that is null."""
    with _open(file, name) as opened:
        column = opened.read(columns=[name])[name]
    if column.null_count:
        raise DataError(f"{file}: column {name!r} is empty in row {column.is_null().index(True).as_py()}")
    return column


def _labels(file: Path, name: str) -> np.ndarray:
    column = _column(file, name)
    if not pa.types.is_integer(column.type):
        raise DataError(
            f"{file}: label column {name!r} must hold integers, it holds {column.type}; set data.columns.label"
        )
    y = column.to_numpy()
    if len(y) and not 0 <= y.min() <= y.max() <= np.iinfo(np.int16).max:
        raise DataError(
            f"{file}: labels in column {name!r} must lie in 0..{np.iinfo(np.int16).max}, got {y.min()}..{y.max()}"
        )
    return y.astype(np.int16)


def _client_ids(file: Path, name: str) -> np.ndarray:
    column = _column(file, name)
    if pa.types.is_integer(column.type):
        return column.to_numpy()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.asarray(column.to_pylist(), dtype=np.str_)
    raise DataError(
        f"{file}: client column {name!r} must hold integers or strings, it holds {column.type}; set data.columns.client"
    )


def _groups(train: list[Path], test: list[Path], name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the groups of both parts, int32, numbered from 0 in the sorted order of the column's values.

    None for the test part if a test file has no such column.
    """
    train_values = np.concatenate([_client_ids(file, name) for file in train])
    values, group = np.unique(train_values, return_inverse=True)
    group = group.astype(np.int32)
    if not test or any(name not in pq.read_schema(file).names for file in test):
        return group, None
    test_values = np.concatenate([_client_ids(file, name) for file in test])
    if unknown := sorted(set(test_values.tolist()) - set(values.tolist())):
        raise DataError(f"column {name!r}: group {unknown[0]!r} is in the test files but not in the training files")
    return group, np.searchsorted(values, test_values).astype(np.int32)


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


def _first_shape(file: Path, name: str) -> tuple[int, int, int]:
    first = next(_encoded(file, name, 1))
    image = _open_image(first[0], file, 0)
    return _channels(image), image.height, image.width


def _pixels(
    files: list[Path], name: str, shape: tuple[int, int, int], rows: int, wanted: bool, progress: Progress | None
) -> np.ndarray:
    """Returns uint8 (rows, *shape); a broadcast 0 if pixels are not wanted."""
    if not wanted:
        return np.broadcast_to(np.uint8(0), (rows, *shape))
    x = np.empty((rows, *shape), np.uint8)
    done = 0
    for file in files:
        row = 0
        for batch in _encoded(file, name, BATCH_ROWS):
            for value in batch:
                x[done] = _decode(value, shape, file, row)
                row, done = row + 1, done + 1
            if progress:
                progress("decoding images", done, rows)
    return x


def _decode(value: pa.Scalar, shape: tuple[int, int, int], file: Path, row: int) -> np.ndarray:
    image = _open_image(value, file, row)
    if (image.height, image.width) != shape[1:]:  # checked before decoding, so that a huge image is not decoded
        raise DataError(
            f"{file}: the image in row {row} is {image.height}x{image.width}, the first image is "
            f"{shape[1]}x{shape[2]}; resize all to the same size"
        )
    try:
        pixels = np.asarray(image.convert("L" if shape[0] == 1 else "RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{file}: the image in row {row} is damaged: {error}") from error
    return pixels[None] if shape[0] == 1 else pixels.transpose(2, 0, 1)


def _open_image(value: pa.Scalar, file: Path, row: int) -> Image.Image:
    if not value.is_valid:
        raise DataError(
            f"{file}: row {row} has no image bytes; files that hold only paths are not supported, embed the images"
        )
    try:
        return Image.open(io.BytesIO(value.as_buffer()), formats=("PNG", "JPEG"))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{file}: the image in row {row} is neither PNG nor JPEG, or damaged: {error}") from error


def _channels(image: Image.Image) -> int:
    return 1 if image.mode in ("1", "L", "LA") else 3
