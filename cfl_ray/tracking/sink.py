"""Trackers beside MLflow: they receive a run's records from its files, each with a cursor of its own.

Records are in `metrics.jsonl` before any tracker sees them. A tracker that fails does not end the run: what it lacks is
delivered with the next record, at the end, or when the run is resumed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from cfl_ray.plugins.calling import place_of
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import private_umask, read_json, write_json
from cfl_ray.tracking.record import EndStatus, RoundRecord, RunEnd, RunInfo
from cfl_ray.tracking.tracker import Tracker, read_end, read_from, read_info


@runtime_checkable
class Sink(Protocol):
    """A tracker as a user writes it: open, log ..., close. A resumed run does all of it again with a new object."""

    def open(self, run_dir: Path, info: RunInfo, after: int) -> None:
        """Begins. after: the last round that was delivered; 0: none. `run_dir` is the directory of one method."""

    def log(self, record: RoundRecord) -> None:
        """Receives the metrics of a round, in the order of rounds. The next round waits for it."""

    def close(self, end: RunEnd | None) -> None:
        """Ends. end: status and summary of the run; None where it stopped and can be resumed."""


@dataclass(frozen=True)
class SinkCursor:
    """How much of a run a sink has."""

    delivered: int = 0  # bytes of the metrics log
    round: int = 0  # the last one


class Relay:
    """Delivers one run directory to one sink. No exception of the sink goes further than a warning.

    name: of the tracker, unique in the run. warn: receives one line when a delivery fails for the first time.
    """

    def __init__(self, name: str, sink: Sink, run_dir: Path, warn: Callable[[str], None]) -> None:
        self.name, self.sink, self.run_dir, self.warn = name, sink, run_dir, warn
        self.file = RunDirectory(run_dir).cursor(name)
        self.is_open = self.warned = False

    def deliver(self) -> None:
        """Delivers what the sink lacks."""
        self._safely(self._deliver)

    def finish(self) -> None:
        """Delivers what the sink lacks and ends it."""
        self._safely(self._deliver)
        if self.is_open:
            self._safely(lambda: self.sink.close(read_end(self.run_dir)))
            self.is_open = False

    def _deliver(self) -> None:
        cursor = SinkCursor(**(read_json(self.file) or {}))
        if not self.is_open:
            self.sink.open(self.run_dir, read_info(self.run_dir), cursor.round)
            self.is_open = True
        for record, offset in read_from(self.run_dir, cursor.delivered):
            self.sink.log(record)
            write_json(self.file, asdict(SinkCursor(offset, record.round)))

    def _safely(self, step: Callable[[], None]) -> None:
        try:
            with private_umask():
                step()
        except Exception as error:  # boundary to a user's code and to other services: no error of it ends the training
            if not self.warned:
                reason = str(error).splitlines()[0][:400] if str(error) else ""
                self.warn(
                    f"tracker {self.name} ({place_of(self.sink)}) failed: {type(error).__name__}: {reason}; the run "
                    f"continues, and {self.run_dir} keeps its results"
                )
            self.warned = True


class RelayingTracker:
    """A tracker, and sinks that get the same records."""

    def __init__(self, tracker: Tracker, relays: Sequence[Relay]) -> None:
        self.tracker, self.relays, self.run_dir = tracker, relays, tracker.run_dir

    def start(self, info: RunInfo) -> None:
        self.tracker.start(info)
        for relay in self.relays:
            relay.deliver()

    def log(self, record: RoundRecord) -> None:
        self.tracker.log(record)
        for relay in self.relays:
            relay.deliver()

    def finish(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        self.tracker.finish(status, summary)
        for relay in self.relays:
            relay.finish()
