"""Kills processes of a run at random moments and compares its outcome, bit for bit, with that of an undisturbed run.

    python -m jobs.chaos --kills 20 --seed 0
    python -m jobs.chaos --kills 3 --methods ditto stocfl --rounds 6 --targets host server
    python -m jobs.chaos --network partition node-vanishes     (no name: every scenario; see network.py)

The run is `cfl-ray run` on a Ray cluster of two nodes, both on this machine: a head with the driver and the server, and
a second node. Processes are killed by SIGKILL. After a node is killed, a new one joins; after the driver is killed,
`cfl-ray resume` continues the run. The script compares every metric of every round, every move of a client between
clusters, and the sha256 of the models and client states of the last checkpoint; metrics.jsonl and MLflow must have
every round once. Exit status 1 if anything differs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported

import psutil
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from cfl_ray import config, simulate
from jobs.chaos.same_outcome import IDENTICAL, chaos_experiment, differences

METHODS = ["ditto", "fedclust", "stocfl", "ifca_cam"]  # client state, one-shot clustering, merging, additive models
TARGETS = ["host", "server", "node", "driver"]
TITLES = {"host": "ray::ClientHost", "server": "ray::ServerActor"}
FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
PROGRESS_SECONDS = 180  # without a new round: the run is stuck


@dataclass
class Kill:
    """One killed process and the time until the run completed the interrupted round."""

    target: str
    method: str
    round: int  # the interrupted one
    second: float  # of that round
    recovery: float = float("nan")  # seconds from the kill to the end of the round


class Run:
    """`cfl-ray run` as a process, on a cluster of two nodes."""

    def __init__(self, file: Path, directory: Path) -> None:
        self.directory = directory
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": False, "_system_config": FAST_HEALTH_CHECKS},
        )
        self.second = self.cluster.add_node(num_cpus=2)
        self.environment = os.environ | {"RAY_ADDRESS": self.cluster.address, "OMP_NUM_THREADS": "1"}
        self.driver = self._start("run", str(file), "--run-dir", str(directory))

    def _start(self, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "cfl_ray", *arguments]
        with self.directory.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def rounds_done(self, methods: list[str]) -> int:
        """Rounds in the metrics logs of all methods."""
        files = (self.directory / name / "metrics.jsonl" for name in methods)
        return sum(file.read_bytes().count(b"\n") for file in files if file.exists())

    def kill(self, target: str, draw: random.Random) -> bool:
        """Kills one process of this kind. Returns False if there is none at the moment."""
        if target == "driver":
            self.driver.kill()
            self.driver.wait()
            self.driver = self._start("resume", str(self.directory))
        elif target == "node":
            raylet = psutil.Process(self.second.all_processes["raylet"][0].process.pid)
            for process in (*raylet.children(recursive=True), raylet):
                _kill(process)
            self.cluster.remove_node(self.second, allow_graceful=False)
            self.second = self.cluster.add_node(num_cpus=2, wait=False)
        else:
            found = [
                process
                for process in psutil.Process().children(recursive=True)
                if _title(process).startswith(TITLES[target])
            ]
            if not found:
                return False
            _kill(draw.choice(sorted(found, key=lambda process: process.pid)))
        return True

    def close(self) -> None:
        if self.driver.poll() is None:
            self.driver.send_signal(signal.SIGTERM)
            self.driver.wait(60)
        self.cluster.shutdown()


def _title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def disturbed(
    file: Path,
    directory: Path,
    methods: list[str],
    rounds: int,
    targets: list[str],
    count: int,
    seed: int,
    seconds: float,
) -> list[Kill]:
    """Runs the experiment and kills `count` processes, each in a different round, at most `seconds` after its start."""
    draw = random.Random(seed)
    rounds_of_kills = sorted(draw.sample(range(1, len(methods) * rounds), count))
    run, kills = Run(file, directory), []
    try:
        for round in rounds_of_kills:
            target, delay = draw.choice(targets), draw.uniform(0, seconds)
            _wait_for_rounds(run, methods, round)
            time.sleep(delay)
            before = run.rounds_done(methods)
            if not run.kill(target, draw):  # for example a server that has not started: kill a process of another kind
                target = next(other for other in TARGETS if other != target and run.kill(other, draw))
            began = time.monotonic()
            method = methods[min(before // rounds, len(methods) - 1)]
            kill = Kill(target, method, before % rounds + 1, delay)
            kills.append(kill)
            _wait_for_rounds(run, methods, before + 1)
            kill.recovery = time.monotonic() - began
            with directory.with_suffix(".kills.jsonl").open("a") as log:
                log.write(json.dumps(vars(kill)) + "\n")
        _until(lambda: run.driver.poll() is not None, run)
        if run.driver.returncode != 0:
            raise SystemExit(f"the run ended with status {run.driver.returncode}; see {directory.with_suffix('.log')}")
    finally:
        run.close()
    return kills


def _wait_for_rounds(run: Run, methods: list[str], rounds: int) -> None:
    _until(lambda: run.rounds_done(methods) >= rounds, run)


def _until(condition: Callable[[], bool], run: Run) -> None:
    """Waits for the condition or the end of the run. Exits if neither happens within PROGRESS_SECONDS."""
    deadline = time.monotonic() + PROGRESS_SECONDS
    while not condition():
        if run.driver.poll() is not None and not condition():
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"no progress for {PROGRESS_SECONDS} s; see {run.directory.with_suffix('.log')}")
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="processes to kill (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills; the experiment has seed 0")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each method")
    parser.add_argument("--methods", nargs="+", default=METHODS, help=f"default: {' '.join(METHODS)}")
    parser.add_argument("--targets", nargs="+", default=TARGETS[:3], choices=TARGETS, help="kinds of processes")
    parser.add_argument("--keep", type=Path, help="folder of both runs; default: a temporary one")
    parser.add_argument(
        "--network",
        nargs="*",
        metavar="SCENARIO",
        help="disturb a network of three machines (namespaces of this one; needs root) instead of killing processes",
    )
    options = parser.parse_args()
    if options.network is not None:
        from jobs.chaos.network import disturb_network

        return disturb_network(options.network, options.methods, options.rounds, options.keep)
    total = len(options.methods) * options.rounds
    if not 0 <= options.kills < total:
        parser.error(f"--kills must be below {total}, the rounds of all methods, got {options.kills}")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="cfl-ray-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "chaos.yaml"
    file.write_text(chaos_experiment(options.methods, options.rounds, folder).to_yaml())
    experiment = config.load(file)  # as the disturbed run reads it
    untracked = experiment.tracking.model_copy(update={"enabled": False})
    results = simulate(experiment.model_copy(update={"tracking": untracked}), folder / "undisturbed")
    seconds = statistics.median(
        record.metrics["round_seconds"] for method in results.methods.values() for record in method.records
    )
    kills = disturbed(
        file,
        folder / "disturbed",
        options.methods,
        options.rounds,
        options.targets,
        options.kills,
        options.seed,
        seconds,
    )
    different = differences(experiment, options.methods, folder / "undisturbed", folder / "disturbed")
    show(kills, seconds, different, options)
    if options.keep is None and not different:
        shutil.rmtree(folder)
    return 1 if different else 0


def show(kills: list[Kill], seconds: float, different: list[str], options: argparse.Namespace) -> None:
    """Prints a row per kill, and the differences."""
    console = Console(highlight=False)
    table = Table("#", "killed", "method", "round", "after s", "recovery s")
    for number, kill in enumerate(kills, 1):
        table.add_row(
            str(number), kill.target, kill.method, str(kill.round), f"{kill.second:.2f}", f"{kill.recovery:.1f}"
        )
    console.print(table)
    counts = ", ".join(f"{number} {target}" for target, number in Counter(kill.target for kill in kills).items())
    console.print(
        f"{len(kills)} kills ({counts or 'none'}), seed {options.seed}; an undisturbed round takes {seconds:.2f} s; "
        "recovery: from the kill to the end of the round"
    )
    console.print("\n".join(["DIFFERENT:", *different]) if different else IDENTICAL)


if __name__ == "__main__":
    sys.exit(main())
