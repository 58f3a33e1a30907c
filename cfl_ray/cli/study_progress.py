"""Progress of a study on the terminal, and its table at the end."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from cfl_ray.cli.tables import duration, metrics_line
from cfl_ray.runtime.comparison import by_experiment, table_of
from cfl_ray.runtime.study.cells import Cell
from cfl_ray.runtime.study.packing import Packing
from cfl_ray.runtime.study.run import StudyResults, StudyWatcher
from cfl_ray.runtime.study.workers import Outcome
from cfl_ray.tracking import read_records


class StudyDisplay(StudyWatcher):
    """Bars of the study and of the runs at work on a terminal; otherwise a line for each run that ends."""

    def __init__(self, console: Console) -> None:
        self.console, self.seconds = console, list[float]()
        columns = [
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", table_column=Column(overflow="fold")),
            TimeElapsedColumn(),
        ]
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.whole: TaskID | None = None
        self.bars: dict[str, TaskID] = {}  # of the runs at work, by name
        self.root, self.at_once, self.left = Path(), 1, 0

    def __enter__(self) -> "StudyDisplay":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    # ---- reports of the study

    def planned(self, cells: Sequence[Cell], finished: Sequence[Cell], packing: Packing, root: Path) -> None:
        self.root, self.at_once, self.left = root, packing.at_once, len(cells)
        done = f", {len(finished)} finished before" if finished else ""
        how = f", {packing}" if cells else ""
        self._print(f"{len(cells) + len(finished)} runs{done}{how}; folder: {root}")
        if self.whole is None:
            self.whole = self.progress.add_task("runs", total=0, note="")
        total = (self.progress.tasks[0].total or 0) + len(cells)
        self.progress.update(self.whole, total=total)

    def live(self, cells: Sequence[Cell]) -> None:
        if self.progress.disable:
            return
        for name in [name for name in self.bars if name not in {cell.name for cell in cells}]:
            self.progress.remove_task(self.bars.pop(name))
        for cell in cells:
            last = self._last(cell)
            if cell.name not in self.bars:
                self.bars[cell.name] = self.progress.add_task(cell.name, total=cell.experiment.rounds, note="")
            self.progress.update(self.bars[cell.name], completed=last)

    def _last(self, cell: Cell) -> int:
        """The last round that is recorded of a run."""
        folder = cell.folder(self.root)
        logs = [path.parent for path in folder.glob("*/metrics.jsonl")]
        return max((record.round for log in logs for record in read_records(log)), default=0)

    def ended(self, outcome: Outcome) -> None:
        cell, took = outcome.cell, duration(outcome.seconds)
        self.left -= 1
        if outcome.status != "finished":
            self._print(f"{cell.name} {outcome.status} after {took}: {outcome.reason}")
            return
        self.seconds.append(outcome.seconds)
        left = f"; about {duration(fmean(self.seconds) * self.left / self.at_once)} left" if self.left else ""
        self._print(f"{cell.name}: {self._figures(cell)}, {took}{left}")
        if self.whole is not None:
            self.progress.update(self.whole, advance=1, note=left.removeprefix("; "))

    def _figures(self, cell: Cell) -> str:
        for log in cell.folder(self.root).glob("*/metrics.jsonl"):
            if records := list(read_records(log.parent)):
                return metrics_line(records[-1].metrics)
        return "no evaluation"

    def warn(self, text: str) -> None:
        self._print(text)

    # ---- the end

    def finish(self, results: StudyResults) -> None:
        """Prints the tables, where results are, and what failed."""
        found = results.figures.found
        if found:
            table = table_of(found, results.study.metrics)
            score = next(name for name in table.columns if f"{name}_std" in table.columns)
            shown = [name for name in dict.fromkeys((score, f"{score}_local", "ari")) if name in table.columns]
            for metric in results.study.metrics or shown:
                wide = by_experiment(table, metric)
                grid = Table(*map(escape, map(str, wide.columns)), title=metric)
                for row in wide.itertuples(index=False):
                    grid.add_row(*(escape(str(cell)) for cell in row))
                self.console.print(grid)
        for outcome in results.failed:
            self._print(f"failed: {outcome.cell.name}: {outcome.reason}")
        self._print(f"results: {results.root} (results.csv and table.md in artifacts/)")
        if results.tracking:
            self._print(f"MLflow: {results.tracking}")

    def _print(self, text: str) -> None:
        self.console.print(
            f"{time.strftime('%H:%M:%S')} {text}" if self.progress.disable else text, markup=False, soft_wrap=True
        )
