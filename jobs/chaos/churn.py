"""Cost of a large federation whose clients join and leave.

    python -m jobs.chaos.churn  50 rounds of 100,000 clients; before each, 1 % join and 1 % leave; 1 % train
    python -m jobs.chaos.churn --clients 20000 --methods ifca

Compares with a federation of the size of one cohort whose clients neither join nor leave: the difference is the cost of
N and of joining and leaving.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported

import numpy as np
from rich.console import Console
from rich.table import Table

from cfl_ray import Experiment, run
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.tracking import RoundRecord

console = Console(highlight=False)


def churn_schedule(clients: int, rounds: int, share: float) -> list[dict]:
    """Events in which `share` of all clients join and as many leave before every round; a tenth is offline at first."""
    draw = np.random.default_rng(0)
    offline = draw.choice(clients, max(clients // 10, 1), replace=False)
    online = np.setdiff1d(np.arange(clients), offline)
    count, events = max(int(share * clients), 1), []
    for round in range(2, rounds + 1):
        join, leave = draw.choice(offline, count, replace=False), draw.choice(online, count, replace=False)
        events.append({"round": round, "join": join.tolist(), "leave": leave.tolist()})
        offline = np.union1d(np.setdiff1d(offline, join), leave)
        online = np.union1d(np.setdiff1d(online, leave), join)
    return events


def churn(options: argparse.Namespace) -> int:
    """Measures rounds of a large federation and of one of the size of its cohort, and prints their seconds."""
    cohort = max(options.clients // 100, 1)
    table = Table(
        "method", "rounds", "s per round, N", "first 10", "last 10", f"s per round, {cohort} clients", "difference"
    )
    for method in options.methods:
        seconds = _seconds(options, method, options.clients, cohort)
        large, small = statistics.median(seconds), statistics.median(_seconds(options, method, cohort, cohort))
        first, last = statistics.median(seconds[1:11]), statistics.median(seconds[-10:])
        cells = (f"{large:.2f}", f"{first:.2f}", f"{last:.2f}", f"{small:.2f}", f"{large - small:+.2f} s")
        table.add_row(method, str(options.rounds), *cells)
    console.print(
        f"{options.clients} clients, cohorts of {cohort}, {cohort} join and {cohort} leave before every round; "
        "medians, without evaluation"
    )
    console.print(table)
    return 0


@dataclass
class Clock(Watcher):
    """Records the times at which the run, the method and each round are reported."""

    times: list[float] = field(default_factory=lambda: [time.monotonic()])

    def method(self, label: str, record: RoundRecord) -> None:
        self.times.append(time.monotonic())

    def round(self, label: str, record: RoundRecord) -> None:
        self.times.append(time.monotonic())


def _seconds(options: argparse.Namespace, method: str, clients: int, cohort: int) -> list[float]:
    """Wall seconds of each whole round: cohort, joining and leaving, training and checkpoint."""
    clock = Clock()
    experiment = Experiment(
        name="churn",
        rounds=options.rounds,
        methods=[method],
        cohort={"clients": cohort},
        data={
            "source": "synthetic",
            "synthetic_shape": [1, 8, 8],
            "synthetic_samples": 20,
            "partition": {"clients": clients},
        },
        model={"options": {"hidden": 64}},
        local={"epochs": 1, "batch_size": 10},
        schedule=churn_schedule(clients, options.rounds, 0.01) if clients > cohort else [],
        evaluation={"every": options.rounds, "clients": 200, "local": False},
        runtime={"hosts": 2, "engine": "sequential"},
        tracking={"enabled": False},
        output=options.output,
    )
    run(experiment, watcher=clock)
    return np.diff(clock.times)[1:-1].tolist()  # without the start and the evaluated last round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--clients", type=int, default=100_000, help="clients of the federation")
    parser.add_argument("--methods", nargs="+", default=["fedavg", "ifca"])
    parser.add_argument("--output", default=tempfile.gettempdir(), help="folder of the run directories")
    return churn(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
