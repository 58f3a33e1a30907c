"""What a person sees while a run goes on."""

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cfl_ray.runtime.driver import Watcher
from cfl_ray.runtime.results import Results
from cfl_ray.runtime.server import Report
from cfl_ray.runtime.setup import Setup
from cfl_ray.tables import comparison, figures


class Display(Watcher):
    """Live progress on a terminal; plain lines, about ten per method, anywhere else. Use as a context."""

    def __init__(self, console: Console, rounds: int):
        self.console, self.rounds, self.began = console, rounds, time.monotonic()
        self.live = console.is_terminal
        columns = [TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"), TimeElapsedColumn()]
        self.progress = Progress(*columns, console=console, disable=not self.live)
        self.task: TaskID | None = None
        self.task_of: dict[str, TaskID] = {}

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()

    # ---- what the run reports

    def preparing(self, what: str, done: int = 0, total: int = 0) -> None:
        if not self.live:
            if not done:
                self._line(f"preparing {what} ...")
            return
        if self.task is None:
            self.task = self.progress.add_task("", total=None, figures="")
        self.progress.update(self.task, description=f"preparing {what}", completed=done, total=total or None)

    def started(self, setup: Setup, run_dir: Path | None, facts: dict[str, str]) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
            self.task = None
        federation = setup.federation
        groups = "" if federation.group_N is None else f", {len(set(federation.group_N.tolist()))} true groups"
        network = setup.network()
        self._line(f"{federation.num_clients} clients{groups}; {network.spec.size:,} parameters; hosts: {facts['hosts']} ({facts['device']})")
        self._line(f"engine {facts['engine']}")
        if run_dir is not None:
            self._line(f"run directory {run_dir}")

    def method(self, label: str, report: Report) -> None:
        if self.live:
            self.task_of[label] = self.progress.add_task(label, total=self.rounds, completed=report.round, figures="")
        self._notes(label, report)

    def round(self, label: str, report: Report) -> None:
        self._notes(label, report)
        if self.live:
            changes = {"figures": figures(report.metrics)} if "accuracy" in report.metrics else {}
            self.progress.update(self.task_of[label], completed=report.round, **changes)
        elif "accuracy" in report.metrics and (report.round % max(1, self.rounds // 10) == 0 or report.finished):
            self._line(f"{label} round {report.round}/{self.rounds}  {figures(report.metrics)}")

    def warn(self, text: str) -> None:
        self._line(f"note: {text}")

    def _notes(self, label: str, report: Report) -> None:
        for note in report.notes[:8]:
            self._line(f"{label} round {report.round}: {note}")
        if len(report.notes) > 8:
            self._line(f"{label} round {report.round}: and {len(report.notes) - 8} notes more")

    def _line(self, text: str) -> None:
        self.progress.console.print(text, markup=False, soft_wrap=True)

    # ---- the end

    def finish(self, results: Results) -> None:
        """The table, where everything is, and what to type next."""
        self.console.print(comparison(results))
        self._line("accuracy: the model the server would give each client next, mean over clients (P-server); P-local: the model each client holds after its own training")
        self._line(f"finished in {time.monotonic() - self.began:.0f} s")
        if results.run_dir is not None:
            self._line(f"results: {results.run_dir} (figures in artifacts/)")
        if results.tracking is not None:
            store = "" if results.tracking.startswith("http") else f"; look at them with: mlflow ui --backend-store-uri {results.tracking}"
            self._line(f"MLflow: {results.tracking}{store}")
        self._line("next: cfl-ray methods (what else there is), cfl-ray run FILE.yaml (an experiment of your own), cfl-ray check (this one's config to start from)")
