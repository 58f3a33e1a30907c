"""Tracker that delivers a live run to MLflow from a background thread, so that training never waits for MLflow."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from filelock import Timeout

from cfl_ray.errors.redaction import redact
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking.delivery import Delivery, is_pending, redacted_reason, set_destination, waiting_rounds
from cfl_ray.tracking.record import EndStatus, RoundRecord, RunInfo
from cfl_ray.tracking.tracker import FileTracker

# Pause after a successful delivery (faster rounds are delivered together), after one failure in a row, after two, ...
PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
PAUSE_AT_FINISH_SECONDS = 0.5
_warn_in_log = logging.getLogger(__name__).warning


class MlflowTracker:
    """Runs of MLflow (keys tracking.uri, tracking.experiment), delivered by a daemon thread from the run directory.

    The files are those of `FileTracker`.
    """

    def __init__(
        self,
        run_dir: str | Path,
        uri: str,  # see `resolve_uri`
        experiment: str,
        parent: str | Path | None = None,  # directory of the parent run, which was started before
        finish_seconds: float = 20.0,  # longest wait of `finish`; one attempt if no delivery has succeeded before
        warn: Callable[[str], None] = _warn_in_log,  # also called from the thread; the text has no credentials
        of_task: Collection[str] = (),  # as of `FileTracker`
    ) -> None:
        self.run_dir = Path(run_dir).absolute()
        self.uri = uri
        self.experiment = experiment
        self.parent = Path(parent).absolute() if parent else None
        self.finish_seconds = finish_seconds
        self.warn = warn
        self._files = FileTracker(self.run_dir, of_task)

    def start(self, info: RunInfo) -> None:
        self._files.start(info)
        set_destination(self.run_dir, self.uri, self.experiment, self.parent)
        self._new = threading.Event()  # there may be something to deliver
        self._finishing = threading.Event()  # the end is recorded: only short pauses from now on
        self._done = threading.Event()  # everything is delivered, or the delivery has given up
        self._new.set()
        threading.Thread(target=self._deliver_until_done, name=f"mlflow-{self.run_dir.name}", daemon=True).start()

    def log(self, record: RoundRecord) -> None:
        self._files.log(record)
        self._new.set()

    def finish(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        self._files.finish(status, summary)
        self._finishing.set()
        self._new.set()
        self._done.wait(self.finish_seconds)
        self._done.set()  # ends the thread after the attempt in progress
        if is_pending(self.run_dir):
            rounds = waiting_rounds(self.run_dir)
            self.warn(
                f"MLflow at {redact(self.uri)} lacks {rounds} rounds and the end of {self.run_dir}; "
                "the next cfl-ray command delivers them"
            )

    def _deliver_until_done(self) -> None:
        delivery = Delivery(self.run_dir, self.uri)
        succeeded, failures = False, 0
        while not self._done.is_set():
            finishing = self._finishing.is_set()
            self._new.clear()
            try:
                delivery.bring_up_to_date()
            except Timeout:  # another process is delivering this run
                self._new.set()
            except Exception as error:  # boundary to MLflow: no error of it ends the training
                self._new.set()
                failures += 1
                if failures == 1:
                    self._warn_of_outage(error)
                if finishing and not succeeded:
                    break
            else:
                succeeded, failures = True, 0
                if finishing:
                    break
            self._pause(failures)
        self._done.set()

    def _pause(self, failures: int) -> None:
        """Waits for at least the pause after so many failures, and until there is something to deliver."""
        if self._finishing.is_set():
            self._done.wait(PAUSE_AT_FINISH_SECONDS)
        else:
            self._finishing.wait(PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)])
        self._new.wait()

    def _warn_of_outage(self, error: Exception) -> None:
        log = RunDirectory(self.run_dir).metrics
        self.warn(
            f"MLflow at {redact(self.uri)} does not accept results ({redacted_reason(error, self.uri)}); "
            f"the run continues and keeps them in {log}"
        )
