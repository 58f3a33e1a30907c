"""Progress of a study on the terminal, and its tables at the end."""

import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from cfl_ray.cli.console import counted, say
from cfl_ray.cli.progress import progress_bars
from cfl_ray.cli.tables import metrics_line, number_table, print_table
from cfl_ray.config.section import as_yaml
from cfl_ray.config.study import ALL_SETTINGS, short_names
from cfl_ray.errors import duration
from cfl_ray.report.drawing import tested_in_words
from cfl_ray.results.comparison import by_experiment, column_of, mean_and_spread
from cfl_ray.run_directory import RunDirectory
from cfl_ray.study.plan import StudyRun
from cfl_ray.study.resources import Resources
from cfl_ray.study.run import StudyResults, StudyWatcher
from cfl_ray.study.sweep import RankedTrial
from cfl_ray.study.worker_pool import RunOutcome
from cfl_ray.tracking import RoundRecord, where_to_look

if TYPE_CHECKING:
    import pandas as pd

_MOST_COLUMNS = 5  # more settings are rows of a table, not columns
_MOST_TRIALS = 30  # printed trials of a method in a setting
_MOST_BARS = 16  # bars of live runs
_LINE_BYTES = 1 << 20  # longer than any line of a metrics log


class StudyDisplay(StudyWatcher):
    """Bars of the study and of its live runs on a terminal; otherwise a line for each run that ends."""

    def __init__(self, console: Console, learns: bool = False) -> None:
        """learns: whether runs depend on earlier results, so that the time left is not known."""
        self.console, self.learns, self.seconds = console, learns, list[float]()
        self.progress = progress_bars(console, "note", 20)
        self.whole: TaskID | None = None
        self.bars: dict[str, TaskID] = {}  # of the live runs, by name
        self.root, self.at_once, self.left = Path(), 1, 0

    def __enter__(self) -> "StudyDisplay":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    # ---- reports of the study

    def planned(self, runs: Sequence[StudyRun], finished: Sequence[StudyRun], resources: Resources, root: Path) -> None:
        self.root, self.at_once, self.left = root, resources.at_once, len(runs)
        done = f", {len(finished)} finished before" if finished else ""
        how = f", {resources}" if runs else ""
        folder = "" if self.whole is not None else f"; folder: {root}"
        self._print(f"{counted(len(runs) + len(finished), 'run')}{done}{how}{folder}")
        if self.whole is None:
            self.whole = self.progress.add_task("runs", total=0, note="")
        total = (self.progress.tasks[0].total or 0) + len(runs)
        self.progress.update(self.whole, total=total)

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
            self._print(f"{run.name}: {warning}")
        if outcome.status != "finished":
            self._print(f"{run.name} {outcome.status} after {took}: {outcome.reason}")
            return
        self.seconds.append(outcome.seconds)
        estimate = duration(fmean(self.seconds) * self.left / self.at_once)
        left = f"; about {estimate} left" if self.left and not self.learns else ""
        last = _last_record(run, self.root)
        self._print(f"{run.name}: {metrics_line(last.metrics) if last else 'no evaluation'}, {took}{left}")
        if self.whole is not None:
            self.progress.update(self.whole, advance=1, note=left.removeprefix("; "))

    def warn(self, text: str) -> None:
        self._print(text)

    # ---- the end

    def finish(self, results: StudyResults) -> None:
        """Prints the tables, the paths of the results, and the failed runs."""
        if results.study.sweep is not None:
            show_trials(results.trials, results.best, results.study.sweep.metric, self.console)
        elif results.run_metrics:
            show_tables(results.table(), results.study.metrics, self.console)
        for outcome in results.failed:
            self._print(f"{outcome.status}: {outcome.run.name}: {outcome.reason}")
        files = sorted(path.name for path in RunDirectory(results.root).artifacts.glob("*"))
        self._print(f"results: {results.root} ({', '.join(files)} in {RunDirectory.artifacts.name})")
        if results.tracking:
            self._print(f"MLflow: {where_to_look(results.root, results.tracking)}")

    def _print(self, text: str) -> None:
        say(f"{time.strftime('%H:%M:%S')} {text}" if self.progress.disable else text, self.console)


def _last_record(run: StudyRun, root: Path) -> RoundRecord | None:
    """The last recorded round of a run."""
    for log in run.folder(root).glob(f"*/{RunDirectory.metrics.name}"):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LINE_BYTES))
            lines = file.read().split(b"\n")[:-1]  # without a line that is being written
        if lines:
            return RoundRecord.from_line(lines[-1])
    return None


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
        grid = number_table(metric, [escape(str(name)) for name in wide.columns], first)
        for name, cells in wide.iterrows():
            grid.add_row(escape(str(name)), *map(str, cells))
        print_table(grid, console)


def show_trials(ranked: Sequence[RankedTrial], best: Sequence[RankedTrial], metric: str, console: Console) -> None:
    """Prints the trials of each method in each setting, the best first, and the overrides of the best trial.

    Equal trials have the same place, with `=`. p: of a paired t-test against the first trial, if seeds allow.
    """
    for (setting, method), group in groupby(ranked, lambda trial: (trial.setting, trial.method)):
        trials = list(group)
        tested = ["p"] if any(trial.p == trial.p for trial in trials) else []
        headings = [*short_names(list(trials[0].parameters)), "runs", metric, *tested]
        grid = number_table(f"{method}{_in(setting)}", [escape(heading) for heading in headings], "place")
        places = [trial.place for trial in trials]
        for trial in trials[:_MOST_TRIALS]:
            cells = [escape(as_yaml(value)) for value in trial.parameters.values()]
            cells += [str(len(trial.values)), mean_and_spread(trial.mean, trial.std) or "-"]
            cells += [tested_in_words(trial.p, trial.effect, len(trial.values), len(trials))] * len(tested)
            grid.add_row(f"{trial.place}{' =' * (places.count(trial.place) > 1)}", *cells)
        print_table(grid, console)
        if len(trials) > _MOST_TRIALS:
            say(f"and {len(trials) - _MOST_TRIALS} more, in artifacts/trials.csv", console)
    for trial in best:
        score = f"{metric} {mean_and_spread(trial.mean, trial.std)} over {counted(len(trial.values), 'run')}"
        rivals = [other for other in ranked if (other.setting, other.method) == (trial.setting, trial.method)]
        if equal := sum(other.place == trial.place for other in rivals) - 1:
            score += f", equal to {equal} other trial{'s' * (equal > 1)}"
        say(f"best for {trial.method}{_in(trial.setting)}: {score}, with\n  {trial.overrides}", console)


def _in(setting: str) -> str:
    return "" if setting == ALL_SETTINGS else f" in {setting}"
