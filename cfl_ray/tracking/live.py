"""The tracker of a run that reports to MLflow while it goes on, and never waits for it."""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import Timeout

from cfl_ray.tracking.delivery import Delivery, is_pending, point_at, reason, waiting_rounds
from cfl_ray.tracking.record import RoundRecord, RunInfo, Status
from cfl_ray.tracking.tracker import METRICS_LOG, Spool
from cfl_ray.tracking.uri import redact

PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # after a delivery (quicker rounds go out together), after one failure in a row, two ...
PAUSE_AT_FINISH_SECONDS = 0.5


class MlflowTracker:
    """Writes the run directory as Spool does; a daemon thread brings MLflow up to date from there."""

    def __init__(
        self,
        run_dir: str | Path,
        uri: str,  # see `resolve_uri`
        experiment: str,
        parent: str | Path | None = None,  # directory of a run that was started before: this one is shown nested in it
        finish_seconds: float = 20.0,  # longest wait of `finish` for a store that answered before; one attempt if it never did
        warn: Callable[[str], None] = logging.getLogger(__name__).warning,  # called from the thread too, never with a credential
    ):
        self.run_dir = Path(run_dir).absolute()
        self.uri = uri
        self.experiment = experiment
        self.parent = Path(parent).absolute() if parent else None
        self.finish_seconds = finish_seconds
        self.warn = warn
        self._spool = Spool(self.run_dir)

    def start(self, info: RunInfo) -> None:
        self._spool.start(info)
        point_at(self.run_dir, self.uri, self.experiment, self.parent)
        self._new = threading.Event()  # there is something to deliver
        self._finishing = threading.Event()  # the end is recorded: no more long pauses
        self._done = threading.Event()  # everything is delivered, or given up for now
        self._new.set()
        threading.Thread(target=self._deliver_until_done, name=f"mlflow-{self.run_dir.name}", daemon=True).start()

    def log(self, record: RoundRecord) -> None:
        self._spool.log(record)
        self._new.set()

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        self._spool.finish(status, summary)
        self._finishing.set()
        self._new.set()
        self._done.wait(self.finish_seconds)
        self._done.set()  # ends the thread after the attempt that is under way
        if is_pending(self.run_dir):
            left = waiting_rounds(self.run_dir)
            self.warn(f"MLflow at {redact(self.uri)} lacks {left} rounds and the end of {self.run_dir}: delivered at the next cfl-ray call")

    def _deliver_until_done(self) -> None:
        delivery = Delivery(self.run_dir, self.uri)
        reached, failures = False, 0
        while not self._done.is_set():
            finishing = self._finishing.is_set()
            self._new.clear()
            try:
                delivery.bring_up_to_date()
            except Timeout:  # another process is delivering this run
                self._new.set()
            except Exception as error:  # the boundary to MLflow: whatever it raises, training goes on
                self._new.set()
                failures += 1
                if failures == 1:
                    self._warn_of_outage(error)
                if finishing and not reached:
                    break
            else:
                reached, failures = True, 0
                if finishing:
                    break
            self._rest(failures)
        self._done.set()

    def _rest(self, failures: int) -> None:
        """Waits until there is something to deliver, and for a while in any case."""
        if self._finishing.is_set():
            self._done.wait(PAUSE_AT_FINISH_SECONDS)
        else:
            self._finishing.wait(PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)])
        self._new.wait()

    def _warn_of_outage(self, error: Exception) -> None:
        log = self.run_dir / METRICS_LOG
        self.warn(f"MLflow at {redact(self.uri)} does not take results ({reason(error, self.uri)}); the run goes on and keeps them in {log}")
