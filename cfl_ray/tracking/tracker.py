"""Tracking in the files of the run directory, which outlive every process and server.

The identity and configuration (RunInfo) are written first, then a line for each round before `log` returns, and the end
(RunEnd) last: it is absent while the run is live or waits to be resumed.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Protocol

from cfl_ray.errors import DataError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import (
    append_line,
    cut_torn_line,
    open_private,
    opened,
    private_folder,
    read_json,
    read_record,
    write_json,
)
from cfl_ray.tracking.record import EndStatus, RoundRecord, RunEnd, RunInfo


class Tracker(Protocol):
    """Receives the reports of a run in the order start, log ..., finish.

    A resumed run calls `start` again on the same directory.
    """

    run_dir: Path

    def start(self, info: RunInfo) -> None:
        """Opens the run. If the directory holds a run already, `info` is ignored and the recorded one stays."""

    def log(self, record: RoundRecord) -> None:
        """Records the metrics of a round by writing one line. A round that is already recorded is ignored."""

    def finish(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        """Closes the run with its RUN_METRICS; the files in `artifacts/` are part of its result."""


class FileTracker:
    """Tracker that writes to the run directory only."""

    def __init__(self, run_dir: str | Path, of_task: Collection[str] = ()) -> None:
        """of_task: names of metrics beside METRICS (`score_metrics_of`) that the summary may have."""
        self.run_dir, self._of_task = Path(run_dir), frozenset(of_task)
        self._last: RoundRecord | None = None
        self._log: BinaryIO | None = None  # open between `start` and `finish`

    def start(self, info: RunInfo) -> None:
        self.close()
        private_folder(RunDirectory(self.run_dir).artifacts)
        if not RunDirectory(self.run_dir).info.exists():
            write_json(RunDirectory(self.run_dir).info, asdict(info))
        RunDirectory(self.run_dir).end.unlink(missing_ok=True)
        path = RunDirectory(self.run_dir).metrics
        cut_torn_line(path)
        for record in read_records(self.run_dir):
            self._last = record
        self._log = open_private(path, "ab")

    def log(self, record: RoundRecord) -> None:
        if self._last is not None and record.round <= self._last.round:
            return
        append_line(self._open_log(), record.to_line().encode())
        self._last = record

    def finish(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        os.fsync(self._open_log().fileno())
        if self._last is None:
            summary_record = RoundRecord(0, summary, read_info(self.run_dir).time_ms, self._of_task)
        else:
            summary_record = RoundRecord(self._last.round, summary, self._last.time_ms, self._of_task)
        end = RunEnd(status, summary_record)
        write_json(
            RunDirectory(self.run_dir).end,
            {"status": end.status, "summary": summary_record.to_fields(), "time_ms": end.time_ms},
        )
        self.close()

    def close(self) -> None:
        """Closes the log file of a run that has no end yet and can be resumed."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _open_log(self) -> BinaryIO:
        assert self._log is not None, "start() opens the log"
        return self._log


def read_info(run_dir: Path) -> RunInfo:
    """Returns the RunInfo of the run in `run_dir`. Raises DataError if no run was started there."""
    info = read_record(RunDirectory(run_dir).info, RunInfo)
    if info is None:
        raise DataError(f"{run_dir} holds no run: {RunDirectory.info.name} is missing")
    return info


def read_end(run_dir: Path) -> RunEnd | None:
    """Returns the end of the run, or None if it has not ended. Raises DataError for a damaged one."""
    fields = read_json(RunDirectory(run_dir).end)
    if fields is None:
        return None
    try:
        return RunEnd.from_fields(fields)
    except ValueError as error:
        raise DataError(f"{RunDirectory(run_dir).end} is damaged ({error}); remove it, and resume the run") from error


def read_records(run_dir: str | Path) -> Iterator[RoundRecord]:
    """Yields the records in the order of their rounds."""
    for record, _ in read_from(Path(run_dir), 0):
        yield record


def read_from(run_dir: Path, offset: int) -> Iterator[tuple[RoundRecord, int]]:
    """Yields each record after byte `offset` of the log, with the offset of the byte that follows it.

    A last line without a line end is still being written and is not read. Raises DataError for a damaged line.
    """
    path = RunDirectory(run_dir).metrics
    with opened(path) as file:
        if file is None:
            return
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                record = RoundRecord.from_line(line)
            except ValueError as error:
                raise DataError(f"{path} is damaged at byte {offset} ({error}); remove that line") from error
            offset += len(line)
            yield record, offset
