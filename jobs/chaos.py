"""Kills processes of a run at random moments and compares what it comes to with the same run left alone: bit for bit.

    python jobs/chaos.py --kills 20 --seed 0
    python jobs/chaos.py --kills 3 --methods ditto stocfl --rounds 6 --targets host server

The run is `cfl-ray run` on a Ray cluster of two nodes, both on this machine: a head with the driver and the server, and a second
node. Kills are SIGKILL. After a node was killed a new one joins; after a driver was killed `cfl-ray resume` goes on. What is
compared: every metric of every round, every move of a client between clusters, the models and the clients' memory of the last
checkpoint by their sha256, and that metrics.jsonl and MLflow have every round once. Exit status 1 where anything differs.
"""

import argparse
import hashlib
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
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported: nobody else may use the cluster

import psutil
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from cfl_ray import config, simulate
from cfl_ray.config import Experiment
from cfl_ray.runtime.checkpoint import CheckpointStore

METHODS = ["ditto", "fedclust", "stocfl", "ifca_cam"]  # client memory, one shot, merging, additive models
TARGETS = ["host", "server", "node", "driver"]
TITLES = {"host": "ray::ClientHost", "server": "ray::ServerActor"}
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 500, "health_check_failure_threshold": 3}
GIVE_UP_SECONDS = 180


@dataclass
class Kill:
    """One fault: what was killed, when, and how long the run took to be one round further."""

    what: str
    method: str
    round: int  # the one at work
    second: float  # into that round
    recovery: float = float("nan")  # from the kill to the end of that round


def experiment(methods: list[str], rounds: int, output: Path) -> Experiment:
    """Digits by four rotations, clients that come, go and are away; small enough for a round of about a second."""
    options = {"ifca_cam": {"warmup_rounds": 2}, "stocfl": {"tau": 0.5}}
    return Experiment(
        name="chaos",
        rounds=rounds,
        methods=[{name: options.get(name, {})} for name in methods],
        data={"shift": {"kind": "rotated"}, "partition": {"clients": 24}, "shards": str(output / "shards")},
        model={"options": {"hidden": 200}},
        local={"epochs": 20, "batch_size": 8, "momentum": 0.5},
        cohort={"fraction": 0.5, "availability": 0.9, "dropout": 0.05},
        schedule=[{"round": 3, "join": [22, 23]}, {"round": 5, "leave": [0], "change": [{"clients": [1], "rotate": 90}]}],
        runtime={"engine": "sequential", "hosts": 3, "retries": 1000},
        output=str(output),
    )


class Run:
    """`cfl-ray run` as a process of its own, on a cluster of two nodes."""

    def __init__(self, file: Path, directory: Path):
        self.directory = directory
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "_system_config": SOON})
        self.second = self.cluster.add_node(num_cpus=2)
        self.environment = os.environ | {"RAY_ADDRESS": self.cluster.address, "OMP_NUM_THREADS": "1"}
        self.driver = self._start("run", str(file), "--run-dir", str(directory))

    def _start(self, *arguments: str) -> subprocess.Popen:
        log = open(self.directory.with_suffix(".log"), "ab")
        return subprocess.Popen([sys.executable, "-m", "cfl_ray.cli", *arguments], env=self.environment, stdout=log, stderr=log)

    def done(self, methods: list[str]) -> int:
        """Rounds that are in the logs, of all methods together."""
        files = (self.directory / name / "metrics.jsonl" for name in methods)
        return sum(file.read_bytes().count(b"\n") for file in files if file.exists())

    def kill(self, what: str, draw: random.Random) -> bool:
        """Kills one such process. Returns False where there is none at the moment."""
        if what == "driver":
            self.driver.kill()
            self.driver.wait()
            self.driver = self._start("resume", str(self.directory))
        elif what == "node":
            raylet = psutil.Process(self.second.all_processes["raylet"][0].process.pid)
            for process in (*raylet.children(recursive=True), raylet):
                _kill(process)
            self.cluster.remove_node(self.second, allow_graceful=False)
            self.second = self.cluster.add_node(num_cpus=2, wait=False)
        else:
            found = [process for process in psutil.Process().children(recursive=True) if _title(process).startswith(TITLES[what])]
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
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def disturbed(file: Path, directory: Path, methods: list[str], rounds: int, targets: list[str], count: int, seed: int, seconds: float) -> list[Kill]:
    """Runs the experiment while `count` processes are killed, each in another round, up to `seconds` into it."""
    draw = random.Random(seed)
    at = sorted(draw.sample(range(1, len(methods) * rounds), count))
    run, kills = Run(file, directory), []
    try:
        for number in at:
            wanted, waits = draw.choice(targets), draw.uniform(0, seconds)
            _until(lambda: run.done(methods) >= number, run)
            time.sleep(waits)
            before, what = run.done(methods), wanted
            if not run.kill(what, draw):  # a server that is not there yet: this moment takes another victim
                what = next(other for other in TARGETS if other != what and run.kill(other, draw))
            began = time.monotonic()
            kills.append(Kill(what, methods[before // rounds] if before < len(methods) * rounds else methods[-1], before % rounds + 1, waits))
            _until(lambda: run.done(methods) > before, run)
            kills[-1].recovery = time.monotonic() - began
            with directory.with_suffix(".kills.jsonl").open("a") as log:
                log.write(json.dumps(vars(kills[-1])) + "\n")
        _until(lambda: run.driver.poll() is not None, run)
        if run.driver.returncode != 0:
            raise SystemExit(f"the run ended with status {run.driver.returncode}; see {directory.with_suffix('.log')}")
    finally:
        run.close()
    return kills


def _until(condition, run: Run) -> None:
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not condition():
        if run.driver.poll() is not None and not condition():
            break  # the run is over: the caller sees how
        if time.monotonic() > deadline:
            raise SystemExit(f"no progress for {GIVE_UP_SECONDS} s; see {run.directory.with_suffix('.log')}")
        time.sleep(0.02)


def outcome(directory: Path, method: str, found: Experiment) -> dict[str, object]:
    """Everything that must be the same, by what it is."""
    folder = directory / method
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in record.items() if name not in ("round_seconds", "time_ms")} for record in records]
    checkpoint = CheckpointStore(folder, found.config_hash).load()
    return {
        "rounds": [record["round"] for record in records],
        "metrics": metrics,
        "moves": (folder / "moves.jsonl").read_text() if (folder / "moves.jsonl").exists() else "",
        "models": _sha256(sorted(checkpoint.tensors.items())),
        "memory": _sha256(sorted(checkpoint.memory())),
        "scalars": {name: checkpoint.values[name] for name in ("state", "ledger")},
    }


def _sha256(entries) -> str:
    digest = hashlib.sha256()
    for key, tensor in entries:
        digest.update(repr((key, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def in_mlflow(output: Path, name: str) -> dict[str, list[int]]:
    """Steps of `clients_online`, which every evaluated round logs, by method."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    experiments = [one.experiment_id for one in client.search_experiments()]
    runs = [run for run in client.search_runs(experiments) if run.info.run_name.startswith(f"{name}/")]
    return {run.info.run_name.removeprefix(f"{name}/"): [metric.step for metric in client.get_metric_history(run.info.run_id, "clients_online")] for run in runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the kills; the experiment has seed 0")
    parser.add_argument("--rounds", type=int, default=15, help="of each method")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--targets", nargs="+", default=TARGETS[:3], choices=TARGETS)
    parser.add_argument("--keep", type=Path, help="folder for both runs; default: a temporary one")
    options = parser.parse_args()
    if not 0 <= options.kills < len(options.methods) * options.rounds:
        parser.error(f"--kills must be below {len(options.methods) * options.rounds}, the rounds of all methods, got {options.kills}")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="cfl-ray-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    alone = experiment(options.methods, options.rounds, folder)
    file = folder / "chaos.yaml"
    file.write_text(alone.to_yaml())
    alone = config.load(file)  # as the other run reads it
    results = simulate(alone.model_copy(update={"tracking": alone.tracking.model_copy(update={"enabled": False})}), folder / "alone")
    seconds = statistics.median(record.metrics["round_seconds"] for method in results.methods.values() for record in method.records)
    kills = disturbed(file, folder / "disturbed", options.methods, options.rounds, options.targets, options.kills, options.seed, seconds)
    differences = [
        f"{method}: {what}"
        for method in options.methods
        for what, value in outcome(folder / "alone", method, alone).items()
        if value != outcome(folder / "disturbed", method, alone)[what]
    ]
    steps = in_mlflow(folder, alone.name)
    differences += [f"{method}: rounds in MLflow {steps.get(method)}" for method in options.methods if sorted(steps.get(method, [])) != list(range(1, options.rounds + 1))]
    show(kills, seconds, differences, options)
    if options.keep is None and not differences:
        shutil.rmtree(folder)
    return 1 if differences else 0


def show(kills: list[Kill], seconds: float, differences: list[str], options: argparse.Namespace) -> None:
    console = Console(highlight=False)
    table = Table("#", "killed", "method", "in round", "after s", "recovery s")
    for number, kill in enumerate(kills, 1):
        table.add_row(str(number), kill.what, kill.method, str(kill.round), f"{kill.second:.2f}", f"{kill.recovery:.1f}")
    console.print(table)
    count = ", ".join(f"{number} {what}" for what, number in Counter(kill.what for kill in kills).items())
    console.print(f"{len(kills)} kills ({count or 'none'}), seed {options.seed}; an undisturbed round takes {seconds:.2f} s; recovery: until the end of the round")
    console.print("\n".join(["DIFFERENT:", *differences]) if differences else "identical: metrics, moves, models, memory; every round once in metrics.jsonl and in MLflow")


if __name__ == "__main__":
    sys.exit(main())
