"""The results of a run in files of its directory, which do not depend on any process or server.

The identity and configuration (RunInfo) are written first, then a line for each round before `log` returns, and the end
(RunEnd) last; a live or interrupted run has no end. Trackers receive the records from these files.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import BinaryIO

from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import append_line, cut_torn_line, open_private, private_folder, write_json
from cfl_ray.tracking.delivery import Delivery, LiveDelivery, Tracker
from cfl_ray.tracking.record import BEST_ROUND, EndStatus, RoundRecord, RunEnd, RunInfo, last_record, read_info

_warn_in_log = logging.getLogger(__name__).warning


class RunLog:
    """Writes the reports of a run to its directory, in the order start, log ..., finish, and wakes its trackers.

    A resumed run has a new RunLog on the same directory.
    """

    def __init__(
        self,
        run_dir: str | Path,
        trackers: Mapping[str, Tracker] | None = None,  # by name
        warn: Callable[[str], None] = _warn_in_log,  # also called from other threads; the text has no credentials
        finish_seconds: float = 20.0,  # longest wait of `finish` for a tracker without progress
        patience: float = math.inf,  # longest wait of `finish` in all, seconds
    ) -> None:
        self.run_dir = Path(run_dir).absolute()
        self._last: RoundRecord | None = None
        self._log: BinaryIO | None = None  # open between `start` and `finish`
        self._deliveries = [
            LiveDelivery(Delivery(self.run_dir, name, tracker), warn, finish_seconds, patience)
            for name, tracker in (trackers or {}).items()
        ]

    def start(self, info: RunInfo) -> None:
        """Opens the run. If the directory already holds a run, `info` is ignored and the recorded info remains."""
        files = RunDirectory(self.run_dir)
        private_folder(files.artifacts)
        if not files.info.exists():
            write_json(files.info, asdict(info))
        files.end.unlink(missing_ok=True)
        cut_torn_line(files.metrics)
        self._last = last_record(self.run_dir)
        self._log = open_private(files.metrics, "ab")
        for delivery in self._deliveries:
            delivery.start()

    def log(self, record: RoundRecord) -> None:
        """Writes the metrics of a round as a line. A round that is already recorded is ignored."""
        if self._last is not None and record.round <= self._last.round:
            return
        append_line(self._open_log(), record.to_line().encode())
        self._last = record
        for delivery in self._deliveries:
            delivery.wake()

    def tell(self, text: str) -> None:
        """Reports the reason for the wait of the run to the trackers; the text is not saved in a file."""
        for delivery in self._deliveries:
            delivery.tell(text)

    def finish(self, status: EndStatus, summary: Mapping[str, float], reason: str = "") -> None:
        """Closes the run with its RUN_METRICS; the files in `artifacts/` are part of its result.

        reason: why it ended before its last round; empty: it did not.
        """
        last = self._last or RoundRecord(0, {}, read_info(self.run_dir).time_ms)
        kept = int(last.metrics.get(BEST_ROUND, 0))
        end = RunEnd(status, RoundRecord(last.round, summary, last.time_ms), reason=reason, kept=kept)
        try:
            os.fsync(self._open_log().fileno())
            values = {"round": last.round, "metrics": dict(end.summary.metrics), "time_ms": last.time_ms}
            absent = [name for name in ("reason", "kept") if not getattr(end, name)]
            own = {name: value for name, value in asdict(end).items() if name not in absent}
            write_json(RunDirectory(self.run_dir).end, own | {"summary": values})
        except OSError:  # a full disk: trackers with a server still receive the end of the run
            for delivery in self._deliveries:
                delivery.unrecorded_end = replace(end, status="FAILED")
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Closes the log file and ends the deliveries. A run without an end can be resumed."""
        if self._log is not None:
            self._log.close()
            self._log = None
            for delivery in self._deliveries:  # all deliver at the same time
                delivery.end()
            for delivery in self._deliveries:
                delivery.finish()

    def _open_log(self) -> BinaryIO:
        assert self._log is not None, "start() opens the log"
        return self._log
