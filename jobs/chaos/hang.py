"""Hosts, servers and a data source that stop answering at random moments.

    python -m jobs.chaos --hang 20 --seed 0
    python -m jobs.chaos --hang 3 --methods ditto --rounds 8 --targets host data

A host or the server is stopped (SIGSTOP), or the data source does not return from a read. The run must name the process
on the terminal, end it within the limit that it has named, and have the outcome of an undisturbed run; MLflow must say
what was waited for last. Exit status 1 if anything of this is not so. Recovery: until the end of the interrupted round.
"""

import argparse
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from cfl_ray.config import Experiment
from jobs.chaos.processes import Run
from jobs.chaos.same_outcome import IDENTICAL, concluded, differences, saved, tags_in_mlflow, undisturbed

TARGETS = ["host", "server", "data"]
LIMIT = 25.0  # seconds: runtime.stall_limit
_WARNING = 0.08  # of it: runtime.stall_warning
UNDISTURBED = 8  # last rounds, in which nothing hangs: a round is recorded when the next ones may be under way already
_DELAY = 0.3  # seconds after the record of a round, at most, before a busy process is chosen
# the Ray actor method that a process executes while it takes part in a round, as it ends the process's title; a host
# that only starts is not chosen, since rounds go on without it
_METHOD = {"host": ".work", "server": ".call"}
_LOOKS = 30.0  # seconds for looks at what makes no progress, and for the end of the process, on a busy machine
_SECONDS_OF_UNIT = {"s": 1.0, "min": 60.0, "h": 3600.0}
_LIMIT_SAID = re.compile(r"(?:the host is replaced|another one is started) after ([\d.]+) (s|min|h)")


@dataclass
class Hang:
    """A process that stopped answering."""

    target: str
    pid: int
    round: int  # that was interrupted, over all methods
    named: float  # seconds until the run has named it
    limit: float  # seconds after which, as the run says, it is replaced
    ended: float  # seconds until it was
    recovery: float  # seconds until the end of the interrupted round

    @property
    def fault(self) -> str:
        """The fault of the run, in words; empty: none."""
        if not self.named <= self.ended:
            return "not named before it was replaced"
        return "" if self.ended <= self.limit + _LOOKS else "replaced too late"


def hang_experiment(methods: Sequence[str], rounds: int, limit: float, output: Path) -> Experiment:
    """Clients whose data source has a trap; limits of seconds."""
    stalls = {"stall_warning": _WARNING * limit, "stall_limit": limit}
    return Experiment(
        name="hang",
        rounds=rounds,
        methods=list(methods),
        data=trapped_data(trap(output)),
        model={"options": {"hidden": 100}},
        local={"epochs": 10, "batch_size": 8, "momentum": 0.5},
        cohort={"fraction": 0.5, "dropout": 0.05},
        schedule=[{"round": 3, "join": [22, 23]}, {"round": 5, "leave": [0]}],
        runtime={"engine": "sequential", "hosts": 2, "retries": 1000} | stalls,
        tracking={"report": False},
        output=str(output),
    )


def trapped_data(trap: Path) -> dict[str, object]:
    """The section `data` of a federation that reads slowly, and stops answering once there is the file `trap`."""
    return {"source": f"{Path(__file__).with_name('trapped_data.py')}:load", "options": {"trap": str(trap)}}


def trap(folder: Path) -> Path:
    """The file with which the data source stops answering."""
    return folder / "trap"


def hung(run: Run, folder: Path, targets: Sequence[str], rounds: int, count: int, seed: int) -> list[Hang]:
    """Lets `count` processes stop answering, each in a different round, within `_DELAY` of its start."""
    draw, hangs = random.Random(seed), []
    order = [targets[number % len(targets)] for number in range(count)]
    draw.shuffle(order)
    for round, target in zip(sorted(draw.sample(range(1, rounds - UNDISTURBED), count)), order, strict=True):
        run.wait_for_rounds(round)
        time.sleep(draw.uniform(0, _DELAY))
        begin = run.log.stat().st_size
        pid = _stop(run, folder, target, draw)
        began = time.monotonic()
        naming = "the server has made no progress" if target == "server" else f"(process {pid} on node"
        run.wait_until(partial(_said, run, begin, naming))
        named, before = time.monotonic() - began, run.rounds_done()
        found = _LIMIT_SAID.search(_said(run, begin, naming))
        limit = float(found[1]) * _SECONDS_OF_UNIT[found[2]] if found else float("nan")
        run.wait_until(partial(_is_gone, pid))
        ended = time.monotonic() - began
        run.wait_for_rounds(before + 1)
        hangs.append(Hang(target, pid, before + 1, named, limit, ended, time.monotonic() - began))
    return hangs


def _stop(run: Run, folder: Path, target: str, draw: random.Random) -> int:
    """Makes a process of this kind hang, and returns its id."""
    found = partial(_busy, run, target)
    if target == "data":
        trap(folder).touch()
        found = partial(_trapped, trap(folder))
    pids: list[int] = []
    run.wait_until(lambda: pids.extend(found()) or pids)
    if not pids:
        raise SystemExit(f"the run ended before a {target} hung; see {run.log}")
    pid = draw.choice(pids)
    if target != "data":
        psutil.Process(pid).send_signal(signal.SIGSTOP)
    return pid


def _trapped(trap: Path) -> list[int]:
    """The process that hangs in the data source, as a list."""
    taken = list(trap.parent.glob(f"{trap.name}.*"))
    for file in taken:
        file.unlink()
    return [int(file.suffix[1:]) for file in taken]


def _busy(run: Run, target: str) -> list[int]:
    """Processes of this kind that take part in a round."""
    found = []
    for process in run.processes(target):
        with suppress(psutil.Error, IndexError):
            if process.cmdline()[0].endswith(_METHOD[target]):
                found.append(process.pid)
    return found


def _is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def _said(run: Run, begin: int, naming: str) -> str:
    """The first line of the terminal from byte `begin` on that has these words; empty: none yet."""
    with run.log.open("rb") as log:
        log.seek(begin)
        return next((line for line in log.read().decode(errors="replace").splitlines() if naming in line), "")


def let_hang(options: argparse.Namespace, folder: Path) -> int:
    """Runs the experiment with and without hangs, and prints a row per hang. Returns the status, see `concluded`."""
    methods, seed = options.methods, options.seed
    file, experiment = saved(hang_experiment(methods, options.rounds, options.limit, folder))
    undisturbed(experiment, folder / "undisturbed")
    run = Run(file, folder / "disturbed")
    try:
        hangs = hung(run, folder, options.targets, len(methods) * options.rounds, options.hang, seed)
        run.wait_for_end()
    finally:
        run.close()
    wrong = differences(experiment, methods, folder / "undisturbed", folder / "disturbed")
    wrong += [f"hang {number}: {hang.fault}" for number, hang in enumerate(hangs, 1) if hang.fault]
    waits = tags_in_mlflow(folder, experiment.name, "last_wait")
    wrong += [] if "" in waits and set(waits) & set(methods) else [f"last_wait in MLflow: {waits}"]
    console = Console(highlight=False)
    table = Table("#", "stopped", "round", "named s", "limit s", "ended s", "recovery s")
    for number, hang in enumerate(hangs, 1):
        figures = (f"{seconds:.1f}" for seconds in (hang.named, hang.limit, hang.ended, hang.recovery))
        table.add_row(str(number), hang.target, str(hang.round), *figures)
    console.print(table)
    counts = ", ".join(f"{number} {target}" for target, number in Counter(hang.target for hang in hangs).items())
    console.print(f"{len(hangs)} hangs ({counts}), seed {seed}; rounds are counted over all methods")
    return concluded(wrong, f"{IDENTICAL}; every hang named and ended in time", folder, options.keep)
