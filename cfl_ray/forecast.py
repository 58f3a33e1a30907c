"""What an experiment will need, before it runs: sizes, memory and traffic."""

import math
import os
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cfl_ray import data, models
from cfl_ray.config import Experiment
from cfl_ray.core.clients import Clients, Round
from cfl_ray.core.cohort import Change, Population, share
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.method import Method, Start
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.robust import Mean
from cfl_ray.core.work import Describe, Losses, MixPending, Outcome, TestClients, Train, Work
from cfl_ray.data.federation import Shape
from cfl_ray.methods import resolve

_PROCESS_BYTES = 450e6  # of a process that has imported torch and Ray, measured with torch 2.15 and Ray 2.60


@dataclass(frozen=True)
class DryBackend:
    """Answers every question without any training, so that a round shows its traffic and nothing else."""

    spec: ParamSpec
    inputs: int  # floats of one sample
    classes: int
    kept: set[int] = field(default_factory=set)  # of how many clients results stayed until they could be averaged

    def run(self, work: Work) -> Outcome:
        size = len(work.ids_M)
        if isinstance(work, (Train, MixPending)):
            self.kept.update([size] if getattr(work, "mix_later", False) else [])
            arrays = {"ok": np.ones(size, bool), "train_loss": np.zeros(size)}
            if getattr(work, "keep", None) is not None:
                arrays |= {"kept": np.ones((size, work.keep.count), np.float32), "norm": np.ones(size)}
            return Outcome(arrays, {}, None if work.mix is None else np.zeros(work.mix.num_rows))
        if isinstance(work, Losses):
            return Outcome({"losses": np.tile(np.arange(work.num_models, dtype=float), (size, 1))})
        if isinstance(work, TestClients):
            return Outcome({"scores": np.zeros((size, 3))})
        assert isinstance(work, Describe)
        length = getattr(work.function, "floats", lambda inputs, classes: self.spec.trained)(self.inputs, self.classes)
        features = np.ones((size, min(work.sketch or length, length)), np.float32)
        return Outcome({"features": features, "ok": np.ones(size, bool), "floats": np.full(size, length)})


@dataclass(frozen=True)
class Traffic:
    """Mbit per client of the federation, down and up."""

    first_round: tuple[float, float]
    later_round: tuple[float, float]
    models: int  # cluster models after the first round
    kept: int  # clients whose results stay in the object store until they can be averaged


def traffic(method: Method, num_clients: int, cohort: int, spec: ParamSpec, local: LocalSGD, shape: Shape) -> Traffic:
    """What one round costs, counted by the method itself on clients that answer without training."""
    start = Start(num_clients, spec, lambda index: torch.zeros(spec.size), shape.input)
    state, ids, mbit = method.init(start), np.arange(cohort), []
    backend = DryBackend(spec, math.prod(shape.input), shape.num_classes)
    for number in (1, 2):
        books = Round()
        clients = Clients(
            ids, np.ones(cohort, np.int64), spec, local, backend, 0, number, books,
            reachable=lambda: (np.arange(num_clients), np.ones(num_clients, np.int64)),
        )  # fmt: skip
        state = method.round(state, clients, Draws(0, number))
        mbit.append((books.ledger.down_bits / num_clients / 1e6, books.ledger.up_bits / num_clients / 1e6))
    kept = max(backend.kept, default=0) if isinstance(method.rule, Mean) else cohort
    return Traffic(mbit[0], mbit[1], state.num_clusters, kept)


def show(experiment: Experiment, console: Console) -> None:
    """Prints the federation's size and, per method, traffic and memory. Raises ConfigError for what cannot work."""
    size = data.describe(experiment.data, experiment.seed)
    recipe = models.recipe(experiment.model.name, experiment.model.options, size.input, size.num_classes)
    spec = ParamSpec.of(recipe())
    fewest, median, most = size.samples
    changes = [Change(event.round, tuple(event.join), tuple(event.leave)) for event in experiment.schedule]
    online = len(Population(size.clients, changes, experiment.seed).online)
    cohort = experiment.cohort.clients or share(experiment.cohort.fraction, online)
    local = LocalSGD(**experiment.local.model_dump())
    steps = local.steps_of(np.array([median]))[0]
    console.print(
        f"federation: {size.clients} clients ({online} at the start), {fewest} / {median:g} / {most} training samples (fewest / median / most), "
        f"{size.groups or 'unknown'} true groups, {size.num_classes} classes, samples of {'x'.join(map(str, size.input))}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"shards: {size.bytes / 1e6:.1f} MB; model: {spec.size:,} parameters, {spec.size * 4 / 1e6:.2f} MB", markup=False, soft_wrap=True)
    console.print(f"a round: {cohort} clients, about {steps} steps each; {experiment.rounds} rounds", markup=False, soft_wrap=True)
    table = Table("method", "Mbit/client down, up: round 1", "later rounds", "whole run", "server MB", "each host MB", title="expected")
    model, kept = spec.size * 4, {}
    for label, method in resolve(experiment.methods).items():
        found = traffic(method, size.clients, cohort, spec, local, Shape(tuple(size.input), size.num_classes))
        kept |= {label: found.kept * model} if found.kept else {}
        total = sum(found.first_round) + (experiment.rounds - 1) * sum(found.later_round)
        server = _PROCESS_BYTES + (found.models + 1) * 4 * model + 12 * size.clients
        host = _PROCESS_BYTES + (found.models * 3 + 6) * model
        cells = (f"{down:.3f}, {up:.3f}" for down, up in (found.first_round, found.later_round))
        table.add_row(label, *cells, f"{total:.1f}", f"{server / 1e6:.0f}", f"{host / 1e6:.0f}")
    console.print(table)
    hosts = experiment.runtime.hosts or len(os.sched_getaffinity(0))
    console.print(f"memory is for one server and each of {hosts} hosts; methods that find their clusters may hold more models at first", markup=False, soft_wrap=True)
    if kept:
        each = ", ".join(f"{label} {size / 1e6:.1f} MB" for label, size in kept.items())
        console.print(f"results of a round that stay in the object store until it is known how to average them: {each}", markup=False, soft_wrap=True)
