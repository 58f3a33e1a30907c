"""Delivery of run directories to MLflow: during a run, at its end, and, if that failed, by a later command.

The cursor `mlflow.json` in the run directory says how much of the run MLflow has. A delivery first acquires the lock
`mlflow.lock` and then reads the cursor, so a live run and a later `cfl-ray` command can both try.
"""

import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from os.path import relpath
from pathlib import Path

from filelock import FileLock, Timeout

from cfl_ray.errors import DataError, UserError
from cfl_ray.errors.redaction import redact
from cfl_ray.run_directory import RunDirectory
from cfl_ray.security.credentials import hides, with_credentials
from cfl_ray.security.signing import is_signed, sign
from cfl_ray.system.files import PRIVATE, read_record, sync, write_json
from cfl_ray.tracking.mlflow import MlflowRun
from cfl_ray.tracking.record import RoundRecord
from cfl_ray.tracking.tracker import read_end, read_from, read_info
from cfl_ray.tracking.uri import accepts_connection

_PURPOSE = "destination of a run's results"
BATCH_ROUNDS = 40
BATCH_METRICS = 900  # with phases and tags MLflow accepts 1,000 in a request, so a batch arrives whole or not at all
_LINE_BYTES = 1 << 20  # more than a line of the metrics log has
LOCK_SECONDS = 5.0
MOVE_SECONDS = 60.0  # a delivery to the previous destination may be in progress


@dataclass(frozen=True)
class Cursor:
    """How much of one run MLflow has."""

    uri: str  # destination, without credentials
    experiment: str
    parent: str | None = None  # directory of the parent run, relative to that of this run
    run_id: str | None = None  # None: the run does not exist in MLflow yet
    delivered: int = 0  # bytes of the metrics log that are delivered
    round: int | None = None  # of the last record in them; None: not known
    ended_ms: int | None = None  # time of the end that is delivered; None: the run is RUNNING in MLflow
    signature: str | None = None  # of the destination for this directory, by the user who chose it


@dataclass(frozen=True)
class Delivered:
    """Rounds of one run that `deliver_pending` delivered."""

    run_dir: Path
    rounds: int


class Delivery:
    """Delivers one run directory to one URI. Can be called again after an exception."""

    def __init__(self, run_dir: Path, uri: str) -> None:
        self.run_dir = run_dir
        self.uri = uri
        self._run: MlflowRun | None = None

    def bring_up_to_date(self, lock_seconds: float = LOCK_SECONDS) -> int:
        """Delivers everything that MLflow lacks and returns the number of rounds delivered.

        Raises filelock.Timeout if another process is delivering this run, ConnectionError, or any error of MLflow.
        """
        with FileLock(RunDirectory(self.run_dir).mlflow_lock, timeout=lock_seconds, mode=PRIVATE):
            try:
                run, cursor = self._open()
                return self._deliver(run, cursor)
            except BaseException:
                self._run = None  # the next call opens the run again, which finds out what the last request did
                raise

    def ensure(self) -> str:
        """Creates the run in MLflow if it does not exist, and returns its id."""
        with FileLock(RunDirectory(self.run_dir).mlflow_lock, timeout=LOCK_SECONDS, mode=PRIVATE):
            run, _ = self._open()
            return run.run_id

    def _open(self) -> tuple[MlflowRun, Cursor]:
        cursor = read_cursor(self.run_dir)
        if not _fits(self.run_dir, cursor):  # opened again, the run finds out which rounds MLflow has
            self._run, cursor = None, self._save(replace(cursor, delivered=0, round=None))
        if self._run and self._run.run_id == cursor.run_id:
            return self._run, cursor
        if hides(self.uri):
            raise ConnectionError("its credentials are not known here; set MLFLOW_TRACKING_URI to it, with them")
        if not accepts_connection(self.uri):
            raise ConnectionError("no connection")
        parent_id = Delivery(_parent(self.run_dir, cursor), self.uri).ensure() if cursor.parent else None
        run = MlflowRun.open(self.uri, cursor.experiment, read_info(self.run_dir), cursor.run_id, parent_id)
        self._run = run
        if run.run_id != cursor.run_id:
            cursor = self._save(replace(cursor, run_id=run.run_id, delivered=0, round=None, ended_ms=None))
        return run, cursor

    def _deliver(self, run: MlflowRun, cursor: Cursor) -> int:
        end = read_end(self.run_dir)  # before the records, so that all records logged before the end are delivered
        if end is None and cursor.ended_ms is not None:
            run.reopen()
            cursor = self._save(replace(cursor, ended_ms=None))
        rounds = 0
        for records, offset in _batches(self.run_dir, cursor.delivered):
            run.log(records)
            sync(RunDirectory(self.run_dir).metrics)  # a power failure must not take what the cursor counts
            cursor = self._save(replace(cursor, delivered=offset, round=records[-1].round))
            rounds += len(records)
        if end and cursor.ended_ms != end.time_ms:
            run.end(end, RunDirectory(self.run_dir).artifacts)
            if end.status == "FINISHED":
                run.log_models(RunDirectory(self.run_dir).models, end.summary.round)
            self._save(replace(cursor, ended_ms=end.time_ms))
        return rounds

    def _save(self, cursor: Cursor) -> Cursor:
        write_json(RunDirectory(self.run_dir).mlflow, asdict(cursor))
        return cursor


def set_destination(run_dir: Path, uri: str, experiment: str, parent: Path | None) -> None:
    """Stores the destination of the run in `run_dir`. If it changes, the whole run is delivered to the new one."""
    signature = sign(_PURPOSE, _signed(run_dir, redact(uri)))
    target = Cursor(redact(uri), experiment, relpath(parent, run_dir) if parent else None, signature=signature)
    if not RunDirectory(run_dir).mlflow.exists():  # without a cursor no delivery can be in progress
        write_json(RunDirectory(run_dir).mlflow, asdict(target))
        return
    cursor = read_cursor(run_dir)
    if replace(cursor, run_id=None, delivered=0, round=None, ended_ms=None) == target:
        return
    with FileLock(RunDirectory(run_dir).mlflow_lock, timeout=MOVE_SECONDS, mode=PRIVATE):
        cursor = replace(read_cursor(run_dir), signature=signature)
        is_same = replace(cursor, run_id=None, delivered=0, round=None, ended_ms=None) == target
        write_json(RunDirectory(run_dir).mlflow, asdict(cursor if is_same else target))


def _signed(run_dir: Path, uri: str) -> list[str]:
    return [str(run_dir.resolve()), uri]


def read_cursor(run_dir: Path) -> Cursor:
    """Returns the cursor of a run. Raises DataError for a run without a destination."""
    cursor = read_record(RunDirectory(run_dir).mlflow, Cursor)
    if cursor is None:
        raise DataError(f"{run_dir} was not started with MLflow: {RunDirectory.mlflow.name} is missing")
    return cursor


def _parent(run_dir: Path, cursor: Cursor) -> Path:
    """The directory of the parent run. Raises DataError where it is not one of those that contain this run's."""
    parent = (run_dir / str(cursor.parent)).resolve()
    if parent not in run_dir.resolve().parents:
        raise DataError(
            f"{RunDirectory(run_dir).mlflow} is damaged: {cursor.parent!r} is no folder that contains {run_dir}"
        )
    return parent


def _fits(run_dir: Path, cursor: Cursor) -> bool:
    """Whether the metrics log begins with what the cursor counts as delivered.

    Not where a power failure has cut it: the rounds that were done again have lines of another length.
    """
    if not cursor.delivered:
        return True
    try:
        with open(RunDirectory(run_dir).metrics, "rb") as log:
            log.seek(max(0, cursor.delivered - _LINE_BYTES))
            before = log.read(cursor.delivered - log.tell())
            if log.tell() != cursor.delivered or not before.endswith(b"\n"):
                return False
        last = RoundRecord.from_line(before[:-1].rpartition(b"\n")[2])
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return cursor.round in (None, last.round)


def waiting_rounds(run_dir: Path) -> int:
    """Returns the number of recorded rounds that MLflow lacks."""
    cursor = read_cursor(run_dir)
    return sum(1 for _ in read_from(run_dir, cursor.delivered if _fits(run_dir, cursor) else 0))


def is_pending(run_dir: Path) -> bool:
    """Returns whether MLflow lacks any part of the run, from a few file operations and without importing mlflow."""
    cursor, end, log = read_cursor(run_dir), read_end(run_dir), RunDirectory(run_dir).metrics
    return (
        cursor.run_id is None
        or (log.exists() and log.stat().st_size != cursor.delivered)
        or (end is not None and end.time_ms != cursor.ended_ms)
    )


def deliver_pending(
    output: str | Path, uri: str | None = None, seconds: float = 10.0, warn: Callable[[str], None] = lambda line: None
) -> list[Delivered]:
    """Delivers what the runs below `output` (output/*, output/*/*, those of studies) could not.

    Returns what was delivered.

    The client of MLflow sends the user's token. So results go only to `uri`, to MLFLOW_TRACKING_URI and to the store
    below `output`, and to the destinations that this user has chosen on this machine; others are named in a warning.

    uri: a destination with its credentials, for runs that are delivered there; credentials are not stored.
    seconds: longest wait; deliveries in progress end in the background.
    warn: receives a line for each run that could not be delivered.
    """
    chosen = (uri, os.environ.get("MLFLOW_TRACKING_URI"), f"sqlite:///{(Path(output) / 'mlflow.db').resolve()}")
    known = {redact(one) for one in chosen if one}
    pending: list[tuple[Path, str]] = []
    unknown: dict[str, list[Path]] = {}
    for run_dir, cursor in _pending(Path(output), warn):
        if cursor.uri in known or is_signed(_PURPOSE, _signed(run_dir, cursor.uri), cursor.signature):
            pending.append((run_dir, cursor.uri))
        else:
            unknown.setdefault(cursor.uri, []).append(run_dir)
    for there, run_dirs in unknown.items():
        warn(_not_sent(there, run_dirs, Path(output)))
    delivered: list[Delivered] = []
    if pending:
        arguments = (pending, uri, time.monotonic() + seconds, delivered, warn)
        worker = threading.Thread(target=_deliver_each, args=arguments, name="mlflow-pending", daemon=True)
        worker.start()
        worker.join(seconds)
    return list(delivered)


def _not_sent(uri: str, run_dirs: list[Path], output: Path) -> str:
    runs = f"{run_dirs[0]} names" if len(run_dirs) == 1 else f"{run_dirs[0]} and {len(run_dirs) - 1} more runs name"
    command = shlex.join(["cfl-ray", "check", f"tracking.uri={uri}", f"output={output}"])
    return (
        f"{runs} MLflow at {uri}, where nothing is sent: neither the experiment nor MLFLOW_TRACKING_URI names it, and "
        f"you did not start them here; to send their results there: {command}"
    )


def _pending(output: Path, warn: Callable[[str], None]) -> Iterator[tuple[Path, Cursor]]:
    for folders in ("*", "*/*", "*/*/*/seed-*/*"):
        for path in sorted(output.glob(f"{folders}/{RunDirectory.mlflow.name}")):
            try:
                if is_pending(path.parent):
                    yield path.parent, read_cursor(path.parent)
            except UserError as error:
                warn(str(error))


def _deliver_each(
    pending: list[tuple[Path, str]],
    uri: str | None,
    deadline: float,
    delivered: list[Delivered],
    warn: Callable[[str], None],
) -> None:
    unreachable: set[str] = set()
    for run_dir, redacted_uri in pending:
        if redacted_uri in unreachable or time.monotonic() > deadline:
            continue
        target = with_credentials(redacted_uri, uri)
        try:
            if target is None:
                raise ConnectionError("set MLFLOW_TRACKING_URI to it, with the credentials")
            delivered.append(Delivered(run_dir, Delivery(run_dir, target).bring_up_to_date(lock_seconds=0)))
        except Timeout:
            continue  # another process, such as the run itself, is delivering it
        except Exception as error:  # boundary to MLflow: no error of it loses results or ends the command
            reason = redacted_reason(error, target or redacted_uri)
            warn(
                f"MLflow at {redacted_uri} lacks results of {run_dir} ({reason}); the next cfl-ray command tries again"
            )
            if isinstance(error, ConnectionError):
                unreachable.add(redacted_uri)


def redacted_reason(error: BaseException, uri: str) -> str:
    """Returns the first line of an exception's text without the credentials of `uri`, at most 400 characters."""
    lines = redact(str(error), uri).splitlines() or [type(error).__name__]
    return lines[0][:400]


def _batches(run_dir: Path, offset: int) -> Iterator[tuple[list[RoundRecord], int]]:
    """Yields the records after byte `offset` of the log in batches, with the offset that follows each batch."""
    records: list[RoundRecord] = []
    end = offset
    for record, after in read_from(run_dir, offset):
        size = sum(len(one.metrics) for one in records) + len(record.metrics)
        if records and (len(records) == BATCH_ROUNDS or size > BATCH_METRICS):
            yield records, end
            records = []
        records.append(record)
        end = after
    if records:
        yield records, end
