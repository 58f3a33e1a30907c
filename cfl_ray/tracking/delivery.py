"""Brings MLflow up to date with run directories: while a run goes on, at its end, and at any later call if that failed.

`mlflow.json` in the run directory says how far MLflow is. Whoever delivers holds the lock `mlflow.lock` and reads it first, so a running
experiment and a later `cfl-ray` call can both try.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from os.path import relpath
from pathlib import Path

from filelock import FileLock, Timeout

from cfl_ray.core.errors import DataError, UserError
from cfl_ray.tracking.files import read_json, write_json
from cfl_ray.tracking.mlflow import MlflowRun
from cfl_ray.tracking.record import RoundRecord
from cfl_ray.tracking.tracker import ARTIFACTS, METRICS_LOG, read_end, read_from, read_info
from cfl_ray.tracking.uri import answers, redact, with_credentials

CURSOR, LOCK = "mlflow.json", "mlflow.lock"
BATCH_ROUNDS = 40  # of about 20 metrics: below the 1000 that MLflow takes in one request, so a batch arrives whole or not at all
LOCK_SECONDS = 5.0
MOVE_SECONDS = 60.0  # a delivery to the place before may be under way


@dataclass(frozen=True)
class Cursor:
    """How far MLflow is with one run."""

    uri: str  # where it is delivered to, without credentials
    experiment: str
    parent: str | None = None  # directory of the parent run, relative to this one
    run_id: str | None = None  # None: not created yet
    delivered: int = 0  # bytes of the metrics log
    ended_ms: int | None = None  # time of the end that MLflow knows; None: it holds the run as running


@dataclass(frozen=True)
class Delivered:
    """What `deliver_pending` brought to MLflow."""

    run_dir: Path
    rounds: int


class Delivery:
    """Delivers one run directory to one URI. After an exception it can simply be called again."""

    def __init__(self, run_dir: Path, uri: str):
        self.run_dir = run_dir
        self.uri = uri
        self._run: MlflowRun | None = None

    def bring_up_to_date(self, lock_seconds: float = LOCK_SECONDS) -> int:
        """Returns the rounds delivered. Raises filelock.Timeout if another process is at it, ConnectionError or what MLflow raises."""
        with FileLock(self.run_dir / LOCK, timeout=lock_seconds):
            try:
                return self._deliver(self._open())
            except BaseException:
                self._run = None  # opening it again finds out what the last request did
                raise

    def ensure(self) -> str:
        """Returns the id of the run in MLflow, which exists from now on."""
        with FileLock(self.run_dir / LOCK, timeout=LOCK_SECONDS):
            return self._open().run_id

    def _open(self) -> Cursor:
        cursor = read_cursor(self.run_dir)
        if self._run and self._run.run_id == cursor.run_id:
            return cursor
        if not answers(self.uri):
            raise ConnectionError("no connection")
        parent_id = Delivery(self.run_dir / cursor.parent, self.uri).ensure() if cursor.parent else None
        self._run = MlflowRun.open(self.uri, cursor.experiment, read_info(self.run_dir), cursor.run_id, parent_id)
        if self._run.run_id == cursor.run_id:
            return cursor
        return self._save(replace(cursor, run_id=self._run.run_id, delivered=0, ended_ms=None))

    def _deliver(self, cursor: Cursor) -> int:
        end = read_end(self.run_dir)  # before the records: what is logged before the end is then among them
        if end is None and cursor.ended_ms is not None:
            self._run.reopen()
            cursor = self._save(replace(cursor, ended_ms=None))
        rounds = 0
        for records, offset in _batches(self.run_dir, cursor.delivered):
            self._run.log(records)
            cursor = self._save(replace(cursor, delivered=offset))
            rounds += len(records)
        if end and cursor.ended_ms != end.time_ms:
            self._run.end(end, self.run_dir / ARTIFACTS)
            self._save(replace(cursor, ended_ms=end.time_ms))
        return rounds

    def _save(self, cursor: Cursor) -> Cursor:
        write_json(self.run_dir / CURSOR, asdict(cursor))
        return cursor


def point_at(run_dir: Path, uri: str, experiment: str, parent: Path | None) -> None:
    """Notes where the run in `run_dir` is delivered to. Another place than before gets the whole run."""
    target = Cursor(redact(uri), experiment, relpath(parent, run_dir) if parent else None)
    fields = read_json(run_dir / CURSOR)
    if fields is None:  # nobody can be delivering it
        write_json(run_dir / CURSOR, asdict(target))
    elif replace(Cursor(**fields), run_id=None, delivered=0, ended_ms=None) != target:
        with FileLock(run_dir / LOCK, timeout=MOVE_SECONDS):
            write_json(run_dir / CURSOR, asdict(target))


def read_cursor(run_dir: Path) -> Cursor:
    """Returns how far MLflow is. Raises DataError for a run that was never pointed at a store."""
    fields = read_json(run_dir / CURSOR)
    if fields is None:
        raise DataError(f"{run_dir} was not started with MLflow: {CURSOR} is missing")
    return Cursor(**fields)


def waiting_rounds(run_dir: Path) -> int:
    """Returns the recorded rounds that MLflow does not have yet."""
    return sum(1 for _ in read_from(run_dir, read_cursor(run_dir).delivered))


def is_pending(run_dir: Path) -> bool:
    """Returns whether MLflow lacks anything of the run: a few file operations, no import of mlflow."""
    cursor, end, log = read_cursor(run_dir), read_end(run_dir), run_dir / METRICS_LOG
    return cursor.run_id is None or (log.exists() and log.stat().st_size > cursor.delivered) or (end is not None and end.time_ms != cursor.ended_ms)


def deliver_pending(
    output: str | Path, uri: str | None = None, seconds: float = 10.0, warn: Callable[[str], None] = lambda line: None
) -> list[Delivered]:
    """Delivers what runs below `output` (down to output/*/*) could not, and returns what went out within `seconds`.

    `uri`: with credentials, for runs that go there; credentials are not stored. `warn` gets a line for each store that is still out of reach.
    """
    waiting = list(_waiting(Path(output), warn))
    delivered: list[Delivered] = []
    if waiting:
        arguments = (waiting, uri, time.monotonic() + seconds, delivered, warn)
        worker = threading.Thread(target=_deliver_each, args=arguments, name="mlflow-pending", daemon=True)
        worker.start()
        worker.join(seconds)
    return list(delivered)


def _waiting(output: Path, warn: Callable[[str], None]) -> Iterator[Path]:
    for pattern in (f"*/{CURSOR}", f"*/*/{CURSOR}"):
        for path in sorted(output.glob(pattern)):
            try:
                if is_pending(path.parent):
                    yield path.parent
            except UserError as error:
                warn(str(error))


def _deliver_each(waiting: list[Path], uri: str | None, deadline: float, delivered: list[Delivered], warn: Callable[[str], None]) -> None:
    out_of_reach: set[str] = set()
    for run_dir in waiting:
        shown = read_cursor(run_dir).uri
        if shown in out_of_reach or time.monotonic() > deadline:
            continue
        target = with_credentials(shown, uri)
        try:
            if target is None:
                raise ConnectionError("set MLFLOW_TRACKING_URI to it, with the credentials")
            delivered.append(Delivered(run_dir, Delivery(run_dir, target).bring_up_to_date(lock_seconds=0)))
        except Timeout:
            continue  # the run itself is delivering
        except Exception as error:  # the boundary to MLflow: whatever it raises, nothing is lost and the command goes on
            warn(f"MLflow at {shown} lacks results of {run_dir} ({reason(error, target or shown)}); the next cfl-ray call tries again")
            if isinstance(error, ConnectionError):
                out_of_reach.add(shown)


def reason(error: BaseException, uri: str) -> str:
    """Returns the first line of an exception's text, short and without credentials."""
    lines = redact(str(error), uri).splitlines() or [type(error).__name__]
    return lines[0][:400]


def _batches(run_dir: Path, offset: int) -> Iterator[tuple[list[RoundRecord], int]]:
    records: list[RoundRecord] = []
    for record, offset in read_from(run_dir, offset):
        records.append(record)
        if len(records) == BATCH_ROUNDS:
            yield records, offset
            records = []
    if records:
        yield records, offset
