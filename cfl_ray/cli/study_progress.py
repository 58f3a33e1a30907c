"""Progress of a study on the terminal, and the tables at its end."""

import math
import re
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from cfl_ray.cli import printed_tables
from cfl_ray.cli.console import say
from cfl_ray.cli.progress import progress_bars
from cfl_ray.config.section import as_yaml
from cfl_ray.config.study import ALL_SETTINGS
from cfl_ray.config.sweep import short_names
from cfl_ray.errors import ConfigError, command, counted, duration
from cfl_ray.report.drawing import listed, tested_in_words
from cfl_ray.results.comparison import by_experiment, column_of, mean_and_spread, rounds_in_words, unequal_runs
from cfl_ray.run_directory import RunDirectory
from cfl_ray.study.run import StudyResults, StudyWatcher
from cfl_ray.study.study_plan import StudyRun
from cfl_ray.study.sweep import RankedTrial
from cfl_ray.study.winners import at_the_edge, study_of_winners
from cfl_ray.study.worker_pool import Resources, RunOutcome
from cfl_ray.tracking import RoundRecord, read_records, where_to_look
from cfl_ray.tracking.record import BEST_ROUND, test_metric

if TYPE_CHECKING:
    import pandas as pd

_MOST_COLUMNS = 5  # more settings are rows of a table, not columns
_MOST_TRIALS = 30  # printed trials of a method in a setting
_MOST_BARS = 16  # bars of live runs
_LINE_BYTES = 1 << 20  # longer than any line of a metrics log


class StudyDisplay(StudyWatcher):
    """Bars of the study and of its live runs on a terminal; otherwise a line for each run that ends."""

    def __init__(self, console: Console) -> None:
        self.console, self.seconds = console, list[float]()
        self.progress = progress_bars(console, "note", 20)
        self.whole: TaskID | None = None
        self.bars: dict[str, TaskID] = {}  # of the live runs, by name
        self.root, self.at_once, self.left, self.later = Path(), 1, 0, 0.0
        self.warned: dict[str, list[str]] = {}  # names of the runs with a warning of each kind

    def __enter__(self) -> "StudyDisplay":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    # ---- reports of the study

    def planned(
        self, runs: Sequence[StudyRun], finished: Sequence[StudyRun], resources: Resources, root: Path, later: float = 0
    ) -> None:
        self.root, self.at_once, self.left, self.later = root, resources.at_once, len(runs), later
        done = f", {len(finished)} finished before" if finished else ""
        how = f", {resources}" if runs else ""
        more = f", at most {later:.0f} later" if later >= 1 else ""
        folder = "" if self.whole is not None else f"; folder: {root}"
        self._print(f"{counted(len(runs) + len(finished), 'run')}{done}{more}{how}{folder}")
        if self.whole is None:
            self.whole = self.progress.add_task("runs", total=0, note="")
        self.progress.update(self.whole, total=self.progress.tasks[0].completed + len(runs) + round(later))

    def live(self, runs: Sequence[StudyRun]) -> None:
        if self.progress.disable:
            return
        for name in [name for name in self.bars if name not in {run.name for run in runs}]:
            self.progress.remove_task(self.bars.pop(name))
        for run in runs:
            if run.name not in self.bars and len(self.bars) < _MOST_BARS:
                self.bars[run.name] = self.progress.add_task(run.name, total=run.experiment.rounds, note="")
            if run.name in self.bars and (last := _last_record(run, self.root)) is not None:
                self.progress.update(self.bars[run.name], completed=last.round)

    def ended(self, outcome: RunOutcome) -> None:
        run, took = outcome.run, duration(outcome.seconds)
        self.left -= 1
        for warning in outcome.warnings:
            names = self.warned.setdefault(_kind_of(warning), [])
            if not names:  # the others are counted at the end
                self._print(f"{run.name}: {warning}")
            names.append(run.name)
        if outcome.status not in ("finished", "paused"):
            self._print(f"{run.name} {outcome.status} after {took}: {outcome.reason}")
            return
        self.seconds.append(outcome.seconds)
        runs = self.left + self.later
        left = f"; about {duration(fmean(self.seconds) * runs / self.at_once)} left" if runs else ""
        self._print(
            f"{run.name}{f' {outcome.reason}' if outcome.status == 'paused' else ''}: "
            f"{printed_tables.end_line(*_last_and_kept(run, self.root))}, {took}{left}"
        )
        if self.whole is not None:
            self.progress.update(self.whole, advance=1, note=left.removeprefix("; "))

    def warn(self, text: str) -> None:
        self._print(text)

    # ---- the end

    def finish(self, results: StudyResults) -> None:
        """Prints the tables, the paths of the results, and the failed runs."""
        if results.study.sweep is not None:
            show_trials(results.trials, results.best, results.study.sweep.metric or "", self.console)
            if results.study.sweep.halving is not None:
                early = sum(not trial.values for trial in results.trials)
                self._print(
                    f"{counted(early, 'trial')} ended early or failed (sweep.halving); without this key every trial is "
                    "trained to its end, as the papers do"
                )
            if results.best:
                self._show_winners(results)
        elif run_metrics := results.run_metrics:
            show_tables(results.table(), results.study.metrics, self.console)
            if best := rounds_in_words(run_metrics):
                self._print(f"results are of {best}")
        for kind, names in self.warned.items():
            if len(names) > 1:
                runs = f"{names[0]} and {counted(len(names) - 1, 'more run')}"
                self._print(f"{runs} had the warning: {kind}")
        for outcome in results.failed:
            self._print(f"{outcome.status}: {outcome.run.name}: {outcome.reason}")
        files = sorted(path.name for path in RunDirectory(results.root).artifacts.glob("*"))
        self._print(f"results: {results.root} ({', '.join(files)} in {RunDirectory.artifacts.name})")
        if results.tracking:
            self._print(f"MLflow: {where_to_look(results.root, results.tracking)}")

    def _show_winners(self, results: StudyResults) -> None:
        """Prints which best values are at an edge of those that were tried, and the files of the best trials."""
        if edges := at_the_edge(results.study, results.best):
            self._print(f"at the edge of the values that were tried, so others may be better: {listed(edges)}")
        self._print(f"each best trial as a config for cfl-ray run: {RunDirectory(results.root).best}")
        try:
            study_of_winners(results.study, results.best)
        except ConfigError as error:
            self._print(f"there is no study of all best trials: {error}")
        else:
            again = command("compare", RunDirectory(results.root).best_study)
            self._print(f"all best trials as a study, for seeds and rounds of your choice: {again}")

    def _print(self, text: str) -> None:
        say(f"{time.strftime('%H:%M:%S')} {text}" if self.progress.disable else text, self.console)


def _kind_of(warning: str) -> str:
    """A warning without the paths, URIs and numbers in which runs differ, each as "..."."""
    return re.sub(r"(\.\.\.[\s,:;]*)+", "... ", re.sub(r"\S*/\S*|\d+(\.\d+)?", "...", warning)).strip()


def _last_record(run: StudyRun, root: Path) -> RoundRecord | None:
    """The last recorded round of a run."""
    for log in RunDirectory(run.folder(root)).of_methods(RunDirectory.metrics):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LINE_BYTES))
            lines = file.read().split(b"\n")[:-1]  # without a line that is being written
        if lines:
            return RoundRecord.from_line(lines[-1])
    return None


def _last_and_kept(run: StudyRun, root: Path) -> tuple[RoundRecord | None, RoundRecord | None]:
    """The record of a run's last round, and that of the round whose models are kept."""
    last = _last_record(run, root)
    if last is None or BEST_ROUND not in last.metrics:
        return last, last
    logs = RunDirectory(run.folder(root)).of_methods(RunDirectory.metrics)
    records = (record for log in logs for record in read_records(log.parent))
    return last, next((record for record in records if record.round == last.metrics[BEST_ROUND]), last)


def show_tables(table: "pd.DataFrame", metrics: Sequence[str], console: Console) -> None:
    """Prints a table for each metric: a row for each method and a column for each setting, or the other way round.

    table: of `table_of`. metrics: if the table has none of them, the score of the task, its P-local and ARI, if
        present, are shown.
    """
    known = [name for name in table.columns if f"{name}_std" in table.columns]
    usual = (known[0], f"{known[0]}_local", "ari")
    wanted = [column_of(name, metrics) for name in metrics]
    for metric in [name for name in wanted if name in known] or [name for name in usual if name in known]:
        wide = by_experiment(table, metric)
        wide = wide.iloc[:, 1:].set_axis(wide.iloc[:, 0], axis="index")  # the first column has the methods
        first = "method"
        if len(wide.columns) > _MOST_COLUMNS:
            wide, first = wide.T, "setting"
        grid = printed_tables.number_table(metric, [escape(str(name)) for name in wide.columns], first)
        for name, cells in wide.iterrows():
            grid.add_row(escape(str(name)), *map(str, cells))
        printed_tables.print_table(grid, console)
    if unequal := unequal_runs(table):
        say(unequal, console)


def show_trials(ranked: Sequence[RankedTrial], best: Sequence[RankedTrial], metric: str, console: Console) -> None:
    """Prints the trials of each method in each setting, the best first, and the overrides of the best trial.

    Equal trials have the same place, with `=`. p: of a paired t-test against the first trial, if seeds allow. If
    validation data choose, the mean on test data is shown beside.
    """
    for (setting, method), group in groupby(ranked, lambda trial: (trial.setting, trial.method)):
        trials = list(group)
        tested = ["p"] if any(trial.p == trial.p for trial in trials) else []
        beside = [f"test {test_metric(metric)}"] if test_metric(metric) != metric else []
        headings = [*short_names(list(trials[0].parameters)), "runs", metric, *beside, *tested]
        grid = printed_tables.number_table(
            f"{method}{_in(setting)}", [escape(heading) for heading in headings], "place"
        )
        places = [trial.place for trial in trials]
        for trial in trials[:_MOST_TRIALS]:
            cells = [escape(as_yaml(value)) for value in trial.parameters.values()]
            cells += [str(len(trial.values)), mean_and_spread(trial.mean, trial.std) or "-"]
            cells += [mean_and_spread(trial.test_mean, math.nan) or "-"] * len(beside)
            cells += [tested_in_words(trial.p, trial.effect, len(trial.values), len(trials))] * len(tested)
            grid.add_row(f"{trial.place}{' =' * (places.count(trial.place) > 1)}", *cells)
        printed_tables.print_table(grid, console)
        if len(trials) > _MOST_TRIALS:
            say(f"and {len(trials) - _MOST_TRIALS} more, in artifacts/trials.csv", console)
    for trial in best:
        score = f"{metric} {mean_and_spread(trial.mean, trial.std)} over {counted(len(trial.values), 'run')}"
        rivals = [other for other in ranked if (other.setting, other.method) == (trial.setting, trial.method)]
        if equal := sum(other.place == trial.place for other in rivals) - 1:
            score += f", equal to {equal} other trial{'s' * (equal > 1)}"
        if trial.tested:
            score += f", test {test_metric(metric)} {mean_and_spread(trial.test_mean, math.nan)}"
        how = f"with\n  {trial.overrides}" if trial.parameters else "the only trial: none of its options is swept"
        say(f"best for {trial.method}{_in(trial.setting)}: {score}, {how}", console)
    if best:
        say(_chosen_on(metric), console)


def _chosen_on(metric: str) -> str:
    """On which data trials are chosen, as a sentence."""
    if test_metric(metric) != metric:
        return f"Trials are chosen by {metric}, on the clients' validation data; the test data chose nothing."
    return (
        f"Trials are chosen by {metric} on the clients' test data, which favours the tuned method; data.validation "
        "holds out validation data for the choice."
    )


def _in(setting: str) -> str:
    return "" if setting == ALL_SETTINGS else f" in {setting}"
