"""Tracker that delivers to MLflow, live and by later commands.

The cursor `mlflow.json` in the run directory also holds the destination. A delivery acquires the lock `mlflow.lock`
before it reads the cursor, so a live run and a later `cfl-ray` command do not conflict.
"""

import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path
from typing import Any

from filelock import Timeout

from cfl_ray.config import TrackingConfig
from cfl_ray.errors import DataError, UserError, command, counted, some_of
from cfl_ray.errors.redaction import redact
from cfl_ray.run_directory import RUNS_OF_STUDY, RunDirectory
from cfl_ray.security.credentials import hides, with_credentials
from cfl_ray.security.signing import is_signed, sign
from cfl_ray.system.files import read_record
from cfl_ray.tracking.delivery import MLFLOW, Delivery, computed, lacks, lock, redacted_reason, update_cursor
from cfl_ray.tracking.mlflow import (
    MlflowRun,
    accepts_connection,
    heed_rate_limit,
    is_refusal,
    is_unavailable,
    page_of,
    resolve_uri,
    store_below,
)
from cfl_ray.tracking.progress import ServerProgress
from cfl_ray.tracking.record import RoundRecord, RunEnd, RunInfo, read_end, read_info

_RUNS = "\0"  # stands for the runs in a text
# in the cursor of a run that MLflow does not have
_NOTHING: dict[str, Any] = {"delivered": 0, "round": None, "ended_ms": None, "files": {}}
_PURPOSE = "destination of a run's results"
_LOADED_MS = 1000 * time.time()  # a run that began later is a new one, of this process
_ATTEMPTED: set[str] = set()  # unique ids of the runs that this process has tried to create
_KNOWN: set[tuple[str, str]] = set()  # runs that this process has found in MLflow, or created there, by URI and id


@dataclass(frozen=True)
class Destination:
    """The destination of a run's results."""

    uri: str  # without credentials
    experiment: str
    parent: str | None = None  # directory of the parent run, relative to this run's directory
    run_id: str | None = None  # None: the run does not exist in MLflow yet
    experiment_id: str | None = None
    files: dict[str, str] = field(default_factory=dict)  # that have arrived: digests by names
    attempted: bool = True  # whether an earlier attempt may have created the run; False: no
    signature: str | None = None  # for this directory, by the user who chose the destination

    @classmethod
    def read(cls, run_dir: Path) -> "Destination":
        """The recorded destination of a run. Raises DataError without one."""
        destination = read_record(RunDirectory(run_dir).mlflow, cls)
        if destination is None:
            raise DataError(f"{run_dir} was not started with MLflow: {RunDirectory.mlflow.name} is missing")
        return destination

    def is_chosen(self, run_dir: Path) -> bool:
        """Whether this user signed this destination for this run directory."""
        return is_signed(_PURPOSE, run_dir, self.uri, self.signature)


class Mlflow:
    """Runs of MLflow (keys tracking.uri, tracking.experiment)."""

    def __init__(self, uri: str, experiment: str, parent: str | Path | None = None, is_recorded: bool = False) -> None:
        """uri: see `resolve_uri`. parent: directory of the parent run, which has started already.

        is_recorded: whether the runs already have this destination; otherwise it is recorded and signed.
        """
        self.uri, self.experiment, self.parent = uri, experiment, Path(parent).absolute() if parent else None
        self.is_recorded = is_recorded
        self._run: MlflowRun | None = None
        self._progress = ServerProgress()

    @classmethod
    def of(cls, run_dir: Path, uri: str) -> "Mlflow":
        """The tracker of an earlier run. uri: its destination, with credentials.

        Raises DataError if the recorded parent is not a directory that contains the run.
        """
        recorded = Destination.read(run_dir)
        parent = (run_dir / recorded.parent).resolve() if recorded.parent else None
        if parent is not None and parent not in run_dir.resolve().parents:
            raise DataError(
                f"{RunDirectory(run_dir).mlflow} is damaged: {recorded.parent!r} is no folder that contains {run_dir}"
            )
        return cls(uri, recorded.experiment, parent, is_recorded=True)

    @property
    def progress(self) -> float:
        """Grows with answers that no earlier attempt had, of all runs of this process."""
        return self._progress.value

    @property
    def needs_open(self) -> bool:
        """True after a failed request: `open` then finds out what MLflow has of the run."""
        return self._run is None

    def open(self, run_dir: Path, info: RunInfo, after: int) -> None:
        """Creates the run if MLflow does not have it; sets a resumed run back to RUNNING."""
        self.run_dir, self._run = run_dir, None
        self._progress.begin()
        run = self._created(run_dir, info)
        if read_end(run_dir) is None:
            run.reopen()
        self._run = run

    def log(self, record: RoundRecord) -> None:
        self.log_batch([record])

    def log_batch(self, records: Sequence[RoundRecord]) -> None:
        with self._opened() as run:
            run.log(records)
            self._progress.keep()

    def log_wait(self, text: str) -> None:
        with self._opened() as run:
            run.log_wait(text)

    def close(self, end: RunEnd | None) -> None:
        if end is None or self._run is None:
            self._run = None
            return
        with self._opened() as run:
            files = Destination.read(self.run_dir).files

            def keep(name: str, digest: str) -> None:
                files[name] = digest
                update_cursor(self.run_dir, MLFLOW, files=files)
                self._progress.keep()

            run.end(end, RunDirectory(self.run_dir).artifacts, files, keep)
            if end.status == "FINISHED":
                run.log_models(RunDirectory(self.run_dir).models, end.kept or end.summary.round)

    @contextmanager
    def _opened(self) -> Iterator[MlflowRun]:
        """Context with the run; after an error in it, `needs_open` is true, unless a request was refused."""
        run, self._run = self._run, None
        assert run is not None, "open() makes the run"
        self._progress.begin()
        try:
            yield run
        except Exception as error:
            if is_refusal(error):
                self._run = run
            raise
        self._run = run

    @staticmethod
    def is_busy(error: Exception) -> bool:
        """Whether the server says to come back later (429, 503); from then on requests wait as it says."""
        if not is_refusal(error) and not is_unavailable(error):
            return False
        heed_rate_limit()
        return True

    def set_destination(self, run_dir: Path, is_new: bool = False) -> None:
        """Records the destination of a run. is_new: whether the run began in this process.

        If the destination changes, the whole run is delivered to the new destination.
        """
        uri, parent = redact(self.uri), relpath(self.parent, run_dir) if self.parent else None
        recorded = Destination.read(run_dir) if RunDirectory(run_dir).mlflow.exists() else None
        is_same = recorded is not None and (recorded.uri, recorded.experiment) == (uri, self.experiment)
        if recorded is None or not is_same or recorded.parent != parent or not recorded.is_chosen(run_dir):
            signature = sign(_PURPOSE, run_dir, uri)
            attempted = recorded is not None or not is_new
            anew = {"run_id": None, **_NOTHING, "attempted": attempted}
            anew = {} if is_same else anew
            values = {"uri": uri, "experiment": self.experiment, "parent": parent, "signature": signature}
            update_cursor(run_dir, MLFLOW, **values, **anew)

    def _created(self, run_dir: Path, info: RunInfo) -> MlflowRun:
        if not self.is_recorded:
            self.set_destination(run_dir, is_new=info.time_ms > _LOADED_MS and info.uid not in _ATTEMPTED)
        if hides(self.uri):
            raise ConnectionError("its credentials are not known here; set MLFLOW_TRACKING_URI to it, with them")
        if not accepts_connection(self.uri):
            raise ConnectionError("no connection")
        recorded = Destination.read(run_dir)
        if not recorded.attempted:
            update_cursor(run_dir, MLFLOW, attempted=True)
        _ATTEMPTED.add(info.uid)
        run = MlflowRun.open(
            self.uri, self.experiment, info, recorded.run_id, self._parent_id, recorded.attempted, self._progress
        )
        if run.run_id != recorded.run_id:
            ids = {"run_id": run.run_id, "experiment_id": run.experiment_id}
            update_cursor(run_dir, MLFLOW, **ids, **_NOTHING)
        _KNOWN.add((self.uri, run.run_id))
        return run

    def _parent_id(self) -> str | None:
        """The id of the parent run, which is created if MLflow does not have it; None without a parent."""
        if self.parent is None:
            return None
        if known := self._known(self.parent):  # without the lock, which the parent has while its files are sent
            return known
        with lock(self.parent):
            of_parent = Mlflow(self.uri, self.experiment, None, self.is_recorded)
            of_parent._progress = self._progress
            return self._known(self.parent) or of_parent._created(self.parent, read_info(self.parent)).run_id

    def _known(self, parent: Path) -> str | None:
        """The id of the parent run if this process has found it in MLflow, or created it there."""
        known = read_record(RunDirectory(parent).mlflow, Destination)
        if known is None or (known.uri, known.experiment) != (redact(self.uri), self.experiment):
            return None
        return known.run_id if known.run_id and (self.uri, known.run_id) in _KNOWN else None


def where_to_look(run_dir: Path, uri: str) -> str:
    """The page of the run at `uri`, as text, with the command that serves a file store."""
    destination = read_record(RunDirectory(run_dir).mlflow, Destination) or Destination(uri, "")
    if destination.run_id is None or destination.experiment_id is None:  # not delivered, or by an earlier version
        page = ""
    else:
        page = page_of(destination.experiment_id, destination.run_id)
    if destination.uri.startswith("http"):
        return f"{destination.uri.rstrip('/')}/{page}"
    to_view = shlex.join(["mlflow", "ui", "--backend-store-uri", destination.uri])
    return f"{destination.uri}; view the results with: {to_view}, at http://127.0.0.1:5000/{page}"


# ---- later commands


def deliver_pending(
    output: str | Path,
    uri: str | None = None,
    seconds: float = 10.0,
    warn: Callable[[str], None] = lambda line: None,
    run_dir: Path | None = None,
) -> dict[Path, int]:
    """Delivers the undelivered records of runs below `output` (output/*, output/*/*, runs of studies).

    Returns the number of delivered rounds of each run that was delivered, by its directory.

    The client of MLflow sends the user's token. So results are sent only to `uri`, to MLFLOW_TRACKING_URI, to the store
    below `output`, and to destinations that this user has chosen on this machine; a warning names others.

    uri: a destination with credentials, for the runs that have this destination; credentials are not stored.
    seconds: longest wait once a run is open at its destination, and before that without progress, which is also what
        this process computes (`computed`); deliveries in progress end in the background.
    warn: receives a line for each undelivered run.
    run_dir: a run whose records are delivered too, as it may be in another place than `output`.
    """
    chosen = (uri, os.environ.get("MLFLOW_TRACKING_URI"), store_below(output))
    known = {redact(destination) for destination in chosen if destination}
    pending: list[tuple[Path, str]] = []
    unknown: dict[str, list[Path]] = {}
    for directory, destination in _pending(Path(output), run_dir, warn):
        if destination.uri in known or destination.is_chosen(directory):
            pending.append((directory, destination.uri))
        else:
            unknown.setdefault(destination.uri, []).append(directory)
    for unknown_uri, run_dirs in unknown.items():
        warn(_not_sent(unknown_uri, run_dirs, Path(output)))
    delivered: dict[Path, int] = {}
    if pending:
        deliveries = _Deliveries(pending, uri, delivered)
        deliveries.wait(seconds)
        for text, run_dirs in list(deliveries.failed.items()):
            warn(text.replace(_RUNS, some_of(run_dirs)))
        if left := dict(deliveries.left):
            warn(
                f"MLflow at {next(iter(left.values()))} still lacks results of {some_of([*left])} after {seconds:.0f} "
                "s; the next cfl-ray command delivers what does not arrive while this one runs"
            )
    return dict(delivered)


def deliver_earlier_results(
    tracking: TrackingConfig,
    output: str | Path,
    warn: Callable[[str], None] = lambda line: None,
    run_dir: Path | None = None,
) -> list[str]:
    """As `deliver_pending`, for an experiment below this `output`. Returns a line on each delivered run."""
    if not tracking.uses_mlflow:
        return []
    delivered = deliver_pending(output, resolve_uri(tracking, output), warn=warn, run_dir=run_dir)
    parts = [f"{counted(rounds, 'round')} of {run}" if rounds else str(run) for run, rounds in delivered.items()]
    return [f"Delivered {part} to MLflow, which was out of reach before." for part in parts]


def _not_sent(uri: str, run_dirs: list[Path], output: Path) -> str:
    runs = (
        f"{run_dirs[0]} names"
        if len(run_dirs) == 1
        else f"{run_dirs[0]} and {counted(len(run_dirs) - 1, 'more run')} name"
    )
    to_send = command("check", f"tracking.uri={uri}", f"output={output}")
    return (
        f"{runs} MLflow at {uri}, where nothing is sent: neither the experiment nor MLFLOW_TRACKING_URI names it, and "
        f"you did not start them here; to send their results there: {to_send}"
    )


def _pending(output: Path, run_dir: Path | None, warn: Callable[[str], None]) -> Iterator[tuple[Path, Destination]]:
    """Yields the runs of which MLflow lacks a part, from a few file operations and without importing mlflow."""
    places = [(output, folders) for folders in ("*", "*/*", f"*/{RUNS_OF_STUDY}/*")]
    if run_dir is not None:
        places += [(run_dir.absolute(), folders) for folders in (".", "*")]
    seen: set[Path] = set()
    for place, folders in places:
        for path in sorted(place.glob(f"{folders}/{RunDirectory.mlflow.name}")):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                destination = Destination.read(path.parent)
                if destination.run_id is None or lacks(path.parent, MLFLOW):
                    yield path.parent, destination
            except UserError as error:
                warn(str(error))


class _Deliveries:
    """A thread that delivers one run after another."""

    def __init__(self, pending: Sequence[tuple[Path, str]], uri: str | None, delivered: dict[Path, int]) -> None:
        """delivered: receives the rounds of each run that was delivered."""
        self.left = dict(pending)  # redacted destinations by the runs that were not tried yet, or not to the end
        self.failed: dict[str, list[Path]] = {}  # runs that MLflow lacks a part of, by a text with `_RUNS` for them
        self._uri, self._delivered = uri, delivered
        self._delivery: Delivery | None = None  # the present one
        self._is_over = False  # no other run is begun

    def wait(self, seconds: float) -> None:
        """Delivers, and waits as `deliver_pending` does."""
        worker = threading.Thread(target=self._deliver_each, name="mlflow-pending", daemon=True)
        worker.start()
        moved, seen, is_open = time.monotonic(), computed(), False
        while worker.is_alive() and time.monotonic() - moved < seconds:
            is_open = is_open or (self._delivery is not None and self._delivery.was_opened)
            if not is_open and (now := computed()) != seen:
                moved, seen = time.monotonic(), now
            worker.join(0.1)
        self._is_over = True

    def _deliver_each(self) -> None:
        unreachable: set[str] = set()
        for run_dir, redacted_uri in list(self.left.items()):
            if self._is_over:
                return
            if redacted_uri not in unreachable:
                try:
                    self._deliver(run_dir, with_credentials(redacted_uri, self._uri))
                except Timeout:
                    pass  # another process, such as the run itself, is delivering it
                except Exception as error:  # boundary to MLflow: its errors must not end the command
                    reason = redacted_reason(error, with_credentials(redacted_uri, self._uri) or redacted_uri)
                    lacks = f"MLflow at {redacted_uri} lacks results of {_RUNS}"
                    text = f"{lacks} ({reason.replace(str(run_dir), _RUNS)}); the next cfl-ray command tries again"
                    self.failed.setdefault(text, []).append(run_dir)
                    if isinstance(error, ConnectionError):
                        unreachable.add(redacted_uri)
            del self.left[run_dir]

    def _deliver(self, run_dir: Path, uri: str | None) -> None:
        """uri: the destination with credentials; None: they are not known."""
        if uri is None:
            raise ConnectionError("set MLFLOW_TRACKING_URI to it, with the credentials")
        self._delivery = Delivery(run_dir, MLFLOW, Mlflow.of(run_dir, uri))
        self._delivered[run_dir] = self._delivery.bring_up_to_date(lock_seconds=0)
