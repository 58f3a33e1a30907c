"""Drives the methods of an experiment one after another and records what they report.

The end of a method (figures, and what MLflow lacks) is written beside the rounds of the next one.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from cfl_ray.core.diagnostics import ReportedDiagnostic
from cfl_ray.errors import DataError, RunStopped
from cfl_ray.methods import full_label
from cfl_ray.results.client_metrics import ClientMetrics
from cfl_ray.results.diagnostics_log import DiagnosticsLog
from cfl_ray.results.export import save_models
from cfl_ray.results.found_runs import FoundRun
from cfl_ray.results.reassignments import Reassignments
from cfl_ray.results.reporting import write_report_of
from cfl_ray.results.results import MethodResult, Results
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.journal import Journal, grown_by
from cfl_ray.runtime.load import load_trained
from cfl_ray.runtime.prepare import Setup
from cfl_ray.runtime.round_report import RoundReport
from cfl_ray.runtime.session import Session
from cfl_ray.system.files import drafted, write_text
from cfl_ray.tracking import (
    RUN_METRICS,
    RoundRecord,
    RunInfo,
    RunLog,
    flatten,
    new_trackers,
    read_end,
    read_records,
    redact,
    resolve_uri,
    summarise,
)
from cfl_ray.tracking.record import EndStatus, primary_of, score_metrics_of


@dataclass
class Watcher:
    """Receives what happens during a run; the default ignores it."""

    def preparing(self, what: str, done: int = 0, total: int = 0) -> None:
        """Something is prepared; `total` 0: of unknown size."""

    def started(self, setup: Setup, run_dir: Path | None, facts: dict[str, str]) -> None:
        """The run begins."""

    def method(self, label: str, report: RoundReport) -> None:
        """A method begins, or goes on after the round of `report`."""

    def round(self, label: str, report: RoundReport) -> None:
        """A round is complete."""

    def warn(self, text: str) -> None:
        """Something is wrong that does not end the run."""


@dataclass(frozen=True)
class StudyPlace:
    """The place of a run in a study."""

    root: Path  # folder of the study, which has the parent run of all its cells
    setting: str
    method: str  # label


class Driver:
    """Drives a session through the methods and records what it reports."""

    def __init__(
        self,
        setup: Setup,
        session: Session,
        directory: Path | None,
        watcher: Watcher,
        facts: dict[str, str],
        study: StudyPlace | None = None,
    ):
        self.setup, self.session, self.directory, self.watcher, self.facts = setup, session, directory, watcher, facts
        self.study = study  # None: the run is no cell of one
        self.experiment = setup.experiment
        self.primary = setup.task.metrics[0]
        self.of_task = frozenset(score_metrics_of([metric.name for metric in setup.task.metrics]))
        self.stopped = False  # on request
        self.writer = ThreadPoolExecutor(1, "end-of-method")
        self.ending: Future[None] | None = None  # the end of the method before
        self.uri: str | None = None  # of MLflow; None: results stay in files
        if self.experiment.tracking.uses_mlflow and directory:
            self.uri = resolve_uri(self.experiment.tracking, self.experiment.output)

    def all_methods(self) -> Results:
        """The results of every method. Raises RunStopped when a request ended the run."""
        parent = self._run_log(None)
        status: EndStatus = "FAILED"
        results: dict[str, MethodResult] = {}
        try:
            for label in self.setup.methods:
                if self.stopped:
                    raise RunStopped(f"stopped before {label}, as asked")
                results[label] = self._method(label)
            self._check_ending(wait=True)
            if self.directory is not None:
                write_figures(
                    RunDirectory(self.directory).artifacts, {label: result.records for label, result in results.items()}
                )
                self._write_report(self.directory, results)
            status = "FINISHED"
        except (KeyboardInterrupt, RunStopped):
            status = "KILLED"
            raise
        finally:
            self.writer.shutdown()  # waits for the end of the last method
            if parent is not None:
                self._finish(parent, status, _comparison(results))
        return Results(results, self.directory, redact(self.uri) if self.uri else None, self.facts)

    def _method(self, label: str) -> MethodResult:
        """Runs one method to its end; one that finished earlier is read from its files."""
        directory = RunDirectory(self.directory).method(label).path if self.directory else None
        records = list(read_records(directory)) if directory else []
        if directory is not None and (end := read_end(directory)) is not None and end.status == "FINISHED":
            return self._result(label, records, dict(end.summary.metrics))
        run_log, moves, clients, diagnostics = (
            self._run_log(label),
            Reassignments(directory),
            ClientMetrics(directory, self.setup.task.score_names),
            DiagnosticsLog(directory),
        )
        try:
            report = self._rounds(label, records, moves, clients, diagnostics, run_log)
            summary = self._summary(records, moves, report)
            self._check_ending(wait=True)
            if self.uri is not None and directory is not None and self.experiment.tracking.log_models:
                # here, not with the end of the method: torch.export must not run beside the training of the next one
                trained = load_trained(self.setup, label, directory.parent)
                save_models(trained, RunDirectory(directory).models, self.watcher.warn)
        except BaseException as error:
            status: EndStatus = "KILLED" if isinstance(error, (KeyboardInterrupt, RunStopped)) else "FAILED"
            if run_log is not None:
                self._finish(run_log, status, {})
            raise
        self.ending = self.writer.submit(self._end, directory, label, records, moves, run_log, summary)
        return self._result(label, records, summary, diagnostics.kept, clients.kept)

    def _result(
        self,
        label: str,
        records: list[RoundRecord],
        summary: dict[str, float],
        reported: Sequence[ReportedDiagnostic] = (),
        clients: pa.Table | None = None,
    ) -> MethodResult:
        if (run_dir := self.directory) is None:
            trained = self.session.trained()
            return MethodResult(label, records, summary, open_trained=trained, reported=reported, clients=clients)
        directory = RunDirectory(run_dir).method(label).path
        return MethodResult(label, records, summary, directory, lambda: load_trained(self.setup, label, run_dir))

    def _end(
        self,
        directory: Path | None,
        label: str,
        records: list[RoundRecord],
        moves: Reassignments,
        run_log: RunLog | None,
        summary: dict[str, float],
    ) -> None:
        """Writes what belongs to a method that is finished. A run that is killed before finds it to do when resumed."""
        status: EndStatus = "FAILED"
        try:
            if directory is not None:
                self._write_artifacts(directory, label, records, moves)
            status = "FINISHED"
        finally:
            if run_log is not None:
                self._finish(run_log, status, summary)

    def _write_report(self, directory: Path, results: dict[str, MethodResult]) -> None:
        """Writes the page of the run. A failure to draw it ends no run."""
        if not self.experiment.tracking.report or self.study is not None:  # a study has one page for all its runs
            return
        try:
            run = FoundRun(directory, self.experiment, Results(results, directory))
            write_report_of([run], RunDirectory(directory).report)
        except Exception as error:
            again = f"`cfl-ray report {directory} -o report.html` tries it again"
            self.watcher.warn(f"the report was not written: {type(error).__name__}: {error}; {again}")

    def _check_ending(self, wait: bool = False) -> None:
        """Raises the error of the end of the method before, if it is done by now. wait: until it is done."""
        if self.ending is not None and (wait or self.ending.done()):
            ending, self.ending = self.ending, None
            ending.result()

    def _rounds(
        self,
        label: str,
        records: list[RoundRecord],
        moves: Reassignments,
        clients: ClientMetrics,
        diagnostics: DiagnosticsLog,
        run_log: RunLog | None,
    ) -> RoundReport:
        """Records the rounds of the method. Raises RunStopped when a request ended the run before the last one."""
        tell = self.watcher.method
        for report in self.session.rounds(label):  # first the restored one, which may not be recorded yet
            self._record(report, records, moves, clients, diagnostics, run_log)
            tell(label, report)
            tell = self.watcher.round
            self._check_ending()
        self.stopped = report.stop
        if not report.finished:
            raise RunStopped(f"stopped after round {report.round} of {label}, as asked")
        return report

    def _record(
        self,
        report: RoundReport,
        records: list[RoundRecord],
        moves: Reassignments,
        clients: ClientMetrics,
        diagnostics: DiagnosticsLog,
        run_log: RunLog | None,
    ) -> None:
        """Records a round, in each file that does not have it: one that was replayed after a fault may be in all, or
        in some where a power failure has cut the others.
        """
        if not report.metrics:
            return
        moves.add(report.round, report.moved)
        if report.scores_MV is not None:
            clients.add(report.round, report.scores_MV)
        diagnostics.add(report.round, {name: report.metrics[name] for name in report.numbers}, report.diagnostics)
        if records and report.round <= records[-1].round:
            return
        run_only = RUN_METRICS.keys() | {f"newcomer_{self.primary.name}", f"newcomer_{self.primary.name}_tuned"}
        metrics = {name: value for name, value in report.metrics.items() if name not in run_only}
        of_task = self.of_task.union(report.numbers)
        record = RoundRecord(report.round, metrics, report.time_ms, of_task, report.phase, report.events)
        records.append(record)
        if run_log is not None:
            run_log.log(record)

    def _summary(self, records: list[RoundRecord], moves: Reassignments, report: RoundReport) -> dict[str, float]:
        clustered = any("num_clusters" in record.metrics for record in records)
        summary = summarise(
            records,
            self.experiment.evaluation.target,
            moves.rounds if clustered else None,
            self.primary.name,
            self.primary.higher_is_better,
        )
        newcomers = (f"newcomer_{self.primary.name}", f"newcomer_{self.primary.name}_tuned")
        return summary | {name: value for name, value in report.metrics.items() if name in newcomers}

    def _write_artifacts(self, directory: Path, label: str, records: list[RoundRecord], moves: Reassignments) -> None:
        federation = grown_by(self.setup.federation, Journal(directory).until(self.experiment.rounds))
        files = RunDirectory(directory)
        moves.write(files.assignments, federation)
        write_figures(files.artifacts, {label: records})
        if events := [event for record in records for event in record.events]:
            write_text(files.cluster_events, "".join(json.dumps(event.to_fields()) + "\n" for event in events))
        if files.diagnostics.exists():
            with drafted(files.artifact(files.diagnostics)) as draft:
                shutil.copyfile(files.diagnostics, draft)
        if files.events.exists():  # who joined and left on request
            write_text(files.artifact(files.events), redact(files.events.read_text()))
        write_text(files.artifact(files.config), redact(self.experiment.to_yaml()))

    # ---- tracking

    def _finish(self, run_log: RunLog, status: EndStatus, summary: dict[str, float]) -> None:
        """Records the end. A failure to do so hides no other failure."""
        try:
            run_log.finish(status, summary)
        except (OSError, DataError) as error:
            if status == "FINISHED":
                raise
            self.watcher.warn(f"the end of {run_log.run_dir} was not recorded: {error}")

    def _run_log(self, label: str | None) -> RunLog | None:
        """The log of one method, or of the comparison of all (None), started; None where no files are kept."""
        if self.directory is None:
            return None
        directory = RunDirectory(self.directory).method(label).path if label else self.directory
        parent = None if label is None else self.study.root if self.study is not None else self.directory
        uri = None if self.study is not None and label is None else self.uri  # a study compares, not each of its cells
        trackers = new_trackers(self.experiment.tracking, uri, parent)
        run_log = RunLog(directory, trackers, self.watcher.warn, self.of_task)
        run_log.start(self._run_info(label))
        return run_log

    def _run_info(self, label: str | None) -> RunInfo:
        data, experiment = self.experiment.data, self.experiment
        tags: dict[str, Any] = {
            "name": experiment.name,
            "dataset": data.source,
            "partition": data.partition.kind
            if data.shift.kind == "none"
            else f"{data.shift.kind}/{data.partition.kind}",
            "seed": experiment.seed,
            "config_hash": experiment.config_hash,
            "git_commit": _git_commit(),
        }
        params = flatten(experiment.to_dict()) | {f"session.{key}": value for key, value in self.facts.items()}
        when = f"seed {experiment.seed}, {time.strftime('%Y-%m-%d %H:%M')}"
        if label is None:
            return RunInfo(f"{experiment.name}, {when}", "", tags, params)
        method = self.setup.methods[label]
        del params["methods"]  # those of the comparison; this one's options are below `method.`
        params |= {f"method.{item.name}": str(getattr(method, item.name)) for item in fields(method)}
        tags |= {"method": method.name, "label": label, "phases": ", ".join(method.phases)}
        if (study := self.study) is not None:
            tags |= {"label": study.method, "setting": study.setting, "study": study.root.name}
            return RunInfo(f"{study.method}, {study.setting}, seed {experiment.seed}", method.name, tags, params)
        return RunInfo(f"{full_label(method)}, {experiment.name}, {when}", method.name, tags, params)


def _comparison(results: Mapping[str, MethodResult]) -> dict[str, float]:
    """Metrics of the parent run, LABEL/METRIC: the last evaluation of every method."""
    return {
        f"{re.sub(r'[^A-Za-z0-9_.-]', '_', label)}/{name}": final[name]
        for label, result in results.items()
        if (final := result.final)
        for name in (*_compared(primary_of(final)), "num_clusters", "ari")
        if name in final
    }


def _compared(primary: str) -> tuple[str, ...]:
    """Scores in the comparison of all methods."""
    return (primary, f"{primary}_local", *(["macro_f1"] if primary == "accuracy" else []))


def write_figures(directory: Path, records_by_method: Mapping[str, Sequence[RoundRecord]]) -> None:
    """Writes the figures of these methods."""
    from cfl_ray.report import figures  # imports matplotlib: half a second that no run waits for at its start

    figures.write_figures(directory, records_by_method)


def _git_commit() -> str:
    """The commit of the running code, or "unknown" outside a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"
