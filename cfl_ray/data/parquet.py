"""Parquet files of images as on Hugging Face: each row has the PNG or JPEG bytes of an image, and its label."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cfl_ray.config import ColumnsConfig
from cfl_ray.data.columns import Named, column_of, decode_row
from cfl_ray.data.images import Images, Progress
from cfl_ray.data.mapped import mapped_array
from cfl_ray.data.tables import concatenated, images_of, label_names
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
    """The images of these files in file order. Raises DataError naming the file and row of unusable data.

    num_classes: None for the largest label + 1. pixels: False decodes only the first image, for its shape.
    """
    labels, others = label_names(columns.label), [name for name in (columns.client, columns.group) if name]
    parts = [_part(train, [*labels, *others])]
    if test:
        group = columns.group or ""
        has_groups = group and all(group in _open(file, labels).schema_arrow.names for file in test)
        parts.append(_part(test, [*labels, group] if has_groups else labels))
    first = next(file for file in train if pq.read_metadata(file).num_rows)  # a training part has a row
    shape = decode_row(next(_encoded(first, columns.image, 1))[0].as_py(), str(first), 0).shape
    inputs = (
        _pixels(files, columns.image, shape, table.num_rows, pixels, progress)
        for files, (_, table) in zip((train, test), parts, strict=False)
    )
    return images_of(parts, inputs, columns, num_classes=num_classes)


def _part(files: list[Path], names: list[str]) -> Named:
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


# --- pixels ------------------------------------------------------------------------------------


def _encoded(file: Path, name: str, batch_rows: int) -> Iterator[pa.Array]:
    """Yields the column's encoded images, batch by batch, as Arrow binary arrays."""
    with _open(file, [name]) as opened:
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
    """uint8 (rows, *shape); a broadcast 0 if pixels are not wanted."""
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
