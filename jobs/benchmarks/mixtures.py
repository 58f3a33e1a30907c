"""CPU seconds of rounds of FedEM with three models and of FedAvg: `python -m jobs.benchmarks mixtures`.

Both run in this process with one thread, interleaved with plain PyTorch loops of the same two rounds. These loops have
no server, no validation and no records: they show how much of the ratio is due to the method itself.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.peers.bare import load, module_of
from benchmarks.workloads import Workload, samples_of
from cfl_ray.data import federation_from_arrays
from cfl_ray.runtime.session import InProcessSession
from cfl_ray.setup.prepare import prepare
from cfl_ray.system.threads import one_thread
from jobs.benchmarks.rounds import experiment_of

MODELS = 3
WORK = Workload("LeNet-5, 10 clients of 600, batch 32", "lenet5", {}, 10, 10, 600, 32, 1)
EPOCHS = (1, 5)
ENGINES = ("manual", "sequential")


class PlainLoop:
    """A round of FedEM in PyTorch alone; with one model it is FedAvg, without the E step."""

    def __init__(self, work: Workload, models: int) -> None:
        x, y, _ = samples_of(work)
        self.x = (torch.from_numpy(x).float() / 255).split(work.samples)
        self.y, self.work = torch.from_numpy(y).split(work.samples), work
        self.modules = [module_of(work) for _ in range(models)]

    def round(self) -> None:
        """Trains all models on each client's data, and averages them."""
        start = [[p.detach().clone() for p in module.parameters()] for module in self.modules]
        totals = [[torch.zeros_like(p) for p in params] for params in start]
        for x, y in zip(self.x, self.y, strict=True):
            for module, params in zip(self.modules, start, strict=True):
                load(list(module.parameters()), params)
            weight_Kn = self.responsibilities(x, y)
            for module, total, weight_n in zip(self.modules, totals, weight_Kn, strict=True):
                optimiser = torch.optim.SGD(module.parameters(), lr=self.work.lr)
                for batch in self.batches(len(y)):
                    loss_B = cross_entropy(module(x[batch]), y[batch], reduction="none")
                    optimiser.zero_grad()
                    (loss_B * weight_n[batch]).mean().backward()
                    optimiser.step()
                for sum_p, p in zip(total, module.parameters(), strict=True):
                    sum_p += p.detach()
        for module, total in zip(self.modules, totals, strict=True):
            load(list(module.parameters()), [sum_p / len(self.y) for sum_p in total])

    @torch.no_grad()
    def responsibilities(self, x: Tensor, y: Tensor) -> Tensor:
        """The E step with equal weights of the models: (K, n); ones for a single model."""
        if len(self.modules) == 1:
            return torch.ones(1, len(y))
        return torch.stack([-cross_entropy(module(x), y, reduction="none") for module in self.modules]).softmax(0)

    def batches(self, samples: int) -> Iterator[Tensor]:
        """Indices of the batches of all epochs."""
        for _ in range(self.work.epochs):
            yield from torch.randperm(samples).split(self.work.batch or samples)


@contextmanager
def our_round(work: Workload, method: dict[str, dict[str, int]] | str, engine: str) -> Iterator[Callable[[], object]]:
    """A function that runs the next round of a method of cfl_ray in this process."""
    x, y, clients = samples_of(work)
    federation = federation_from_arrays(x, y, clients, num_classes=work.classes, holdout=0.001)
    changes = {"methods": [method], "data": federation, "runtime": {"engine": engine, "checkpoint_every": 10_000}}
    setup = prepare(experiment_of(work, "runs", 10_000, **changes))
    session = InProcessSession(setup, None)
    rounds = session.rounds(next(iter(setup.methods)), lambda text: None)
    next(rounds)
    try:
        yield lambda: next(rounds)
    finally:
        session.close()


def cpu_seconds(step: Callable[[], object]) -> float:
    """CPU seconds of this process in a call."""
    began = time.process_time()
    step()
    return time.process_time() - began


def compare(name: str, fedavg: Callable[[], object], fedem: Callable[[], object], rounds: int) -> None:
    """Prints the medians of both, and of their ratio, after one warm-up."""
    pairs = [(cpu_seconds(fedavg), cpu_seconds(fedem)) for _ in range(rounds + 1)][1:]
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"{name}: FedAvg {first:.2f} s, FedEM {second:.2f} s, ratio {ratio:.2f}", flush=True)


def mixtures(rounds: int) -> None:
    """Prints CPU seconds per round and their ratio, by local epochs, of the plain loops and of each engine."""
    print(f"{WORK.description}; K = {MODELS}; CPU seconds of one thread per round, median of {rounds}, interleaved")
    for epochs in EPOCHS:
        work = replace(WORK, epochs=epochs)
        with one_thread():
            compare(
                f"{epochs} local epochs, plain loop", PlainLoop(work, 1).round, PlainLoop(work, MODELS).round, rounds
            )
        for engine in ENGINES:
            fedem = {"fedem": {"num_models": MODELS}}
            with our_round(work, "fedavg", engine) as one, our_round(work, fedem, engine) as other:
                compare(f"{epochs} local epochs, {engine}", one, other, rounds)
