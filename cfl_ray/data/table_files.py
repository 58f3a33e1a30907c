"""Files of tables as Arrow tables: CSV and Parquet, with columns of plain types.

Ids and labels are text as the file has it: 007 is not 7. Errors name the file, and what to set.
"""

import codecs
import json
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from cfl_ray.data.reading import reading
from cfl_ray.errors import DataError

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}
_BLOCK = 16 << 20  # bytes of a CSV file that are parsed at a time; a row must fit
_LARGEST_BLOCK = (1 << 31) - 1
_PICKLE = "a pickle of Python; return its arrays from a function my.py:load (data.source)"
_OTHERS = {  # first bytes of files that are no tables here, and how such a file is converted
    b"ARROW1": "an Arrow IPC (Feather) file; pandas.read_feather(FILE).to_parquet(...) converts it",
    b"FEA1": "a Feather file; pandas.read_feather(FILE).to_parquet(...) converts it",
    b"ORC": "an ORC file; pandas.read_orc(FILE).to_parquet(...) converts it",
    b"PK\x03\x04": "a zip archive; unpack it",  # `_kind_of_zip` says more
    b"\xd0\xcf\x11\xe0": "an old Excel file (.xls); save it as CSV",
    b"\x93NUMPY": "an array of NumPy; use source arrays (numpy.savez)",
    b"SQLite format 3": "an SQLite database; pandas.read_sql(QUERY, sqlite3.connect(FILE)).to_parquet(...) converts it",
    b"\x89HDF": "an HDF5 file; return its arrays from a function my.py:load (h5py, or pandas.read_hdf)",
    b"{": "JSON; pandas.read_json(FILE, lines=True).to_parquet(...) converts lines of JSON",
    b"[": "JSON; pandas.read_json(FILE).to_parquet(...) converts it",
    b"\x80\x03": _PICKLE,
    b"\x80\x04": _PICKLE,
    b"\x80\x05": _PICKLE,
    b"<": "HTML or XML; get the file itself, or save the table as CSV",
    b"version https://git-lfs": "a pointer of Git LFS, not the file; run git lfs pull",
}
_PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst", b"\xfd7zXZ": ".xz"}
_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # byte order marks
FILENAME = "filename"  # an id that is the name of the file, if the file has no such column
_SUFFIXES = r"(\.csv|\.tsv|\.txt|\.parquet)?(\.gz|\.bz2|\.zst)?$"
_INTEGER = r"^\s*(0|-?[1-9][0-9]*)\s*$"  # an integer as programs write it, without leading zeros or a sign +


@dataclass(frozen=True)
class CsvFormat:
    """How CSV files are written."""

    delimiter: str = ","
    encoding: str = "utf-8"
    decimal: str = "."


COMMON = CsvFormat()


def read_rows(file: Path, csv: CsvFormat = COMMON, ids: Sequence[str] = (), labels: Sequence[str] = ()) -> pa.Table:
    """The table of a CSV or Parquet file, whose content decides which it is, with plain columns.

    ids: columns that are text unless all cells are integers as programs write them. labels: columns of integers that
    are text if a cell has leading zeros. Both may also be in the names of folders, client=3/part-0.parquet.
    """
    first = _first_bytes(file)
    if first.startswith(b"PAR1") or file.suffix == ".parquet":
        try:
            table = pa.parquet.read_table(file, partitioning=None)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read as a Parquet file: {error}") from error
    else:
        table = _read_csv(file, first, csv, ids, labels)
    table = plain_table(table)
    for name, value in _folder_columns(file).items():
        if name in (*ids, *labels) and name not in table.column_names:
            table = table.append_column(name, _of_path(value, table.num_rows))
    return table


def with_filenames(tables: dict[Path, pa.Table]) -> dict[Path, pa.Table]:
    """The tables of a part with the column FILENAME, if they have none: paths below their folder, without suffixes."""
    folder = os.path.commonpath([file.parent for file in tables])
    paths = {file: file.relative_to(folder).as_posix() for file in tables}
    names = {file: re.sub(_SUFFIXES, "", path) for file, path in paths.items()}
    if len(set(names.values())) < len(names):  # 3.csv and 3.parquet
        names = paths
    return {
        file: table
        if FILENAME in table.column_names
        else table.append_column(FILENAME, _of_path(names[file], table.num_rows))
        for file, table in tables.items()
    }


def _folder_columns(file: Path) -> dict[str, str]:
    """The columns in names of folders, as Hive, Spark, pandas and polars write them: client=3."""
    parts = (part.partition("=") for part in file.parts[:-1] if "=" in part)
    return {unquote(name): unquote(value) for name, _, value in parts}


def _of_path(value: str, rows: int) -> pa.Array:
    missing = value == "__HIVE_DEFAULT_PARTITION__"
    typed: Any = None if missing else int(value) if re.match(_INTEGER, value) else value
    return pa.repeat(pa.scalar(typed, pa.int64() if isinstance(typed, int) else pa.string()), rows)


def plain_table(table: pa.Table) -> pa.Table:
    """The table with plain columns."""
    for index, field in enumerate(table.schema):
        values = _without_periods(field, table.column(index))
        values = plain(values)
        if values.type != field.type:
            table = table.set_column(index, field.name, values)
    return table


def _without_periods(field: pa.Field, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of a column, as words if they are periods of pandas, such as 2024-03, which are stored as ordinals."""
    name, details = getattr(field.type, "extension_name", ""), None
    if name == "pandas.period":
        details = field.type.__arrow_ext_serialize__()
    elif (metadata := field.metadata or {}).get(b"ARROW:extension:name") == b"pandas.period":  # pandas is not imported
        details = metadata.get(b"ARROW:extension:metadata", b"")
    if details is None:
        return values
    import pandas  # imported here, for it takes half a second

    with reading(f"column {field.name!r}", "periods of pandas", "write them as text (astype(str))"):
        chunks = [getattr(chunk, "storage", chunk) for chunk in values.chunks]
        ordinals = pa.chunked_array(chunks, pa.int64()).to_pandas(integer_object_nulls=True)
        known = [ordinal for ordinal in ordinals if ordinal is not None]
        kind = pandas.PeriodDtype(json.loads(details)["freq"])
        words = iter(pandas.arrays.PeriodArray(np.array(known, np.int64), dtype=kind).astype(str))
        return pa.chunked_array([pa.array([None if o is None else next(words) for o in ordinals], pa.string())])


def plain(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of a column in the type that they have without encodings: categories, views, extension types.

    Text is string or large_string, an identifier of the type uuid is text.
    """
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        storage = pa.chunked_array([chunk.storage for chunk in values.chunks], kind.storage_type)
        if getattr(kind, "extension_name", "") != "arrow.uuid":
            return plain(storage)
        words = [None if value is None else str(value) for value in values.to_pylist()]
        return pa.chunked_array([pa.array(words, pa.string())])
    if pa.types.is_dictionary(kind):
        return plain(values.cast(kind.value_type))
    if pa.types.is_run_end_encoded(kind):
        return plain(pa.chunked_array([pc.run_end_decode(chunk) for chunk in values.chunks], kind.value_type))
    if pa.types.is_string_view(kind):
        return values.cast(pa.large_string())
    if pa.types.is_binary_view(kind):
        return values.cast(pa.large_binary())
    return values


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds strings."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


# ---- CSV


def _first_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(32)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def other_kind(file: Path) -> str | None:
    """The kind of a file that is no table, with how to convert it; None if its first bytes do not tell."""
    start = _first_bytes(file).removeprefix(codecs.BOM_UTF8).lstrip()
    of_zip = _kind_of_zip(file) if start.startswith(b"PK") else None
    return of_zip or next((what for magic, what in _OTHERS.items() if start.startswith(magic)), None)


def _kind_of_zip(file: Path) -> str | None:
    """The kind of a zip archive with files of a known program; None for any other."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return None
    return next((what for pattern, what in _ZIPS.items() if any(re.search(pattern, name) for name in names)), None)


_ZIPS = {  # a name inside a zip archive -> what it is, and how it is read
    r"^\[Content_Types\]\.xml$": "an Excel file (.xlsx); pandas.read_excel(FILE).to_parquet(...) converts it",
    r"(^|/)data\.pkl$": "a file of torch.save; return its tensors from a function my.py:load (data.source)",
    r"\.npy$": "an .npz file of NumPy; use source arrays",
}


def _read_csv(file: Path, first: bytes, csv: CsvFormat, ids: Sequence[str], labels: Sequence[str]) -> pa.Table:
    packed = next((suffix for start, suffix in _PACKED.items() if first.startswith(start)), None)
    if packed in (".gz", ".bz2", ".zst"):
        if not file.name.endswith(packed):
            raise DataError(f"{file} is compressed; rename it to {file.name}{packed}, or decompress it")
    else:
        other = other_kind(file)
        if packed or other:
            raise DataError(f"{file} is no CSV or Parquet file: it is {other or 'compressed as .xz; decompress it'}")
    _check_encoding(file, first, csv.encoding)
    table = _parsed(file, csv)
    _check_header(file, table, csv)
    inferred = {name: table.schema.field(name).type for name in {*ids, *labels} if table.column_names.count(name) == 1}
    # words have no empty cells for Arrow; a column of other types with an empty cell stays as it is, for the error
    written = {name for name, kind in inferred.items() if not is_text(kind) and not table[name].null_count}
    written = {name for name in written if name in ids or pa.types.is_integer(inferred[name])}
    if written:
        as_text = _parsed(file, csv, sorted(written))
        for name in written:
            is_integer = pc.all(pc.match_substring_regex(as_text[name], _INTEGER)).as_py()
            if not (is_integer and pa.types.is_integer(inferred[name])):
                table = table.set_column(table.column_names.index(name), name, as_text[name])
    return table


def _check_encoding(file: Path, first: bytes, encoding: str) -> None:
    """Raises DataError if the file has another encoding, which Arrow would notice in some columns only."""
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError:
        raise DataError(f"data.encoding: unknown encoding {encoding!r}; e.g. utf-8, cp1252, latin-1, utf-16") from None
    mark = next((name for mark, name in _MARKS.items() if first.startswith(mark)), None)
    if mark is not None and codecs.lookup(encoding).name == "utf-8":
        raise DataError(f"{file} is text in {mark.upper()}, by its byte order mark; set data.encoding: {mark}")
    place = 0
    try:
        with pa.input_stream(str(file)) as stream:
            while block := stream.read(1 << 20):
                decoder.decode(block)
                place += len(block)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        byte = error.object[error.start : error.start + 1].hex()
        advice = "if Excel wrote it, set data.encoding: cp1252; else the encoding in which it was saved"
        advice = advice if codecs.lookup(encoding).name == "utf-8" else "set data.encoding to that of the file"
        raise DataError(
            f"{file} is not text in {encoding} (byte 0x{byte} near place {place + error.start}); {advice}, or save it "
            "as UTF-8"
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} cannot be read as a CSV file: {error}") from error


def _parsed(file: Path, csv: CsvFormat, text: Sequence[str] | None = None) -> pa.Table:
    """All columns with the types that Arrow infers, or the columns `text` as text."""
    convert = pa.csv.ConvertOptions(
        include_columns=text or [],
        column_types=dict.fromkeys(text or [], pa.string()),
        strings_can_be_null=False,
        decimal_point=csv.decimal,
    )
    parse = pa.csv.ParseOptions(delimiter=csv.delimiter, newlines_in_values=True)
    for block in (_BLOCK, min(max(_BLOCK, 16 * file.stat().st_size), _LARGEST_BLOCK)):  # 16: the file may be compressed
        options = pa.csv.ReadOptions(block_size=block, encoding=csv.encoding)
        try:
            return pa.csv.read_csv(file, options, parse, convert)
        except (pa.ArrowException, OSError, UnicodeError) as error:
            problem = error
            if not re.search("straddling|Empty CSV file or block", str(error)):  # a row longer than a block
                break
    raise DataError(f"{file} cannot be read as a CSV file: {problem}{_delimiter_advice(file, csv)}") from problem


def _check_header(file: Path, table: pa.Table, csv: CsvFormat) -> None:
    """Raises DataError if the first line is no header, or has another delimiter."""
    names = table.column_names
    if len(names) == 1 and (advice := _delimiter_advice(file, csv)):
        raise DataError(f"{file} has a single column, {names[0]!r}{advice}")
    if names[0].startswith("#"):
        raise DataError(f"{file}: its first line is a comment, {names[0]!r}; the first line must name the columns")
    numbered = [[str(number) for number in range(first, first + len(names))] for first in (0, 1)]
    named = [name for name in names if name]
    if all(map(is_number, named)) and named and names not in numbered and named != numbered[0][: len(named)]:
        raise DataError(
            f"{file} has no header: its first line holds numbers, {', '.join(names[:4])}; the first line must name the "
            "columns"
        )


def _delimiter_advice(file: Path, csv: CsvFormat) -> str:
    """The delimiter to set if the first line has another one; else an empty text."""
    try:
        with pa.input_stream(str(file)) as stream:
            line = stream.read(1 << 16).decode(csv.encoding, "ignore").splitlines()[0]
    except (OSError, IndexError, pa.ArrowException):
        return ""
    counts = {other: line.count(other) for other in DELIMITERS if other != csv.delimiter and other in line}
    if csv.delimiter in line or not counts:
        return ""
    best = max((other for other in counts if other != " "), key=lambda other: counts[other], default=" ")
    shown = {"\t": '"\\t"'}.get(best, f'"{best}"')
    return f"; its first line has {DELIMITERS[best]} between names: set data.delimiter: {shown}"


def is_number(text: str) -> bool:
    """Whether a text is a number as Python reads it."""
    try:
        float(text)
    except ValueError:
        return False
    return True
