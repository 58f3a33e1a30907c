"""The setup of a run, which every process gets: the experiment, its federation, network recipe and methods."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn

from cfl_ray.clock.devices import Clock
from cfl_ray.clock.virtual_time import Asynchrony, VirtualTime
from cfl_ray.config import Experiment
from cfl_ray.config.attack import AttackersConfig
from cfl_ray.config.unused import warnings_of
from cfl_ray.core.engine_names import SEQUENTIAL
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import stream
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.core.tasks import CLASSIFICATION, Task
from cfl_ray.data.federation import Federation
from cfl_ray.engine.attack import Attack, AttackKind
from cfl_ray.engine.engines import Division
from cfl_ray.engine.worker import Worker
from cfl_ray.errors import ConfigError
from cfl_ray.models import ModelRecipe
from cfl_ray.nn.fingerprints import fingerprint_of, is_same
from cfl_ray.nn.network import Network
from cfl_ray.nn.shared import digest_of
from cfl_ray.population.availability import ALWAYS, Availability
from cfl_ray.population.population import count_of
from cfl_ray.privacy.examples import ExampleAccount
from cfl_ray.privacy.privacy_plan import PrivacyPlan
from cfl_ray.setup.criterion import RoundChoice
from cfl_ray.setup.dry_rounds import DryRounds, load_of, of_few


@dataclass(frozen=True)
class Setup:
    """An experiment with its federation, network recipe and methods. Pickles to paths and recipes.

    Plugins are resolved once, here, and pickled with it.
    """

    experiment: Experiment
    federation: Federation
    recipe: ModelRecipe
    methods: dict[str, Method[Any]]  # by label, in the order of the config
    availability: Availability = ALWAYS
    task: Task = CLASSIFICATION  # with all metrics that are measured
    local: LocalSGD = LocalSGD()  # of methods without own settings
    own_local: Mapping[str, LocalSGD] = field(default_factory=dict)  # of methods with own settings, by label
    attack_kind: AttackKind = AttackKind()
    privacy: Mapping[str, PrivacyPlan] = field(default_factory=dict)  # by label; empty: not private
    # by label: the account of samples after all rounds, if clients take part in every round; empty: none
    examples: Mapping[str, ExampleAccount] = field(default_factory=dict)
    secure: SecureAggregation | None = None  # None: uploads are not masked
    frozen: str = ""  # digest of the frozen parameters; empty if there are none
    clock: Clock | None = None  # None: no virtual time
    asynchrony: Asynchrony | None = None  # None: synchronous rounds
    of_model: tuple[str, ...] = ()  # warnings that depend on the model
    choice: RoundChoice = RoundChoice()  # the metrics of `stopping` and `keep`
    template: nn.Module | None = None  # see `Network`; None without frozen parameters, or if it cannot be pickled

    def local_of(self, label: str) -> LocalSGD:
        """The local training of a method."""
        return self.own_local.get(label, self.local)

    @property
    def division(self) -> Division:
        """The division of a full cohort into chunks."""
        cohort = self.experiment.cohort
        clients = cohort.clients or count_of(cohort.fraction, self.federation.num_clients)
        return Division(clients, bool(self.experiment.runtime.clients_per_host))

    def dry_rounds(self, label: str, spec: ParamSpec) -> DryRounds:
        """All rounds of a method without training."""
        return DryRounds(
            self.methods[label],
            self.federation.num_clients,
            self.division.cohort,
            self.local_of(label),
            spec,
            self.federation.shape,
            self.experiment.rounds,
            self.secure,
        )

    def time_of(self, label: str, spec: ParamSpec, sizes_of: Callable[[np.ndarray], np.ndarray]) -> VirtualTime | None:
        """The virtual time of a method, before round 1. sizes_of: n_i of clients in the present round."""
        if self.clock is None:
            return None
        size = max(round(float(np.mean(self.federation.num_samples_N))), 1)
        dry = replace(self.dry_rounds(label, spec), size=size)
        return VirtualTime(self.clock, of_few(load_of, dry, dry.cohort), dry.local, sizes_of)

    def network(self, device: str = "cpu") -> Network:
        """A new network that any model of the experiment can be loaded into."""
        shape, runtime = self.federation.shape, self.experiment.runtime
        network = Network(
            self.recipe,
            shape.input,
            device,
            shape.dtype,
            self.task,
            runtime.precision,
            runtime.gpus_per_host or 1.0,  # several hosts, or runs of a study, may share a GPU
            seed=self.experiment.seed,
            template=self.template,
            key=self.recipe.key,
        )
        if self.frozen and self.template is None and digest_of(network.frozen) != self.frozen:
            raise ConfigError(
                "the model has frozen parameters, a process cannot send it to another (pickle), and its factory "
                "initialises it differently every time; draw its weights with PyTorch's global generator"
            )
        for name, buffer in network.outside.items():
            if name in self.recipe.constants and not is_same(fingerprint_of(buffer), self.recipe.constants[name]):
                raise ConfigError(
                    f"the model's buffer {name} differs between processes; draw it with the global generator of "
                    "PyTorch, NumPy or `random`, which have the seed of the run while the factory is called"
                )
        return network

    def worker(self, device: str = "cpu", engine: str = SEQUENTIAL, last_batch: int = 0) -> Worker:
        """A new worker for a process. engine, last_batch: of `EngineChoice`."""
        configured = self.experiment.runtime.engine != "auto"
        return Worker(self.network(device), self.federation, engine, self.attack, configured, last_batch)

    @property
    def warnings(self) -> list[str]:
        """A line for each key that is valid but has no effect, or probably another effect than intended."""
        clients, cohort = self.federation.num_clients, self.division.cohort
        of_methods = {label: method.warning(clients, cohort) for label, method in self.methods.items()}
        texts = [f"{label}: {text}" for label, text in of_methods.items() if text]
        return [*warnings_of(self.experiment), *self.recipe.warnings, *texts, *self.of_model, *self.choice.warnings]

    @property
    def attack(self) -> Attack:
        """The attack of the experiment, and the clients that carry it out."""
        wanted, total = self.experiment.attack, self.federation.num_clients
        if not isinstance(wanted, AttackersConfig):
            return Attack()
        draw = stream(self.experiment.seed, 0, 0, -1, "attackers")
        drawn = draw.choice(total, count_of(wanted.fraction, total), replace=False).tolist()
        clients = frozenset(drawn if wanted.clients is None else wanted.clients)
        return Attack(self.attack_kind, clients, wanted.from_round)
