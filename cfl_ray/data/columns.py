"""Columns of tables as arrays: numbers, labels, targets, ids, groups, times and lists.

Messages of checks name the file, the column and the row.
"""

import re
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cfl_ray.config import ColumnsConfig
from cfl_ray.core.tasks import TARGETS
from cfl_ray.data.array_checks import DENSE, dense_labels, numbers, targets_of
from cfl_ray.data.table_files import is_number, is_text, plain
from cfl_ray.errors import DataError, did_you_mean

MAX_LABEL = np.iinfo(np.int16).max
Named = tuple[str, pa.Table]  # rows, with the name of their file or folder for messages

# words that other programs read as empty cells
_MISSING = {"NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-nan", "NULL", "null", "None", "none", "nil", "NaT", "?"}


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


_FEATURE_ADVICE = "; set data.columns.features, and write categories as columns of 0 and 1 (pandas.get_dummies)"


def float32_column(part: Named, column: str, decimal: str, warnings: list[str]) -> np.ndarray:
    """A feature column as float32. warnings: gets a line if float32 does not have the digits that tell rows apart."""
    values = check_numbers(part, column, "feature column", _FEATURE_ADVICE, decimal=decimal).to_numpy()
    x = numbers(f"{part[0]}: column {column!r}", values)
    spread, lost = float(values.std()), float(np.abs(values - x.astype(np.float64)).max())
    if lost > spread / 1000 > 0:
        warnings.append(
            f"{part[0]}: column {column!r} loses up to {lost:.2g} when it is stored as float32, its standard deviation "
            f"is {spread:.2g}; subtract a constant, e.g. {values.mean():.6g}, in the file"
        )
    return x


def labels_of(parts: list[Named], column: str, dense: bool) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The labels of each part, int16 (n,), and the words by label, in sorted order of the training words, if any.

    dense: whether integers that occur are numbered anew, without gaps; the words are then the original integers.
    """
    columns = [_with_integers(column_of(part, column)) for part in parts]
    kinds = [values.type for values in columns]
    if all(pa.types.is_integer(kind) or pa.types.is_boolean(kind) for kind in kinds):
        found = [(f"{part[0]}: column {column!r}", y.to_numpy()) for part, y in zip(parts, columns, strict=True)]
        return numbered(found) if dense else ([integer_labels(*each) for each in found], ())
    for (file, _), values, kind in zip(parts, columns, kinds, strict=True):
        if not pa.types.is_integer(kind) and not is_text(kind):
            example = ""
            if pa.types.is_floating(kind):
                y = values.to_numpy()
                row = int((~_is_whole(y)).argmax())
                example = f", e.g. {y[row]:g} in row {row} (the first is row 0); set task: regression to learn numbers"
                example += " (csv, hf_disk), write classes as whole numbers from 0 or as words, or"
            raise DataError(
                f"{file}: label column {column!r} must hold integers or words, it holds {kind}{example or ';'} "
                "set data.columns.label"
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


def names_of_codes(codes: tuple[str, ...], class_names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the classes that occur. codes: ascending integers as text."""
    if not 0 <= int(codes[0]) <= int(codes[-1]) < len(class_names):
        raise DataError(f"labels {codes[0]}..{codes[-1]} do not fit the {len(class_names)} names of classes")
    return tuple(class_names[int(code)] for code in codes)


def integer_labels(place: str, y: np.ndarray) -> np.ndarray:
    """Integers or booleans as labels, int16 (n,). Raises DataError for labels outside 0..MAX_LABEL.

    place: file and column, for messages.
    """
    if len(y) and not 0 <= y.min() <= y.max() <= MAX_LABEL:
        rows = int((y == -1).sum())
        no_label = (
            f"leave out the rows of -1, which have no label ({rows} of {len(y)}); if it is a class, " if rows else ""
        )
        raise DataError(f"{place}: labels must lie in 0..{MAX_LABEL}, got {y.min()}..{y.max()}; {no_label}{DENSE}")
    return y.astype(np.int16)


def numbered(parts: list[tuple[str, np.ndarray]]) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The labels of each part numbered densely, int16 (n,), and the original labels. parts: as in `dense_labels`."""
    labels, names = dense_labels(parts)
    if len(names) > MAX_LABEL + 1:
        raise DataError(f"{parts[0][0]}: {len(names)} different labels, at most {MAX_LABEL + 1} can be classes")
    return [y.astype(np.int16) for y in labels], names


def label_names(columns: str | list[str]) -> list[str]:
    """The names of the label columns."""
    return [columns] if isinstance(columns, str) else columns


def targets_of_columns(part: Named, columns: str | list[str], targets: str) -> np.ndarray:
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


def ids_of(part: Named, column: str, what: str) -> np.ndarray:
    """The ids in a column, integers or strings. what: client or group."""
    values = _with_integers(column_of(part, column))
    kind = values.type
    if pa.types.is_integer(kind):
        return values.to_numpy()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return np.asarray([_text_of(value) for value in values.to_pylist()], np.str_)
    if not pa.types.is_nested(kind) and not pa.types.is_floating(kind):
        return np.asarray(values.cast(pa.string()).to_pylist(), np.str_)
    raise DataError(
        f"{part[0]}: {what} column {column!r} must hold integers or strings, it holds {values.type}; "
        f"set data.columns.{what}"
    )


def _with_integers(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column whose floats are all whole numbers as integers, as pandas writes these if a row had none."""
    if pa.types.is_floating(values.type):
        numbers = values.to_numpy()
        if _is_whole(numbers).all():
            return pa.chunked_array([numbers.astype(np.int64)])
    return values


def _is_whole(numbers: np.ndarray) -> np.ndarray:
    """Whether each of some floats is a whole number that a float tells from the next one."""
    return (numbers == np.round(numbers)) & (np.abs(numbers) < 2**53)


def _text_of(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()


def unread_warnings(file: str, names: list[str], columns: ColumnsConfig) -> list[str]:
    """A warning of the columns of images or lists that are not read, if no column of clients is named; else empty."""
    read = (columns.image, *label_names(columns.label), columns.client, columns.group, columns.time)
    unread = [name for name in names if name not in read]
    if columns.client is not None or not unread:
        return []
    more = " ..." if len(unread) > 5 else ""
    return [
        f"{file}: the columns {', '.join(unread[:5])}{more} are not read; if one has the client of each sample, name "
        "it in data.columns.client"
    ]


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
