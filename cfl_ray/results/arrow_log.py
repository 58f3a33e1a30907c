"""Arrow streams with a batch per round: record files in the folder of a method, in addition to its JSON lines.

    client_metrics.arrow    round, client, the scores of the client
    diagnostics.arrow       round, name, axes, shape, labels of each axis, values (row by row)
    reassignments.arrow     round, client, cluster (-1: the client left its cluster)

Without a directory the batches are in memory. An incomplete last batch is removed; replayed rounds are ignored.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cfl_ray.core.reassigned import Reassigned
from cfl_ray.core.reported import Diagnostic, ReportedDiagnostic
from cfl_ray.data.federation import Federation
from cfl_ray.errors import DataError
from cfl_ray.report.report_data import ClusterHistory, Reassignment
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import append_line, drafted, open_private, opened
from cfl_ray.tracking import RoundRecord


class ArrowLog:
    """A stream to append to: a file or, without a file, the batches in `kept`."""

    def __init__(self, file: Path | None, schema: pa.Schema):
        self.file, self.schema = file, schema
        self.kept: list[pa.RecordBatch] = []

    def open(self) -> list[pa.RecordBatch]:
        """The batches of the file; an incomplete last batch is removed. Raises DataError for other columns."""
        return [] if self.file is None else read_batches(self.file, self.schema, cut=True)

    def append(self, batch: pa.RecordBatch) -> None:
        """Appends a batch; it is in the file when this returns."""
        if self.file is None:
            self.kept.append(batch)
            return
        begun = self.file.exists() and self.file.stat().st_size > 0
        with open_private(self.file, "ab") as out:
            if not begun:
                append_line(out, memoryview(self.schema.serialize()))
            append_line(out, memoryview(batch.serialize()))


def read_batches(file: Path, schema: pa.Schema, cut: bool = False) -> list[pa.RecordBatch]:
    """The complete batches of a file; empty without a file. Raises DataError for other columns than `schema`.

    cut: whether an incomplete last batch is removed from the file.
    """
    batches, end, columns = whole_batches(file)
    check_columns(file, columns, schema)
    if cut and file.exists() and end < file.stat().st_size:
        os.truncate(file, end)
    return batches


def check_columns(file: Path, columns: pa.Schema | None, expected: pa.Schema) -> None:
    """Raises DataError if a file has other columns than expected. columns: None if the file is empty."""
    if columns not in (None, expected):
        raise DataError(f"{file} has columns {columns.names}, expected {expected.names}")


def whole_batches(file: Path) -> tuple[list[pa.RecordBatch], int, pa.Schema | None]:
    """The complete batches, the offset after the last of them, and their columns (None for an empty or missing file).

    Raises DataError for a file that cannot be read, or is damaged before its end.
    """
    batches: list[pa.RecordBatch] = []
    schema = None
    with opened(file) as regular:  # raises unless it is a regular file
        if regular is None:
            return [], 0, None
    with pa.memory_map(str(file)) as source:  # pages are read when values are used
        end = 0
        try:
            reader = pa.ipc.open_stream(source)
            schema = reader.schema
            _ = schema.names  # raises ValueError for damaged names
            end = source.tell()
            while True:
                batch = reader.read_next_batch()
                batch.validate(full=True)  # offsets outside of the file would end the process
                batches.append(batch)
                end = source.tell()
        except (StopIteration, pa.ArrowInvalid, OSError) as error:
            source.seek(end)
            if not _has_batch(source.read_buffer()):
                return batches, end, schema
            damage: Exception = error
        except (pa.ArrowException, ValueError, OverflowError) as error:
            damage = error
        # damaged before the end: the file is left as it is
        reason = str(damage) or f"batch {len(batches) + 1} is missing, and others follow"
        raise DataError(f"{file} is damaged ({reason}); remove it: what it has recorded so far is lost") from damage


def _has_batch(rest: pa.Buffer) -> bool:
    """Whether a complete batch begins in what follows the last batch that could be read."""
    words = np.frombuffer(rest, "<u4", count=rest.size // 8 * 2)[::2]
    for start in np.flatnonzero(words == 0xFFFFFFFF) * 8:  # messages begin so, at multiples of 8
        with suppress(pa.ArrowException, ValueError, OSError, EOFError):
            if pa.ipc.read_message(rest.slice(start)).type == "record batch":
                return True
    return False


# ---- metrics of clients


_SCORES = ("accuracy", "macro_f1", "loss")  # of classification


def _client_schema(scores: Sequence[str]) -> pa.Schema:
    return pa.schema([("round", pa.int32()), ("client", pa.int64()), *((name, pa.float32()) for name in scores)])


class ClientMetrics:
    """P-server of every client and evaluated round, a batch per evaluation."""

    def __init__(self, directory: Path | None, scores: Sequence[str] = _SCORES):
        self.log = ArrowLog(RunDirectory(directory).client_metrics if directory else None, _client_schema(scores))
        batches = self.log.open()
        self.last = max((batch["round"][0].as_py() or 0 for batch in batches if batch.num_rows), default=0)

    @property
    def kept(self) -> pa.Table:
        """The scores in memory."""
        return pa.Table.from_batches(self.log.kept, self.log.schema)

    @np.errstate(over="ignore")  # scores beyond float32 are infinite
    def add(self, round: int, scores_MV: np.ndarray) -> None:
        """Keeps the scores of a round: client, then each score. They are in the file when this returns."""
        if round <= self.last:
            return
        client, *scores = scores_MV.T
        rounds, of_scores = np.full(len(client), round, np.int32), (values.astype(np.float32) for values in scores)
        columns = rounds, client.astype(np.int64), *of_scores
        self.log.append(pa.record_batch([*map(pa.array, columns)], schema=self.log.schema))
        self.last = round


def read_client_metrics(path: Path) -> pa.Table:
    """The complete batches of the file; an empty table without a file. Raises DataError for a damaged file."""
    batches, _, schema = whole_batches(path)
    schema = schema or _client_schema(_SCORES)
    if schema != _client_schema(schema.names[2:]):
        check_columns(path, schema, _client_schema(_SCORES))
    return pa.Table.from_batches(batches, schema)


# ---- diagnostics


_DIAGNOSTICS = pa.schema(
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
    """The diagnostics of a method: a row for each array that differs from the previous one of its name.

    A number is a metric of its round, in `metrics.jsonl`; here it has a single row without axes, of its first round,
    which marks the name as a diagnostic.
    """

    def __init__(self, directory: Path | None):
        self.log = ArrowLog(RunDirectory(directory).diagnostics if directory else None, _DIAGNOSTICS)
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
    return _rows_of(read_batches(file, _DIAGNOSTICS))


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
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _DIAGNOSTICS, strict=True)]
    return pa.record_batch(arrays, schema=_DIAGNOSTICS)


def _rows_of(batches: Iterable[pa.RecordBatch]) -> list[ReportedDiagnostic]:
    rows = []
    for batch in batches:
        for row in range(batch.num_rows):
            round, name, axes, shape, labels = (batch[column][row].as_py() for column in range(5))
            value = batch["values"][row].values.to_numpy(zero_copy_only=False).reshape(shape)
            diagnostic = Diagnostic(value, tuple(axes), tuple(np.array(label, np.int64) for label in labels))
            rows.append(ReportedDiagnostic(name, round, diagnostic))
    return rows


# ---- reassignments


_REASSIGNMENTS = pa.schema([("round", pa.int32()), ("client", pa.int32()), ("cluster", pa.int32())])
# of artifacts/assignments.parquet, a row for each change of a client's cluster: the client is in `cluster` (-1: none)
# from the end of `round` until its next row
_ASSIGNMENTS = pa.schema(
    [
        pa.field("client", pa.int64(), nullable=False),
        pa.field("name", pa.string()),  # always null: `TrainedMethod.assignments` has the names
        pa.field("group", pa.int32()),  # true group; null: not known
        pa.field("cluster", pa.int32(), nullable=False),
        pa.field("round", pa.int32(), nullable=False),
    ]
)
_ROWS = 1 << 17  # most rows of a batch, and fewest of a row group except the last


class Reassignments:
    """The clients that changed their cluster, round by round."""

    def __init__(self, directory: Path | None):
        self.log = ArrowLog(RunDirectory(directory).reassignments if directory else None, _REASSIGNMENTS)
        rounds = self.rounds
        self.last = rounds[-1][0] if rounds else 0
        self.log.open()

    @property
    def rounds(self) -> list[Reassignment]:
        """The rounds with reassignments, and these reassignments."""
        return _rounds_of(self.log.kept) if self.log.file is None else read_reassignments(self.log.file)

    def add(self, round: int, reassigned: Reassigned) -> None:
        """Stores the reassignments of a round, if any; they are in the file when this returns."""
        if not len(reassigned) or round <= self.last:
            return
        columns = (np.full(len(reassigned), round, np.int32), reassigned.client_R, reassigned.cluster_R)
        self.log.append(pa.record_batch([*map(pa.array, columns)], schema=_REASSIGNMENTS))
        self.last = round

    @property
    def rounds_with_changes(self) -> list[int]:
        """Rounds in which a client moved between clusters.

        The first assignment of a client does not count, unless the method forms its first clusters after round 1.
        """
        return ClusterHistory(self.rounds).rounds_with_changes

    def write(self, path: Path, federation: Federation) -> None:
        """Writes assignments.parquet, replacing an existing file.

        Raises DataError if the file of reassignments has clients that are not in the federation.
        """
        rounds = self.rounds
        largest = max((int(reassigned.client_R[-1]) for _, reassigned in rounds), default=0)
        if largest >= federation.num_clients:
            raise DataError(
                f"{self.log.file} has client {largest}, and the federation {federation.num_clients} clients"
            )
        with drafted(path) as draft, pq.ParquetWriter(draft, _ASSIGNMENTS) as writer:
            waiting, rows = list[pa.RecordBatch](), 0
            for batch in _assignments(rounds, federation.group_N):
                waiting.append(batch)
                rows += batch.num_rows
                if rows >= _ROWS:
                    writer.write_table(pa.Table.from_batches(waiting))
                    waiting, rows = [], 0
            writer.write_table(pa.Table.from_batches(waiting, _ASSIGNMENTS))


def read_reassignments(file: Path) -> list[Reassignment]:
    """The rounds of the file with their reassignments, in memory-mapped arrays; empty without a file.

    An incomplete end is ignored. Raises DataError for a file that is damaged before its end.
    """
    try:
        return _rounds_of(read_batches(file, _REASSIGNMENTS))
    except (ValueError, OverflowError) as error:  # an ArrowInvalid is a ValueError
        raise DataError(
            f"{file} is damaged ({error}); restore it, or remove it: the reassignments so far are lost then"
        ) from error


def _rounds_of(batches: Sequence[pa.RecordBatch]) -> list[Reassignment]:
    """The reassignments in these batches. Raises ValueError for a batch that no round has."""
    rounds: list[Reassignment] = []
    for batch in batches:
        batch.validate()
        round_R, client_R, cluster_R = (column.to_numpy() for column in batch.columns)
        if len(round_R) == 0 or (round_R != round_R[0]).any():
            raise ValueError("a batch is not of one round")
        if rounds and round_R[0] <= rounds[-1][0]:
            raise ValueError(f"round {round_R[0]} after round {rounds[-1][0]}")
        reassigned = Reassigned(client_R, cluster_R)
        reassigned.check()
        rounds.append((int(round_R[0]), reassigned))
    return rounds


def _assignments(rounds: Sequence[Reassignment], group_N: np.ndarray | None) -> Iterator[pa.RecordBatch]:
    """Rows of assignments.parquet. group_N: true group of each client, below 0 if it is not known."""
    for round, reassigned in rounds:
        for at in range(0, len(reassigned), _ROWS):
            client_r, cluster_r = reassigned.client_R[at : at + _ROWS], reassigned.cluster_R[at : at + _ROWS]
            group_r = np.full(len(client_r), -1, np.int32) if group_N is None else group_N[client_r]
            columns = [
                pa.array(client_r, pa.int64()),
                pa.nulls(len(client_r), pa.string()),
                pa.array(group_r, pa.int32(), mask=group_r < 0),
                pa.array(cluster_r),
                pa.array(np.full(len(client_r), round, np.int32)),
            ]
            yield pa.record_batch(columns, schema=_ASSIGNMENTS)
