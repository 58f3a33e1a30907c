"""Whether a long run stays as it began, and whether a large federation costs more than its cohort.

    python jobs/endurance.py soak                       2,000 quick rounds on digits: memory, open files and object store, by round
    python jobs/endurance.py churn                      100,000 clients, 1 % a round, 1 % join and 1 % leave before every round, 50 rounds
    python jobs/endurance.py churn --clients 20000 --methods ifca

`soak` compares the end with round 200. `churn` compares with a run whose whole federation is as large as one cohort, where nobody
comes or goes: what takes longer is the price of N and of the coming and going.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported: nobody else may use the cluster

import numpy as np
import psutil
import ray
from rich.console import Console
from rich.table import Table

from cfl_ray import Experiment, run
from cfl_ray.runtime.driver import Watcher

console = Console(highlight=False)


@dataclass(frozen=True)
class Sample:
    """What the processes of a run use after a round."""

    round: int
    server_mb: float  # private memory
    host_mb: float  # the largest
    files: int  # open files and sockets of server and hosts together
    store_mb: float  # of the object store


@dataclass
class Sampling(Watcher):
    """Looks at server, hosts and object store after every `every` rounds."""

    every: int
    samples: list[Sample] = field(default_factory=list)

    def round(self, label, report):
        if report.round % self.every == 0:
            self.samples.append(sample(report.round))


def sample(round: int) -> Sample:
    servers, hosts = _processes("ray::ServerActor"), _processes("ray::ClientHost")
    files = sum(process.num_fds() for process in (*servers, *hosts))
    store = ray.cluster_resources()["object_store_memory"] - ray.available_resources().get("object_store_memory", 0)
    return Sample(round, max(map(_private_mb, servers)), max(map(_private_mb, hosts)), files, store / 1e6)


def _processes(title: str) -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if (process.cmdline() or [""])[0].startswith(title)]


def _private_mb(process: psutil.Process) -> float:
    info = process.memory_info()
    return (info.rss - info.shared) / 1e6


def soak(options: argparse.Namespace) -> int:
    watcher = Sampling(max(options.rounds // 20, 1))
    experiment = Experiment(
        name="soak", rounds=options.rounds, methods=[options.methods[0]], data={"shift": {"kind": "rotated"}},
        local={"epochs": 1, "batch_size": 10}, cohort={"fraction": 0.2}, evaluation={"every": 10},
        runtime={"hosts": 2, "engine": "sequential"}, tracking={"enabled": False}, output=options.output,
    )  # fmt: skip
    began = time.monotonic()
    run(experiment, watcher=watcher)
    table = Table("round", "server MB", "host MB", "open files", "object store MB")
    for one in watcher.samples:
        table.add_row(str(one.round), f"{one.server_mb:.1f}", f"{one.host_mb:.1f}", str(one.files), f"{one.store_mb:.2f}")
    console.print(table)
    settled = next((one for one in watcher.samples if one.round >= min(200, options.rounds // 2)), watcher.samples[0])
    last = watcher.samples[-1]
    for name in ("server_mb", "host_mb", "files", "store_mb"):
        a, b = getattr(settled, name), getattr(last, name)
        console.print(f"{name}: {a:.1f} in round {settled.round}, {b:.1f} in round {last.round} ({(b / a - 1) * 100 if a else 0:+.1f} %)")
    console.print(f"{options.rounds} rounds of {options.methods[0]} in {time.monotonic() - began:.0f} s")
    return 0


def coming_and_going(clients: int, rounds: int, share: float, seed: int = 0) -> list[dict]:
    """A schedule in which `share` of all clients come and as many leave before every round; a tenth is away at first."""
    draw = np.random.default_rng(seed)
    away = draw.choice(clients, max(clients // 10, 1), replace=False)
    here = np.setdiff1d(np.arange(clients), away)
    count, events = max(int(share * clients), 1), []
    for number in range(2, rounds + 1):
        come, go = draw.choice(away, count, replace=False), draw.choice(here, count, replace=False)
        events.append({"round": number, "join": come.tolist(), "leave": go.tolist()})
        away, here = np.union1d(np.setdiff1d(away, come), go), np.union1d(np.setdiff1d(here, go), come)
    return events


def churn(options: argparse.Namespace) -> int:
    cohort = max(options.clients // 100, 1)
    table = Table("method", "rounds", "s a round, N", "first 10", "last 10", f"s a round, {cohort} clients", "beyond it")
    for method in options.methods:
        seconds = [_seconds(options, method, clients, cohort) for clients in (options.clients, cohort)]
        many, few = (statistics.median(one) for one in seconds)
        first, last = statistics.median(seconds[0][1:11]), statistics.median(seconds[0][-10:])
        table.add_row(method, str(options.rounds), f"{many:.2f}", f"{first:.2f}", f"{last:.2f}", f"{few:.2f}", f"{many - few:+.2f} s")
    console.print(f"{options.clients} clients, {cohort} a round, {cohort} come and {cohort} leave before every round; medians, without evaluation")
    console.print(table)
    return 0


def _seconds(options: argparse.Namespace, method: str, clients: int, cohort: int) -> list[float]:
    """Wall seconds of each round from end to end: drawing, coming and going, training, checkpoint."""

    class Clock(Watcher):
        times = [time.monotonic()]

        def method(self, label, report):
            self.times.append(time.monotonic())

        def round(self, label, report):
            self.times.append(time.monotonic())

    clock = Clock()
    experiment = Experiment(
        name="churn", rounds=options.rounds, methods=[method], cohort={"clients": cohort},
        data={"source": "synthetic", "synthetic_shape": [1, 8, 8], "synthetic_samples": 20, "partition": {"clients": clients}},
        model={"options": {"hidden": 64}}, local={"epochs": 1, "batch_size": 10},
        schedule=coming_and_going(clients, options.rounds, 0.01) if clients > cohort else [],
        evaluation={"every": options.rounds, "clients": 200, "local": False},
        runtime={"hosts": 2, "engine": "sequential"}, tracking={"enabled": False}, output=options.output,
    )  # fmt: skip
    run(experiment, watcher=clock)
    return np.diff(clock.times)[1:-1].tolist()  # without the start and the round that was evaluated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("soak", "churn"))
    parser.add_argument("--rounds", type=int, help="default: 2000 (soak), 50 (churn)")
    parser.add_argument("--clients", type=int, default=100_000, help="N (churn)")
    parser.add_argument("--methods", nargs="+", help="default: stocfl (soak), fedavg ifca (churn)")
    parser.add_argument("--output", default=tempfile.gettempdir())
    options = parser.parse_args()
    options.rounds = options.rounds or {"soak": 2000, "churn": 50}[options.what]
    options.methods = options.methods or {"soak": ["stocfl"], "churn": ["fedavg", "ifca"]}[options.what]
    return {"soak": soak, "churn": churn}[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
