"""Tables: CSV files with a column for each feature, and Hugging Face data sets saved to disk as Arrow files."""

import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from PIL import Image, UnidentifiedImageError

from cfl_ray.config import ColumnsConfig
from cfl_ray.core.tasks import TARGETS
from cfl_ray.data.arrays import targets_of
from cfl_ray.data.images import Images
from cfl_ray.errors import DataError, did_you_mean

MAX_LABEL = np.iinfo(np.int16).max
Named = tuple[str, pa.Table]  # the rows of the training or test part, with a name for messages


def read_csv(train: list[Path], test: list[Path], columns: ColumnsConfig, targets: str = "class") -> Images:
    """Returns the samples of CSV files. Inputs are float32 (n, F), a number for each feature column."""
    parts = [_concatenated(files, [_csv(file) for file in files]) for files in (train, test) if files]
    for part in parts:
        for name in _names(columns.label):
            _column(part, name)
    for column in (columns.client, columns.group):
        if column is not None:
            _column(parts[0], column)
    special = {*_names(columns.label), columns.client, columns.group}
    features = columns.features or [name for name in parts[0][1].column_names if name not in special]
    if not features:
        raise DataError(f"{parts[0][0]} has no column except {columns.label!r}; set data.columns.features")
    inputs = [np.stack([_numbers(part, name) for name in features], 1) for part in parts]
    return images_of(parts, inputs, columns, None, targets)


def read_hf(
    train: Path, test: Path | None, columns: ColumnsConfig, vocabulary: int | None, targets: str = "class"
) -> Images:
    """Returns the samples of data sets that `Dataset.save_to_disk` wrote into these folders.

    The input column contains images, or lists of equal length: of numbers, or of token ids if `vocabulary` is given.
    """
    parts = [_saved(folder) for folder in (train, test) if folder is not None]
    inputs = [_lists_or_images(part, columns.image, vocabulary) for part in parts]
    return images_of(parts, inputs, columns, vocabulary, targets)


def images_of(
    parts: list[Named],
    inputs: list[np.ndarray],
    columns: ColumnsConfig,
    vocabulary: int | None,
    targets: str = "class",
) -> Images:
    """Returns the samples of a training part and, if given, a test part, with labels, clients and groups."""
    if len(parts) == 2 and inputs[0].shape[1:] != inputs[1].shape[1:]:
        raise DataError(
            f"{parts[1][0]} holds inputs of shape {inputs[1].shape[1:]}, {parts[0][0]} of {inputs[0].shape[1:]}; "
            "they must agree"
        )
    class_names: tuple[str, ...] = ()
    if targets == "class":
        if not isinstance(columns.label, str):
            raise DataError(
                f"data.columns.label names {len(columns.label)} columns, a class has 1; set task: multi_label"
            )
        labels, class_names = _labels(parts, columns.label)
        num_classes = max(int(y.max()) for y in labels) + 1
    else:
        labels = [_targets(part, columns.label, targets) for part in parts]
        if targets == "tokens":
            num_classes = vocabulary or max(int(y.max()) for y in labels) + 1
        else:
            num_classes = labels[0].shape[1] if labels[0].ndim == 2 else 1
    client = None if columns.client is None else _ids(parts[0], columns.client)
    group = test_group = None
    if columns.group is not None:
        values, group = np.unique(_ids(parts[0], columns.group), return_inverse=True)
        group = group.astype(np.int32)
        if len(parts) == 2 and columns.group in parts[1][1].column_names:
            test_values = _ids(parts[1], columns.group)
            if unknown := sorted(set(test_values.tolist()) - set(values.tolist())):
                raise DataError(f"{parts[1][0]}: group {unknown[0]!r} of column {columns.group!r} has no training row")
            test_group = np.searchsorted(values, test_values).astype(np.int32)
    return Images(
        inputs[0],
        labels[0],
        inputs[1] if len(parts) == 2 else None,
        labels[1] if len(parts) == 2 else None,
        num_classes,
        scale=255 if inputs[0].dtype == np.uint8 else 1,
        client=client,
        group=group,
        test_group=test_group,
        vocabulary=vocabulary,
        targets=targets,
        class_names=class_names,
    )


# --- files --------------------------------------------------------------------------------------


_BINARY = {b"PAR1": "Parquet", b"ARRO": "Arrow", b"FEA1": "Feather"}  # by the first four bytes


def _csv(file: Path) -> pa.Table:
    try:
        return pyarrow.csv.read_csv(file)
    except (pa.ArrowException, OSError) as error:
        with suppress(OSError), file.open("rb") as opened:
            if kind := _BINARY.get(opened.read(4)):
                raise DataError(
                    f"{file} is a file of {kind}, not of CSV; a function that returns arrays can read it (data.source: "
                    "my.py:load)"
                ) from error
        raise DataError(f"{file} is not a readable CSV file with a header: {error}") from error


def _saved(folder: Path) -> Named:
    files = sorted(folder.glob("*.arrow"))
    if not files:
        raise DataError(
            f"{folder} holds no *.arrow file of Dataset.save_to_disk; for a DatasetDict name its part, "
            "e.g. data.train_files: train"
        )
    tables = []
    for file in files:
        try:
            with pa.memory_map(str(file)) as source:
                tables.append(pa.ipc.open_stream(source).read_all())
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} is not a readable Arrow stream file: {error}") from error
    return _concatenated(files, tables)


def _concatenated(files: list[Path], tables: list[pa.Table]) -> Named:
    for file, table in zip(files, tables, strict=True):
        if table.column_names != tables[0].column_names:
            raise DataError(f"{file} has columns {table.column_names}, {files[0]} has {tables[0].column_names}")
    name = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    table = pa.concat_tables(tables, promote_options="permissive")
    if table.num_rows == 0:
        raise DataError(f"{name} holds no row")
    return name, table


# --- columns ------------------------------------------------------------------------------------


def _column(part: Named, column: str) -> pa.ChunkedArray:
    """Returns a column without nulls. Raises DataError with the first row that is null."""
    name, table = part
    if column not in table.column_names:
        raise DataError(f"{name} has no column {column!r}{did_you_mean(column, table.column_names)}; set data.columns")
    values = table[column]
    if values.null_count:
        row = values.is_null().index(True).as_py()
        raise DataError(
            f"{name}: column {column!r} is empty in row {row} (the first is row 0); fill it, or delete the row"
        )
    return values


def _numbers(part: Named, column: str) -> np.ndarray:
    values = _column(part, column)
    _check_numbers(part, column, "feature column", "set data.columns.features")
    return _finite(part, column, values.to_numpy().astype(np.float32))


def _check_numbers(part: Named, column: str, what: str, advice: str) -> None:
    """Raises DataError, with the first row without a number, if a column does not hold numbers."""
    values = _column(part, column)
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return
    example = ""
    if _is_text(kind):
        cells = values.to_pylist()
        row = next((row for row, cell in enumerate(cells) if not _is_number(cell)), 0)
        example = f", e.g. {cells[row]!r} in row {row} (the first is row 0)"
    raise DataError(f"{part[0]}: {what} {column!r} must hold numbers, it holds {kind}{example}; {advice}")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _finite(part: Named, column: str, x: np.ndarray) -> np.ndarray:
    finite = np.isfinite(x.reshape(len(x), -1)).all(1)
    if not finite.all():
        row = finite.argmin()
        raise DataError(
            f"{part[0]}: column {column!r} has NaN or infinity as float32 in row {row} (the first is row 0)"
        )
    return x


def _labels(parts: list[Named], column: str) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The labels of each part, int16 (n,), and the words by label, in sorted order of the training words, if any."""
    columns = [_column(part, column) for part in parts]
    if all(pa.types.is_integer(values.type) for values in columns):
        labels = [values.to_numpy() for values in columns]
        for part, y in zip(parts, labels, strict=True):
            if not 0 <= y.min() <= y.max() <= MAX_LABEL:
                raise DataError(
                    f"{part[0]}: labels in column {column!r} must lie in 0..{MAX_LABEL}, got {y.min()}..{y.max()}"
                )
        return [y.astype(np.int16) for y in labels], ()
    if not all(_is_text(values.type) for values in columns):
        raise DataError(
            f"{parts[0][0]}: label column {column!r} must hold integers or words, it holds {columns[0].type}; "
            + ("set task: regression to learn numbers, or " if pa.types.is_floating(columns[0].type) else "")
            + "set data.columns.label"
        )
    words = [np.asarray(values.to_pylist(), np.str_) for values in columns]
    known = np.unique(words[0])
    if unknown := sorted(set(np.concatenate(words).tolist()) - set(known.tolist())):
        raise DataError(f"{parts[1][0]}: label {unknown[0]!r} of column {column!r} has no training row")
    return [np.searchsorted(known, part_words).astype(np.int16) for part_words in words], tuple(known.tolist())


def _names(columns: str | list[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else columns


def _targets(part: Named, columns: str | list[str], targets: str) -> np.ndarray:
    """Returns targets that are not classes: a number from each label column, or the lists in a single column."""
    place = f"{part[0]}: data.columns.label {columns!r}"
    try:
        if isinstance(columns, str) and pa.types.is_nested(_column(part, columns).type):
            y = np.asarray(_column(part, columns).to_pylist())
        else:
            for name in _names(columns):
                _check_numbers(part, name, "label column", "correct the cell, or set data.columns.label")
            parts = [_column(part, name).to_numpy() for name in _names(columns)]
            y = parts[0] if isinstance(columns, str) and targets == "real" else np.stack(parts, 1)
        return targets_of(place, y, targets).astype(TARGETS[targets].stored)
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error


def _ids(part: Named, column: str) -> np.ndarray:
    values = _column(part, column)
    if pa.types.is_integer(values.type):
        return values.to_numpy()
    if _is_text(values.type):
        return np.asarray(values.to_pylist(), np.str_)
    raise DataError(f"{part[0]}: column {column!r} must hold integers or strings, it holds {values.type}")


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _lists_or_images(part: Named, column: str, vocabulary: int | None) -> np.ndarray:
    values = _column(part, column)
    kind = values.type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return _decoded(part, column, values)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise DataError(
            f"{part[0]}: input column {column!r} must hold images or lists of numbers, it holds {kind}; "
            "set data.columns.image"
        )
    rows = values.to_pylist()
    lengths = np.array([len(row) for row in rows])
    if (lengths != lengths[0]).any():
        row = int((lengths != lengths[0]).argmax())
        raise DataError(
            f"{part[0]}: column {column!r} has {lengths[row]} values in row {row}, {lengths[0]} in row 0; "
            "fill or cut them to equal lengths"
        )
    try:
        x = np.asarray(rows)
    except ValueError as error:
        raise DataError(f"{part[0]}: column {column!r} holds lists of different shapes: {error}") from error
    if vocabulary is None:
        return _finite(part, column, x.astype(np.float32))
    if not np.issubdtype(x.dtype, np.integer) or x.min() < 0 or x.max() >= vocabulary:
        raise DataError(
            f"{part[0]}: column {column!r} must hold token ids 0 .. {vocabulary - 1} (data.vocabulary), "
            f"got {x.dtype} {x.min()} .. {x.max()}"
        )
    return x.astype(np.int32)


def _decoded(part: Named, column: str, values: pa.ChunkedArray) -> np.ndarray:
    images = []
    for row, value in enumerate(values.to_pylist()):
        if value["bytes"] is None:
            raise DataError(f"{part[0]}: row {row} has no image bytes in {column!r}; embed the images before saving")
        images.append(decode(io.BytesIO(value["bytes"]), f"{part[0]}: the image in row {row}"))
        if images[-1].shape != images[0].shape:
            raise DataError(
                f"{part[0]}: the image in row {row} has shape {images[-1].shape}, the first image {images[0].shape}; "
                "resize them to one size"
            )
    return np.stack(images)


def decode(content: io.BytesIO | Path, name: str) -> np.ndarray:
    """Returns an image as uint8 (C, H, W); C is 1 for a grey image and 3 for other images."""
    try:
        with Image.open(content, formats=("PNG", "JPEG")) as image:
            grey = image.mode in ("1", "L", "LA")
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} is neither PNG nor JPEG, or damaged: {error}") from error
    return pixels[None] if grey else pixels.transpose(2, 0, 1)
