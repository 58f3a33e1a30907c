"""Delivery of a run directory to a tracker: during the run, at its end, when it is resumed, or by a later command.

Records are in `metrics.jsonl` before any tracker receives them. The cursor, a file per tracker in the run directory,
holds the delivered part of the log, so that each record is delivered once, even after failures and kills.
"""

import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from filelock import Timeout

from cfl_ray.errors import FOREIGN, RunError, counted, text_of
from cfl_ray.errors.redaction import redact
from cfl_ray.plugins.calling import is_user_file, place_of, raised_at
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import lock_in_folder, private_umask, read_json, read_record, sync, write_json
from cfl_ray.system.signals import Flag
from cfl_ray.tracking.record import (
    BEST_ROUND,
    KEPT,
    RoundRecord,
    RunEnd,
    RunInfo,
    read_end,
    read_from,
    read_info,
    read_records,
)

MLFLOW = "mlflow"  # the only tracker to which a later command can deliver
BATCH_ROUNDS = 40
BATCH_METRICS = 900  # with phases and tags below MLflow's limit of 1,000 per request: a batch is a single request
LOCK_SECONDS = 5.0
# Pause after a successful delivery (faster rounds are delivered together), after 1 failure in a row, after 2, ...
PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# after 1, 2, ... failures once the run has written its last record; only the first if the tracker failed before
PAUSES_AT_END_SECONDS = (0.5, 1.0, 2.0, 4.0)
_SAID_BUSY = 3  # refusals in a row, each after the pause that the server asks for, after which a line says so
_T = TypeVar("_T")
_CPU_SECONDS = 0.5  # that this process computes while it waits for a tracker, which count as progress
_SAID_WAIT_SECONDS = 10.0  # of `finish` for an open tracker, after which a line says what is left


class Undeliverable(RunError):
    """The tracker does not take these results before a user acts, as if something was deleted from it."""


@runtime_checkable
class Tracker(Protocol):
    """Receives the records of a run in a separate thread: open, log ..., close.

    A resumed run repeats this with a new object. Optional: `log_batch(records)`, called instead of `log` with up to 40
    waiting rounds; `log_wait(text)`, which receives the reason for a long wait of a round; `needs_open`: while it
    is true, the tracker is opened again; `is_busy(error)`: whether an error only says that the tracker is busy; and
    `progress`: a number that grows with each answer of the tracker.
    """

    def open(self, run_dir: Path, info: RunInfo, after: int) -> None:
        """Begins. after: the last round that was delivered; 0: none. `run_dir` is the directory of a method."""

    def log(self, record: RoundRecord) -> None:
        """Receives the metrics of a round, in the order of rounds."""

    def close(self, end: RunEnd | None) -> None:
        """Ends. end: status and summary of the run; None if the run has no end, or the tracker lacks records."""


@dataclass(frozen=True)
class Cursor:
    """The delivered part of a run."""

    delivered: int = 0  # bytes of the metrics log
    round: int | None = None  # of the last delivered record; None: not known
    ended_ms: int | None = None  # time of the delivered end; None: the run is live for the tracker


def update_cursor(run_dir: Path, name: str, **values: Any) -> None:
    """Changes values in the cursor file of a tracker; the file of MLflow also holds its `Destination`."""
    file = RunDirectory(run_dir).cursor(name)
    write_json(file, (read_json(file) or {}) | values)


def read_cursor(run_dir: Path, name: str) -> Cursor:
    """The cursor of a tracker; at the start of the log if no record was delivered."""
    return read_record(RunDirectory(run_dir).cursor(name), Cursor) or Cursor()


def lock(run_dir: Path, seconds: float = LOCK_SECONDS) -> AbstractContextManager[Any]:
    """Context that excludes other processes from the delivery of the run to MLflow. Raises filelock.Timeout."""
    return lock_in_folder(RunDirectory(run_dir).mlflow_lock, seconds)


class Delivery:
    """Delivers a run directory to a tracker. Its methods can be called again after an exception."""

    def __init__(self, run_dir: Path, name: str, tracker: Tracker) -> None:
        """name: of the tracker, unique in the run."""
        self.run_dir, self.name, self.tracker = run_dir, name, tracker
        self.was_opened = self.is_closed = False
        self.wait = ""  # reason for the wait of the run, until it is delivered
        self.progress = 0  # number of operations that need not be repeated

    def bring_up_to_date(self, lock_seconds: float = LOCK_SECONDS) -> int:
        """Delivers all records that the tracker lacks, and the end, and returns the number of delivered rounds.

        Raises filelock.Timeout if another process is delivering this run, and any error of the tracker.
        """
        with self._alone(lock_seconds):
            end = read_end(self.run_dir)  # read first, so that all records before the end are delivered
            is_new = self._open()
            before, rounds = read_cursor(self.run_dir, self.name), 0
            cursor = replace(before, ended_ms=before.ended_ms if end else None)
            if is_new:  # a power failure may have truncated the log: delivered records are identified by their rounds
                cursor = replace(cursor, delivered=0)
            log_batch = getattr(self.tracker, "log_batch", None)
            for records, offset in batches(self.run_dir, cursor, BATCH_ROUNDS if log_batch else 1):
                if records and log_batch:
                    log_batch(records)
                elif records:
                    self.tracker.log(records[0])
                sync(RunDirectory(self.run_dir).metrics)  # the log must be on disk before the cursor counts it
                cursor = replace(cursor, delivered=offset, round=records[-1].round if records else cursor.round)
                before = self._save(before, cursor)
                rounds += len(records)
            if wait := self.wait:
                getattr(self.tracker, "log_wait", lambda text: None)(wait)
                self.wait = "" if self.wait == wait else self.wait
            if end and cursor.ended_ms != end.time_ms:
                self.tracker.close(self._with_kept(end))
                self.is_closed = True
                cursor = replace(cursor, ended_ms=end.time_ms)
            self._save(before, cursor)
            return rounds

    def give_up(self, end: RunEnd | None) -> None:
        """Closes a tracker that lacks records, or whose run has no recorded end.

        end: an end that could not be written to the disk; None: no end.
        """
        if self.was_opened and not self.is_closed:
            with self._alone(0):
                self.tracker.close(end and self._with_kept(end))

    def _with_kept(self, end: RunEnd) -> RunEnd:
        """The end with the metrics of the kept round as KEPT/METRIC, if its models are not those of the last round.

        The metrics of a tracker's run end with the last round, and means over runs are of kept rounds.
        """
        if not end.kept:
            return end
        kept = next((record.metrics for record in read_records(self.run_dir) if record.round == end.kept), {})
        named = {f"{KEPT}/{name}": value for name, value in kept.items() if name not in (BEST_ROUND, "round_seconds")}
        return replace(end, summary=replace(end.summary, metrics={**end.summary.metrics, **named}))

    def _open(self) -> bool:
        """Opens the tracker unless it is open, and returns whether it opened it."""
        if self.was_opened and not getattr(self.tracker, "needs_open", False):
            return False
        cursor = read_cursor(self.run_dir, self.name)
        self.tracker.open(self.run_dir, read_info(self.run_dir), cursor.round or 0)
        self.progress += not self.was_opened  # again after a failure is no progress
        self.was_opened = True
        return True

    def _save(self, before: Cursor, cursor: Cursor) -> Cursor:
        if cursor != before:
            update_cursor(self.run_dir, self.name, **asdict(cursor))
            self.progress += 1
        return cursor

    def _alone(self, seconds: float) -> AbstractContextManager[Any]:
        """The lock for MLflow, to which other processes also deliver; else a private umask, for trackers with files."""
        return lock(self.run_dir, seconds) if self.name == MLFLOW else private_umask()


class LiveDelivery:
    """A daemon thread that delivers a live run to a tracker, so that training does not wait for the tracker."""

    def __init__(
        self, delivery: Delivery, warn: Callable[[str], None], finish_seconds: float, patience: float = math.inf
    ) -> None:
        """finish_seconds: longest wait of `finish` without progress. patience: its longest wait in all, seconds."""
        self.delivery, self.warn, self.finish_seconds, self.patience = delivery, warn, finish_seconds, patience
        self._uri = str(self._optional(lambda tracker: tracker.uri, ""))  # of MLflow
        self.unrecorded_end: RunEnd | None = None
        self._ends = Flag()  # no record follows: pauses are short from now on
        self._new = Flag()  # records may be undelivered
        self._done = Flag()  # all records are delivered, or the delivery has given up
        # for the thread
        self._failures = self._failures_at_end = 0  # failed attempts in a row; those of them after `end`
        self._retries_at_end = len(PAUSES_AT_END_SECONDS)  # attempts after the first failure after `end`
        self._refusals = 0  # attempts in a row that ended because the tracker is busy
        self._undeliverable: Undeliverable | None = None

    def start(self) -> None:
        self._new.set()
        name = f"{self.delivery.name}-{self.delivery.run_dir.name}"
        threading.Thread(target=self._deliver_until_done, name=name, daemon=True).start()

    def wake(self) -> None:
        """Signals new records."""
        self._new.set()

    def tell(self, text: str) -> None:
        """Sets the reason for the wait of the run."""
        self.delivery.wait = text
        self._new.set()

    def end(self) -> None:
        """Signals that no record follows."""
        self._ends.set()
        self._new.set()

    def finish(self) -> None:
        """Waits, after `end`, until all records are delivered.

        At most `patience` seconds, and `finish_seconds` without progress. A line says what is left if it takes long.
        """
        progress: object = None
        began = moved = time.monotonic()
        opened: float | None = None  # when the tracker was seen to be open
        is_said = False
        while not self._done.is_set():
            now = time.monotonic()
            seen = *self._progress(), *computed()
            if seen != progress:
                progress, moved = seen, now
            left = min(moved + self.finish_seconds, began + self.patience) - now
            if left <= 0:
                break
            opened = now if opened is None and self.delivery.was_opened else opened
            if opened is not None and not is_said and now - opened >= _SAID_WAIT_SECONDS:
                is_said = True
                more = began + self.patience - now
                limit = "" if more == math.inf else f", for at most {more:.0f} s more (tracking.patience)"
                self.warn(f"{self._title()} still receives {self._left()}{limit}")
            self._done.wait(min(left, 1.0))
        self._done.set()  # ends the thread after the attempt in progress
        if lacks(self.delivery.run_dir, self.delivery.name):
            command = "the next cfl-ray command with the same output, or cfl-ray resume, delivers them"
            later = f"; {command}" if self.delivery.name == MLFLOW else ""
            if self._undeliverable is not None:
                later = f": {self._undeliverable}. Then {command}"
            log = RunDirectory(self.delivery.run_dir).metrics
            self.warn(f"{self._title()} lacks {self._left()}, which {log} keeps{later}")

    def _left(self) -> str:
        """The rounds and the end that the tracker lacks, in words."""
        rounds = waiting_rounds(self.delivery.run_dir, self.delivery.name)
        lost = f"{counted(rounds, 'round')} and " * bool(rounds)
        return f"{lost}the end of {self.delivery.run_dir}"

    def _deliver_until_done(self) -> None:
        try:
            while not self._done.is_set() and not self._attempt():
                self._pause()
            with suppress(*FOREIGN):  # the warning is given already
                self.delivery.give_up(self.unrecorded_end)
        finally:
            self._done.set()

    def _attempt(self) -> bool:
        """Delivers what the tracker lacks. Returns whether no attempt follows: all is delivered, or it gives up."""
        self._new.clear()
        ends, progress = self._ends.is_set(), self._progress()
        try:
            self.delivery.bring_up_to_date()
        except Timeout:  # another process is delivering this run
            self._new.set()
            return False
        except FOREIGN as error:  # boundary to user code and services: their errors must not end the training
            self._new.set()
            if self._is_busy(error):
                self._refusals += 1
                if self._refusals == _SAID_BUSY:
                    self.warn(f"{self._title()} asks to come back later (429 or 503); results reach it later")
                return False
            self._refusals = 0
            self._undeliverable = error if isinstance(error, Undeliverable) else None
            self._failures += 1
            if self._failures == 1:
                self._warn_of(error)
            if not ends:
                self._retries_at_end = 1
                return False
            self._failures_at_end = 1 if self._progress() > progress else self._failures_at_end + 1
            return not self.delivery.was_opened or self._failures_at_end > self._retries_at_end
        self._failures, self._retries_at_end = 0, len(PAUSES_AT_END_SECONDS)
        self._refusals, self._undeliverable = 0, None
        return ends

    def _progress(self) -> tuple[int, float]:
        """Operations that have succeeded, and the progress that the tracker reports within one."""
        return self.delivery.progress, self._optional(lambda tracker: float(tracker.progress), 0.0)

    def _is_busy(self, error: BaseException) -> bool:
        return self._optional(lambda tracker: bool(tracker.is_busy(error)), False)

    def _optional(self, read: Callable[[Any], _T], default: _T) -> _T:
        """A value of the tracker; the default if the tracker does not have it, or fails."""
        try:
            return read(self.delivery.tracker)
        except FOREIGN:
            return default

    def _pause(self) -> None:
        """Waits for the pause after the failures so far, and then until records may be undelivered."""
        if self._refusals:
            self._done.wait(PAUSES_SECONDS[min(self._refusals, len(PAUSES_SECONDS)) - 1])
        elif self._ends.is_set():
            self._done.wait(PAUSES_AT_END_SECONDS[max(0, self._failures_at_end - 1)])
        else:
            self._ends.wait(PAUSES_SECONDS[min(self._failures, len(PAUSES_SECONDS) - 1)])
        self._new.wait()

    def _warn_of(self, error: BaseException) -> None:
        log = RunDirectory(self.delivery.run_dir).metrics
        place = raised_at(self.delivery.tracker, error)
        line = f" (line {place[1]})" if place and is_user_file(place[0]) else ""
        reason = f"{type(error).__name__}: {redacted_reason(error, self._uri)}{line}"
        self.warn(f"{self._title()} failed: {reason}; the run continues, and {log} keeps its results")

    def _title(self) -> str:
        if self.delivery.name == MLFLOW:
            return f"MLflow at {redact(self._uri)}"
        return f"tracker {self.delivery.name} ({place_of(self.delivery.tracker)})"


def computed() -> tuple[int, int]:
    """The number of imported modules, and of half seconds of CPU time, of this process: both only grow.

    It is progress of a tracker that has not answered: the import of its package, also for another log of this process,
    and what a library computes itself, such as the tables of a new SQLite store; both take long on a busy machine.
    """
    return len(sys.modules), int(time.process_time() / _CPU_SECONDS)


def redacted_reason(error: BaseException, uri: str) -> str:
    """Returns the beginning of an exception's text without the credentials of `uri`, at most 400 characters.

    Without what SQLAlchemy appends to the reason of a database: the statement, and a link to its own pages.
    """
    reason = re.split(r" \[SQL: | \(Background on this error at: ", text_of(error))[0]
    return redact(reason or type(error).__name__, uri)[:400]


def lacks(run_dir: Path, name: str) -> bool:
    """Returns whether a tracker lacks a record or the end of the run, from a few file operations."""
    cursor, end, log = read_cursor(run_dir, name), read_end(run_dir), RunDirectory(run_dir).metrics
    return (log.exists() and log.stat().st_size != cursor.delivered) or (
        end is not None and end.time_ms != cursor.ended_ms
    )


def waiting_rounds(run_dir: Path, name: str) -> int:
    """Returns the number of recorded rounds that a tracker lacks."""
    last = read_cursor(run_dir, name).round
    return sum(last is None or record.round > last for record in read_records(run_dir))


def batches(run_dir: Path, cursor: Cursor, rounds: int) -> Iterator[tuple[list[RoundRecord], int]]:
    """Yields the records after the cursor in batches of at most `rounds`, with the offset after each batch.

    Rounds that were delivered already and repeated after a power failure are skipped.
    """
    batch: list[RoundRecord] = []
    end = cursor.delivered
    for record, after in read_from(run_dir, cursor.delivered):
        size = sum(len(waiting.metrics) for waiting in batch) + len(record.metrics)
        if batch and (len(batch) == rounds or size > BATCH_METRICS):
            yield batch, end
            batch = []
        if cursor.round is None or record.round > cursor.round:
            batch.append(record)
        end = after
    if end != cursor.delivered:
        yield batch, end
