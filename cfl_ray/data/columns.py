"""Columns of tables and the images in them, with checks whose messages name the file, the column and the row."""

import io
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, UnidentifiedImageError

from cfl_ray.errors import DataError, did_you_mean

MAX_LABEL = np.iinfo(np.int16).max
Named = tuple[str, pa.Table]  # rows, with the name of their file or folder for messages


def column_of(part: Named, column: str) -> pa.ChunkedArray:
    """Returns a column without empty cells. Raises DataError with the first row that is null or an empty text."""
    name, table = part
    if column not in table.column_names:
        raise DataError(f"{name} has no column {column!r}{did_you_mean(column, table.column_names)}; set data.columns")
    values = table[column]
    empty = pc.equal(values, "") if is_text(values.type) else values.is_null()
    if count := pc.sum(empty := pc.fill_null(empty, True)).as_py():
        what = "is empty" if is_text(values.type) else "is empty (or NA or NaN)"
        place = f"row {pc.index(empty, True)} (the first is row 0){f' and {count - 1} more' * (count > 1)}"
        raise DataError(f"{name}: column {column!r} {what} in {place}; fill it, or delete the row")
    return values


def check_numbers(
    part: Named, column: str, what: str = "column", advice: str = "", booleans: bool = True
) -> pa.ChunkedArray:
    """A column of numbers without nulls. Raises DataError with the first row without a number.

    what: name of the column's role, for the message. advice: text at the end of the message. booleans: whether true and
    false count as 1 and 0.
    """
    values = column_of(part, column)
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or (booleans and pa.types.is_boolean(kind)):
        return values
    example = ""
    if is_text(kind):
        cells = values.to_pylist()
        row = next((row for row, cell in enumerate(cells) if not _is_number(cell)), 0)
        example = f", e.g. {cells[row]!r} in row {row} (the first is row 0)"
    raise DataError(f"{part[0]}: {what} {column!r} must hold numbers, it holds {kind}{example}{advice}")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def integer_labels(part: Named, column: str) -> np.ndarray:
    """A column of integers as labels, int16 (n,). Raises DataError for labels outside 0..MAX_LABEL."""
    y = column_of(part, column).to_numpy()
    if len(y) and not 0 <= y.min() <= y.max() <= MAX_LABEL:
        raise DataError(f"{part[0]}: labels in column {column!r} must lie in 0..{MAX_LABEL}, got {y.min()}..{y.max()}")
    return y.astype(np.int16)


def ids_of(part: Named, column: str, what: str) -> np.ndarray:
    """A column of integers or strings. what: client or group."""
    values = column_of(part, column)
    if pa.types.is_integer(values.type):
        return values.to_numpy()
    if is_text(values.type):
        return np.asarray(values.to_pylist(), np.str_)
    raise DataError(
        f"{part[0]}: {what} column {column!r} must hold integers or strings, it holds {values.type}; "
        f"set data.columns.{what}"
    )


def groups_of(train: np.ndarray, test: np.ndarray | None, where: str) -> tuple[np.ndarray, np.ndarray | None]:
    """The groups of both parts, int32, numbered from 0 in the sorted order of the training values.

    where: file and column of the test part. Raises DataError for a group without a training row.
    """
    values, group = np.unique(train, return_inverse=True)
    if test is None:
        return group.astype(np.int32), None
    if unknown := sorted(set(test.tolist()) - set(values.tolist())):
        raise DataError(f"{where}: group {unknown[0]!r} has no training row")
    return group.astype(np.int32), np.searchsorted(values, test).astype(np.int32)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds strings."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def read_npz(file: Path, required: Sequence[str], optional: Sequence[str] | None, needs: str) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file by name. Raises DataError if a required array is missing.

    optional: all other arrays that the file may have; None: it may have any others, which are not read. needs: the
    arrays that the file needs, for the message.
    """
    known = (*required, *(optional or ()))
    try:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(
                f"{file} holds a single array without a name, as numpy.save writes it; {needs} (numpy.savez)"
            )
        with loaded:
            unknown = [name for name in loaded.files if name not in known]
            arrays = {name: loaded[name] for name in known if name in loaded}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file} cannot be read as an .npz file of plain arrays: {error}") from error
    if missing := [name for name in required if name not in arrays]:
        raise DataError(f"{file} has no array {missing[0]!r}; {needs}")
    if unknown and optional is not None:
        raise DataError(f"{file} has an unknown array {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    return arrays


def decode_row(content: bytes | None, file: str, row: int, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """The image in a row of a file, as `decode` does. Raises DataError for a row without bytes."""
    if content is None:
        raise DataError(
            f"{file}: row {row} has no image bytes; files that hold only paths are not supported, embed the images"
        )
    return decode(io.BytesIO(content), f"{file}: the image in row {row}", shape)


def decode(content: io.BytesIO | Path, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """An image as uint8 (C, H, W); C is 1 for a grey image and 3 for other images.

    shape: that of the first image, which decides C. Raises DataError for an image of another height or width, and for
    colours if the first image is grey.
    """
    try:
        with Image.open(content, formats=("PNG", "JPEG")) as image:
            # checked before decoding, so that a huge image is not decoded
            if shape is not None and (image.height, image.width) != shape[1:]:
                raise DataError(
                    f"{name} is {image.height}x{image.width}, the first image is {shape[1]}x{shape[2]}; "
                    "resize all to the same size"
                )
            is_grey = image.mode in ("1", "L", "LA")
            grey = is_grey if shape is None else shape[0] == 1
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
            if grey and not is_grey and (np.asarray(image.convert("RGB")) != pixels[..., None]).any():
                raise DataError(f"{name} has colours, the first image is grey; convert all images to one mode")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} is neither PNG nor JPEG, or damaged: {error}") from error
    return pixels[None] if grey else pixels.transpose(2, 0, 1)
