"""Tables: CSV and Parquet files with a column for each feature, and saved Hugging Face data sets.

Messages of checks name the file, the column and the row.
"""

import re
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from cfl_ray.config import ColumnsConfig
from cfl_ray.core.tasks import TARGETS
from cfl_ray.data import hf_disk
from cfl_ray.data.array_checks import (
    DENSE,
    copied_tokens,
    dense_labels,
    label_warnings,
    num_outputs,
    numbers,
    targets_of,
    tokens,
)
from cfl_ray.data.data_set import DataSet
from cfl_ray.data.decoding import Decoder
from cfl_ray.data.index_columns import FEWEST, counting_columns, index_columns
from cfl_ray.data.table_files import COMMON, CsvFormat, is_number, is_text, plain, read_rows
from cfl_ray.errors import DataError, did_you_mean

MAX_LABEL = np.iinfo(np.int16).max
Named = tuple[str, pa.Table]  # rows, with the name of their file or folder for messages


def column_of(part: Named, column: str) -> pa.ChunkedArray:
    """Returns a column without empty cells. Raises DataError with the first row that is null or an empty text."""
    name, table = part
    if column not in table.column_names:
        raise DataError(f"{name} has no column {column!r}{did_you_mean(column, table.column_names)}; set data.columns")
    values = plain(table[column])
    empty = pc.equal(pc.utf8_trim_whitespace(values), "") if is_text(values.type) else values.is_null()
    if count := pc.sum(empty := pc.fill_null(empty, True)).as_py():
        what = "is empty" if is_text(values.type) else "is empty (or NA or NaN)"
        place = f"row {pc.index(empty, True)} (the first is row 0){f' and {count - 1} more' * (count > 1)}"
        raise DataError(f"{name}: column {column!r} {what} in {place}; fill it, or delete the row")
    return values


def check_numbers(
    part: Named, column: str, what: str = "column", advice: str = "", booleans: bool = True, decimal: str = "."
) -> pa.ChunkedArray:
    """A column of numbers without nulls. Raises DataError with the first row without a number.

    what: name of the column's role, for the message. advice: text at the end of the message. booleans: whether true and
    false count as 1 and 0. decimal: as in `CsvFormat`, by which CSV files were read.
    """
    values = column_of(part, column)
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or (booleans and pa.types.is_boolean(kind)):
        return values
    if pa.types.is_decimal(kind):
        return values.cast(pa.float64())
    example = ""
    if is_text(kind):
        cells = values.to_pylist()
        row = next((row for row, cell in enumerate(cells) if not _is_written_with(decimal, cell)), 0)
        example = f", e.g. {cells[row]!r} in row {row} (the first is row 0){_about(cells[row], decimal)}"
    elif pa.types.is_temporal(kind):
        example = "; write a number instead, e.g. days or seconds since a date of your choice"
    raise DataError(f"{part[0]}: {what} {column!r} must hold numbers, it holds {kind}{example}{advice}")


def _is_written_with(decimal: str, cell: str) -> bool:
    """Whether a cell is a number with this decimal mark."""
    return is_number(cell) if decimal == "." else "." not in cell and is_number(cell.replace(decimal, "."))


def _about(cell: str, decimal: str) -> str:
    """The reason why a cell may be no number, to follow it in a message; else an empty text."""
    if decimal == ",":
        if re.fullmatch(r"\s*[-+]?\d{1,3}(\.\d{3})+(,\d*)?\s*", cell):
            return ", which has separators of thousands: remove them"
        return ', which has a decimal point, but data.decimal is ","' if is_number(cell) else ""
    if re.fullmatch(r"\s*[-+]?\d{1,3}(,\d{3})+(\.\d*)?\s*", cell):
        return ", which has separators of thousands: remove them"
    if re.fullmatch(r"\s*[-+]?\d{1,3}(\.\d{3})+,\d+\s*", cell):
        return ', which has separators of thousands: remove them; for the decimal comma set data.decimal: ","'
    if re.fullmatch(r"\s*[-+]?\d+,\d+\s*", cell):
        return ', which has a decimal comma: set data.decimal: ","'
    return ""


def integer_labels(part: Named, column: str) -> np.ndarray:
    """A column of integers or booleans as labels, int16 (n,). Raises DataError for labels outside 0..MAX_LABEL."""
    y = column_of(part, column).to_numpy()
    if len(y) and not 0 <= y.min() <= y.max() <= MAX_LABEL:
        rows = int((y == -1).sum())
        no_label = (
            f"leave out the rows of -1, which have no label ({rows} of {len(y)}); if it is a class, " if rows else ""
        )
        raise DataError(
            f"{part[0]}: labels in column {column!r} must lie in 0..{MAX_LABEL}, got {y.min()}..{y.max()}; "
            f"{no_label}{DENSE}"
        )
    return y.astype(np.int16)


def ids_of(part: Named, column: str, what: str) -> np.ndarray:
    """The ids in a column, integers or strings. what: client or group."""
    values = column_of(part, column)
    kind = values.type
    if pa.types.is_integer(kind):
        return values.to_numpy()
    if pa.types.is_floating(kind):  # pandas holds integers so if a row had none
        numbers = values.to_numpy()
        if (numbers == np.round(numbers)).all() and (np.abs(numbers) < 2**53).all():
            return numbers.astype(np.int64)
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return np.asarray([_text_of(value) for value in values.to_pylist()], np.str_)
    elif not pa.types.is_nested(kind):
        return np.asarray(values.cast(pa.string()).to_pylist(), np.str_)
    raise DataError(
        f"{part[0]}: {what} column {column!r} must hold integers or strings, it holds {values.type}; "
        f"set data.columns.{what}"
    )


def _text_of(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()


def alike_warnings(place: str, ids: np.ndarray, what: str) -> list[str]:
    """A warning if ids are text and differ in spelling only: 007 and 7, 1 and 1.0, or white space; otherwise empty.

    Words for classes and groups also in case: Yes and yes; single letters may be meant, and ids of clients are codes.
    place: file and column. what: client, group or class.
    """
    if ids.dtype.kind != "U":
        return []
    spellings: dict[str, list[str]] = {}
    for name in np.unique(ids).tolist():
        folded = " ".join(unicodedata.normalize("NFKC", name).split())
        if what != "client" and len(folded) > 1:
            folded = folded.casefold()
        spellings.setdefault(_folded_number(folded) if is_number(folded) else folded, []).append(name)
    warnings = []
    if alike := [names for names in spellings.values() if len(names) > 1]:
        shown = " and ".join(map(repr, alike[0]))
        more = f", and {len(alike) - 1} more such pairs" if len(alike) > 1 else ""
        warnings.append(f"{place}: {shown} are different: a {what} each{more}; if they are the same, write them alike")
    if missing := sorted({name for names in spellings.values() for name in names} & _MISSING):
        warnings.append(f"{place}: {missing[0]!r} is taken as a word, the name of a {what}, not as an empty cell")
    return warnings


def _folded_number(text: str) -> str:
    """A number in one spelling; integers keep all their digits, which float64 does not have."""
    with suppress(ValueError):
        return str(int(text))
    value = float(text)
    return str(int(value)) if value.is_integer() else f"{value:.17g}"


_MISSING = {"NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-nan", "NULL", "null", "None", "none", "nil", "NaT", "?"}


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
    train: list[Path],
    test: list[Path],
    columns: ColumnsConfig,
    targets: str = "class",
    csv: CsvFormat = COMMON,
    dense: bool = False,
    validation: Sequence[Path] = (),
) -> DataSet:
    """The samples of CSV or Parquet files. Inputs are float32 (n, F), a number for each feature column."""
    test = [*test, *validation]
    labels = label_names(columns.label)
    ids = [name for name in (columns.client, columns.group) if name is not None]
    as_text = labels if targets == "class" else []
    times = [] if columns.time is None else [columns.time]
    tables = {file: read_rows(file, csv, ids, as_text) for file in (*train, *test)}
    for name in as_text:
        hf_disk.check_class_names({file: table.schema for file, table in tables.items()}, name)
    given = {*labels, *ids, *times, *(columns.features or ())}
    left_out = {name for table in tables.values() for name in index_columns(table)} - given
    parts = []
    for files in (train, test):
        if files:
            used = [_without(tables[file], left_out) for file in files]
            parts.append(concatenated(files, used, text=[*ids, *as_text]))
    for part in parts:
        for name in labels:
            column_of(part, name)
    for column in ids:
        column_of(parts[0], column)
    features, warnings = _features(parts[0], [tables[file] for file in train], columns, sorted(left_out))
    inputs = (np.stack([_numbers(part, name, csv.decimal, warnings) for name in features], 1) for part in parts)
    num_validation = sum(tables[file].num_rows for file in validation)
    data_set = data_set_of(parts, inputs, columns, targets=targets, dense=dense, num_validation=num_validation)
    if not columns.features:
        warnings += _label_copies(parts[0][0], features, data_set)
    warnings += shared_rows(parts, data_set)
    return replace(data_set, warnings=(*data_set.warnings, *dict.fromkeys(warnings)))


def shared_rows(parts: list[Named], data_set: DataSet) -> list[str]:
    """A warning if test rows occur among the training rows, more often than these among themselves; otherwise empty."""
    if data_set.test_x is None or data_set.test_y is None or not len(data_set.test_x):
        return []
    train_n, test_m = _marks(data_set.train_x, data_set.train_y), _marks(data_set.test_x, data_set.test_y)
    found, repeated = int(np.isin(test_m, train_n).sum()), len(train_n) - len(np.unique(train_n))
    if found * len(train_n) <= 2 * repeated * len(test_m):
        return []
    return [
        f"{parts[1][0]}: {found} of its {len(test_m)} rows equal a training row of {parts[0][0]} in all inputs and the "
        "target, so scores are of data that were trained on; leave them out of one of the two"
    ]


def _marks(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A number for each row, uint64 (n,), equal for equal rows: the sum of its bytes times odd numbers, modulo 2^64."""
    marks = np.zeros(len(x), np.uint64)
    for values in (x, y):
        byte_nB = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
        factor_B = np.random.default_rng(byte_nB.shape[1]).integers(0, 2**63, byte_nB.shape[1], np.uint64) * 2 + 1
        for first in range(0, len(byte_nB), _BLOCK):
            rows = slice(first, first + _BLOCK)
            marks[rows] = marks[rows] * np.uint64(0x9E3779B97F4A7C15) + byte_nB[rows].astype(np.uint64) @ factor_B
    return marks


_BLOCK = 4096  # rows whose marks are computed together


def _without(table: pa.Table, names: set[str]) -> pa.Table:
    return table.select([index for index, name in enumerate(table.column_names) if name not in names])


def _features(
    train: Named, tables: list[pa.Table], columns: ColumnsConfig, left_out: list[str]
) -> tuple[list[str], list[str]]:
    """The names of the feature columns, and warnings on columns that were chosen or left out without being named.

    tables: of each training file. left_out: columns that are not in `train`.
    """
    name, table = train
    special = {*label_names(columns.label), columns.client, columns.group, columns.time}
    if columns.features:
        if wrong := [column for column in columns.features if column in special]:
            raise DataError(
                f"data.columns.features names {wrong[0]!r}, which is the label, the client, the group or the time: a "
                "model would read its target from its input; leave it out"
            )
        return columns.features, []
    others = [column for column in table.column_names if column not in special]
    usual, counting = counting_columns(tables, others)
    features = [column for column in others if column not in usual]
    if not features:
        raise DataError(f"{name} has no column except {columns.label!r}; set data.columns.features")
    shown = ", ".join(features[:_SHOWN]) + (f", ... ({len(features)} in all)" if len(features) > _SHOWN else "")
    warnings = [
        f"{name}: the inputs are the columns {shown}: all others; if one of them would not be known of a new sample, "
        "name the inputs in data.columns.features"
    ]
    if index := [*left_out, *usual]:
        listed = ", ".join(map(repr, index))
        warnings.append(f"{name}: left out as an index of the rows: {listed}; data.columns.features can name it")
    if counting:
        warnings.append(
            f"{name}: the input {counting[0]!r} numbers the rows, as an index or an id does; if it is one, name the "
            "other inputs in data.columns.features"
        )
    return features, warnings


_SHOWN = 20  # columns that a warning lists


def _label_copies(name: str, features: list[str], data_set: DataSet) -> list[str]:
    """A warning if an input column equals the labels, or the numbers of their names; otherwise empty."""
    y = data_set.train_y
    if y.ndim != 1 or len(y) < FEWEST or len(np.unique(y)) == 1:
        return []
    copies = [column for column, x in zip(features, data_set.train_x.T, strict=True) if (x == y).all()]
    if not copies:
        return []
    return [
        f"{name}: the input {copies[0]!r} equals the label in every row (classes are numbers in the order of their "
        "names), as a copy does; if it is one, name the other inputs in data.columns.features"
    ]


def read_hf(
    train: Path,
    test: Path | None,
    columns: ColumnsConfig,
    vocabulary: int | None,
    targets: str = "class",
    transparency: str = "white",
    dense: bool = False,
    validation: Path | None = None,
) -> DataSet:
    """The samples of data sets that `Dataset.save_to_disk` wrote into these folders.

    The input column contains images, or lists of equal length: of numbers, or of token ids if `vocabulary` is given.
    """
    saved = [hf_disk.saved_dataset(folder) for folder in (train, test, validation) if folder is not None]
    for part in saved:
        if (kind := part.kind_of(columns.image)) in _OTHER_MEDIA:
            raise DataError(
                f"{part.folder}: input column {columns.image!r} is {kind}, which is not read; set data.columns.image "
                "to images or lists of numbers"
            )
    ids = [name for name in (columns.client, columns.group) if name is not None]
    tables = [part.tables() for part in saved]
    parts = [concatenated(saved[0].files, tables[0], text=ids)]
    if len(saved) > 1:
        files = [file for part in saved[1:] for file in part.files]
        parts.append(concatenated(files, [table for of_part in tables[1:] for table in of_part], text=ids))
    num_validation = 0 if validation is None else sum(table.num_rows for table in tables[-1])
    class_names: tuple[str, ...] = ()
    if targets == "class" and isinstance(columns.label, str):
        class_names = hf_disk.common_class_names(saved, columns.label)
    modes = [part.mode_of(columns.image) for part in saved]
    if len(set(modes)) > 1:
        raise DataError(
            f"{saved[1].folder}: input column {columns.image!r} has images of mode {modes[1]}, {saved[0].folder} of "
            f"{modes[0]}; cast one part, test.cast_column({columns.image!r}, train.features[{columns.image!r}])"
        )
    if modes[0] is not None and modes[0] not in Image.MODES:
        raise DataError(
            f"{saved[0].folder}: input column {columns.image!r} has the unknown mode {modes[0]!r} of images"
        )
    decoder = Decoder(transparency, modes[0])
    inputs = (_lists_or_images(part, columns.image, vocabulary, decoder) for part in parts)
    data_set = data_set_of(
        parts,
        inputs,
        columns,
        vocabulary,
        targets,
        dense=dense,
        class_names=class_names,
        num_validation=num_validation,
    )
    notes, warnings = decoder.report(parts[0][0])
    warnings = [*data_set.warnings, *warnings]
    return replace(data_set, notes=tuple(notes), warnings=tuple(warnings), decoding=decoder.version)


_OTHER_MEDIA = ("Audio", "Video", "Pdf", "Nifti", "Mesh", "Translation", "TranslationVariableLanguages")


def data_set_of(
    parts: list[Named],
    inputs: Iterable[np.ndarray],
    columns: ColumnsConfig,
    vocabulary: int | None = None,
    targets: str = "class",
    num_classes: int | None = None,
    dense: bool = False,
    class_names: tuple[str, ...] = (),
    num_validation: int = 0,
) -> DataSet:
    """The samples of a training part and, if given, a test part, with labels, clients and groups.

    num_validation: rows at the end of the test part that are the validation part.

    inputs: of each part; they are computed after the labels are checked. num_classes: None for the largest label + 1.
    dense: whether integer labels are numbered anew, as in `dense_labels`. class_names: of integer labels, if the files
    have them; their number is that of the classes.
    """
    warnings: list[str] = []
    if targets != "class":
        labels = [_targets(part, columns.label, targets) for part in parts]
    elif isinstance(columns.label, str):
        labels, words = _labels(parts, columns.label, dense)
        if dense and words:
            class_names = _names_of(words, class_names) if class_names else words
        num_classes = len(class_names) or num_classes
        class_names = class_names or words
        warnings += alike_warnings(f"{parts[0][0]}: column {columns.label!r}", np.array(words), "class")
    else:
        raise DataError(
            f"data.columns.label names {len(columns.label)} columns, a class has 1; name a single column, or set "
            "task: multi_label (csv, hf_disk)"
        )
    named = [(f"{file}: column {columns.label!r}", y) for (file, _), y in zip(parts, labels, strict=True)]
    num_classes = num_outputs(num_classes, named, targets, vocabulary)
    warnings += label_warnings(named[0][0], labels[0], num_classes, DENSE) if targets == "class" else []
    client = None if columns.client is None else ids_of(parts[0], columns.client, "client")
    if client is not None:
        warnings += alike_warnings(f"{parts[0][0]}: column {columns.client!r}", client, "client")
    validated = None if client is None or not num_validation else _validated_clients(parts, columns, num_validation)
    if client is not None and validated is not None and (count := int((~np.isin(validated, client)).sum())):
        warnings.append(
            f"{parts[1][0]}: {count} of {num_validation} validation samples are left out, since their clients have no "
            "training sample"
        )
    group = test_group = None
    if (name := columns.group) is not None:
        values = [ids_of(part, name, "group") for part in parts if part is parts[0] or name in part[1].column_names]
        warnings += alike_warnings(f"{parts[0][0]}: column {name!r}", values[0], "group")
        group, test_group = groups_of(values[0], values[1] if len(values) == 2 else None, f"{parts[-1][0]}: {name!r}")
    time = None if columns.time is None else ranks_in_time(parts[0], columns.time)
    x, *test_x = inputs
    for what, (train, *test) in {"inputs": [x, *test_x], "targets": labels}.items():
        if test and (shape := test[0].shape[1:]) != train.shape[1:]:
            raise DataError(
                f"{parts[1][0]} holds {what} of shape {shape}, {parts[0][0]} of {train.shape[1:]}; they must agree"
            )
    warnings += copied_tokens(f"{parts[0][0]}: column {columns.label!r}", x, labels[0], targets)
    return DataSet(
        x,
        labels[0],
        test_x[0] if test_x else None,
        labels[1] if test_x else None,
        num_classes,
        scale=255 if x.dtype == np.uint8 else 1,
        client=client,
        group=group,
        test_group=test_group,
        time=time,
        vocabulary=vocabulary,
        targets=targets,
        class_names=class_names,
        warnings=tuple(warnings),
        num_validation=num_validation,
        validation_client=validated,
    )


def _validated_clients(parts: list[Named], columns: ColumnsConfig, count: int) -> np.ndarray | None:
    """The client of each sample of the validation part, the last `count` rows; None without a column of clients."""
    name, table = parts[1]
    if columns.client is None or columns.client not in table.column_names:
        return None
    return ids_of((name, table.slice(table.num_rows - count)), columns.client, "client")


def ranks_in_time(part: Named, column: str) -> np.ndarray:
    """Ranks of the rows by a column of numbers, dates or times, int64 (n,); rows of one time have the same rank."""
    values = column_of(part, column)
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_temporal(kind)):
        raise DataError(
            f"{part[0]}: time column {column!r} must hold numbers, dates or times, it holds {kind}; write times as "
            "2026-01-31 12:00:00, or set data.columns.time"
        )
    return np.unique(values.to_numpy(), return_inverse=True)[1].astype(np.int64)


# --- files --------------------------------------------------------------------------------------


def concatenated(files: list[Path], tables: list[pa.Table], text: Iterable[str] = ()) -> Named:
    """The rows of all tables, with a name.

    text: columns that become text if they are text in one of the tables. Raises DataError for different columns, two
    columns of the same name, types that do not agree, and without a row.
    """
    for file, table in zip(files, tables, strict=True):
        if len(set(table.column_names)) < len(table.column_names):
            raise DataError(f"{file} has two columns of the same name, rename one: {', '.join(table.column_names)}")
        if sorted(table.column_names) != sorted(tables[0].column_names):
            raise DataError(f"{file} has columns {table.column_names}, {files[0]} has {tables[0].column_names}")
    tables = [table.select(tables[0].column_names) for table in tables]
    for name in set(text) & set(tables[0].column_names):
        tables = _as_text_if_any(tables, name)
    name = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        for column in tables[0].column_names:
            for file, other in zip(files, tables, strict=True):
                first, kind = tables[0].schema.field(column).type, other.schema.field(column).type
                if not _agree(first, kind):
                    raise DataError(
                        f"{file}: column {column!r} holds {kind}, but {first} in {files[0]}; they must agree"
                    ) from error
        raise DataError(f"{name}: its files hold different types: {error}") from error
    if table.num_rows == 0:
        raise DataError(f"{name} holds no row")
    return name, table


def _agree(first: pa.DataType, second: pa.DataType) -> bool:
    schemas = [pa.schema([pa.field("", kind)]) for kind in (first, second)]
    try:
        pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException:
        return False
    return True


def _as_text_if_any(tables: list[pa.Table], name: str) -> list[pa.Table]:
    """The tables, with this column as text if it is text in one of them and integers in another."""
    if not any(is_text(table.schema.field(name).type) for table in tables):
        return tables
    return [
        table.set_column(table.column_names.index(name), name, table[name].cast(pa.string()))
        if pa.types.is_integer(table.schema.field(name).type)
        else table
        for table in tables
    ]


# --- columns ------------------------------------------------------------------------------------


def _numbers(part: Named, column: str, decimal: str, warnings: list[str]) -> np.ndarray:
    """A feature column as float32. warnings: gets a line if float32 does not have the digits that tell rows apart."""
    values = check_numbers(part, column, "feature column", "; set data.columns.features", decimal=decimal).to_numpy()
    x = numbers(f"{part[0]}: column {column!r}", values)
    spread, lost = float(values.std()), float(np.abs(values - x.astype(np.float64)).max())
    if lost > spread / 1000 > 0:
        warnings.append(
            f"{part[0]}: column {column!r} loses up to {lost:.2g} when it is stored as float32, its standard deviation "
            f"is {spread:.2g}; subtract a constant, e.g. {values.mean():.6g}, in the file"
        )
    return x


def _labels(parts: list[Named], column: str, dense: bool) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The labels of each part, int16 (n,), and the words by label, in sorted order of the training words, if any.

    dense: whether integers that occur are numbered anew, without gaps; the words are then the original integers.
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


def _names_of(codes: tuple[str, ...], class_names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the classes that occur. codes: ascending integers as text."""
    if not 0 <= int(codes[0]) <= int(codes[-1]) < len(class_names):
        raise DataError(f"labels {codes[0]}..{codes[-1]} do not fit the {len(class_names)} names of classes")
    return tuple(class_names[int(code)] for code in codes)


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
        if isinstance(columns, str) and is_list((values := column_of(part, columns)).type):
            y = stacked(place, values)
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
    if not is_list(kind):
        raise DataError(
            f"{part[0]}: input column {column!r} must hold images or lists of numbers, it holds {kind}; "
            "set data.columns.image"
        )
    name = f"{part[0]}: column {column!r}"
    x = stacked(name, values)
    return numbers(name, x) if vocabulary is None else tokens(name, x, vocabulary)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def stacked(place: str, values: pa.ChunkedArray) -> np.ndarray:
    """Lists of numbers, or of lists, as one array (n, ...). Raises DataError for unequal lengths and for gaps.

    place: begins messages.
    """
    shape: tuple[int, ...] = ()
    arrays, first = [], 0
    for chunk in values.chunks:
        if len(chunk):
            array, inner = _stacked(place, chunk, first, shape)
            arrays.append(array)
            shape, first = inner, first + len(chunk)
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _stacked(place: str, values: pa.Array, first: int, expected: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """(array, shape of a row) of a chunk. first: its first row. expected: the shape of rows before; (): none."""
    rows = len(values)
    shape: list[int] = []
    while is_list(values.type):
        if values.null_count:
            row = first + pc.index(values.is_null(), True).as_py() * rows // len(values)
            raise DataError(f"{place} has a missing list in row {row}; fill it, or delete the row")
        lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
        depth = len(shape)
        wanted = expected[depth] if depth < len(expected) else int(lengths[0])
        if (lengths != wanted).any():
            entry = int((lengths != wanted).argmax())
            raise DataError(
                f"{place} has {lengths[entry]} values in row {first + entry * rows // len(values)}, {wanted} in row 0; "
                "fill or cut them to equal lengths"
            )
        if wanted == 0:
            raise DataError(f"{place} has 0 values in row {first}; fill or cut them to equal lengths of at least 1")
        shape.append(wanted)
        values = pc.list_flatten(values)
    if values.null_count:
        row = first + pc.index(values.is_null(), True).as_py() * rows // len(values)
        raise DataError(f"{place} has a missing number in row {row}; fill it, or delete the row")
    kind = values.type
    if pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(f"{place} must hold lists of numbers, it holds lists of {kind}; set data.columns")
    return values.to_numpy(zero_copy_only=False).reshape(rows, *shape), tuple(shape)
