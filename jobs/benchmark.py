"""Seconds per round of this system and of a careful bare PyTorch loop, interleaved in one run; and peak memory.

    python jobs/benchmark.py                    speed: the ratio on W1, W2, W3 (about five minutes on two cores)
    python jobs/benchmark.py memory             peak memory of server and hosts as the cohort and N grow
    python jobs/benchmark.py speed W2 --rounds 5

The bare loop has one process per core, one thread each; each keeps one module and its clients' tensors in memory, trains with
torch.optim.SGD without a DataLoader, and adds up n_i * W_i; the parent averages. It has no evaluation, clusters, faults or
tracking. What is timed of this system is a whole FedAvg round on Ray, without its evaluation.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.nn.functional import cross_entropy

from cfl_ray import Experiment
from cfl_ray.core.errors import ConfigError
from cfl_ray.data import federation_from_arrays
from cfl_ray.models import recipe


@dataclass(frozen=True)
class Workload:
    """Clients of one round and what each does. Inputs are 1x28x28."""

    about: str
    model: str
    options: dict
    classes: int
    clients: int
    samples: int
    batch: int | None
    epochs: int
    lr: float = 0.05


WORKLOADS = {
    "W1": Workload("MLP 784-2048-10, 480 clients of 50, full batch, 5 epochs", "mlp", {"hidden": 2048}, 10, 480, 50, None, 5),
    "W2": Workload("LeNet-5, 10 clients of 500, batch 10, 10 epochs", "lenet5", {}, 10, 10, 500, 10, 10),
    "W3": Workload("CNN 32-64-512, 62 classes, 180 clients of 200, batch 20, 1 epoch", "leaf_cnn", {}, 62, 180, 200, 20, 1),
}
INPUT = (1, 28, 28)


def samples_of(work: Workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    total = work.clients * work.samples
    return draw.integers(0, 256, (total, *INPUT), dtype=np.uint8), draw.integers(0, work.classes, total), np.repeat(np.arange(work.clients), work.samples)


# ---- the bare loop


def _bare_process(pipe, work: Workload, mine: range, threads: int) -> None:
    torch.set_num_threads(threads)
    x, y, _ = samples_of(work)
    rows = slice(mine.start * work.samples, mine.stop * work.samples)
    x, y = torch.from_numpy(x[rows]).float().div_(255).split(work.samples), torch.from_numpy(y[rows]).split(work.samples)
    module = recipe(work.model, work.options, INPUT, work.classes)()
    params = list(module.parameters())
    while (start := pipe.recv()) is not None:
        total = [torch.zeros_like(p) for p in params]
        for x_i, y_i in zip(x, y):
            with torch.no_grad():
                for p, value in zip(params, start):
                    p.copy_(value)
            _bare_client(module, params, x_i, y_i, work)
            with torch.no_grad():
                for accumulated, p in zip(total, params):
                    accumulated.add_(p, alpha=work.samples)
        pipe.send([t.detach() for t in total])


def _bare_client(module, params, x, y, work: Workload) -> None:
    optimiser = torch.optim.SGD(params, lr=work.lr)
    batch = work.batch or len(y)
    for _ in range(work.epochs):
        order = torch.randperm(len(y)) if batch < len(y) else None
        for at in range(0, len(y), batch):
            x_B, y_B = (x, y) if order is None else (x[order[at : at + batch]], y[order[at : at + batch]])
            optimiser.zero_grad(set_to_none=True)
            cross_entropy(module(x_B), y_B).backward()
            optimiser.step()


class Bare:
    """The bare loop in as many processes as there are cores."""

    def __init__(self, work: Workload):
        cores = len(os.sched_getaffinity(0))
        self.work = work
        self.start = [p.detach() for p in recipe(work.model, work.options, INPUT, work.classes)().parameters()]
        context = multiprocessing.get_context("spawn")
        cuts = np.linspace(0, work.clients, cores + 1).astype(int)
        self.pipes, self.processes = [], []
        for begin, end in zip(cuts, cuts[1:]):
            mine, theirs = context.Pipe()
            process = context.Process(target=_bare_process, args=(theirs, work, range(begin, end), 1), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def round(self) -> float:
        began = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(self.start)
        totals = [pipe.recv() for pipe in self.pipes]
        self.start = [sum(parts) / (self.work.clients * self.work.samples) for parts in zip(*totals)]
        return time.perf_counter() - began

    def memory(self) -> float:
        return sum(psutil.Process(process.pid).memory_full_info().uss for process in self.processes) / 1e6

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            pipe.send(None)
            process.join()


# ---- this system


class Ours:
    """FedAvg on Ray, one host per core."""

    def __init__(self, experiment: Experiment):
        from cfl_ray.runtime.cluster import RaySession
        from cfl_ray.runtime.setup import prepare

        self.session = RaySession(prepare(experiment), None)
        self.session.begin("fedavg")
        self.engine = self.session.facts()["engine"]
        self.peak: dict[str, float] = {}  # MB of private memory, by kind of process
        self.closing = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def round(self) -> float:
        return self.session.advance().metrics["round_seconds"]

    def _watch(self) -> None:
        """Linux keeps no peak of private memory, so it is looked at ten times a second."""
        kinds = {"ray::ServerActor": "server", "ray::ClientHost": "host"}
        processes = {}
        while not self.closing.wait(0.1):
            if len(processes) < 1 + len(os.sched_getaffinity(0)):
                titles = {process.pid: " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])}
                processes = {pid: kind for pid, title in titles.items() for prefix, kind in kinds.items() if title.startswith(prefix)}
            for pid, kind in processes.items():
                self.peak[kind] = max(self.peak.get(kind, 0), _private_mb(pid))

    def close(self) -> None:
        self.closing.set()
        self.session.close()


def _private_mb(pid: int) -> float:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status.get("RssAnon", "0").split()[0]) / 1000


def experiment_of(work: Workload, output: str, rounds: int, **changes) -> Experiment:
    values = {
        "name": "benchmark",
        "rounds": rounds,
        "methods": ["fedavg"],
        "model": {"name": work.model, "options": work.options},
        "local": {"epochs": work.epochs, "batch_size": work.batch, "lr": work.lr},
        "cohort": {"clients": work.clients},
        "evaluation": {"every": 10_000, "local": False, "clients": 10},
        "runtime": {"checkpoint_every": 10_000},
        "output": output,
    }
    return Experiment(**(values | changes))


def speed(names: list[str], rounds: int) -> None:
    print(f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}; seconds per round, median of {rounds}, interleaved after one warm-up")
    for name in names:
        work = WORKLOADS[name]
        x, y, clients = samples_of(work)
        with tempfile.TemporaryDirectory() as output:
            ours = Ours(experiment_of(work, output, rounds + 2, data=federation_from_arrays(x, y, clients, num_classes=work.classes, holdout=0.001)))
            bare = Bare(work)
            pairs = [(ours.round(), bare.round()) for _ in range(rounds + 1)][1:]
            mine, theirs = (statistics.median(column) for column in zip(*pairs))
            ratio = statistics.median(a / b for a, b in pairs)
            peaks = ", ".join(f"{kind} {mb:.0f} MB" for kind, mb in sorted(ours.peak.items()))
            print(f"{name} ({work.about}): cfl_ray {mine:.2f} s, bare {theirs:.2f} s, ratio {ratio:.2f}; peak: {peaks}; bare processes now: {bare.memory():.0f} MB; {ours.engine}", flush=True)
            bare.close()
            ours.close()


def memory(rounds: int) -> None:
    print("peak private memory of server and of the largest host, W1 with data made from the client's id")
    work = WORKLOADS["W1"]
    for clients, cohort in ((4_800, 480), (48_000, 4_800), (1_000_000, 480)):
        data = {"source": "synthetic", "partition": {"clients": clients}, "synthetic_samples": work.samples}
        with tempfile.TemporaryDirectory() as output:
            ours = Ours(experiment_of(work, output, rounds + 1, data=data, cohort={"clients": cohort}))
            seconds = [ours.round() for _ in range(rounds)]
            peaks = ", ".join(f"{kind} {mb:.0f} MB" for kind, mb in sorted(ours.peak.items()))
            print(f"N = {clients:,}, cohort {cohort:,}: {peaks}; {statistics.median(seconds):.1f} s a round", flush=True)
            ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["speed", "memory"], default="speed")
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if unknown := set(arguments.workloads) - set(WORKLOADS):
        raise ConfigError(f"unknown workload {', '.join(sorted(unknown))}; valid: {', '.join(WORKLOADS)}")
    match arguments.what:
        case "speed":
            speed(arguments.workloads, arguments.rounds)
        case "memory":
            memory(arguments.rounds)


if __name__ == "__main__":
    main()
