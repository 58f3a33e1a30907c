"""Resources of a long run by round (soak), and cost of a large federation whose clients join and leave (churn).

    python -m jobs.chaos.endurance soak   2,000 short rounds on digits: memory, open files and object store, by round
    python -m jobs.chaos.endurance churn  50 rounds of 100,000 clients; before each, 1 % join and 1 % leave; 1 % train
    python -m jobs.chaos.endurance churn --clients 20000 --methods ifca

`soak` compares the last round with round 200. `churn` compares with a federation of the size of one cohort whose
clients neither join nor leave: the difference is the cost of N and of joining and leaving.
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
import psutil
import ray
from rich.console import Console
from rich.table import Table

from cfl_ray import Experiment, run
from cfl_ray.runtime.driver import Watcher
from cfl_ray.runtime.round_report import RoundReport

console = Console(highlight=False)


@dataclass(frozen=True)
class Sample:
    """Resources that the processes of a run use after a round."""

    round: int
    server_mb: float  # private memory of the server
    host_mb: float  # private memory of the largest host
    files: int  # open files and sockets of server and hosts together
    store_mb: float  # used memory of the object store


@dataclass
class Sampling(Watcher):
    """Takes a sample after every `every` rounds."""

    every: int
    samples: list[Sample] = field(default_factory=list)

    def round(self, label: str, report: RoundReport) -> None:
        if report.round % self.every == 0:
            self.samples.append(sample(report.round))


def sample(round: int) -> Sample:
    """The resources that server, hosts and object store use now."""
    servers, hosts = _processes("ray::ServerActor"), _processes("ray::ClientHost")
    files = sum(process.num_fds() for process in (*servers, *hosts))
    store = ray.cluster_resources()["object_store_memory"] - ray.available_resources().get("object_store_memory", 0)
    return Sample(round, max(map(_private_mb, servers)), max(map(_private_mb, hosts)), files, store / 1e6)


def _processes(title: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if (process.cmdline() or [""])[0].startswith(title)
    ]


def _private_mb(process: psutil.Process) -> float:
    info = process.memory_info()
    return (info.rss - info.shared) / 1e6


def soak(options: argparse.Namespace) -> int:
    """Runs many short rounds and prints the resources of the processes."""
    watcher = Sampling(max(options.rounds // 20, 1))
    experiment = Experiment(
        name="soak",
        rounds=options.rounds,
        methods=[options.methods[0]],
        data={"shift": {"kind": "rotated"}},
        local={"epochs": 1, "batch_size": 10},
        cohort={"fraction": 0.2},
        evaluation={"every": 10},
        runtime={"hosts": 2, "engine": "sequential"},
        tracking={"enabled": False},
        output=options.output,
    )
    began = time.monotonic()
    run(experiment, watcher=watcher)
    table = Table("round", "server MB", "host MB", "open files", "object store MB")
    for at in watcher.samples:
        table.add_row(str(at.round), f"{at.server_mb:.1f}", f"{at.host_mb:.1f}", str(at.files), f"{at.store_mb:.2f}")
    console.print(table)
    reference = min(200, options.rounds // 2)
    settled = next((at for at in watcher.samples if at.round >= reference), watcher.samples[0])
    last = watcher.samples[-1]
    for name in ("server_mb", "host_mb", "files", "store_mb"):
        before, after = getattr(settled, name), getattr(last, name)
        growth = (after / before - 1) * 100 if before else 0
        console.print(
            f"{name}: {before:.1f} in round {settled.round}, {after:.1f} in round {last.round} ({growth:+.1f} %)"
        )
    console.print(f"{options.rounds} rounds of {options.methods[0]} in {time.monotonic() - began:.0f} s")
    return 0


def churn_schedule(clients: int, rounds: int, share: float, seed: int = 0) -> list[dict]:
    """Events in which `share` of all clients join and as many leave before every round; a tenth is offline at first."""
    draw = np.random.default_rng(seed)
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

    def method(self, label: str, report: RoundReport) -> None:
        self.times.append(time.monotonic())

    def round(self, label: str, report: RoundReport) -> None:
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
    parser.add_argument("what", choices=("soak", "churn"))
    parser.add_argument("--rounds", type=int, help="rounds; default: 2000 (soak), 50 (churn)")
    parser.add_argument("--clients", type=int, default=100_000, help="clients of the federation (churn)")
    parser.add_argument("--methods", nargs="+", help="methods; default: stocfl (soak), fedavg ifca (churn)")
    parser.add_argument("--output", default=tempfile.gettempdir(), help="folder of the run directories")
    options = parser.parse_args()
    options.rounds = options.rounds or {"soak": 2000, "churn": 50}[options.what]
    options.methods = options.methods or {"soak": ["stocfl"], "churn": ["fedavg", "ifca"]}[options.what]
    return {"soak": soak, "churn": churn}[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
