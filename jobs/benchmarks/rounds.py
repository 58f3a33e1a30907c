"""Seconds and peak memory of FedAvg rounds of cfl_ray on Ray; seconds interleaved with those of a bare PyTorch loop."""

import os
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from benchmarks.models import MODELS
from benchmarks.peers.bare import Bare
from benchmarks.workloads import WORKLOADS, Workload, samples_of
from cfl_ray import Experiment
from cfl_ray.data import federation_from_arrays
from cfl_ray.run_directory import RunDirectory


class OnRay:
    """A method of cfl_ray on Ray, with one host per core."""

    def __init__(self, experiment: Experiment, run_dir: Path | None = None) -> None:
        from cfl_ray.runtime.on_ray.ray_session import RaySession
        from cfl_ray.setup.prepare import prepare

        setup = prepare(experiment)
        self.session = RaySession(setup, run_dir)
        self.session.about()  # waits for the hosts
        began = time.perf_counter()
        self.rounds = self.session.rounds(next(iter(setup.methods)), lambda text: None)
        next(self.rounds)
        self.restoring = time.perf_counter() - began  # seconds
        self.engine = self.session.about()[0]["engine"]
        self.peak: dict[str, float] = {}  # MB of private memory, by kind of process
        self.closing = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def round(self) -> float:
        """Runs one round and returns its seconds."""
        return next(self.rounds).metrics["round_seconds"]

    def _watch(self) -> None:
        """Samples the private memory ten times a second, since Linux does not record its peak."""
        kinds = {"ray::ServerActor": "server", "ray::ClientHost": "host"}
        processes = {}
        while not self.closing.wait(0.1):
            if len(processes) < 1 + len(os.sched_getaffinity(0)):
                found = psutil.process_iter(["cmdline"])
                titles = {process.pid: " ".join(process.info["cmdline"] or []) for process in found}
                processes = {
                    pid: kind
                    for pid, title in titles.items()
                    for prefix, kind in kinds.items()
                    if title.startswith(prefix)
                }
            for pid, kind in processes.items():
                with suppress(OSError):  # the process has ended
                    self.peak[kind] = max(self.peak.get(kind, 0), _private_mb(pid))

    @property
    def peaks(self) -> str:
        """The peaks so far, as text."""
        return ", ".join(f"{kind} {mb:.0f} MB" for kind, mb in sorted(self.peak.items()))

    def close(self) -> None:
        self.closing.set()
        self.session.close()


def _private_mb(pid: int) -> float:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status.get("RssAnon", "0").split()[0]) / 1000


def bare_memory(bare: Bare) -> float:
    """Private memory of the processes of the bare loop in MB."""
    return sum(psutil.Process(process.pid).memory_full_info().uss for process in bare.processes) / 1e6


def experiment_of(work: Workload, output: str, rounds: int, **changes) -> Experiment:
    """FedAvg on a workload, with its network as an ordinary module and, unless `changes` name others, its data."""
    if "data" not in changes:
        given = samples_of(work)
        if work.tokens:
            data = federation_from_arrays(*given, targets="tokens", vocabulary=work.classes, holdout=0.001)
        else:
            data = federation_from_arrays(*given, num_classes=work.classes, holdout=0.001)
        changes["data"] = data
    values = {
        "name": "benchmark",
        "rounds": rounds,
        "methods": ["fedavg"],
        "model": {"name": MODELS[work.model], "options": {"classes": work.classes} | work.options},
        "local": {"epochs": work.epochs, "batch_size": work.batch, "lr": work.lr},
        "cohort": {"clients": work.clients},
        "evaluation": {"every": 10_000, "local": False, "clients": 10},
        "runtime": {"checkpoint_every": 10_000},
        "output": output,
    }
    if work.tokens:
        values["task"] = "next_token"
    return Experiment(**(values | changes))


def speed(names: list[str], rounds: int) -> None:
    """Prints seconds per round of both systems, their ratio and their memory, by workload."""
    print(
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}; "
        f"seconds per round, median of {rounds}, interleaved after one warm-up"
    )
    for name in names:
        work = WORKLOADS[name]
        with tempfile.TemporaryDirectory() as output:
            measured = OnRay(experiment_of(work, output, rounds + 2))
            bare = Bare(work)
            pairs = [(measured.round(), bare.round()) for _ in range(rounds + 1)][1:]
            seconds, bare_seconds = (statistics.median(column) for column in zip(*pairs))
            ratio = statistics.median(a / b for a, b in pairs)
            print(
                f"{name} ({work.description}): cfl_ray {seconds:.2f} s, bare {bare_seconds:.2f} s, ratio {ratio:.2f}; "
                f"peak: {measured.peaks}; bare processes now: {bare_memory(bare):.0f} MB; {measured.engine}",
                flush=True,
            )
            bare.close()
            measured.close()


def memory(rounds: int) -> None:
    """Prints the peak memory of server and hosts, by number of clients and size of the cohort."""
    print("peak private memory of the server and of the largest host; W1, data generated from the client id")
    work = WORKLOADS["W1"]
    for clients, cohort in ((4_800, 480), (48_000, 4_800), (1_000_000, 480)):
        data = {"source": "synthetic", "partition": {"clients": clients}, "synthetic_samples": work.samples}
        with tempfile.TemporaryDirectory() as output:
            measured = OnRay(experiment_of(work, output, rounds + 1, data=data, cohort={"clients": cohort}))
            seconds = [measured.round() for _ in range(rounds)]
            print(
                f"N = {clients:,}, cohort {cohort:,}: {measured.peaks}; {statistics.median(seconds):.1f} s per round",
                flush=True,
            )
            measured.close()


def states(rounds: int, clients: int, cohort: int) -> None:
    """Prints seconds and peak memory of rounds whose clients keep 1 MB each, and how long a resumed run reads.

    rounds: in units of 20.
    """
    print(f"Ditto, {clients:,} clients with a state of 1 MB, cohort {cohort}, state_budget 1 GiB")
    with tempfile.TemporaryDirectory() as output:
        run_dir = Path(output) / "run"
        run_dir.mkdir()
        values = {
            "rounds": 20 * rounds + 1,
            "methods": ["ditto"],
            "data": {"source": "synthetic", "partition": {"clients": clients}, "synthetic_samples": 10},
            "model": {"name": "mlp", "options": {"hidden": 315}},
            "local": {"epochs": 1},
            "cohort": {"clients": cohort},
            "evaluation": {"every": 10_000, "local": False, "clients": 10},
            "runtime": {"checkpoint_every": 20},
            "output": output,
        }
        measured = OnRay(Experiment(**values), run_dir)
        for _ in range(rounds):
            seconds = [measured.round() for _ in range(20)]
            files = (
                sum(file.stat().st_size for file in RunDirectory(run_dir).method("ditto").checkpoints.iterdir()) / 1e9
            )
            print(
                f"20 rounds: {sum(seconds) / 20:.2f} s a round; peak so far {measured.peaks}; files {files:.1f} GB",
                flush=True,
            )
        measured.close()
        again = OnRay(Experiment(**values), run_dir)
        print(f"a resumed run goes on after {again.restoring:.1f} s")
        again.close()
