"""Runs the unfinished cells of the published tables, one after another, and writes each into docs/results as it ends.

    python -m jobs.experiments --core-hours 6            the next cells, in the order of order.txt
    python -m jobs.experiments --left                    what is left, and what it would take; runs nothing
    python -m jobs.experiments --order mine.txt --core-hours 6

A cell is a method in a setting with a seed. It is finished when docs/results has it with all rounds and every value of
the recipe that its published metric depends on. A line of the order is a recipe below jobs/experiments and a selection
as `cfl-ray compare` takes it: `fedac/table1 --setting cifar10_dirichlet --method ifca --seed 0`.

Each cell is a `cfl-ray compare` of its own, in its study's folder below --runs, which lies beside the checkout and not
in it. What a kill or a reboot leaves there is continued by the next call. Once the core hours are used up, and at
Ctrl-C or SIGTERM (status 130), the cell at work is interrupted, which the next call continues too. A cell that fails is
named and left out; the status is then 1.
"""

import argparse
import math
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from cfl_ray import UserError
from cfl_ray.errors import ConfigError
from cfl_ray.study.study_plan import Selection, StudyRun, plan
from cfl_ray.system.signals import sigterm_interrupts
from jobs.results.cells import ROOT, STUDIES, is_whole, study_of
from jobs.results.page import read_costs

ORDER = STUDIES / "order.txt"
RUNS = ROOT.parent / "cfl_ray_experiments"
_OVERRIDES = ("tracking.enabled=false", "runtime.backend=in_process")
_LOOK_EVERY = 2.0  # seconds between two looks at the CPU time of a cell
_END_SECONDS = 120.0  # that an interrupted cell has to write its checkpoint


@dataclass(frozen=True)
class Cell:
    """One run of a recipe. study: PAPER/NAME."""

    study: str
    run: StudyRun

    @property
    def words(self) -> list[str]:
        """It as a line of the order."""
        run = self.run
        return [self.study, "--setting", run.setting, "--method", run.method, "--seed", str(run.seed)]

    def command(self, runs: Path) -> list[str]:
        recipe, *selection = self.words
        file, folder = STUDIES / f"{recipe}.yaml", self.folder(runs)
        return [
            *_python("cfl_ray"),
            "compare",
            str(file),
            *selection,
            "--folder",
            str(folder),
            "--at-once",
            "1",
            *_OVERRIDES,
        ]

    def folder(self, runs: Path) -> Path:
        """The folder of its study."""
        return runs / study_of(STUDIES / f"{self.study}.yaml").name

    @cached_property
    def is_finished(self) -> bool:
        """Whether docs/results has it as its recipe says."""
        name = self.study.replace("/", "-")
        return is_whole(name, self.run.setting, self.run.method, self.run.seed)


def read_order(file: Path) -> list[Cell]:
    """The cells that the lines of a file select, each once. Raises ConfigError with the line that selects nothing."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("recipe")
    for name, kind in (("setting", str), ("method", str), ("seed", int)):
        parser.add_argument(f"--{name}", action="append", default=[], type=kind)
    cells: dict[str, Cell] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not (words := shlex.split(line, comments=True)):
            continue
        try:
            given, unknown = parser.parse_known_args(words)
            recipe = STUDIES / f"{given.recipe}.yaml"
            if unknown or not recipe.is_file():
                raise ConfigError(f"unknown: {' '.join(unknown)}" if unknown else f"there is no {recipe}")
            runs = plan(study_of(recipe), Selection(given.setting, given.method, given.seed))
        except (UserError, argparse.ArgumentError) as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
        for cell in (Cell(given.recipe, run) for run in runs):
            cells.setdefault(" ".join(cell.words), cell)
    return list(cells.values())


class Budget:
    """CPU time of processes that this one starts. seconds: that they may take together."""

    def __init__(self, seconds: float):
        self.seconds, self.used = seconds, 0.0

    @property
    def is_spent(self) -> bool:
        return self.used >= self.seconds

    def run(self, command: list[str], log: Path) -> int:
        """The status of a command, which is interrupted when the time is used up; its output goes to `log`."""
        before = self.used
        with log.open("a") as output:
            process = psutil.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            try:
                while process.poll() is None:
                    self.used = max(self.used, before + _cpu_seconds(process))
                    if self.is_spent:
                        break
                    time.sleep(_LOOK_EVERY)
            finally:  # SIGTERM, since a background job of a shell ignores SIGINT, and so do its children
                if process.poll() is None:
                    process.terminate()
                    try:
                        process.wait(_END_SECONDS)
                    except psutil.TimeoutExpired:
                        process.kill()
            return int(process.wait())


def _cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process and of those that it started, ended ones included."""
    total = 0.0
    try:
        for one in [process, *process.children(recursive=True)]:
            times = one.cpu_times()
            total += times.user + times.system
            total += times.children_user + times.children_system
    except psutil.NoSuchProcess:  # ended meanwhile: the next look counts it
        pass
    return total


def run(cells: list[Cell], runs: Path, budget: Budget) -> list[Cell]:
    """Runs unfinished cells until the budget is spent; returns those that failed."""
    runs.mkdir(parents=True, exist_ok=True)
    for folder in dict.fromkeys(cell.folder(runs) for cell in cells):
        if folder.is_dir():  # cells that ended just before this program was killed
            _results("collect", str(folder))
    failed = []
    for cell in cells:
        if budget.is_spent:
            break
        if cell.is_finished:
            continue
        began, log = budget.used, runs / f"{cell.folder(runs).name}.log"
        print(" ".join(cell.words), flush=True)
        status = budget.run(cell.command(runs), log)
        hours = (budget.used - began) / 3600
        if status == 0:
            for words in (["collect", str(cell.folder(runs))], ["share", cell.study.partition("/")[0]], ["write"]):
                _results(*words)
            print(f"  finished after {hours:.2f} core hours", flush=True)
        elif budget.is_spent:
            print(f"  interrupted after {hours:.2f} core hours", flush=True)
        else:
            failed.append(cell)
            print(f"  failed with status {status}: {log}", flush=True)
    return failed


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def _results(*words: str) -> None:
    """A command of jobs.results, in a process of its own since this one has read the figures that it changes."""
    subprocess.run([*_python("jobs.results"), *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def left(cells: list[Cell]) -> str:
    """For each study the unfinished cells and their core hours, in words."""
    costs = read_costs()
    hours = {(row.study, row.setting): row.hours_of_one for row in costs.itertuples()}
    lines, total = [], 0.0
    for study in dict.fromkeys(cell.study for cell in cells):
        of_study = [cell for cell in cells if cell.study == study]
        waiting = [cell for cell in of_study if not cell.is_finished]
        known = [hours.get((study.replace("/", "-"), cell.run.base), math.nan) for cell in waiting]
        estimate = sum(one for one in known if not math.isnan(one))
        total += estimate
        lacking = sum(map(math.isnan, known))
        unknown = f", {lacking} of them without an estimate" if lacking else ""
        lines.append(f"{study}: {len(waiting)} of {len(of_study)} left, {estimate:.1f} core hours{unknown}")
    return "\n".join([*lines, f"all: {total:.1f} core hours"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core-hours", type=float, help="CPU time of the cells of this call, all together")
    parser.add_argument("--order", type=Path, default=ORDER, help="the file with what to run (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs (default: %(default)s)")
    parser.add_argument("--left", action="store_true", help="print what is left, and run nothing")
    given = parser.parse_args(arguments)
    if not given.left and not (given.core_hours and given.core_hours > 0):
        parser.error("--core-hours takes a number above 0")
    cells = read_order(given.order)
    try:
        with sigterm_interrupts():
            failed = [] if given.left else run(cells, given.runs.resolve(), Budget(given.core_hours * 3600))
    except KeyboardInterrupt:
        print("  interrupted; the same command continues", flush=True)
        return 130
    print(left(read_order(given.order)))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
