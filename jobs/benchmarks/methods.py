"""CPU seconds of a round of each method, beside the passes that it makes: `python -m jobs.benchmarks methods`.

A pass of a sample through a model counts 1 without gradients and 3 with them, forward and backward. They are counted at
the module in rounds of the engine `sequential`, which calls it for every pass, with a small network, on which their
number does not depend. What a method costs beyond its passes is its server, its exchange of models and what its clients
keep. Both figures are of rounds after the first ones, in which some methods compare all clients, without evaluation;
they are printed as multiples of FedAvg's.

    python -m jobs.benchmarks methods --rounds 2 --output docs/performance.md    # writes the table, row by row
    python -m jobs.benchmarks methods --methods moon fedproto                    # these alone
"""

import datetime
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.compare import machine, with_section
from benchmarks.workloads import Workload
from cfl_ray.methods import REGISTRY
from cfl_ray.runtime.session import InProcessSession
from cfl_ray.setup.prepare import prepare
from cfl_ray.system.threads import one_thread
from cfl_ray.tracking import RoundRecord
from jobs.benchmarks.in_process import cpu_seconds
from jobs.benchmarks.rounds import experiment_of

CLIENTS, COHORT, GROUPS = 60, 18, 4
WORK = Workload("LeNet-5, 60 clients of 192, 18 a round", "lenet5", {}, 10, COHORT, 192, 10, 2)
SMALL = replace(WORK, model="mlp", options={"hidden": 8})
DATA = {
    "source": "synthetic",
    "partition": {"clients": CLIENTS},
    "synthetic_samples": WORK.samples,
    "synthetic_shape": list(WORK.input),
    "synthetic_groups": GROUPS,
}
WARM_UP = 4  # rounds
BEGIN = "<!-- begin: written by python -m jobs.benchmarks methods -->"
MOST = 1.2  # a method above this multiple of its passes is marked


class Passes:
    """A hook that counts the passes of a module, in samples."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.total += len(inputs[0]) * (3 if output.requires_grad else 1)


def options_of(name: str) -> dict[str, int]:
    """As many clusters as there are groups, where the method is told a number."""
    known = {field.name for field in fields(REGISTRY[name]) if field.default is not None}
    return {key: GROUPS for key in ("num_clusters", "num_models") if key in known}


@contextmanager
def rounds_of(name: str, engine: str, work: Workload = WORK) -> Iterator[InProcessSession]:
    """A session of a method in this process."""
    runtime = {"engine": engine, "checkpoint_every": 10_000}
    settings = {"data": DATA, "methods": [{name: options_of(name)}], "runtime": runtime}
    session = InProcessSession(prepare(experiment_of(work, "runs", 10_000, **settings)), None)
    try:
        yield session
    finally:
        session.close()


def passes(name: str, rounds: int) -> float:
    """Passes of a round, the median after the warm-up."""
    with rounds_of(name, "sequential", SMALL) as session:
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


def seconds(name: str, rounds: int, of_fedavg: Iterator[RoundRecord]) -> tuple[float, bool]:
    """CPU seconds of a round as a multiple of FedAvg's, in turn with it: the least of each; and whether in `manual`.

    of_fedavg: its rounds, of which at least one has been taken. `manual` leaves some client programs to `sequential`.
    """
    records: list[RoundRecord] = []
    with rounds_of(name, "manual") as session:
        step = session.rounds(name, lambda text: None)
        records += islice(step, 1 + WARM_UP)
        steps = (of_fedavg, step)
        pairs = [[cpu_seconds(lambda rows=rows: records.append(next(rows))) for rows in steps] for _ in range(rounds)]
    least, other = (min(column) for column in zip(*pairs, strict=True))
    return other / least, not any(record.fallbacks for record in records)


def methods(rounds: int, output: Path | None = None, names: Sequence[str] | None = None) -> None:
    """Prints passes, seconds and their ratio for methods; a ratio above `MOST` is marked.

    output: a page, whose table is written after every method. names: of the methods; None: all.
    """
    title = f"{WORK.description}; FedAvg is 1. {machine()}; PyTorch {torch.__version__}; {datetime.date.today()}; "
    lines = [
        f"{title}load average {os.getloadavg()[0]:.1f}; the least of {rounds} rounds in turn.",
        "",
        "| method | passes | seconds | seconds / passes | |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    with one_thread(), rounds_of("fedavg", "manual") as session:
        of_fedavg, step = passes("fedavg", rounds), session.rounds("fedavg", lambda text: None)
        list(islice(step, 2))
        for name in names or REGISTRY:
            needed, (taken, is_manual) = passes(name, rounds) / of_fedavg, seconds(name, rounds, step)
            marks = ["above"] * (needed > 0 and taken / needed > MOST) + ["in `sequential`"] * (not is_manual)
            lines.append(f"| {name} | {needed:.2f} | {taken:.2f} | {taken / needed:.2f} | {', '.join(marks)} |")
            print(lines[-1], flush=True)
            if output:
                output.write_text(with_section(output.read_text(), "\n".join(lines), BEGIN))
