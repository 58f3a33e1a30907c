"""Progress of a live run on the terminal, and the table at its end."""

import math
import threading
import time
from pathlib import Path
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from cfl_ray.cli import printed_tables
from cfl_ray.cli.console import say
from cfl_ray.cli.live_client import own_step
from cfl_ray.config import Experiment
from cfl_ray.errors import Diverged, RunStopped, counted, duration
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.results.recorded_runs import recorded_run
from cfl_ray.results.results import Results, divergence
from cfl_ray.results.study_folder import is_finished
from cfl_ray.run_directory import RunDirectory
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking import RoundRecord, where_to_look
from cfl_ray.tracking.record import METRICS, is_evaluated, why_early

WATCH_SECONDS = 2.0  # between two checks of the current round
LONG_ROUND_SECONDS = 10.0  # the step of longer rounds is shown
MAX_NOTES = 8  # largest number of notes shown per round


class Pace:
    """Seconds per round, and an estimate of the time left. The first round of a method, a warm-up, is excluded.

    Only rounds of this process count, not rounds before a resumption.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds  # of each method
        self.seconds: dict[str, list[float]] = {}  # of the rounds so far, by method
        self.since = 0.0  # end of the last round

    def begin(self, label: str, now: float) -> None:
        """A method begins."""
        self.seconds[label], self.since = [], now

    def add(self, label: str, now: float) -> None:
        """A round is complete."""
        if label in self.seconds:
            self.seconds[label].append(now - self.since)
        self.since = now

    def left_of_method(self, label: str, round: int) -> float | None:
        """Returns the seconds left after `round`; None before the second round."""
        warm = self.seconds.get(label, [])[1:]
        return fmean(warm) * (self.rounds - round) if warm else None

    def left_of_run(self, label: str, round: int, waiting: int) -> float | None:
        """Returns the seconds left of the run; the `waiting` methods take the mean time of the methods so far."""
        left = self.left_of_method(label, round)
        if left is None:
            return None
        paces = [fmean(seconds[1:]) for seconds in self.seconds.values() if seconds[1:]]
        return left + waiting * self.rounds * fmean(paces)


class Rate:
    """A limit of lines by time: `least` seconds from one to the next, and a tenth of the time so far."""

    def __init__(self, least: float) -> None:
        self.least, self.began, self.last = least, time.monotonic(), -math.inf

    def is_due(self, always: bool = False) -> bool:
        """Returns whether a line is due now, or wanted in any case; then it counts as the last one."""
        now = time.monotonic()
        if not always and now - self.last < max(self.least, (now - self.began) / 10):
            return False
        self.last = now
        return True


def progress_bars(console: Console, field: str, width: int) -> Progress:
    """Returns bars of a width, each with the task's `field` as text beside it; without a terminal nothing is shown."""
    columns = [
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
        BarColumn(width),
        MofNCompleteColumn(),
        TextColumn(f"{{task.fields[{field}]}}", table_column=Column(overflow="fold")),
        TimeElapsedColumn(),
    ]
    return Progress(*columns, console=console, disable=not console.is_terminal)


class Display(Watcher):
    """Progress bars on a terminal; otherwise plain lines, about ten per method. A context manager.

    least: seconds between plain lines, which are then printed by time (`Rate`); notes of rounds in between are counted.
    """

    def __init__(self, console: Console, rounds: int, least: float | None = None) -> None:
        self.console, self.rounds, self.began = console, rounds, time.monotonic()
        self.live = console.is_terminal
        self.progress = progress_bars(console, "metrics", 24 if console.width >= 120 else 10)
        self.preparation: TaskID | None = None  # its bar, while the federation is prepared
        self.bars: dict[str, TaskID] = {}  # by method
        self.metrics: dict[str, str] = {}  # of the last evaluation, by method
        self.tested_on = ""
        self.experiment: Experiment | None = None  # once the run has started
        self.further: list[str] = []  # metrics of its task that other runs do not have
        self.labels: list[str] = []  # of all methods, in order
        self.run_dir: Path | None = None
        self.at_work: tuple[str, int] | None = None  # method and last complete round
        self.left: dict[str, str] = {}  # time left, by method
        self.ended = threading.Event()
        self.pace = Pace(rounds)
        self.rates = None if least is None else {"rounds": Rate(least), "notes": Rate(least)}
        self.hidden = 0  # notes that were not printed

    def __enter__(self) -> "Display":
        self.progress.start()
        if self.live:
            threading.Thread(target=self._watch_long_rounds, name="long-rounds", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended.set()
        self.progress.stop()
        if isinstance(error, RunStopped) and self.experiment is not None and self.run_dir is not None:
            results = recorded_run(self.run_dir, self.experiment)
            if any(method.final for method in results.methods.values()):
                self.show_table(results)

    # ---- reports of the run

    def preparing(self, what: str, done: int = 0, total: int = 0) -> None:
        if not self.live:
            if not done:
                self._line(f"preparing {what} ...")
            return
        if self.preparation is None:
            self.preparation = self.progress.add_task("", total=None, metrics="")
        self.progress.update(self.preparation, description=f"preparing {what}", completed=done, total=total or None)

    def started(self, setup: Setup, run_dir: Path | None, run_info: dict[str, str]) -> None:
        if self.preparation is not None:
            self.progress.remove_task(self.preparation)
            self.preparation = None
        self.labels, self.run_dir, self.experiment = list(setup.methods), run_dir, setup.experiment
        self.further = [metric.name for metric in setup.task.metrics if metric.name not in METRICS]
        federation, network = setup.federation, setup.network()
        groups = f", {counted(federation.num_groups, 'true group')}" if federation.num_groups else ""
        number = sum(tensor.numel() for tensor in network.frozen.values())
        frozen = f" and {number:,} frozen" * bool(number)
        self._line(
            f"{counted(federation.num_clients, 'client')}{groups}; {network.spec.size:,} parameters{frozen}; "
            f"hosts: {run_info['hosts']} ({run_info['device']})"
        )
        self.tested_on = federation.tested_on
        self._line(self.tested_on)
        if federation.share is None and federation.validated_on:  # notes have the sizes of a share
            self._line(federation.validated_on)
        for warning in setup.warnings + setup.federation.warnings:
            self._line(f"warning: {warning}")
        for note in printed_tables.notes_on(setup, network, int(federation.num_samples_N.max())):
            self._line(f"note: {note}")
        self._line(f"engine {run_info['engine']}")
        if run_dir is not None:
            self._line(f"run directory {run_dir}")

    def method(self, label: str, record: RoundRecord) -> None:
        self.pace.begin(label, time.monotonic())
        if self.live:
            self.bars[label] = self.progress.add_task(label, total=self.rounds, completed=record.round, metrics="")
        self._notes(label, record)
        self.at_work = (label, record.round)

    def round(self, label: str, record: RoundRecord) -> None:
        self.pace.add(label, time.monotonic())
        self._notes(label, record)
        evaluated = is_evaluated(record.metrics)
        self.left[label] = left = self._time_left(label, record)
        self.at_work = None if record.finished else (label, record.round)
        if self.live:
            if evaluated:
                self.metrics[label] = printed_tables.metrics_line(record.metrics)
            total = record.round if record.finished else self.rounds
            self.progress.update(self.bars[label], completed=record.round, total=total)
            self._show(label)
        elif evaluated and self._is_due(record):
            line = f"{label} round {record.round}/{self.rounds}  {printed_tables.metrics_line(record.metrics)}"
            hidden, self.hidden = f"({self.hidden} notes and events are not shown)" if self.hidden else "", 0
            self._line("  ".join(filter(None, [line, left, hidden])))

    def _is_due(self, record: RoundRecord) -> bool:
        """Returns whether an evaluated round has a line."""
        if self.rates is not None:
            return self.rates["rounds"].is_due(record.finished)
        return record.round % max(1, self.rounds // 10) == 0 or record.finished

    def _show(self, label: str, *more: str) -> None:
        """Writes metrics and time left, and `more`, next to the bar of a method."""
        shown = filter(None, [self.metrics.get(label), self.left.get(label), *more])
        self.progress.update(self.bars[label], metrics="  ".join(shown))

    def _watch_long_rounds(self) -> None:
        """Shows the elapsed time and the step of long rounds until the display ends."""
        while not self.ended.wait(WATCH_SECONDS):
            at_work, seconds = self.at_work, time.monotonic() - self.pace.since
            if at_work is None or seconds < LONG_ROUND_SECONDS:
                continue
            step = own_step(self.run_dir) if self.run_dir else None
            label, done = at_work
            if self.at_work == at_work and label in self.bars:
                self._show(label, f"round {done + 1}: {f'{step}, ' if step else ''}{duration(seconds)} so far")

    def _time_left(self, label: str, record: RoundRecord) -> str:
        """Returns the time left of the method and of the run as text; empty if it is not known."""
        waiting = len(self.labels) - self.labels.index(label) - 1 if label in self.labels else 0
        of_method = self.pace.left_of_method(label, record.round)
        of_run = self.pace.left_of_run(label, record.round, waiting)
        if of_method is None or of_run is None or (record.finished and not waiting):
            return ""
        if not waiting:
            return f"about {duration(of_run)} left"
        if record.finished:
            return f"about {duration(of_run)} left in all"
        return f"about {duration(of_method)} left, {duration(of_run)} in all"

    def complete(self, results: Results) -> None:
        pass  # `finish` raises Diverged

    def warn(self, text: str) -> None:
        self._line(f"note: {text}")

    def _notes(self, label: str, record: RoundRecord) -> None:
        events = [event.text for event in record.events]
        count = len(record.notes) + len(events)
        if self.rates is not None and count and not self.rates["notes"].is_due():
            self.hidden += count
            return
        # in the order of the round: clients join and leave before the training, in which clusters change
        for what, notes in (("notes", record.notes), ("events of clusters", events)):
            more = [f"and {len(notes) - MAX_NOTES} more {what}"] if len(notes) > MAX_NOTES else []
            for note in [*notes[:MAX_NOTES], *more]:
                self._line(f"{label} round {record.round}: {note}")

    def _line(self, text: str) -> None:
        say(text, self.progress.console)

    # ---- end of the run

    def finish(self, results: Results) -> None:
        """Prints how long the run took, and its results. Raises Diverged if a method diverged."""
        self.show(results, f"finished in {time.monotonic() - self.began:.0f} s")
        if reasons := divergence(results):
            raise Diverged(reasons)

    def show_table(self, results: Results) -> None:
        """Prints the table of results and warnings about them."""
        printed_tables.print_table(printed_tables.comparison(results, self.further), self.console)
        is_weighted = self.experiment is not None and self.experiment.evaluation.weights == "samples"
        weights = ", weighted by their test samples" * is_weighted
        self._line(
            f"{printed_tables.score_of(results)}: of the model that the server would give each client next, mean over "
            f"clients{weights} (P-server); P-local: of the model that each client holds after its own training"
        )
        self._line(printed_tables.SECONDS)
        if self.tested_on:
            self._line(self.tested_on)
        for label, method in results.methods.items():
            finished = method.directory is None or is_finished(method.directory)
            if early := why_early(method.records, self.rounds, finished, method.ended):
                self._line(f"note: {label} {method.ended or f'ended {early}'}")
            if warning := printed_tables.alone_warning(method.final):
                self._line(f"warning: {label}: {warning}")
            if warning := printed_tables.rejection_warning(label, method.records):
                self._line(f"warning: {warning}")

    def show(self, results: Results, took: str | None = None) -> None:
        """Prints the table of results, the places of all files, and the next commands."""
        self.show_table(results)
        if took:
            self._line(took)
        if results.run_dir is not None:
            self._line(f"results: {results.run_dir} (figures in artifacts/)")
            report = RunDirectory(results.run_dir).report
            if report.is_file():
                self._line(f"report: {report}")
        if results.tracking is not None and results.run_dir is not None:
            self._line(f"MLflow: {where_to_look(results.run_dir, results.tracking)}")
        self._line(
            "next: cfl-ray methods (the other methods), cfl-ray run FILE.yaml (your own experiment), "
            "cfl-ray check --yaml (all settings, as a template)"
        )
