"""Recorded traces: when clients were reachable, and the speeds of their devices. CSV and Parquet files."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from cfl_ray.data.columns import check_numbers, column_of
from cfl_ray.data.table_files import read_rows
from cfl_ray.errors import DataError, did_you_mean

_TRACE_COLUMNS = ("client", "from", "to")
_DEVICE_COLUMNS = ("computation", "communication")


def read_trace(path: str | Path, num_clients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(client int64 (I,), from float64 (I,), to float64 (I,)) of the intervals in a CSV or parquet file.

    Raises DataError naming the file, the row and both values of an unusable interval.
    """
    file, table = part = _table(path, "cohort.availability.file", _TRACE_COLUMNS)
    if not pa.types.is_integer(table["client"].type):
        raise DataError(f"{file}: column 'client' must hold client ids, integers, it holds {table['client'].type}")
    client_I = column_of(part, "client").to_numpy().astype(np.int64)
    from_I, to_I = (_floats(part, name) for name in _TRACE_COLUMNS[1:])
    _refuse(
        file,
        (client_I < 0) | (client_I >= num_clients),
        lambda row: f"client {client_I[row]} does not exist; the federation has clients 0 .. {num_clients - 1}",
    )
    _refuse(
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
    file, table = part = _table(path, "clock.file", _DEVICE_COLUMNS)
    compute_R, network_R = (_floats(part, name) for name in _DEVICE_COLUMNS)
    if not len(table):
        raise DataError(f"{file} has no device")
    for name, values_R in zip(_DEVICE_COLUMNS, (compute_R, network_R), strict=True):
        bad_R = ~(np.isfinite(values_R) & (values_R > 0))
        _refuse(file, bad_R, lambda row: f"{name} is {values_R[row]:g}; it must be above 0")  # noqa: B023
    return compute_R * 3e-3, network_R * 1e3


def _table(path: str | Path, key: str, columns: Sequence[str]) -> tuple[str, pa.Table]:
    """The table of a file, which has these columns. key: the config key of the file, for messages."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{key}: there is no file {file}")
    table = read_rows(file)
    if missing := [name for name in columns if name not in table.column_names]:
        raise DataError(
            f"{file} has no column {missing[0]!r}{did_you_mean(missing[0], table.column_names)}; "
            f"a trace has {', '.join(columns[:-1])} and {columns[-1]}"
        )
    return str(file), table


def _floats(part: tuple[str, pa.Table], column: str) -> np.ndarray:
    """A column of numbers, float64."""
    return check_numbers(part, column, booleans=False).to_numpy().astype(np.float64)


def _refuse(file: str, bad_I: np.ndarray, message: Callable[[int], str]) -> None:
    """Raises DataError for the first bad row."""
    if bad_I.any():
        row = int(bad_I.argmax())
        raise DataError(f"{file}, row {row}: {message(row)}")
