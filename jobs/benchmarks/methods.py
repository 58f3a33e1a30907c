"""CPU seconds of a round of each method, beside the passes that it makes: `python -m jobs.benchmarks methods`.

A pass of a sample through a model counts 1 without gradients and 3 with them, forward and backward. They are counted at
the module in rounds of the engine `sequential`, which calls it for every pass. What a method costs beyond its passes is
its server, its exchange of models and what its clients keep. Both figures are medians of the rounds after the first
ones, in which some methods compare all clients, without evaluation; they are printed as multiples of FedAvg's.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.workloads import Workload
from cfl_ray.methods import REGISTRY
from cfl_ray.runtime.session import InProcessSession
from cfl_ray.setup.prepare import prepare
from cfl_ray.system.threads import one_thread
from jobs.benchmarks.in_process import cpu_seconds
from jobs.benchmarks.rounds import experiment_of

CLIENTS, COHORT, GROUPS = 60, 18, 4
WORK = Workload("LeNet-5, 60 clients of 192, 18 a round", "lenet5", {}, 10, COHORT, 192, 10, 2)
DATA = {
    "source": "synthetic",
    "partition": {"clients": CLIENTS},
    "synthetic_samples": WORK.samples,
    "synthetic_shape": list(WORK.input),
    "synthetic_groups": GROUPS,
}
WARM_UP = 4  # rounds
MOST = 1.2  # a method above this multiple of its passes is marked


class Passes:
    """A hook that counts the passes of a module, in samples."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.total += len(inputs[0]) * (3 if output.requires_grad else 1)


def options_of(name: str) -> dict[str, int]:
    """As many clusters as there are groups, where the method takes a number."""
    known = {field.name for field in fields(REGISTRY[name])}
    return {key: GROUPS for key in ("num_clusters", "num_models") if key in known}


@contextmanager
def rounds_of(name: str, engine: str) -> Iterator[InProcessSession]:
    """A session of a method in this process."""
    runtime = {"engine": engine, "checkpoint_every": 10_000}
    settings = {"data": DATA, "methods": [{name: options_of(name)}], "runtime": runtime}
    session = InProcessSession(prepare(experiment_of(WORK, "runs", 10_000, **settings)), None)
    try:
        yield session
    finally:
        session.close()


def passes(name: str, rounds: int) -> float:
    """Passes of a round, the median after the warm-up."""
    with rounds_of(name, "sequential") as session:
        found, counting = [], Passes()
        step = session.rounds(name, lambda text: None)
        next(step)
        hook = session.worker.network.module.register_forward_hook(counting)
        for _ in range(WARM_UP + rounds):
            counting.total = 0
            next(step)
            found.append(counting.total)
        hook.remove()
    return statistics.median(found[WARM_UP:])


def seconds(name: str, rounds: int) -> float:
    """CPU seconds of a round as a multiple of FedAvg's, whose rounds are in turn with the method's: least of each."""
    with rounds_of("fedavg", "manual") as first, rounds_of(name, "manual") as second:
        steps = [session.rounds(label, lambda text: None) for session, label in ((first, "fedavg"), (second, name))]
        pairs = [[cpu_seconds(partial(next, step)) for step in steps] for _ in range(1 + WARM_UP + rounds)]
    least, other = (min(column) for column in zip(*pairs[1 + WARM_UP :], strict=True))
    return other / least


def methods(rounds: int) -> None:
    """Prints passes, seconds and their ratio for every method; a ratio above `MOST` is marked."""
    table = Table("method", "passes", "seconds", "seconds / passes", "", title=f"{WORK.description}; FedAvg is 1")
    with one_thread():
        of_fedavg = passes("fedavg", rounds)
        for name in REGISTRY:
            needed, taken = passes(name, rounds) / of_fedavg, seconds(name, rounds)
            ratio = taken / needed
            mark = "above" if ratio > MOST else ""
            table.add_row(name, f"{needed:.2f}", f"{taken:.2f}", f"{ratio:.2f}", mark)
    Console(width=100).print(table)
