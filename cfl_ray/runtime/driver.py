"""Drives the methods of an experiment one after another and keeps what they report."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from cfl_ray.core.errors import DataError, Stopped
from cfl_ray.report.figures import write_figures
from cfl_ray.runtime.atwork import CONFIG
from cfl_ray.runtime.journal import Journal, grown_by
from cfl_ray.runtime.results import MethodResult, Moves, Results
from cfl_ray.runtime.server import Report
from cfl_ray.runtime.session import Session
from cfl_ray.runtime.setup import Setup
from cfl_ray.tracking import (
    ARTIFACTS,
    ROUND_METRICS,
    RUN_METRICS,
    MlflowTracker,
    RoundRecord,
    RunInfo,
    Spool,
    Tracker,
    flatten,
    read_end,
    read_records,
    redact,
    resolve_uri,
    summarise,
)
from cfl_ray.tracking.files import write_text
from cfl_ray.tracking.record import Status


@dataclass
class Watcher:
    """Told what happens while a run goes on; the default says nothing."""

    def preparing(self, what: str, done: int = 0, total: int = 0) -> None: ...
    def started(self, setup: Setup, run_dir: Path | None, facts: dict[str, str]) -> None: ...
    def method(self, label: str, report: Report) -> None: ...
    def round(self, label: str, report: Report) -> None: ...
    def warn(self, text: str) -> None: ...


class Driver:
    """Drives a session through the methods and keeps what it reports."""

    def __init__(self, setup: Setup, session: Session, directory: Path | None, watcher: Watcher, facts: dict[str, str]):
        self.setup, self.session, self.directory, self.watcher, self.facts = setup, session, directory, watcher, facts
        self.experiment = setup.experiment
        self.stopped = False  # on request
        self.uri = resolve_uri(self.experiment.tracking, self.experiment.output) if self.experiment.tracking.enabled and directory else None

    def all_methods(self) -> Results:
        parent = self._tracker(None)
        status = "FAILED"
        try:
            results = {}
            for label in self.setup.methods:
                if self.stopped:
                    raise Stopped(f"stopped before {label}, as asked")
                results[label] = self._method(label)
            if parent is not None:
                write_figures(self.directory / ARTIFACTS, {label: result.records for label, result in results.items()})
            status = "FINISHED"
        except (KeyboardInterrupt, Stopped):
            status = "KILLED"
            raise
        finally:
            if parent is not None:
                self._finish(parent, status, {})
        return Results(results, self.directory, redact(self.uri) if self.uri else None, self.facts)

    def _method(self, label: str) -> MethodResult:
        directory = self.directory / label if self.directory else None
        records = list(read_records(directory)) if directory else []
        if directory is not None and (end := read_end(directory)) is not None and end.status == "FINISHED":
            return MethodResult(label, records, dict(end.summary.metrics))
        tracker, moves = self._tracker(label), Moves(directory)
        status, summary = "FAILED", {}
        try:
            report = self.session.begin(label)
            self._take(report, records, moves, tracker)  # a round that was saved just before a crash, and not yet kept here
            self.watcher.method(label, report)
            while not (report.finished or report.stop):
                report = self.session.advance()
                self._take(report, records, moves, tracker)
                self.watcher.round(label, report)
            self.stopped = report.stop
            if not report.finished:
                raise Stopped(f"stopped after round {report.round} of {label}, as asked")
            summary = self._summary(records, moves, report)
            if tracker is not None:
                federation = grown_by(self.setup.federation, Journal(directory).until(self.experiment.rounds))
                moves.write(directory / ARTIFACTS / "assignments.parquet", federation)
                write_figures(directory / ARTIFACTS, {label: records})
                write_text(directory / ARTIFACTS / CONFIG, redact(self.experiment.to_yaml()))
            status = "FINISHED"
        except (KeyboardInterrupt, Stopped):
            status = "KILLED"
            raise
        finally:
            if tracker is not None:
                self._finish(tracker, status, summary)
        return MethodResult(label, records, summary)

    def _finish(self, tracker: Tracker, status: Status, summary: dict[str, float]) -> None:
        """Records the end. That it cannot be recorded hides no other failure: the run is resumed from its checkpoints, not from its end."""
        try:
            tracker.finish(status, summary)
        except (OSError, DataError) as error:
            if status == "FINISHED":
                raise
            self.watcher.warn(f"the end of {tracker.run_dir} was not recorded: {error}")

    def _take(self, report: Report, records: list[RoundRecord], moves: Moves, tracker: Tracker | None) -> None:
        """Keeps a round; one that was replayed after a fault is there already."""
        if not report.metrics or (records and report.round <= records[-1].round):
            return
        record = RoundRecord(report.round, {name: value for name, value in report.metrics.items() if name in ROUND_METRICS}, report.time_ms)
        records.append(record)
        moves.add(report)
        if tracker is not None:
            tracker.log(record)

    def _summary(self, records: list[RoundRecord], moves: Moves, report: Report) -> dict[str, float]:
        clustered = any("num_clusters" in record.metrics for record in records)
        summary = summarise(records, self.experiment.evaluation.target, moves.rounds if clustered else None)
        return summary | {name: value for name, value in report.metrics.items() if name in RUN_METRICS}

    def _tracker(self, label: str | None) -> Tracker | None:
        """The tracker of one method, or of the comparison of all (None), started; None where nothing is kept."""
        if self.directory is None:
            return None
        directory = self.directory / label if label else self.directory
        if self.uri is None:
            tracker: Tracker = Spool(directory)
        else:
            parent = self.directory if label else None
            tracker = MlflowTracker(directory, self.uri, self.experiment.tracking.experiment, parent, warn=self.watcher.warn)
        data = self.experiment.data
        tags = {
            "dataset": data.source,
            "partition": data.partition.kind if data.shift.kind == "none" else f"{data.shift.kind}/{data.partition.kind}",
            "seed": self.experiment.seed,
            "config_hash": self.experiment.config_hash,
            "git_commit": _git_commit(),
        }
        name = f"{self.experiment.name}/{label}" if label else self.experiment.name
        method = self.setup.methods[label].name if label else ""
        facts = {f"session.{key}": value for key, value in self.facts.items()}
        options = {f"method.{key}": str(value) for key, value in vars(self.setup.methods[label]).items()} if label else {}
        tracker.start(RunInfo(name, method, tags | ({"method": method} if method else {}), flatten(self.experiment.to_dict()) | facts | options))
        return tracker


def _git_commit() -> str:
    """The commit of the code at work, or "unknown" outside a checkout."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"
