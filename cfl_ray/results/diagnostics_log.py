"""The diagnostics of a method in its folder: an Arrow stream with a row for each array.

    diagnostics.arrow    round, name, axes, shape, labels of each axis, values (row by row)

A number is a metric of its round, in `metrics.jsonl`; this file has a single row without axes for it, of its first
round, which marks the name as a diagnostic.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from cfl_ray.core.diagnostics import Diagnostic, ReportedDiagnostic
from cfl_ray.results.arrow_log import ArrowLog, read_batches
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
    """Stores the diagnostics of a method, round by round, in a file or, without a directory, in memory.

    An incomplete last batch is removed. Replayed rounds and unchanged arrays are ignored.
    """

    def __init__(self, directory: Path | None):
        self.log = ArrowLog(RunDirectory(directory).diagnostics if directory else None, _SCHEMA)
        self.last = {row.name: row for row in _rows_of(self.log.open())}  # by name

    @property
    def kept(self) -> list[ReportedDiagnostic]:
        """The diagnostics in memory."""
        return _rows_of(self.log.kept)

    def add(self, round: int, numbers: Mapping[str, float], arrays: Iterable[ReportedDiagnostic]) -> None:
        """Keeps the diagnostics of a round; they are in the file when this returns."""
        first = (
            ReportedDiagnostic(name, round, Diagnostic(np.array(value)))
            for name, value in numbers.items()
            if name not in self.last
        )
        new = [*first, *filter(self._is_new, arrays)]
        if new:
            self.last |= {row.name: row for row in new}
            self.log.append(_batch_of(new))

    def _is_new(self, reported: ReportedDiagnostic) -> bool:
        last = self.last.get(reported.name)
        return last is None or (reported.round > last.round and not reported.diagnostic.equals(last.diagnostic))


def read_diagnostics(file: Path) -> list[ReportedDiagnostic]:
    """The rows of the file, oldest first; empty without a file. Raises DataError for a file with other columns."""
    return _rows_of(read_batches(file, _SCHEMA))


def by_name(reported: Iterable[ReportedDiagnostic], records: Sequence[RoundRecord]) -> dict[str, dict[int, Diagnostic]]:
    """Diagnostics by name and round, with numbers from the records."""
    by_round_of: dict[str, dict[int, Diagnostic]] = {}
    for diagnostic in reported:
        if diagnostic.diagnostic.axes:
            by_round_of.setdefault(diagnostic.name, {})[diagnostic.round] = diagnostic.diagnostic
        else:
            by_round_of[diagnostic.name] = {
                record.round: Diagnostic(np.array(record.metrics[diagnostic.name]))
                for record in records
                if diagnostic.name in record.metrics
            }
    return {name: rounds for name, rounds in by_round_of.items() if rounds}


def _batch_of(new: Sequence[ReportedDiagnostic]) -> pa.RecordBatch:
    diagnostics = [row.diagnostic for row in new]
    columns = (
        [row.round for row in new],
        [row.name for row in new],
        [list(diagnostic.axes) for diagnostic in diagnostics],
        [list(diagnostic.value.shape) for diagnostic in diagnostics],
        [[label.tolist() for label in diagnostic.labels] for diagnostic in diagnostics],
        [np.asarray(diagnostic.value, np.float32).reshape(-1) for diagnostic in diagnostics],
    )
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=_SCHEMA)


def _rows_of(batches: Iterable[pa.RecordBatch]) -> list[ReportedDiagnostic]:
    rows = []
    for batch in batches:
        for row in range(batch.num_rows):
            round, name, axes, shape, labels = (batch[column][row].as_py() for column in range(5))
            value = batch["values"][row].values.to_numpy(zero_copy_only=False).reshape(shape)
            diagnostic = Diagnostic(value, tuple(axes), tuple(np.array(label, np.int64) for label in labels))
            rows.append(ReportedDiagnostic(name, round, diagnostic))
    return rows
