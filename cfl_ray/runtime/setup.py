"""From an experiment to everything a process needs to work on it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from cfl_ray import data, models
from cfl_ray.config import Experiment, check_cohort
from cfl_ray.core.availability import ALWAYS, Availability, Bernoulli, Diurnal, Trace
from cfl_ray.core.cohort import share
from cfl_ray.core.errors import ConfigError, DataError
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.core.rng import stream
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.data.federation import Federation
from cfl_ray.data.traces import read_trace
from cfl_ray.engine import choose
from cfl_ray.engine.attack import Attack
from cfl_ray.engine.network import Network
from cfl_ray.engine.worker import Worker
from cfl_ray.methods import resolve
from cfl_ray.models import ModelRecipe
from cfl_ray.tracking.files import read_json, write_json


@dataclass(frozen=True)
class Setup:
    """An experiment whose federation, network and methods stand ready. Pickles to what hosts need: paths and recipes."""

    experiment: Experiment
    federation: Federation
    recipe: ModelRecipe
    methods: dict[str, Method]  # by label, in the order of the config
    availability: Availability = ALWAYS

    @property
    def local(self) -> LocalSGD:
        local = self.experiment.local
        return LocalSGD(local.epochs, local.steps, local.batch_size, local.lr, local.momentum, local.weight_decay, local.persist)

    def network(self, device: str = "cpu") -> Network:
        return Network(self.recipe, self.federation.shape.input, device)

    def worker(self, device: str = "cpu", engine: str = "sequential") -> Worker:
        return Worker(self.network(device), self.federation, engine, self.attack)

    @property
    def attack(self) -> Attack:
        """What some clients do, and who they are."""
        wanted, total = self.experiment.attack, self.federation.num_clients
        if wanted.kind == "none":
            return Attack()
        drawn = stream(self.experiment.seed, 0, 0, -1, "attackers").choice(total, share(wanted.fraction, total), replace=False).tolist()
        who = frozenset(drawn if wanted.clients is None else wanted.clients)
        return Attack(wanted.kind, who, wanted.scale, wanted.sigma, wanted.from_round)


def prepare(experiment: Experiment, progress: Callable[[str, int, int], None] | None = None) -> Setup:
    """Writes or reuses the shards and checks everything that can be checked before a run. Raises ConfigError or DataError."""
    methods = resolve(experiment.methods)
    federation = experiment.data.federation
    if federation is None:
        federation = data.build(experiment.data, experiment.seed, shards_folder(experiment), progress)
    _check_clients(experiment, federation)
    changes = [
        DataChange(event.round, tuple(change.clients), change.rotate // 90 % 4, change.relabel, None if change.data_of is None else tuple(change.data_of))
        for event in experiment.schedule
        for change in event.change
    ]
    if changes:
        federation = ChangingFederation(federation, changes)
    recipe = models.recipe(experiment.model.name, experiment.model.options, federation.shape.input, federation.shape.num_classes)
    setup = Setup(experiment, federation, recipe, methods, _availability(experiment, federation.num_clients))
    _check_attack(setup.attack, federation.num_clients)
    return setup


def _availability(experiment: Experiment, num_clients: int) -> Availability:
    """Raises DataError where it is a trace that cannot be used."""
    given = experiment.cohort.availability
    if given.kind == "trace":
        return Trace(*read_trace(given.file, num_clients), given.unit)
    if given.kind == "diurnal":
        return Diurnal(given.chance, given.amplitude, given.period, experiment.seed, given.zones)
    return ALWAYS if given.kind == "always" else Bernoulli(given.chance)


def shards_folder(experiment: Experiment) -> str:
    """Where this experiment's shards are kept."""
    return experiment.data.shards or str(Path(experiment.output) / "shards")


def _check_clients(experiment: Experiment, federation: Federation) -> None:
    count = federation.num_clients
    check_cohort(experiment.cohort.clients or 0, count)
    for event in experiment.schedule:
        for client in (*event.join, *event.leave):
            if not 0 <= client < count:
                raise ConfigError(f"schedule, round {event.round}: client {client} does not exist; the federation has clients 0 .. {count - 1}")
    later = {client for event in experiment.schedule for client in event.join}
    if len(later) >= count:
        raise ConfigError(f"schedule: all {count} clients join later, so round 1 has none; leave at least one out of `join`")


def _check_attack(attack: Attack, count: int) -> None:
    if attack.clients and max(attack.clients) >= count:
        raise ConfigError(f"attack.clients: client {max(attack.clients)} does not exist; the federation has clients 0 .. {count - 1}")
    if len(attack.clients) >= count:
        raise ConfigError(f"attack: all {count} clients attack, so none is honest; leave at least one out")


def engine_choice(setup: Setup, device: str, measured: Callable[[], choose.Choice]) -> choose.Choice:
    """The configured engine, or the measured one; a measurement is kept beside the runs, so that a repeated run chooses alike.

    Where it cannot be kept, or the file cannot be read, the run goes on with what it measures.
    """
    wanted = setup.experiment.runtime.engine
    if wanted != "auto":
        return choose.Choice(wanted, f"{wanted}: as configured")
    file = Path(setup.experiment.output) / "engine-choices.json"
    key = choose.key(setup.network(device), setup.local)
    known = {}
    with suppress(DataError, OSError):
        known = read_json(file) or {}
    if key in known:
        return choose.Choice(*known[key])
    choice = measured()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, known | {key: [choice.engine, choice.reason]})
    return choice


def device_of(experiment: Experiment, has_gpu: bool) -> str:
    """cpu or cuda. Raises ConfigError where cuda is asked for and there is none."""
    wanted, present = experiment.runtime.device, torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError("runtime.device: cuda, but torch finds no GPU here; set runtime.device=cpu or auto")
    return "cuda" if present and (wanted == "cuda" or (wanted == "auto" and has_gpu)) else "cpu"
