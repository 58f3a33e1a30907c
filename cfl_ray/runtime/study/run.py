"""Running a study from start to end, and going on with one that stopped."""

from __future__ import annotations

import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from cfl_ray.config import Experiment
from cfl_ray.config.study import Study, load_study
from cfl_ray.core.errors import ConfigError, Interrupted, RunError
from cfl_ray.core.files import write_text
from cfl_ray.core.tasks import resolve_task
from cfl_ray.runtime.comparison import STUDY, StudyFigures, format_table, read_study, table_of
from cfl_ray.runtime.run_lock import hold_run
from cfl_ray.runtime.study.cells import ALL, Cell, Selection, plan
from cfl_ray.runtime.study.packing import Packing, pack
from cfl_ray.runtime.study.sweep import Trials, trials_of
from cfl_ray.runtime.study.workers import Outcome, run_cells
from cfl_ray.tracking import ARTIFACTS, FileTracker, MlflowTracker, RunInfo, Tracker, flatten, redact, resolve_uri
from cfl_ray.tracking.record import METRICS, EndStatus, score_metrics_of


@dataclass
class StudyWatcher:
    """Receives what happens during a study; the default ignores it."""

    def planned(self, cells: Sequence[Cell], finished: Sequence[Cell], packing: Packing, root: Path) -> None:
        """Cells to run, and those that were finished before. A sweep that learns plans several times."""

    def live(self, cells: Sequence[Cell]) -> None:
        """The cells at work, about once a second."""

    def ended(self, outcome: Outcome) -> None:
        """A cell has ended."""

    def warn(self, text: str) -> None:
        """Something is wrong that does not end the study."""


@dataclass(frozen=True)
class StudyResults:
    """The runs of a study, as far as they are finished."""

    study: Study
    root: Path  # folder of the study
    failed: list[Outcome] = field(default_factory=list)
    tracking: str | None = None  # MLflow, without credentials; None: not tracked

    @property
    def figures(self) -> StudyFigures:
        """The last evaluation of every finished cell."""
        return read_study(self.root)


def run_study(
    study: Study | str | Path,
    folder: str | Path | None = None,
    only: Selection = ALL,
    at_once: int | None = None,
    watcher: StudyWatcher | None = None,
) -> StudyResults:
    """Runs what is not finished of a study, and writes its tables.

    study: a `Study`, or its YAML file.
    folder: of all its runs; None: the name of the study below `output` of its experiment. What is finished there is not
        run again, and what stopped goes on.
    at_once: runs at the same time at most; None: as many as this machine, or the Ray cluster, has room for.

    A run that fails does not end the others. Raises ConfigError for bad input, Interrupted on Ctrl-C.
    """
    given = study if isinstance(study, Study) else load_study(study)
    return _Launch(given, only, at_once, watcher or StudyWatcher(), folder).run()


def plan_study(study: Study, folder: str | Path | None = None, only: Selection = ALL) -> tuple[list[Cell], Path]:
    """The cells that `run_study` would run, and the folder of the study; of a sweep that learns, its range's ends."""
    launch = _Launch(study, only, None, StudyWatcher(), folder)
    return launch.cells, launch.root


class _Launch:
    """One start of a study."""

    def __init__(
        self, study: Study, only: Selection, at_once: int | None, watcher: StudyWatcher, folder: str | Path | None
    ):
        self.study, self.only, self.at_once, self.watcher = study, only, at_once, watcher
        self.trials: Trials = trials_of(study.sweep)
        self.cells = first = plan(study, only, self.trials.first())  # what is invalid is found before anything starts
        if not first:
            raise ConfigError(f"study {study.name} has no run that is selected")
        self.experiment: Experiment = first[0].experiment
        self.root = Path(folder or Path(self.experiment.output) / study.name).absolute()
        self.of_task = frozenset(name for cell in first for name in _scores_of(cell.experiment))
        self.failed: list[Outcome] = []
        self.uri: str | None = None
        if self.experiment.tracking.uses_mlflow:
            self.uri = resolve_uri(self.experiment.tracking, self.experiment.output)

    def run(self) -> StudyResults:
        self.root.mkdir(parents=True, exist_ok=True)
        record = self.root / STUDY
        write_text(record, redact(self.study.to_yaml()), mode=0o600)
        with hold_run(record), _sigterm_interrupts():
            tracker = self._tracker()
            tracker.start(self._info())
            status: EndStatus = "FAILED"
            try:
                self._all_cells()
                status = "FAILED" if self.failed else "FINISHED"
            except KeyboardInterrupt:
                status = "KILLED"
                again = shlex.join(["cfl-ray", "sweep" if self.study.sweep else "compare", str(record)])
                raise Interrupted(f"stopped. Every saved round is kept; go on with: {again}") from None
            finally:
                summary = self._write_tables()
                tracker.finish(status, summary)
        return StudyResults(self.study, self.root, self.failed, redact(self.uri) if self.uri else None)

    def _all_cells(self) -> None:
        self.trials.open(self.root)
        while trials := self.trials.next(self.at_once or 8):
            cells = plan(self.study, self.only, trials)
            done = [cell for cell in cells if cell.is_finished(self.root)]
            for cell in cells:
                if cell.is_live(self.root):
                    raise RunError(f"{cell.name} is live already: {cell.folder(self.root)}")
            left = [cell for cell in cells if cell not in done]
            packing = pack(self.experiment.runtime, len(left), self.at_once)
            self.watcher.planned(left, done, packing, self.root)
            for outcome in run_cells(left, self.root, packing, self.watcher.live):
                self.watcher.ended(outcome)
                if outcome.status == "failed":
                    self.failed.append(outcome)
            self._tell(trials)

    def _tell(self, trials: Sequence[Mapping[str, Any]]) -> None:
        """Tells the sampler of a sweep the results of its trials."""
        if self.study.sweep is None:
            return
        figures = read_study(self.root)
        for parameters in trials:
            of_trial = plan(self.study, self.only, [parameters])
            values = [figures.value(cell.setting, cell.method, cell.seed, self.study.sweep.metric) for cell in of_trial]
            known = [value for value in values if value is not None]
            self.trials.tell(parameters, fmean(known) if len(known) == len(values) else None)

    # ---- results

    def _write_tables(self) -> dict[str, float]:
        """Writes results.csv and the tables, and returns the metrics of the parent run: SETTING/METHOD/METRIC."""
        figures = read_study(self.root)
        if not figures.found:
            return {}
        folder = self.root / ARTIFACTS
        folder.mkdir(exist_ok=True)
        write_text(folder / "results.csv", figures.to_frame().to_csv(index=False))
        try:
            table = table_of(figures.found, self.study.metrics)
            write_text(folder / "table.md", format_table(table, "md") + "\n")
        except ConfigError as error:  # a metric that no run has
            self.watcher.warn(f"no table was written: {error}")
            return {}
        names = [name for name in table.columns if name in METRICS or name in self.of_task]
        return {
            f"{_plain(row['experiment'])}/{_plain(row['method'])}/{name}": float(row[name])
            for _, row in table.iterrows()
            for name in names
            if row[name] == row[name]
        }

    def _tracker(self) -> Tracker:
        if self.uri is None:
            return FileTracker(self.root, self.of_task)
        experiment = self.experiment.tracking.experiment
        return MlflowTracker(self.root, self.uri, experiment, warn=self.watcher.warn, of_task=self.of_task)

    def _info(self) -> RunInfo:
        tags = {"study": self.study.name, "seeds": str(self.study.seeds)}
        return RunInfo(self.study.name, "", tags, flatten(self.study.model_dump(mode="json", by_alias=True)))


def _scores_of(experiment: Experiment) -> set[str]:
    """Names of the metrics of the experiment's task."""
    task = resolve_task(experiment.task).with_metrics(experiment.evaluation.metrics)
    return score_metrics_of([metric.name for metric in task.metrics])


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Lets SIGTERM, which stops a submitted job, end the study as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
