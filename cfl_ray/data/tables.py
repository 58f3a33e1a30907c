"""Tables: CSV and Parquet files with a column for each feature, and saved Hugging Face data sets.

Messages of checks name the file, the column and the row.
"""

import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from cfl_ray.config import ColumnsConfig
from cfl_ray.core.tasks import TARGETS
from cfl_ray.data.arrays import DENSE, dense_labels, label_warnings, num_outputs, numbers, targets_of, tokens
from cfl_ray.data.decoding import Decoder
from cfl_ray.data.images import Images
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
    """A column of integers or booleans as labels, int16 (n,). Raises DataError for labels outside 0..MAX_LABEL."""
    y = column_of(part, column).to_numpy()
    if len(y) and not 0 <= y.min() <= y.max() <= MAX_LABEL:
        raise DataError(
            f"{part[0]}: labels in column {column!r} must lie in 0..{MAX_LABEL}, got {y.min()}..{y.max()}; {DENSE}"
        )
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


def read_csv(
    train: list[Path], test: list[Path], columns: ColumnsConfig, targets: str = "class", dense: bool = False
) -> Images:
    """The samples of CSV or Parquet files. Inputs are float32 (n, F), a number for each feature column."""
    parts = [concatenated(files, [_rows(file) for file in files]) for files in (train, test) if files]
    for part in parts:
        for name in label_names(columns.label):
            column_of(part, name)
    for column in (columns.client, columns.group):
        if column is not None:
            column_of(parts[0], column)
    special = {*label_names(columns.label), columns.client, columns.group}
    features = columns.features or [name for name in parts[0][1].column_names if name not in special]
    if not features:
        raise DataError(f"{parts[0][0]} has no column except {columns.label!r}; set data.columns.features")
    inputs = (np.stack([_numbers(part, name) for name in features], 1) for part in parts)
    return images_of(parts, inputs, columns, targets=targets, dense=dense)


def read_hf(
    train: Path,
    test: Path | None,
    columns: ColumnsConfig,
    vocabulary: int | None,
    targets: str = "class",
    transparency: str = "white",
    dense: bool = False,
) -> Images:
    """The samples of data sets that `Dataset.save_to_disk` wrote into these folders.

    The input column contains images, or lists of equal length: of numbers, or of token ids if `vocabulary` is given.
    """
    parts = [_saved(folder) for folder in (train, test) if folder is not None]
    decoder = Decoder(transparency)
    inputs = (_lists_or_images(part, columns.image, vocabulary, decoder) for part in parts)
    images = images_of(parts, inputs, columns, vocabulary, targets, dense=dense)
    notes, warnings = decoder.report(parts[0][0])
    return replace(images, notes=tuple(notes), warnings=(*images.warnings, *warnings))


def images_of(
    parts: list[Named],
    inputs: Iterable[np.ndarray],
    columns: ColumnsConfig,
    vocabulary: int | None = None,
    targets: str = "class",
    num_classes: int | None = None,
    dense: bool = False,
) -> Images:
    """The samples of a training part and, if given, a test part, with labels, clients and groups.

    inputs: of each part; they are computed after the labels are checked. num_classes: None for the largest label + 1.
    dense: whether integer labels are numbered anew, as in `dense_labels`.
    """
    class_names: tuple[str, ...] = ()
    if targets != "class":
        labels = [_targets(part, columns.label, targets) for part in parts]
    elif isinstance(columns.label, str):
        labels, class_names = _labels(parts, columns.label, dense)
    else:
        raise DataError(
            f"data.columns.label names {len(columns.label)} columns, a class has 1; name a single column, or set "
            "task: multi_label (csv, hf_disk)"
        )
    named = [(f"{file}: column {columns.label!r}", y) for (file, _), y in zip(parts, labels, strict=True)]
    num_classes = num_outputs(None if dense and class_names else num_classes, named, targets, vocabulary)
    warnings = label_warnings(named[0][0], labels[0], num_classes, DENSE) if targets == "class" else []
    client = None if columns.client is None else ids_of(parts[0], columns.client, "client")
    group = test_group = None
    if (name := columns.group) is not None:
        values = [ids_of(part, name, "group") for part in parts if part is parts[0] or name in part[1].column_names]
        group, test_group = groups_of(values[0], values[1] if len(values) == 2 else None, f"{parts[-1][0]}: {name!r}")
    x, *test_x = inputs
    for what, (train, *test) in {"inputs": [x, *test_x], "targets": labels}.items():
        if test and (shape := test[0].shape[1:]) != train.shape[1:]:
            raise DataError(
                f"{parts[1][0]} holds {what} of shape {shape}, {parts[0][0]} of {train.shape[1:]}; they must agree"
            )
    return Images(
        x,
        labels[0],
        test_x[0] if test_x else None,
        labels[1] if test_x else None,
        num_classes,
        scale=255 if x.dtype == np.uint8 else 1,
        client=client,
        group=group,
        test_group=test_group,
        vocabulary=vocabulary,
        targets=targets,
        class_names=class_names,
        warnings=tuple(warnings),
    )


# --- files --------------------------------------------------------------------------------------


def _rows(file: Path) -> pa.Table:
    kind = "Parquet" if file.suffix == ".parquet" else "CSV"
    try:
        table = pa.parquet.read_table(file) if kind == "Parquet" else pa.csv.read_csv(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as a {kind} file: {error}") from error
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):  # categories of pandas
            table = table.set_column(index, field.name, table.column(index).cast(field.type.value_type))
    return table


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
    return concatenated(files, tables)


def concatenated(files: list[Path], tables: list[pa.Table]) -> Named:
    """The rows of all tables, with a name.

    Raises DataError for different columns, two columns of the same name, and without a row.
    """
    for file, table in zip(files, tables, strict=True):
        if len(set(table.column_names)) < len(table.column_names):
            raise DataError(f"{file} has two columns of the same name, rename one: {', '.join(table.column_names)}")
        if table.column_names != tables[0].column_names:
            raise DataError(f"{file} has columns {table.column_names}, {files[0]} has {tables[0].column_names}")
    name = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    table = pa.concat_tables(tables, promote_options="permissive")
    if table.num_rows == 0:
        raise DataError(f"{name} holds no row")
    return name, table


# --- columns ------------------------------------------------------------------------------------


def _numbers(part: Named, column: str) -> np.ndarray:
    values = check_numbers(part, column, "feature column", "; set data.columns.features")
    return numbers(f"{part[0]}: column {column!r}", values.to_numpy())


def _labels(parts: list[Named], column: str, dense: bool) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The labels of each part, int16 (n,), and the words by label, in sorted order of the training words, if any.

    dense: as in `images_of`; the words are the original integers.
    """
    columns = [column_of(part, column) for part in parts]
    kinds = [values.type for values in columns]
    if all(pa.types.is_integer(kind) or pa.types.is_boolean(kind) for kind in kinds):
        if dense:
            return numbered([(f"{part[0]}: column {column!r}", column_of(part, column).to_numpy()) for part in parts])
        return [integer_labels(part, column) for part in parts], ()
    for (file, _), kind in zip(parts, kinds, strict=True):
        if not pa.types.is_integer(kind) and not is_text(kind):
            is_real = pa.types.is_floating(kind)
            raise DataError(
                f"{file}: label column {column!r} must hold integers or words, it holds {kind}; "
                f"{'set task: regression to learn numbers (csv, hf_disk), or ' * is_real}set data.columns.label"
            )
    if not all(map(is_text, kinds)):
        raise DataError(
            f"{parts[1][0]}: label column {column!r} holds {kinds[1]}, but {kinds[0]} in {parts[0][0]}; they must agree"
        )
    words = [np.asarray(values.to_pylist(), np.str_) for values in columns]
    known = np.unique(words[0])
    if len(known) > MAX_LABEL + 1:
        raise DataError(
            f"{parts[0][0]}: label column {column!r} holds {len(known)} different words, at most {MAX_LABEL + 1} can "
            "be classes; set data.columns.label"
        )
    if unknown := sorted(set(np.concatenate(words).tolist()) - set(known.tolist())):
        raise DataError(f"{parts[1][0]}: label {unknown[0]!r} of column {column!r} has no training row")
    return [np.searchsorted(known, part_words).astype(np.int16) for part_words in words], tuple(known.tolist())


def numbered(parts: list[tuple[str, np.ndarray]]) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The labels of each part numbered densely, int16 (n,), and the original labels. parts: as in `dense_labels`."""
    labels, names = dense_labels(parts)
    if len(names) > MAX_LABEL + 1:
        raise DataError(f"{parts[0][0]}: {len(names)} different labels, at most {MAX_LABEL + 1} can be classes")
    return [y.astype(np.int16) for y in labels], names


def label_names(columns: str | list[str]) -> list[str]:
    """The names of the label columns."""
    return [columns] if isinstance(columns, str) else columns


def _targets(part: Named, columns: str | list[str], targets: str) -> np.ndarray:
    """Targets that are not classes: a number from each label column, or the lists in a single column."""
    place = f"{part[0]}: data.columns.label {columns!r}"
    try:
        if isinstance(columns, str) and pa.types.is_nested(column_of(part, columns).type):
            y = np.asarray(column_of(part, columns).to_pylist())
        else:
            advice = "; correct the cell, or set data.columns.label"
            parts = [check_numbers(part, name, "label column", advice).to_numpy() for name in label_names(columns)]
            y = parts[0] if isinstance(columns, str) and targets == "real" else np.stack(parts, 1)
        return targets_of(place, y, targets).astype(TARGETS[targets].stored)
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error


def _lists_or_images(part: Named, column: str, vocabulary: int | None, decoder: Decoder) -> np.ndarray:
    values = column_of(part, column)
    kind = values.type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        images = [
            (value["bytes"], f"{part[0]}: the image in row {row}", "") for row, value in enumerate(values.to_pylist())
        ]
        return decoder.first(*images[0][:2]).all(images, len(images))
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
    name = f"{part[0]}: column {column!r}"
    return numbers(name, x) if vocabulary is None else tokens(name, x, vocabulary)


# ---- traces


COLUMNS = ("client", "from", "to")
DEVICE_COLUMNS = ("computation", "communication")


def read_trace(path: str | Path, num_clients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(client int64 (I,), from float64 (I,), to float64 (I,)) of the intervals in a CSV or parquet file.

    Raises DataError naming the file, the row and both values of an unusable interval.
    """
    file, table = part = _table(path, "cohort.availability.file", COLUMNS)
    if not pa.types.is_integer(table["client"].type):
        raise DataError(f"{file}: column 'client' must hold client ids, integers, it holds {table['client'].type}")
    client_I = column_of(part, "client").to_numpy().astype(np.int64)
    from_I, to_I = (check_numbers(part, name, booleans=False).to_numpy().astype(np.float64) for name in COLUMNS[1:])
    _check(
        file,
        (client_I < 0) | (client_I >= num_clients),
        lambda row: f"client {client_I[row]} does not exist; the federation has clients 0 .. {num_clients - 1}",
    )
    _check(
        file,
        ~(from_I <= to_I),
        lambda row: f"an interval from {from_I[row]:g} to {to_I[row]:g}; from must not be after to",
    )
    return client_I, from_I, to_I


def read_devices(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of training per sample, bit/s both ways), float64 (R,), of the devices in a CSV or parquet file.

    Its columns are those of FedScale: computation, ms of a forward pass per sample, a third of a training pass; and
    communication, kbit/s. Raises DataError naming the file, the row and the value of an unusable device.
    """
    file, table = part = _table(path, "clock.file", DEVICE_COLUMNS)
    compute_R, network_R = (
        check_numbers(part, name, booleans=False).to_numpy().astype(np.float64) for name in DEVICE_COLUMNS
    )
    if not len(table):
        raise DataError(f"{file} has no device")
    for name, values_R in zip(DEVICE_COLUMNS, (compute_R, network_R), strict=True):
        bad_R = ~(np.isfinite(values_R) & (values_R > 0))
        _check(file, bad_R, lambda row: f"{name} is {values_R[row]:g}; it must be above 0")  # noqa: B023
    return compute_R * 3e-3, network_R * 1e3


def _table(path: str | Path, key: str, columns: Sequence[str]) -> Named:
    """The table of a file, which has these columns. key: the config key of the file, for messages."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{key}: there is no file {file}")
    table = _rows(file)
    if missing := [name for name in columns if name not in table.column_names]:
        raise DataError(
            f"{file} has no column {missing[0]!r}{did_you_mean(missing[0], table.column_names)}; "
            f"a trace has {', '.join(columns[:-1])} and {columns[-1]}"
        )
    return str(file), table


def _check(file: str, bad_I: np.ndarray, message: Callable[[int], str]) -> None:
    if bad_I.any():
        row = int(bad_I.argmax())
        raise DataError(f"{file}, row {row}: {message(row)}")
