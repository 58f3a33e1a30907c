"""Rounds of cfl_ray in this process, and plain PyTorch loops of the same rounds: CPU seconds of one thread."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.peers.bare import load, module_of
from benchmarks.workloads import Workload, samples_of
from cfl_ray.runtime.session import InProcessSession
from cfl_ray.setup.prepare import prepare
from jobs.benchmarks.rounds import experiment_of


class PlainLoop:
    """A round of FedEM in PyTorch alone; with one model it is FedAvg, without the E step."""

    def __init__(self, work: Workload, models: int) -> None:
        x, y, _ = samples_of(work)
        self.x = (torch.from_numpy(x) if work.tokens else torch.from_numpy(x).float() / 255).split(work.samples)
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
                    loss_B = losses(module(x[batch]), y[batch])
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
        return torch.stack([-losses(module(x), y) for module in self.modules]).softmax(0)

    def batches(self, samples: int) -> Iterator[Tensor]:
        """Indices of the batches of all epochs."""
        for _ in range(self.work.epochs):
            yield from torch.randperm(samples).split(self.work.batch or samples)


def losses(outputs: Tensor, y: Tensor) -> Tensor:
    """The cross entropy of each sample; of outputs (B, T, V) for tokens, the mean over the tokens."""
    loss_B = cross_entropy(outputs.mT if y.ndim == 2 else outputs, y, reduction="none")
    return loss_B.mean(1) if y.ndim == 2 else loss_B


@contextmanager
def our_round(work: Workload, method: dict[str, dict[str, int]] | str, engine: str) -> Iterator[Callable[[], object]]:
    """A function that runs the next round of a method of cfl_ray in this process."""
    runtime = {"engine": engine, "checkpoint_every": 10_000}
    setup = prepare(experiment_of(work, "runs", 10_000, methods=[method], runtime=runtime))
    session = InProcessSession(setup, None)
    rounds = session.rounds(next(iter(setup.methods)), lambda text: None)
    next(rounds)
    try:
        yield lambda: next(rounds)
    finally:
        session.close()


def chosen_engine(work: Workload) -> str:
    """The engine of `runtime.engine: auto` for a long experiment with FedAvg."""
    session = InProcessSession(prepare(experiment_of(work, "runs", 10_000)), None)
    try:
        return session.choice.engine
    finally:
        session.close()


def cpu_seconds(step: Callable[[], object]) -> float:
    """CPU seconds of this process in a call."""
    began = time.process_time()
    step()
    return time.process_time() - began


def compare(
    name: str, steps: tuple[Callable[[], float], Callable[[], float]], labels: tuple[str, str], rounds: int
) -> None:
    """Prints the least and the median CPU seconds of two steps that are run in turn, and their ratio, after a warm-up.

    steps: return the CPU seconds that they took.
    """
    pairs = [tuple(step() for step in steps) for _ in range(rounds + 1)][1:]
    first, second = zip(*pairs, strict=True)
    (least, median), (other_least, other) = ((min(times), statistics.median(times)) for times in (first, second))
    ratio = statistics.median(b / a for a, b in pairs)
    print(
        f"{name}: {labels[0]} {least:.3f} s, median {median:.3f}; {labels[1]} {other_least:.3f} s, median {other:.3f}; "
        f"ratio {other_least / least:.2f}, median {ratio:.2f}",
        flush=True,
    )
