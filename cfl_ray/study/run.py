"""Runs a study, or continues a stopped study."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from cfl_ray.config import Experiment
from cfl_ray.config.study import ALL_SETTINGS, Study, load_study
from cfl_ray.config.sweep import SweepConfig, Trial
from cfl_ray.errors import ConfigError, Interrupted, RunError, command, did_you_mean, some_of
from cfl_ray.errors.redaction import HIDDEN, redact
from cfl_ray.lifecycle.extension import check_extension
from cfl_ray.lifecycle.recorder import write_figures
from cfl_ray.report.ranks import ranks_of, ranks_table
from cfl_ray.results import comparison
from cfl_ray.results.kept_code import with_code_of_study
from cfl_ray.results.published import load_published
from cfl_ray.results.recorded_runs import find_runs
from cfl_ray.results.reporting import report_at_the_end
from cfl_ray.results.run_record import check_hash_of_run
from cfl_ray.results.study_folder import begun_runs, is_finished, run_folders
from cfl_ray.results.trust import sign_study
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.lock import hold
from cfl_ray.security.credentials import remember_credentials
from cfl_ray.study.halving import Stage, has_round, mean_at, stages_of, survivors
from cfl_ray.study.status import left_out_of
from cfl_ray.study.study_plan import ALL, Selection, StudyRun, config_of, metric_of, metric_warnings, plan, scores_of
from cfl_ray.study.sweep import RankedTrial, Trials, best_of, goal_of, rank, to_frame, trials_of
from cfl_ray.study.winners import study_of_winners
from cfl_ray.study.worker_pool import END_SECONDS, Resources, RunOutcome, WorkerPool, check_main, resources_for
from cfl_ray.system.files import write_text
from cfl_ray.system.signals import interrupts_noted, sigterm_interrupts
from cfl_ray.tracking import (
    Mlflow,
    RunInfo,
    RunLog,
    deliver_pending,
    flatten,
    last_record,
    read_records,
    resolve_uri,
)
from cfl_ray.tracking.record import METRICS, EndStatus, RoundRecord, mean_of_runs, metric_names

if TYPE_CHECKING:
    import pandas as pd

_PACKED = ("backend", "address", "hosts", "clients_per_host", "gpus_per_host", "cpus_per_host", "device")
_DRAWN = 8  # number of settings with figures in MLflow; the report has figures of all settings
_MORE_SECONDS = 5.0  # added to END_SECONDS in the wait for runs whose study was killed

_logger = logging.getLogger(__name__)


class StudyWatcher:
    """Receives the events of a study; the default logs warnings and runs that fail, and ignores the rest."""

    def planned(
        self, runs: Sequence[StudyRun], finished: Sequence[StudyRun], resources: Resources, root: Path, later: float = 0
    ) -> None:
        """Runs to execute, and runs that are finished already.

        later: number of runs that will follow these at most. Called several times in a sweep that learns or halves.
        """

    def live(self, runs: Sequence[StudyRun]) -> None:
        """The live runs, about once a second."""

    def ended(self, outcome: RunOutcome) -> None:
        """A run has ended."""
        for warning in outcome.warnings:
            self.warn(f"{outcome.run.name}: {warning}")
        if outcome.status not in ("finished", "paused"):
            self.warn(f"{outcome.run.name} {outcome.status}: {outcome.reason}")

    def warn(self, text: str) -> None:
        """A warning about a problem that does not end the study."""
        _logger.warning("%s", text)


@dataclass(frozen=True)
class StudyResults:
    """The results of the finished runs of a study."""

    study: Study
    root: Path  # folder of the study
    failed: list[RunOutcome] = field(default_factory=list)  # also runs that were stopped on request
    tracking: str | None = None  # MLflow, without credentials; None: not tracked
    trials: list[RankedTrial] = field(default_factory=list)  # of a sweep, the best first

    @property
    def run_metrics(self) -> comparison.RunMetrics:
        """The metrics of every finished run, by (setting, method) and seed."""
        return comparison.read_study(self.root)

    @property
    def best(self) -> list[RankedTrial]:
        """The best trial of a sweep for each method in each setting."""
        return best_of(self.trials)

    def table(self) -> pd.DataFrame:
        """Mean and spread over the seeds of the study's recorded metrics; if none is recorded, of the usual metrics."""
        run_metrics = self.run_metrics
        return comparison.table_of(run_metrics, comparison.measured(run_metrics, self.study.metrics))

    def to_frame(self) -> pd.DataFrame:
        """A row for each finished run: setting, method, seed, then a column for each metric."""
        return comparison.runs_frame(self.run_metrics)


def run_study(
    study: Study | str | Path,
    folder: str | Path | None = None,
    only: Selection = ALL,
    at_once: int | None = None,
    watcher: StudyWatcher | None = None,
    extend: str | Path | None = None,
    code: str | None = None,
) -> StudyResults:
    """Runs the unfinished runs of a study, and writes its tables.

    study: a `Study`, or its YAML file.
    folder: of all its runs; None: the name of the study below `output` of its experiment. Finished runs in it are not
        repeated, and stopped runs continue.
    only: settings, methods and seeds to run; empty: all.
    at_once: largest number of parallel runs; None: as many as fit on this machine or the Ray cluster.
    extend: folder of this study with fewer `rounds`. Runs begin with a copy of their rounds in it, if any; this does
        not change their results.
    code: version of the user's files that were edited or are gone since the first runs: "run", the copy in their
        directories, for all runs, or "now", the present files, with which the tables mix two versions. None: the copy.

    Each run is in a separate process that imports the calling script: its statements belong below
    `if __name__ == "__main__":`. A failed run does not end the others. Raises ConfigError for bad input,
    Interrupted on Ctrl-C.

        study = Study(
            name="lr",
            seeds=[0, 1],
            experiment={"rounds": 2, "methods": ["fedavg", "ifca"], "data": {"partition": {"clients": 6}}},
            settings={"small": {"local": {"lr": 0.01}}, "large": {"local": {"lr": 0.1}}},
        )
        results = run_study(study)
        print(results.to_frame()[["setting", "method", "seed", "accuracy"]])
    """
    check_main()
    given = study if isinstance(study, Study) else load_study(study)
    return _Launch(given, only, at_once, watcher or StudyWatcher(), folder, extend, code).run()


def plan_study(study: Study, folder: str | Path | None = None, only: Selection = ALL) -> tuple[list[StudyRun], Path]:
    """The runs that `run_study` would start, and the study's folder; for `tpe`, runs at the ends of its ranges."""
    launch = _Launch(study, only, None, StudyWatcher(), folder)
    return launch.runs, launch.root


class _Launch:
    """A start of a study."""

    def __init__(
        self,
        study: Study,
        only: Selection,
        at_once: int | None,
        watcher: StudyWatcher,
        folder: str | Path | None,
        extend: str | Path | None = None,
        code: str | None = None,
    ):
        self.study, self.only, self.at_once, self.watcher = study.located(), only, at_once, watcher
        self.code = code
        root = Path(folder or Path(self.study.experiment.get("output") or "runs") / study.name).absolute()
        if RunDirectory(root).is_study:
            self.study = with_code_of_study(root, begun_runs(root), self.study, code, watcher.warn)
        # all checks precede the first run
        self.runs = first = plan(self.study, only, trials_of(self.study).first())
        if not first:
            raise ConfigError(f"study {study.name} has no run that is selected")
        if (sweep := self.study.sweep) is not None:
            _check_halving(sweep, first)
            self.study = self.study.with_metric(metric_of(self.study, first))
        self.trials: Trials = trials_of(self.study)
        self.experiment: Experiment = first[0].experiment
        self.root = Path(folder or Path(self.experiment.output) / study.name).absolute()
        self.extend = None if extend is None else Path(extend).absolute()
        self.of_task = frozenset(name for run in first for name in scores_of(run.experiment))
        self.failed: list[RunOutcome] = []
        _check_runtime(first)
        self.uri = self._uri()
        if study.published is not None:
            if not Path(study.published).is_file():
                raise ConfigError(f"published: there is no file {study.published}")
            published = load_published(study.published).tables
            for name in (name for name in study.tables if name not in published):
                known = did_you_mean(name, published)
                raise ConfigError(f"tables: {study.published} has no table {name!r}{known}")

    def _uri(self) -> str | None:
        """The destination of results in MLflow; None: files only."""
        tracking = self.experiment.tracking
        if not tracking.uses_mlflow:
            return None
        uri = resolve_uri(tracking, self.experiment.output)
        if HIDDEN in uri:
            raise ConfigError(
                f"tracking.uri: {uri} lacks its credentials, which are hidden in this copy of the study; give "
                "tracking.uri=... with them, or tracking.uri=null and the whole URI as MLFLOW_TRACKING_URI"
            )
        return uri

    def run(self) -> StudyResults:
        try:
            return self._run()
        except OSError as error:  # a full disk or a missing folder
            file = error.filename or self.root
            again = f"; go on with: {self._again()}" if RunDirectory(self.root).is_study else ""
            raise RunError(f"{file}: {error.strerror or error}{again}") from error

    def _run(self) -> StudyResults:
        self._check_folder()
        if self.extend is not None:
            self._check_extension(self.extend)
        for warning in metric_warnings(self.study, self.runs):
            self.watcher.warn(warning)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = RunDirectory(self.root).study_lock
        lock.touch()
        with hold(lock), interrupts_noted(), sigterm_interrupts():
            self._check_runs()
            remember_credentials(self.study.model_dump(mode="json", by_alias=True))
            sign_study(self.root, self.study)
            write_text(RunDirectory(self.root).study, self.study.to_yaml(credentials=False))
            tracking = self.experiment.tracking
            trackers = {} if self.uri is None else {"mlflow": Mlflow(self.uri, tracking.experiment)}
            run_log = RunLog(self.root, trackers, self.watcher.warn, patience=tracking.patience)
            tags = {"study": self.root.name, "seeds": str(self.study.seeds)}
            params = flatten(self.study.model_dump(mode="json", by_alias=True))
            run_log.start(RunInfo(self.study.name, "", tags, params))
            status: EndStatus = "FAILED"
            try:
                self.trials.open(self.root)
                self._all_runs()
                status = "FAILED" if self.failed else "FINISHED"
            except KeyboardInterrupt:
                status = "KILLED"
                raise Interrupted(f"stopped. Every saved round is kept; go on with: {self._again()}") from None
            finally:
                self._end(run_log, status)
            if self.uri is not None:  # records that the runs could not deliver while they were live
                deliver_pending(self.root.parent, self.uri, warn=self.watcher.warn)
        return StudyResults(
            self.study,
            self.root,
            self.failed,
            redact(self.uri) if self.uri else None,
            self._ranked(comparison.read_study(self.root)),
        )

    def _end(self, run_log: RunLog, status: EndStatus) -> None:
        """Writes the tables of finished runs, then the end of the study: FAILED if a table cannot be written."""
        try:
            run_metrics = comparison.read_study(self.root)
            # step of the parent's metrics, which grows with the number of finished runs
            count = sum(map(len, run_metrics.values()))
            if summary := self._write_tables(run_metrics):
                last = last_record(self.root) or RoundRecord(0, {})
                # runs may have been repeated, or metrics added, since the last start
                step = max(count, last.round + (summary != last.metrics))
                run_log.log(RoundRecord(step, summary, int(time.time() * 1000)))
        except BaseException:
            status = "FAILED"
            raise
        finally:
            run_log.finish(status, {})

    def _again(self) -> str:
        """The command that continues this study."""
        if self.only == ALL and self.extend is None:
            return command("resume", self.root)
        extending = [] if self.extend is None else [f"--extend={self.extend}"]
        verb, study = "sweep" if self.study.sweep else "compare", RunDirectory(self.root).study
        return command(verb, study, f"--folder={self.root}", *self.only.options, *extending)

    def _check_folder(self) -> None:
        """Raises ConfigError if the folder holds a run or another study."""
        directory = RunDirectory(self.root)
        if directory.is_run:
            raise ConfigError(f"{self.root} holds a run; choose another folder for the study")
        if directory.is_study and (there := load_study(directory.study).name) != self.study.name:
            raise ConfigError(
                f"{self.root} is the folder of study {there!r}, this one is {self.study.name!r}; choose another folder"
            )

    def _check_extension(self, earlier: Path) -> None:
        """Raises ConfigError unless `earlier` is another folder of this study, with runs of fewer rounds."""
        if earlier.resolve() == self.root.resolve():
            raise ConfigError(f"extend: {earlier} is this study's own folder; give the longer one another")
        if not RunDirectory(earlier).is_study:
            raise ConfigError(f"extend: {earlier} holds no study: there is no {RunDirectory(earlier).study}")
        begun = [run for run in self.runs if RunDirectory(run.folder(earlier)).is_run]
        if not begun and not self.study.learns:
            raise ConfigError(f"extend: {earlier} has none of the runs of this study, such as {self.runs[0].name}")
        for run in begun:
            if not RunDirectory(run.folder(self.root)).is_run:
                check_extension(run.folder(earlier), run.experiment)

    def _check_runs(self) -> None:
        """Raises ConfigError if the config of a run in a selected setting differs from the present study.

        This includes runs that are not selected and former seeds, since tables would mix both configs. Warns of runs
        whose setting, method or seed is no longer in the study: the tables include them.
        """
        runs = {(run.setting, run.method): run for run in plan(self.study, ALL, self.trials.first())}
        selected = {run.setting for run in self.runs}
        others = []
        for setting, method, folder in run_folders(self.root):
            run, seed = runs.get((setting, method)), RunDirectory.seed_of(folder)
            if run is not None and setting in selected:
                check_hash_of_run(RunDirectory(folder), run.experiment.model_copy(update={"seed": seed}))
            if (run is None and not self.study.learns) or seed not in self.study.seeds:
                others.append(f"{setting}, {method}, seed {seed}")
        if others:
            self.watcher.warn(
                f"the folder has runs that the study no longer names: {some_of(others)}; tables and reports show "
                "them too; move them away to leave them out"
            )

    def _all_runs(self) -> None:
        first = plan(self.study, self.only, self.trials.first())
        of_trial = Counter((run.method, run.trial) for run in first).most_common(1)[0][1]
        room = resources_for(self.experiment.runtime, of_trial * 10**6, self.at_once).at_once
        with WorkerPool(self.root, self.extend, self.code) as pool:
            while trials := self.trials.next(-(-room // of_trial)):
                left, stages = trials, self._stages(trials)
                for stage in stages:
                    later = self.trials.later() * of_trial + stage.later * of_trial
                    self._run_trials(left, pool, later, stage.until)
                    if stage.until is not None:
                        left = self._that_go_on(left, stage.until)
                self._tell(trials)

    def _run_trials(self, trials: Sequence[Trial], pool: WorkerPool, later: float, until: int | None) -> None:
        """Runs the unfinished runs of trials. until: the round after which they pause; None: to their ends."""
        runs = plan(self.study, self.only, trials)
        self._wait_for_others(runs)
        done = [run for run in runs if run.is_finished(self.root) or has_round(run, self.root, until)]
        left = [run for run in runs if run not in done]
        for run in left:
            RunDirectory(run.folder(self.root)).pruned.unlink(missing_ok=True)
        resources = resources_for(self.experiment.runtime, len(left), self.at_once, len(pool.workers))
        self.watcher.planned(left, done, resources, self.root, later)
        for outcome in pool.run(left, resources, self.watcher.live, until):
            self.watcher.ended(outcome)
            if outcome.status not in ("finished", "paused"):
                self.failed.append(outcome)

    def _stages(self, trials: Sequence[Trial]) -> list[Stage]:
        """The stages in which these trials are trained; a single one, to the end, unless the sweep halves."""
        halving = None if self.study.sweep is None else self.study.sweep.halving
        if halving is None:
            return [Stage(None, 0.0)]
        return stages_of(halving, len(trials), min(run.experiment.rounds for run in self.runs))

    def _that_go_on(self, trials: Sequence[Trial], until: int) -> list[Trial]:
        """The trials that go on after a round; the runs of the others are marked as ended early."""
        assert self.study.sweep is not None and self.study.sweep.halving is not None
        values = {}
        for trial in trials:
            of_trial = plan(self.study, self.only, [trial])
            values[trial.method, trial.name] = mean_at(of_trial, self.root, self.study.sweep.metric or "", until)
        going = survivors(trials, values, self.study.sweep.halving.factor, goal_of(self.study.sweep) == "minimize")
        for trial in (trial for trial in trials if trial not in going):
            for run in plan(self.study, self.only, [trial]):
                directory = RunDirectory(run.folder(self.root))
                if directory.is_run and not directory.failure.is_file() and not run.is_finished(self.root):
                    write_text(directory.pruned, f"ended after round {until} by sweep.halving\n")
        return going

    def _wait_for_others(self, runs: Sequence[StudyRun]) -> None:
        """Waits for runs whose study was killed, while they save their state. Raises RunError for other live runs."""
        deadline = time.monotonic() + END_SECONDS + _MORE_SECONDS
        for run in runs:
            while run.is_live(self.root):
                if time.monotonic() > deadline:
                    raise RunError(f"{run.name} is live already: {run.folder(self.root)}")
                time.sleep(0.2)

    def _tell(self, trials: Sequence[Trial]) -> None:
        """Reports the results of trials to the sampler of a sweep. Raises ConfigError if no run has its metric."""
        if self.study.sweep is None:
            return
        metric = self.study.sweep.metric or ""
        runs_of = [plan(self.study, self.only, [trial]) for trial in trials]
        # not all runs: a sweep would read its first trials as often as it has batches
        run_metrics = comparison.read_study(
            self.root, {run.folder(self.root) for of_trial in runs_of for run in of_trial}
        )
        if metric not in (present := comparison.metrics_of(run_metrics)):
            # earlier trials may have it, such as rounds_to_target
            present = comparison.metrics_of(comparison.read_study(self.root))
        if present and metric not in present:
            raise ConfigError(f"sweep.metric: no run has the metric {metric!r}{did_you_mean(metric, present)}")
        for trial, of_trial in zip(trials, runs_of, strict=True):
            of_seeds = [run_metrics.get((run.setting, run.method), {}).get(run.seed, {}) for run in of_trial]
            if not of_trial:  # of a method that is not selected
                continue
            values = [metrics.get(metric, nan) for metrics in of_seeds]
            known = [value for value in values if not isnan(value)]
            self.trials.tell(trial, fmean(known) if len(known) == len(values) else None)

    def _ranked(self, run_metrics: comparison.RunMetrics) -> list[RankedTrial]:
        """The trials of a sweep, the best first."""
        if self.study.sweep is None:
            return []
        return rank(self.study, plan(self.study, self.only, self.trials.so_far()), run_metrics)

    # ---- results

    def _write_tables(self, run_metrics: comparison.RunMetrics) -> dict[str, float]:
        """Writes results.csv and the tables, and returns the metrics of the parent run: SETTING/METHOD/METRIC."""
        if not run_metrics:
            return {}
        directory = RunDirectory(self.root)
        directory.artifacts.mkdir(mode=0o700, exist_ok=True)
        write_text(directory.results_table, comparison.runs_frame(run_metrics).to_csv(index=False))
        if self.study.sweep is not None:
            ranked = self._ranked(run_metrics)
            write_text(directory.trials_table, to_frame(ranked, self.study.sweep.metric or "").to_csv(index=False))
            self._write_best(directory.best, best_of(ranked))
        known = comparison.measured(run_metrics, self.study.metrics)
        if missing := [name for name in self.study.metrics if name not in known]:
            self.watcher.warn(f"the table is without {', '.join(missing)}, which no run has")
        table, present = comparison.table_of(run_metrics, known), comparison.metrics_of(run_metrics)
        metric_of = {name: name for name in table.columns} | {
            comparison.column_of(name, present): name for name in known
        }
        write_text(directory.table, self._table_text(run_metrics, table, metric_of[table.columns[3]]))
        if self.uri is not None and self.study.sweep is None:
            self._write_figures(directory.artifacts)
        if self.experiment.tracking.report:
            # trusted: these are runs of this study
            report_at_the_end(self.root, lambda: find_runs([self.root], trust=True), self.watcher.warn)
        return self._means(table, metric_of)

    def _table_text(self, run_metrics: comparison.RunMetrics, table: pd.DataFrame, score: str) -> str:
        """The table as Markdown, and below it the ranks by their score, kept rounds and missing runs."""
        less = comparison.is_less_better(score, comparison.metrics_of(run_metrics))
        ranks = ranks_of(run_metrics, score, less) if self.study.sweep is None else None
        best = comparison.rounds_in_words(run_metrics)
        more = [
            *([] if ranks is None else [ranks_table(ranks)]),
            *([f"Of {best}."] if best else []),
            left_out_of(self.root),
        ]
        return "\n\n".join(filter(None, [comparison.format_table(table, "md"), *more])) + "\n"

    def _means(self, table: pd.DataFrame, metric_of: dict[str, str]) -> dict[str, float]:
        """The metrics of the parent run: the means in a table. metric_of: the metric of each column."""
        means = [name for name in table.columns if f"{name}_std" in table.columns]  # without the spreads over the seeds
        names = [name for name in means if metric_of[name] in METRICS or metric_of[name] in self.of_task]
        settings, methods = metric_names(table["experiment"]), metric_names(table["method"])
        return {
            f"{settings[row['experiment']]}/{methods[row['method']]}/{metric_of[name]}": float(row[name])
            for _, row in table.iterrows()
            for name in names
            if row[name] == row[name]
        }

    def _write_best(self, folder: Path, best: Sequence[RankedTrial]) -> None:
        """Writes the config of the best trial of each method in each setting, with the first seed of the study.

        Also the study that compares these trials, if there is one.
        """
        folder.mkdir(mode=0o700, exist_ok=True)
        for trial in best:
            place = trial.method if trial.setting == ALL_SETTINGS else f"{trial.setting},{trial.method}"
            values = config_of(self.study, trial.setting, trial.trial, trial.method, min(trial.values))
            write_text(folder / f"{place}.yaml", self.study.config_text(values, trial.in_words))
        file = RunDirectory(self.root).best_study
        text = ""
        with suppress(ConfigError):  # the values of a shared key differ, which the command says at its end
            text = study_of_winners(self.study, best).to_yaml(credentials=False)
        if not text:
            file.unlink(missing_ok=True)
            return
        found = "\n".join(f"# {trial.in_words}" for trial in best)
        write_text(file, f"{text.rstrip()}\n\n{found}\n")

    def _write_figures(self, folder: Path) -> None:
        """Writes figures that compare the methods of each setting by means over the seeds, for its run in MLflow."""
        records_of: dict[str, dict[str, list[list[RoundRecord]]]] = {}
        for setting, method, run in run_folders(self.root):
            for end in RunDirectory(run).of_methods(RunDirectory.end):
                if is_finished(end.parent):
                    records_of.setdefault(setting, {}).setdefault(method, []).append(list(read_records(end.parent)))
        plain = metric_names(records_of)
        for setting, of_methods in list(records_of.items())[:_DRAWN]:
            prefix = f"{plain[setting]}_" if len(records_of) > 1 else ""
            means = {method: mean_of_runs(runs) for method, runs in of_methods.items()}
            write_figures(folder, means, self.watcher.warn, prefix)


def _check_halving(sweep: SweepConfig, runs: Sequence[StudyRun]) -> None:
    """Raises ConfigError if runs are compared before their first evaluation."""
    if sweep.halving is None:
        return
    for run in runs:
        if (every := run.experiment.evaluation.every) > sweep.halving.first:
            raise ConfigError(
                f"sweep.halving.first is {sweep.halving.first}, but {run.name} is evaluated first after round {every} "
                "(evaluation.every); trials are compared by an evaluation"
            )


def _check_runtime(runs: Sequence[StudyRun]) -> None:
    """Raises ConfigError if settings differ in keys that determine the number of parallel runs."""
    first = runs[0]
    for run in runs:
        for key in _PACKED:
            mine, others = getattr(run.experiment.runtime, key), getattr(first.experiment.runtime, key)
            if mine != others:
                raise ConfigError(
                    f"runtime.{key} is the same in all runs of a study, got {others!r} in {first.setting} and {mine!r} "
                    f"in {run.setting}"
                )
