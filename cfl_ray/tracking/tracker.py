"""Where a run's figures go first: files of its run directory, which outlive every process and server.

    run.json        what the run is (RunInfo)
    metrics.jsonl   one line per evaluated round, appended and flushed before the round counts as logged
    end.json        how it ended (RunEnd); absent while the run goes on or waits to be resumed
    artifacts/      files that belong to the result
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from cfl_ray.core.errors import DataError
from cfl_ray.tracking.files import append_line, cut_torn_line, read_json, write_json
from cfl_ray.tracking.record import RoundRecord, RunEnd, RunInfo, Status

INFO, METRICS_LOG, END, ARTIFACTS = "run.json", "metrics.jsonl", "end.json", "artifacts"


class Tracker(Protocol):
    """Takes what a run reports, in the order start, log ..., finish; a resumed run starts again on the same directory."""

    run_dir: Path

    def start(self, info: RunInfo) -> None:
        """Opens the run, or opens it again: then `info` is ignored, what was recorded first stands."""

    def log(self, record: RoundRecord) -> None:
        """Keeps the figures of a round. A round that is already there (replayed after a crash) is ignored. Costs a write of one line."""

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        """Closes the run with its RUN_METRICS; the files in `artifacts/` of the run directory belong to it."""


class Spool:
    """The tracker that writes the run directory and nothing else."""

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)
        self._last: RoundRecord | None = None
        self._log = None

    def start(self, info: RunInfo) -> None:
        self.close()
        (self.run_dir / ARTIFACTS).mkdir(parents=True, exist_ok=True)
        if not (self.run_dir / INFO).exists():
            write_json(self.run_dir / INFO, asdict(info))
        (self.run_dir / END).unlink(missing_ok=True)
        path = self.run_dir / METRICS_LOG
        cut_torn_line(path)
        for self._last in read_records(self.run_dir):
            pass
        self._log = path.open("ab", buffering=0)

    def log(self, record: RoundRecord) -> None:
        if self._last is not None and record.round <= self._last.round:
            return
        append_line(self._log, record.to_line().encode())
        self._last = record

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        os.fsync(self._log.fileno())
        round, time_ms = (self._last.round, self._last.time_ms) if self._last else (0, read_info(self.run_dir).time_ms)
        write_json(self.run_dir / END, asdict(RunEnd(status, RoundRecord(round, summary, time_ms))))
        self.close()

    def close(self) -> None:
        """Lets go of the file; for a run that is left without an end, to be resumed."""
        if self._log:
            self._log.close()
            self._log = None


def read_info(run_dir: Path) -> RunInfo:
    """Returns what the run in `run_dir` is. Raises DataError where no run was started."""
    fields = read_json(run_dir / INFO)
    if fields is None:
        raise DataError(f"{run_dir} holds no run: {INFO} is missing")
    return RunInfo(**fields)


def read_end(run_dir: Path) -> RunEnd | None:
    """Returns how the run ended, None while it has not."""
    fields = read_json(run_dir / END)
    return fields and RunEnd(**(fields | {"summary": RoundRecord(**fields["summary"])}))


def read_records(run_dir: str | Path) -> Iterator[RoundRecord]:
    """Yields the recorded rounds in order."""
    for record, _ in read_from(Path(run_dir), 0):
        yield record


def read_from(run_dir: Path, offset: int) -> Iterator[tuple[RoundRecord, int]]:
    """Yields each record after byte `offset` of the log, with the offset behind it. A line still being written is left for later."""
    path = run_dir / METRICS_LOG
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                record = RoundRecord.from_line(line)
            except (ValueError, KeyError, AttributeError) as error:
                raise DataError(f"{path} is damaged at byte {offset} ({error}); remove that line") from error
            offset += len(line)
            yield record, offset
