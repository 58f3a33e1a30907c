"""The setup of an experiment: everything a process needs to work on it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cfl_ray import data, models
from cfl_ray.clock.devices import Clock
from cfl_ray.clock.from_config import asynchrony_of, clock_of
from cfl_ray.clock.virtual_time import Asynchrony, VirtualTime
from cfl_ray.config import AttackConfig, Experiment, LocalConfig, changed_local, check_buffer, check_cohort
from cfl_ray.config.attack import ATTACK_KINDS, AttackersConfig, PluginAttackConfig
from cfl_ray.config.clock import RunningClockConfig
from cfl_ray.config.cohort import (
    AVAILABILITY_KINDS,
    BernoulliConfig,
    DiurnalConfig,
    PluginAvailabilityConfig,
    TraceConfig,
)
from cfl_ray.config.schedule import check_schedule
from cfl_ray.core.aggregation import Mean
from cfl_ray.core.availability import (
    ALWAYS,
    ARGUMENTS,
    Availability,
    Bernoulli,
    Diurnal,
    OwnAvailability,
    Trace,
)
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.local_sgd import ExampleNoise, LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.core.optimizers import resolve_optimizer
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.population import Population, PopulationChange, count_of
from cfl_ray.core.privacy import PrivacyError
from cfl_ray.core.rng import stream
from cfl_ray.core.schedules import resolve_schedule
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.core.tasks import CLASSIFICATION, Task, resolve_task
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.data.federation import Federation
from cfl_ray.data.traces import read_trace
from cfl_ray.engine import autotune
from cfl_ray.engine.attack import UPLOAD, Attack, check_own
from cfl_ray.engine.engines import SEQUENTIAL
from cfl_ray.engine.kept_choices import kept_choice
from cfl_ray.engine.worker import Worker
from cfl_ray.errors import ConfigError
from cfl_ray.methods import resolve
from cfl_ray.models import ModelRecipe
from cfl_ray.nn.network import Network, template_of
from cfl_ray.nn.shared import digest_of
from cfl_ray.plugins.calling import with_options
from cfl_ray.privacy.examples import ExampleAccount, delta_of
from cfl_ray.privacy.noisy_sums import PrivateRun, rounded_norm
from cfl_ray.privacy.plan import PrivacyPlan, plan_of
from cfl_ray.setup.dry_rounds import DryBackend, dry_rounds, traffic, why_synchronous
from cfl_ray.setup.dry_run import (
    try_aggregation,
    try_attack,
    try_availability,
    try_metrics,
)
from cfl_ray.setup.first_models import start_of
from cfl_ray.system.machine import available_memory
from cfl_ray.tracking import check_mlflow, new_trackers
from cfl_ray.tracking.record import check_score_name

_DRY_FLOATS = 10**9  # floats of the models in all rounds without training that plan a private run


def local_training(settings: LocalConfig) -> LocalSGD:
    """The local training of these settings. Raises ConfigError for an optimiser or a schedule that cannot be used."""
    keys = settings.model_dump(exclude={"optimizer", "optimizer_options", "schedule", "step_schedule"})
    return LocalSGD(
        **keys,
        optimizer=resolve_optimizer(settings.optimizer, settings.optimizer_options),
        schedule=resolve_schedule("local.schedule", settings.schedule),
        step_schedule=resolve_schedule("local.step_schedule", settings.step_schedule),
    )


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
    attack_kind: Any = "none"  # name of a built-in attack, or the plugin, ready for use
    privacy: Mapping[str, PrivacyPlan] = field(default_factory=dict)  # by label; empty: not private
    # by label: the account of samples after all rounds, if clients take part in every round; empty: none
    examples: Mapping[str, ExampleAccount] = field(default_factory=dict)
    secure: SecureAggregation | None = None  # None: uploads are not masked
    frozen: str = ""  # digest of the frozen parameters; empty if there are none
    clock: Clock | None = None  # None: no virtual time
    asynchrony: Asynchrony | None = None  # None: synchronous rounds
    template: nn.Module | None = None  # see `Network`; None without frozen parameters, or if it cannot be pickled

    def local_of(self, label: str) -> LocalSGD:
        """The local training of a method."""
        return self.own_local.get(label, self.local)

    @property
    def division(self) -> autotune.Division:
        """The division of a full cohort into chunks."""
        cohort = self.experiment.cohort
        clients = cohort.clients or count_of(cohort.fraction, self.federation.num_clients)
        return autotune.Division(clients, bool(self.experiment.runtime.clients_per_host))

    def time_of(self, label: str, spec: ParamSpec, sizes_of: Callable[[np.ndarray], np.ndarray]) -> VirtualTime | None:
        """The virtual time of a method, before round 1. sizes_of: n_i of clients in the present round."""
        if self.clock is None:
            return None
        size, local = self.federation.num_clients, self.local_of(label)
        shape, cohort = self.federation.shape, self.division.cohort
        estimate = traffic(self.methods[label], size, cohort, spec, local, shape, self.secure)
        return VirtualTime(self.clock, estimate.load, local, sizes_of)

    def network(self, device: str = "cpu", memory_share: float = 1.0) -> Network:
        """A new network that any model of the experiment can be loaded into."""
        shape, precision = self.federation.shape, self.experiment.runtime.precision
        network = Network(
            self.recipe,
            shape.input,
            device,
            shape.dtype,
            self.task,
            precision,
            memory_share,
            self.experiment.seed if self.frozen else 0,
            self.template,
        )
        if self.frozen and self.template is None and digest_of(network.frozen) != self.frozen:
            raise ConfigError(
                "the model has frozen parameters, a process cannot send it to another (pickle), and its factory "
                "initialises it differently every time; draw its weights with PyTorch's global generator"
            )
        return network

    def worker(self, device: str = "cpu", engine: str = "sequential", memory_share: float = 1.0) -> Worker:
        """A new worker for a process. memory_share: of the device's memory that the process may use."""
        return Worker(self.network(device, memory_share), self.federation, engine, self.attack)

    @property
    def attack(self) -> Attack:
        """The attack of the experiment, and the clients that carry it out."""
        wanted, total = self.experiment.attack, self.federation.num_clients
        if not isinstance(wanted, AttackersConfig):
            return Attack()
        draw = stream(self.experiment.seed, 0, 0, -1, "attackers")
        drawn = draw.choice(total, count_of(wanted.fraction, total), replace=False).tolist()
        clients = frozenset(drawn if wanted.clients is None else wanted.clients)
        amounts = {key: getattr(wanted, key) for key in ("scale", "sigma") if hasattr(wanted, key)}
        return Attack(self.attack_kind, clients, from_round=wanted.from_round, **amounts)


def prepare(experiment: Experiment, progress: Callable[[str, int, int], None] | None = None) -> Setup:
    """The setup of the experiment, checked before a run; its shards are written or reused.

    Raises ConfigError or DataError.
    """
    resolve_learning(experiment, resolve(experiment.methods))  # before the shards are written, which takes time
    federation = experiment.data.federation
    if federation is None:
        folder = shards_folder(experiment)
        federation = data.build(experiment.data, experiment.seed, folder, progress, experiment.targets)
    return setup_on(experiment, federation)


def setup_on(experiment: Experiment, federation: Federation) -> Setup:
    """The setup of the experiment on this federation. Raises ConfigError or DataError if they do not fit.

    `cfl-ray check` calls it with a stand-in of the same sizes, so that both refuse the same experiments.
    """
    methods = resolve(experiment.methods)
    task, local, own_local = resolve_learning(experiment, methods)
    _check_targets(task, federation)
    new_trackers(experiment.tracking)  # called only for the errors that it raises; every method gets its own trackers
    if experiment.tracking.log_models and experiment.tracking.enabled:
        check_mlflow()
    check_schedule(experiment.schedule, federation.num_clients)
    population = population_of(experiment, federation.num_clients)
    for round in sorted({event.round for event in experiment.schedule if event.round <= experiment.rounds}):
        population.advance(round)  # raises ConfigError if no client would be left
    check_cohort(experiment.cohort.clients or 0, federation.num_clients)
    if changes := _data_changes(experiment):
        federation = ChangingFederation(federation, changes)
    model, shape = experiment.model, federation.shape
    outputs = () if shape.targets == "class" else shape.outputs
    recipe = models.recipe(
        model.name, model.options, shape.input, shape.num_classes, shape.dtype, outputs, model.weights
    )
    task.check(shape.outputs, shape.target_shape)
    availability = _availability(experiment, federation.num_clients)
    attack_kind = _attack_kind(experiment.attack)
    setup = Setup(experiment, federation, recipe, methods, availability, task, local, own_local, attack_kind)
    if isinstance(experiment.clock, RunningClockConfig):
        clock = clock_of(experiment.clock, federation.num_clients, experiment.seed)
        setup = replace(setup, clock=clock, asynchrony=asynchrony_of(experiment.asynchronous))
    if (template := template_of(recipe, experiment.seed)) is not None:
        frozen = digest_of({name: p for name, p in template.named_parameters() if not p.requires_grad})
        setup = replace(setup, frozen=frozen, template=template)
    _check_attack(setup.attack, federation.num_clients)
    _try_methods(setup)
    if experiment.secure_aggregation is not None:
        setup = replace(setup, secure=SecureAggregation(**experiment.secure_aggregation.model_dump()))
        _check_secure(setup)
    if experiment.private_clients is not None:
        setup = replace(setup, privacy={label: _privacy_of(setup, label) for label in methods})
    if experiment.privacy is not None and experiment.privacy.examples is not None:
        setup = replace(setup, examples={label: _examples_of(setup, label) for label in methods})
    _check_asynchronous(setup)
    _check_batches(setup)
    _try_own_parts(setup)
    _check_engine(setup)
    return setup


def _check_batches(setup: Setup) -> None:
    """Raises ConfigError if clients train on a batch of one sample but the model cannot: BatchNorm needs two."""
    network, sizes_N = setup.network(), setup.federation.num_samples_N
    if not network.batch_statistics:
        return
    for label in setup.methods:
        local = setup.local_of(label)
        batch_N = np.asarray(local.batch_of(sizes_N))
        single_N = (sizes_N == 1) | (batch_N == 1) | ((sizes_N % batch_N == 1) & (not local.drop_last))
        if not single_N.any() or (reason := network.why_not_batch_of(1)) is None:
            continue
        client, more = int(single_N.argmax()), int(single_N.sum()) - 1
        whole = sizes_N[client] == 1 or batch_N[client] == 1
        cure = (
            "leave such clients out (data.partition.min_samples: 2) and set local.batch_size to 2 or more"
            if whole
            else "set local.drop_last: true, which leaves that batch out, or another local.batch_size"
        )
        raise ConfigError(
            f"client {client}{f' and {more} more' * bool(more)} would train on a batch of one sample "
            f"({sizes_N[client]} samples in batches of {batch_N[client]}), which the model's BatchNorm refuses "
            f"({reason}); {cure}, or use GroupNorm"
        )


def _check_engine(setup: Setup) -> None:
    """Raises ConfigError for a configured engine that can train the clients of none of the methods."""
    engine = setup.experiment.runtime.engine
    if engine in ("auto", SEQUENTIAL):
        return
    network, reason = setup.network(), ""
    for label in setup.methods:
        why_not = autotune.why_not(engine, network, setup.federation, setup.local_of(label))
        if why_not is None:
            return
        reason = reason or why_not
    raise ConfigError(f"runtime.engine: {engine} cannot train these clients: {reason}; use auto or {SEQUENTIAL}")


def _try_own_parts(setup: Setup) -> None:
    """Raises ConfigError for a plugin that fails when it is called."""
    shape, num_clients = setup.federation.shape, setup.federation.num_clients
    try_metrics(setup.task, shape)
    for method in setup.methods.values():
        try_aggregation(method.aggregation_rule, setup.division.cohort)
    try_attack(setup.attack_kind, setup.recipe, shape)
    try_availability(setup.availability, num_clients)


def resolve_learning(
    experiment: Experiment, methods: dict[str, Method[Any]]
) -> tuple[Task, LocalSGD, dict[str, LocalSGD]]:
    """(task, local training, local training of methods with own settings by label).

    Raises ConfigError for invalid settings, or settings that a method cannot use.
    """
    task = resolve_task(experiment.task).with_metrics(experiment.evaluation.metrics)
    for metric in task.metrics:
        check_score_name(metric.name)
    if experiment.attack.kind == "label_flip" and task.targets != "class":
        raise ConfigError(f"attack.kind: label_flip needs classes, the targets of the task are {task.targets!r}")
    settings = {
        label: changed_local(experiment.local, method.local, f"methods: {label}.local")
        for label, method in methods.items()
        if method.local
    }
    local, own = (
        local_training(experiment.local),
        {label: local_training(section) for label, section in settings.items()},
    )
    if experiment.privacy is not None and (examples := experiment.privacy.examples) is not None:
        noise = ExampleNoise(examples.noise_multiplier, examples.clip)
        local, own = replace(local, examples=noise), {k: replace(sgd, examples=noise) for k, sgd in own.items()}
    for sgd in (local, *own.values()):
        for t in (1, experiment.rounds):
            sgd.in_round(t, experiment.rounds)  # raises ConfigError for a schedule that fails
    for label, method in methods.items():
        _check_method(label, method, task, settings.get(label, experiment.local), own.get(label, local))
    return task, local, own


def _check_method(label: str, method: Method[Any], task: Task, settings: LocalConfig, local: LocalSGD) -> None:
    """Raises ConfigError for a method that does not support this task or this local training."""
    if task.targets != "class" and (reason := method.needs_classes):
        raise ConfigError(f"{label} needs classes, the targets of the task are {task.targets!r}: {reason}")
    if (local.optimizer or local.step_schedule) and (reason := method.needs_sgd):
        raise ConfigError(
            f"{label} needs local.optimizer sgd and a constant local.step_schedule, got "
            f"{settings.optimizer} and {settings.step_schedule}: {reason}"
        )
    if local.persist and local.momentum > 0 and (reason := method.needs_fresh_momentum):
        raise ConfigError(
            f"{label} needs local.persist false or local.momentum 0, got persist true and momentum "
            f"{local.momentum:g}: {reason}"
        )


def _check_memory(label: str, method: Method[Any], parameters: int) -> None:
    """Raises ConfigError, before models are made, if the cluster models do not fit into this machine's memory."""
    wanted, available = getattr(method, "num_clusters", None) or 0, available_memory()
    most = available // (parameters * 4)  # bytes of a float
    if wanted > most:
        raise ConfigError(
            f"{label}.num_clusters is {wanted}: its models need {wanted * parameters * 4 / 1e9:.1f} GB, and this "
            f"machine has {available / 1e9:.1f} GB of memory available; use at most {most} clusters"
        )


def compared_clients(setup: Setup, label: str) -> int:
    """S, the number of clients that a method compares pair by pair, or its maximum; see `Method.compares`."""
    experiment, cohort = setup.experiment, setup.division.cohort
    population = population_of(experiment, setup.federation.num_clients)
    match setup.methods[label].compares:
        case "cohort":
            return cohort
        case "participants":
            return min(cohort * experiment.rounds, setup.federation.num_clients)
        case "reachable":
            drawn = population.draw(1, 1.0, None, setup.availability, experiment.cohort.dropout)
            return len(drawn.ids_M)
    return 0


def _check_pairs(setup: Setup, label: str) -> None:
    """Raises ConfigError if the arrays of all pairs of compared clients do not fit into this machine's memory."""
    method, count, available = setup.methods[label], compared_clients(setup, label), available_memory()
    needed = count**2 * method.pair_bytes
    if needed > available:
        raise ConfigError(
            f"{label} compares {count:,} clients with each other ({method.compares}): their pairs need "
            f"{needed / 1e9:.1f} GB, and this machine has {available / 1e9:.1f} GB of memory available, enough for "
            f"{math.isqrt(available // method.pair_bytes):,} clients; use fewer clients, a larger machine, or a method "
            "that compares clients with models (ifca)"
        )


def _try_methods(setup: Setup) -> None:
    """Raises ConfigError for an option that does not fit the model. Creates and discards every method's first state."""
    network = setup.network()
    for label, method in setup.methods.items():
        method.check_model(network.spec)
        _check_memory(label, method, network.spec.size)
        _check_pairs(setup, label)
        start = start_of(setup.experiment, label, network, setup.federation.num_clients)
        CheckedMethod(method, network.spec.size).init(start)


def _privacy_of(setup: Setup, label: str) -> PrivacyPlan:
    """The privacy of a method, planned by rounds without training. Raises ConfigError if it cannot be private."""
    _check_mean(setup, label, "be private", "privacy.clip")
    count = setup.federation.num_clients
    plan = plan_of(setup.experiment, count, label, lambda private: _tried(setup, label, private))
    if setup.secure is not None:
        norm = rounded_norm(setup.secure.levels // 2, setup.network().spec.size)
        for clients in (_most_masked(setup), 1):
            share = plan.privacy.share_of_noise(norm, setup.secure.least(clients))
            setup.secure.check(clients, share)
    return plan


def _examples_of(setup: Setup, label: str) -> ExampleAccount:
    """The account of samples after all rounds, if every client takes part in each.

    Raises ConfigError for a method or model that DP-SGD cannot protect, and for a delta that is too large.
    """
    assert setup.experiment.privacy is not None and setup.experiment.privacy.examples is not None
    config, network, local = setup.experiment.privacy.examples, setup.network(), setup.local_of(label)
    unlike = {
        "BatchNorm mixes the samples of a batch; use GroupNorm": network.batch_statistics,
        "its forward pass draws at random beside dropout layers": network.random_forward,
    }
    for reason in (reason for reason, holds in unlike.items() if holds):
        raise ConfigError(f"privacy.examples needs gradients of single samples, and the model has none: {reason}")
    if local.drop_last:
        raise ConfigError(f"privacy.examples draws every sample by itself; {label} has local.drop_last: true")
    sizes_N = setup.federation.num_samples_N
    account = ExampleAccount(config.noise_multiplier, delta_of(config, sizes_N), len(sizes_N))
    try:
        rounds = [[float(steps_M.max()) for *_, steps_M in stats.example_steps] for _, stats in _tried(setup, label)]
    except PrivacyError as error:
        raise ConfigError(f"{label} cannot protect single samples: {error}") from None
    # the steps of a client with one sample give the number of local trainings
    times = sum(rounds[-1]) / float(local.steps_of(np.ones(1))[0])
    steps_N = np.ceil(times * setup.experiment.rounds * local.steps_of(sizes_N))
    account.charge(np.arange(len(sizes_N)), local, sizes_N, steps_N)
    return account


def _check_mean(setup: Setup, label: str, what: str, key: str) -> None:
    """Raises ConfigError for an aggregation rule that reads the updates of single clients."""
    method = setup.methods[label]
    if not isinstance(method.aggregation_rule, Mean):
        raise ConfigError(
            f"{label} cannot {what} with aggregation {method.aggregation}: the rule reads the updates of single "
            f"clients; use aggregation mean ({key} bounds every update)"
        )


def _tried(setup: Setup, label: str, private: PrivateRun | None = None) -> Iterator[Any]:
    """Yields the first rounds of a method without training, in which it requests everything that its server reads."""
    federation, spec = setup.federation, setup.network().spec
    return dry_rounds(
        setup.methods[label],
        federation.num_clients,
        setup.division.cohort,
        spec,
        setup.local_of(label),
        federation.shape,
        DryBackend.of(spec, federation.shape),
        private,
        min(setup.experiment.rounds, max(2, _DRY_FLOATS // spec.size)),
        setup.secure,
    )


def _most_masked(setup: Setup) -> int:
    """The maximum number of clients in a secure sum."""
    poisson, cohort = setup.experiment.cohort.sampling == "poisson", setup.division.cohort
    selected = math.ceil(cohort * setup.experiment.cohort.over_selection)
    return setup.federation.num_clients if poisson else min(selected, setup.federation.num_clients)


def _check_secure(setup: Setup) -> None:
    """Raises ConfigError for a method whose server reads more than sums, and for sums that can exceed the ring."""
    assert setup.secure is not None
    setup.secure.check(_most_masked(setup))
    for label in setup.methods:
        _check_mean(setup, label, "be aggregated securely", "secure_aggregation.clip")
        try:
            for _ in _tried(setup, label):
                pass
        except PrivacyError as error:
            raise ConfigError(f"{label} cannot be aggregated securely: {error}") from None


def _check_asynchronous(setup: Setup) -> None:
    """Raises ConfigError for methods whose rounds cannot be asynchronous, and a buffer that would never be full."""
    if setup.asynchrony is None:
        return
    check_buffer(setup.asynchrony.buffer, setup.experiment.asynchronous.concurrency or setup.division.cohort)
    spec = setup.network().spec
    for label, method in setup.methods.items():
        if reason := why_synchronous(method, spec, setup.local_of(label), setup.federation.shape):
            raise ConfigError(
                f"asynchronous.buffer: {label} cannot run asynchronously: {reason}; leave out the method or the buffer"
            )


def _check_targets(task: Task, federation: Federation) -> None:
    if federation.shape.targets != task.targets:
        raise ConfigError(
            f"task {task.name} needs targets {task.targets!r}, the federation has {federation.shape.targets!r}; say "
            f"targets={task.targets!r} where it is made (federation_from_arrays), or choose another task"
        )


def _data_changes(experiment: Experiment) -> list[DataChange]:
    return [
        DataChange(
            event.round,
            tuple(change.clients),
            change.rotate // 90 % 4,
            change.relabel,
            None if change.data_of is None else tuple(change.data_of),
            change.swap,
            change.back_to,
        )
        for event in experiment.events
        for change in event.change
    ]


def _attack_kind(given: AttackConfig) -> Any:
    """The name of a built-in attack, or the plugin. Raises ConfigError if the plugin is not an attack."""
    if not isinstance(given, PluginAttackConfig):
        return given.kind
    made = with_options(ATTACK_KINDS.resolve(given.kind), given.options, "attack", UPLOAD)
    check_own(made)
    return made


def _availability(experiment: Experiment, num_clients: int) -> Availability:
    """The model of the clients' availability. Raises DataError for a trace that cannot be used."""
    given = experiment.cohort.availability
    if isinstance(given, PluginAvailabilityConfig):
        function = with_options(AVAILABILITY_KINDS.resolve(given.kind), given.options, "availability", ARGUMENTS)
        return OwnAvailability(function, num_clients, experiment.seed)
    if isinstance(given, TraceConfig):
        return Trace(*read_trace(given.file, num_clients), given.unit)
    if isinstance(given, DiurnalConfig):
        return Diurnal(given.chance, given.amplitude, given.period, experiment.seed, given.zones)
    return Bernoulli(given.chance) if isinstance(given, BernoulliConfig) else ALWAYS


def shards_folder(experiment: Experiment) -> str:
    """The folder or URI of this experiment's shards."""
    return experiment.data.shards or str(Path(experiment.output) / "shards")


def population_of(experiment: Experiment, num_clients: int) -> Population:
    """The clients online before round 1, with the changes that the schedule plans."""
    changes = [PopulationChange(event.round, tuple(event.join), tuple(event.leave)) for event in experiment.schedule]
    return Population(num_clients, changes, experiment.seed)


def ignored_events(experiment: Experiment) -> str | None:
    """Text that names the events of the schedule that have no effect; None if all have an effect."""
    if late := sorted({event.round for event in experiment.events if event.round > experiment.rounds}):
        rounds = f"round{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
        return f"the events of the schedule in {rounds} are ignored: the last round is {experiment.rounds}"
    return None


def _check_attack(attack: Attack, count: int) -> None:
    if attack.clients and max(attack.clients) >= count:
        raise ConfigError(
            f"attack.clients: client {max(attack.clients)} does not exist; the federation has clients 0 .. {count - 1}"
        )
    if len(attack.clients) >= count:
        raise ConfigError(f"attack: all {count} clients attack, so none is honest; leave at least one out")


def engine_choice(
    setup: Setup, device: str, measured: Callable[[], autotune.EngineChoice], kept: str | None = None
) -> autotune.EngineChoice:
    """The configured engine, the engine that the run began with, or the fastest engine in a measurement.

    device: name of the device of the hosts. kept: the engine of the run before it was interrupted; None: a new run.
    """
    wanted = setup.experiment.runtime.engine
    if wanted != "auto":
        return autotune.EngineChoice(wanted, f"{wanted}: as configured")
    if kept is not None:
        return autotune.EngineChoice(kept, f"{kept}: as at the start of the run")
    file = Path(setup.experiment.output) / "engine-choices.json"
    key = autotune.cache_key(setup.network(), setup.local, setup.division, device)
    return kept_choice(file, key, measured)


def compute_device(experiment: Experiment, has_gpu: bool) -> str:
    """The device "cpu" or "cuda". Raises ConfigError if the config demands cuda and there is none."""
    wanted, present = experiment.runtime.device, torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError("runtime.device: cuda, but torch finds no GPU here; set runtime.device=cpu or auto")
    return "cuda" if present and (wanted == "cuda" or (wanted == "auto" and has_gpu)) else "cpu"
