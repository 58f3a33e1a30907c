"""Availability traces: files with the intervals in which each client is available."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from cfl_ray.errors import DataError, did_you_mean

COLUMNS = ("client", "from", "to")


def read_trace(path: str | Path, num_clients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (client int64 (I,), from float64 (I,), to float64 (I,)) of the intervals in a CSV or parquet file.

    Raises DataError naming the file, the row and both values of an unusable interval.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"cohort.availability.file: there is no file {file}")
    is_parquet = file.suffix == ".parquet"
    try:
        table = pa.parquet.read_table(file) if is_parquet else pa.csv.read_csv(file)
    except (pa.ArrowException, OSError) as error:
        kind = "parquet" if is_parquet else "CSV"
        raise DataError(f"{file} cannot be read as a {kind} file: {error}") from error
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise DataError(
            f"{file} has no column {missing[0]!r}{did_you_mean(missing[0], table.column_names)}; "
            "a trace has client, from and to"
        )
    if not pa.types.is_integer(table["client"].type):
        raise DataError(f"{file}: column 'client' must hold client ids, integers, it holds {table['client'].type}")
    client_I = _numbers(file, table, "client").astype(np.int64)
    from_I, to_I = (_numbers(file, table, name).astype(np.float64) for name in COLUMNS[1:])
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


def _numbers(file: Path, table: pa.Table, name: str) -> np.ndarray:
    column = table[name]
    if column.null_count:
        raise DataError(f"{file}: column {name!r} is empty in row {column.is_null().index(True).as_py()}")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataError(f"{file}: column {name!r} must hold numbers, it holds {column.type}")
    return column.to_numpy()


def _check(file: Path, bad_I: np.ndarray, message: Callable[[int], str]) -> None:
    if bad_I.any():
        row = int(bad_I.argmax())
        raise DataError(f"{file}, row {row}: {message(row)}")
