"""The record of one method while it runs: its files, and the log that feeds the trackers."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cfl_ray.errors import FOREIGN, DataError, class_and_text
from cfl_ray.results.arrow_log import ClientMetrics, DiagnosticsLog, Reassignments
from cfl_ray.results.results import MethodResult, recovery_metrics
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.journal import Journal, grown_by
from cfl_ray.setup.setup import Setup
from cfl_ray.system.files import drafted, private_folder, write_text
from cfl_ray.tracking import RUN_METRICS, RoundRecord, RunLog, check_metrics, last_record, read_records, summarise
from cfl_ray.tracking.record import EndStatus, score_metrics_of, validation_metric

_PAUSE_SECONDS = 1.0  # before figures that failed are drawn again


class MethodRecorder:
    """Records the rounds of a method, and at its end writes the summary, figures and tables.

    directory: of the method; None: nothing is written. run_log: started; None without a directory.
    """

    def __init__(self, setup: Setup, label: str, directory: Path | None, run_log: RunLog | None):
        self.setup, self.label, self.directory, self.run_log = setup, label, directory, run_log
        self.primary = setup.task.metrics[0]
        # metrics of the whole run, as RUN_METRICS
        of_newcomers = tuple(f"newcomer_{self.primary.name}{end}" for end in ("", "_tuned"))
        self.of_newcomers = of_newcomers + tuple(map(validation_metric, of_newcomers))
        self.records: list[RoundRecord] = []  # of all rounds; with a directory from the method's end on only
        self.last = last_record(directory) if directory else None
        self.reassignments = Reassignments(directory)
        self.clients = ClientMetrics(directory, setup.task.score_names)
        self.diagnostics = DiagnosticsLog(directory)
        self.summary: dict[str, float] = {}
        self.ended = ""  # why the method ended before its last round
        self.run_only = {*RUN_METRICS, *self.of_newcomers}  # names that records do not have
        if setup.choice.keeps_by is not None:  # then newcomers' metrics of the run are those of the kept round
            self.run_only -= {*self.of_newcomers}
        self.of_task = score_metrics_of([metric.name for metric in setup.task.metrics])

    @property
    def last_round(self) -> int:
        """The last recorded round; 0: none."""
        return self.last.round if self.last else 0

    def add(self, record: RoundRecord) -> None:
        """Records a round in each file that does not have it.

        A round that is replayed after a fault may be in all files, or in some if a power failure truncated the others.
        """
        self.ended = record.ended
        if not record.metrics:
            return
        numbers = {name: record.metrics[name] for name in record.numbers}
        self.reassignments.add(record.round, record.reassigned)
        if record.scores_MV is not None:
            self.clients.add(record.round, record.scores_MV)
        self.diagnostics.add(record.round, numbers, record.diagnostics)
        if record.round <= self.last_round:
            return
        # records that stay in memory share these names, of which every round has a copy
        metrics = {sys.intern(name): value for name, value in record.metrics.items() if name not in self.run_only}
        check_metrics(metrics, {*self.of_task, *numbers})
        self.last = RoundRecord(record.round, metrics, record.time_ms, record.phase, record.events)
        if self.run_log is None:
            self.records.append(self.last)
        else:
            self.run_log.log(self.last)

    def summarise(self, last: RoundRecord) -> None:
        """Computes the metrics of the whole run, after its last round."""
        self.records = list(read_records(self.directory)) if self.directory else self.records
        clustered = any("num_clusters" in record.metrics for record in self.records)
        self.summary = summarise(
            self.records,
            self.setup.experiment.evaluation.target,
            self.reassignments.rounds_with_changes if clustered else None,
            self.primary.name,
            self.primary.higher_is_better,
        )
        self.summary |= self._recovery()
        kept = last.metrics if self.setup.choice.keeps_by is None else self.result().final
        self.summary |= {name: kept[name] for name in self.of_newcomers if name in kept}

    def _recovery(self) -> dict[str, float]:
        """Recovery from the changes of data so far; empty without any."""
        changed_in = self.setup.federation.changed_in.items()
        changed = {round: ids.tolist() for round, ids in changed_in if round <= self.last_round}
        if not changed:
            return {}
        return recovery_metrics(self.result().recovery(changed, higher_is_better=self.primary.higher_is_better))

    def result(self, open_trained: Callable[[], TrainedMethod] | None = None) -> MethodResult:
        """The result so far. open_trained: opens the trained method."""
        return MethodResult(
            self.label,
            self.records,
            self.summary,
            self.directory,
            open_trained,
            reported=self.diagnostics.kept,
            clients=self.clients.kept,
            ended=self.ended,
        )

    def finish(self, warn: Callable[[str], None], status: EndStatus = "FINISHED") -> None:
        """Writes figures, tables and the end. A run that was killed before this writes them when it is resumed.

        status: FAILED for a method whose saved models are not those that were evaluated.
        """
        wanted, status = status, "FAILED"
        try:
            if self.directory is not None:
                self._write_artifacts(RunDirectory(self.directory), warn)
                RunDirectory(self.directory).sync_records()  # a finished method is not continued: none is written again
            status = wanted
        finally:
            finish_log(self.run_log, status, self.summary, warn, self.ended)

    def _write_artifacts(self, files: RunDirectory, warn: Callable[[str], None]) -> None:
        journal = Journal(files.path).until(self.setup.experiment.rounds)
        self.reassignments.write(files.assignments, grown_by(self.setup.federation, journal).at(self.last_round))
        write_figures(files.artifacts, {self.label: self.records}, warn)
        if events := [event for record in self.records for event in record.events]:
            write_text(files.cluster_events, "".join(json.dumps(event.to_fields()) + "\n" for event in events))
        for file in filter(Path.exists, (files.diagnostics, files.events)):  # events: joins and leaves on request
            _copy(file, files.artifact(file))
        write_text(files.artifact(files.config), self.setup.experiment.to_yaml(credentials=False))


def finish_log(
    run_log: RunLog | None,
    status: EndStatus,
    summary: Mapping[str, float],
    warn: Callable[[str], None],
    reason: str = "",
) -> None:
    """Records the end of a run. A failure to do so is raised if the run is finished, otherwise it is a warning.

    reason: as in `RunLog.finish`.
    """
    if run_log is None:
        return
    try:
        run_log.finish(status, summary, reason)
    except (OSError, DataError) as error:
        if status == "FINISHED":
            raise
        warn(f"the end of {run_log.run_dir} was not recorded: {error}")


def write_figures(
    directory: Path,
    records_by_method: Mapping[str, Sequence[RoundRecord]],
    warn: Callable[[str], None],
    prefix: str = "",
) -> None:
    """Writes the figures of these methods. A failure is only a warning, since the results are saved.

    prefix: of the names of the files.
    """
    for is_last in (False, True):
        try:
            from cfl_ray.report import figures  # imports matplotlib, which takes 0.5 s: not at the start of a run

            figures.write_figures(directory, records_by_method, prefix)
            return
        except FOREIGN as error:
            # matplotlib fails while a tracker's thread imports IPython, and works afterwards
            if is_last:
                warn(f"the figures in {directory} were not written: {class_and_text(error)}")
            else:
                time.sleep(_PAUSE_SECONDS)


def copy_figures(source: Path, directory: Path) -> bool:
    """Copies the figures of a folder, which take much longer to draw again. Returns whether there are any."""
    figures = sorted(source.glob("*.png"))
    if figures:
        private_folder(directory)
    for figure in figures:
        _copy(figure, directory / figure.name)
    return bool(figures)


def _copy(file: Path, to: Path) -> None:
    with drafted(to) as draft:
        shutil.copyfile(file, draft)
