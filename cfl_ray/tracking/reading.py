"""Readers of the files of `RunLog`."""

from collections.abc import Iterator
from pathlib import Path

from cfl_ray.errors import DataError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import opened, read_record
from cfl_ray.tracking.record import RoundRecord, RunEnd, RunInfo


def read_info(run_dir: Path) -> RunInfo:
    """Returns the RunInfo of the run in `run_dir`. Raises DataError if the directory has no started run."""
    info = read_record(RunDirectory(run_dir).info, RunInfo)
    if info is None:
        raise DataError(f"{run_dir} holds no run: {RunDirectory.info.name} is missing")
    return info


def read_end(run_dir: Path) -> RunEnd | None:
    """Returns the end of the run, or None if it has not ended. Raises DataError for a damaged file."""
    return read_record(RunDirectory(run_dir).end, RunEnd)


def read_records(run_dir: str | Path) -> Iterator[RoundRecord]:
    """Yields the records in the order of their rounds."""
    for record, _ in read_from(Path(run_dir), 0):
        yield record


def last_record(run_dir: str | Path) -> RoundRecord | None:
    """The record of the last round; None before the first. Reads all, so that a damaged line is an error."""
    last = None
    for record in read_records(run_dir):
        last = record
    return last


def read_from(run_dir: Path, offset: int) -> Iterator[tuple[RoundRecord, int]]:
    """Yields each record after byte `offset` of the log, with the offset after it.

    A last line without a line end is still being written and is skipped. Raises DataError for a damaged line.
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
