"""The diagnostics of a method in its folder: an Arrow stream with a row for each array.

    diagnostics.arrow    round, name, axes, shape, labels of each axis, values (row by row)

A number is a metric of its round, in `metrics.jsonl`; here it has one row without axes, of the first round that has it,
which says that this name is a diagnostic.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from cfl_ray.core.diagnostics import Diagnostic, ReportedDiagnostic
from cfl_ray.results.arrow_log import ArrowLog, check_columns, whole_batches
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import RoundRecord

_SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("name", pa.string()),
        ("axes", pa.list_(pa.string())),
        ("shape", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.list_(pa.int64()))),
        ("values", pa.list_(pa.float32())),
    ]
)


class DiagnosticsLog:
    """Receives the diagnostics of a method, round by round, in a file or, without a directory, in memory.

    A batch that a crash has torn is cut off; what is replayed is ignored, as is an array that is as it was before.
    """

    def __init__(self, directory: Path | None):
        self.log = ArrowLog(RunDirectory(directory).diagnostics, _SCHEMA) if directory else None
        self.kept: list[ReportedDiagnostic] = []  # without a file
        batches = self.log.open() if self.log else []
        self.last = {one.name: one for batch in batches for one in _rows_of(batch)}  # by name

    def add(self, round: int, numbers: Mapping[str, float], arrays: Iterable[ReportedDiagnostic]) -> None:
        """Keeps the diagnostics of a round; they are in the file when this returns."""
        first = (
            ReportedDiagnostic(name, round, Diagnostic(np.array(value)))
            for name, value in numbers.items()
            if name not in self.last
        )
        new = [*first, *filter(self._is_new, arrays)]
        if not new:
            return
        self.last |= {one.name: one for one in new}
        if self.log is None:
            self.kept += new
        else:
            self.log.append(_batch_of(new))

    def _is_new(self, one: ReportedDiagnostic) -> bool:
        last = self.last.get(one.name)
        return last is None or (one.round > last.round and not one.diagnostic.equals(last.diagnostic))


def read_diagnostics(file: Path) -> list[ReportedDiagnostic]:
    """The rows of the file, oldest first; none if there is no file. Raises DataError for one with other columns."""
    batches, _, schema = whole_batches(file) if file.exists() else ([], 0, None)
    check_columns(file, schema, _SCHEMA)
    return [one for batch in batches for one in _rows_of(batch)]


def by_name(reported: Iterable[ReportedDiagnostic], records: Sequence[RoundRecord]) -> dict[str, dict[int, Diagnostic]]:
    """Diagnostics by name and round; of numbers, those in the records."""
    found: dict[str, dict[int, Diagnostic]] = {}
    for one in reported:
        if one.diagnostic.axes:
            found.setdefault(one.name, {})[one.round] = one.diagnostic
        else:
            found[one.name] = {
                record.round: Diagnostic(np.array(record.metrics[one.name]))
                for record in records
                if one.name in record.metrics
            }
    return {name: rounds for name, rounds in found.items() if rounds}


def _batch_of(new: Sequence[ReportedDiagnostic]) -> pa.RecordBatch:
    found = [one.diagnostic for one in new]
    columns = (
        [one.round for one in new],
        [one.name for one in new],
        [list(one.axes) for one in found],
        [list(one.value.shape) for one in found],
        [[label.tolist() for label in one.labels] for one in found],
        _flat([one.value for one in found]),
    )
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=_SCHEMA)


def _flat(values: Sequence[np.ndarray]) -> pa.Array:
    """A list array with the values of each array, row by row."""
    offsets = np.cumsum([0, *(value.size for value in values)])
    flat = np.concatenate([np.asarray(value, np.float32).reshape(-1) for value in values])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat))


def _rows_of(batch: pa.RecordBatch) -> Iterable[ReportedDiagnostic]:
    for row in range(batch.num_rows):
        round, name, axes, shape, labels = (batch[column][row].as_py() for column in range(5))
        value = batch["values"][row].values.to_numpy(zero_copy_only=False).reshape(shape)
        diagnostic = Diagnostic(value, tuple(axes), tuple(np.array(label, np.int64) for label in labels))
        yield ReportedDiagnostic(name, round, diagnostic)
