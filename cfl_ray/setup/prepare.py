"""Makes the setup of a run from its config, and checks it."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cfl_ray import data, models
from cfl_ray.clock.from_config import asynchrony_of, availability_of, clock_of
from cfl_ray.config import AttackConfig, Experiment, LocalConfig, changed_local, check_cohort
from cfl_ray.config.attack import ATTACK_KINDS, PluginAttackConfig
from cfl_ray.config.clock import RunningClockConfig
from cfl_ray.config.data import ValidationConfig
from cfl_ray.config.schedule import check_schedule
from cfl_ray.core.augmentation import resolve_augmentations
from cfl_ray.core.local_sgd import ExampleNoise, LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.core.optimizers import resolve_optimizer
from cfl_ray.core.schedules import resolve_schedule
from cfl_ray.core.tasks import Task, resolve_task
from cfl_ray.data.changes import ChangingFederation
from cfl_ray.data.federation import Federation
from cfl_ray.data.split import with_validation
from cfl_ray.engine.attack import UPLOAD, AttackKind, check_own
from cfl_ray.errors import ConfigError
from cfl_ray.methods import resolve
from cfl_ray.nn.network import template_of
from cfl_ray.nn.shared import digest_of
from cfl_ray.plugins.calling import with_options
from cfl_ray.setup import checks
from cfl_ray.setup.protection import protected
from cfl_ray.setup.round_choice import round_choice
from cfl_ray.setup.scheduled_changes import data_changes, population_of
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking import check_destination, new_trackers, resolve_uri
from cfl_ray.tracking.record import check_score_name


def prepare(
    experiment: Experiment, progress: Callable[[str, int, int], None] | None = None, converts_changed: bool = False
) -> Setup:
    """The setup of the experiment, checked before a run; its shards are written or reused.

    converts_changed: as in `data.build`. Raises ConfigError or DataError.
    """
    resolve_learning(experiment, resolve(experiment.methods))  # before the shards are written, which takes time
    federation = experiment.data.federation
    if federation is None:
        folder = shards_folder(experiment)
        federation = data.build(
            experiment.data,
            experiment.seed,
            folder,
            progress,
            experiment.targets,
            converts_changed,
            experiment.protocol,
        )
    return setup_on(experiment, federation)


def setup_on(experiment: Experiment, federation: Federation) -> Setup:
    """The setup of the experiment on this federation. Raises ConfigError or DataError if they do not fit.

    `cfl-ray check` calls it with a stand-in of the same sizes, so that both refuse the same experiments.
    """
    methods = resolve(experiment.methods)
    checks.check_labels(methods)
    task, local, own_local = resolve_learning(experiment, methods)
    checks.check_targets(task, federation)
    checks.check_classes(task, federation.shape, experiment.evaluation.confusion)
    new_trackers(experiment.tracking)  # called only for the errors that it raises; every method gets its own trackers
    if experiment.tracking.uses_mlflow:
        check_destination(resolve_uri(experiment.tracking, experiment.output))
    _check_cohorts(experiment, federation.num_clients)
    federation = _with_validation(experiment, federation)
    if changes := data_changes(experiment):
        federation = ChangingFederation(federation, changes)
    shape, recipe = federation.shape, _recipe_of(experiment, federation)
    task.check(shape.outputs, shape.target_shape)
    running = experiment.clock if isinstance(experiment.clock, RunningClockConfig) else None
    frozen, template = "", template_of(recipe, experiment.seed, shape.input, shape.dtype)
    if template is not None:
        frozen = digest_of({name: p for name, p in template.named_parameters() if not p.requires_grad})
    setup = Setup(
        experiment,
        federation,
        recipe,
        methods,
        availability=availability_of(experiment.cohort.availability, federation.num_clients, experiment.seed),
        task=task,
        local=local,
        own_local=own_local,
        attack_kind=_attack_kind_of(experiment.attack),
        frozen=frozen,
        clock=None if running is None else clock_of(running, federation.num_clients, experiment.seed),
        asynchrony=None if running is None else asynchrony_of(experiment.asynchronous),
        template=template,
    )
    return _checked(setup)


def _check_cohorts(experiment: Experiment, num_clients: int) -> None:
    """Raises ConfigError for a schedule that does not fit, or leaves no client, and for a cohort of more clients."""
    check_schedule(experiment.schedule, num_clients)
    population = population_of(experiment, num_clients)
    for round in sorted({event.round for event in experiment.schedule if event.round <= experiment.rounds}):
        population.advance(round)
    check_cohort(experiment.cohort.clients or 0, num_clients)


def _with_validation(experiment: Experiment, federation: Federation) -> Federation:
    """The federation with the validation data that the experiment asks for, if any."""
    if (share := experiment.data.validation) is None:
        return federation
    if federation.validation is not None and share != ValidationConfig() and not experiment.data.names_validation_part:
        line = "data.validation.fraction and order have no effect: the data have a validation part of their own"
        federation.preparation_warnings = (*federation.preparation_warnings, line)
    return with_validation(federation, share.fraction, share.order, experiment.seed)


def _checked(setup: Setup) -> Setup:
    """The setup with what its checks find out: the engine, the protection of uploads, and warnings of the model."""
    checks.check_attackers(setup.attack, setup.federation.num_clients)
    checks.check_reported(setup)
    setup = replace(setup, choice=round_choice(setup))
    network = setup.network()
    checks.try_methods(setup, network)
    checks.check_features(setup, network)
    setup = protected(replace(setup, of_model=checks.warnings_of_model(setup, network)), network)
    checks.check_asynchronous(setup, network.spec)
    checks.check_batches(setup, network)
    checks.try_plugins(setup)
    checks.check_engine(setup, network)
    return setup


def with_parts_of(setup: Setup, experiment: Experiment) -> Setup:
    """The setup with methods, model and task of the same experiment with other code (`Experiment.with_code`)."""
    methods = resolve(experiment.methods)
    task, local, own_local = resolve_learning(experiment, methods)
    recipe = _recipe_of(experiment, setup.federation)
    return replace(
        setup, experiment=experiment, methods=methods, task=task, local=local, own_local=own_local, recipe=recipe
    )


def _recipe_of(experiment: Experiment, federation: Federation) -> models.ModelRecipe:
    model, shape = experiment.model, federation.shape
    outputs = () if shape.targets == "class" else shape.outputs
    return models.recipe(
        model.name, model.options, shape.input, shape.num_classes, shape.dtype, outputs, model.weights, experiment.seed
    )


def _attack_kind_of(given: AttackConfig) -> AttackKind:
    """The attack of the section. Raises ConfigError if a plugin is not an attack."""
    kind: Callable[..., AttackKind] = ATTACK_KINDS.code_of(given)
    if not isinstance(given, PluginAttackConfig):
        return kind(**{item.name: getattr(given, item.name) for item in fields(kind)})  # type: ignore[arg-type]
    made = with_options(ATTACK_KINDS.resolve(given.kind), given.options, "attack", UPLOAD)
    check_own(made)
    return kind(made)


def shards_folder(experiment: Experiment) -> str:
    """The folder or URI of this experiment's shards."""
    return experiment.data.shards or str(Path(experiment.output) / "shards")


def local_sgd(settings: LocalConfig) -> LocalSGD:
    """The local training of these settings. Raises ConfigError for an optimiser or a schedule that cannot be used."""
    keys = settings.model_dump(exclude={"optimizer", "optimizer_options", "schedule", "step_schedule", "augment"})
    return LocalSGD(
        **keys,
        optimizer=resolve_optimizer(settings.optimizer, settings.optimizer_options),
        schedule=resolve_schedule("local.schedule", settings.schedule),
        step_schedule=resolve_schedule("local.step_schedule", settings.step_schedule),
        augment=resolve_augmentations(settings.augment),
    )


def resolve_learning(
    experiment: Experiment, methods: dict[str, Method[Any]]
) -> tuple[Task, LocalSGD, dict[str, LocalSGD]]:
    """(task, local training, local training of methods with own settings by label).

    Raises ConfigError for invalid settings, or settings that a method cannot use.
    """
    task = resolve_task(experiment.task).with_metrics(experiment.evaluation.metrics)
    for metric in task.metrics:
        check_score_name(metric.name)
    if experiment.attack.needs_classes and task.targets != "class":
        kind = experiment.attack.kind
        raise ConfigError(f"attack.kind: {kind} needs classes, the targets of the task are {task.targets!r}")
    settings = {
        label: changed_local(experiment.local, method.local, f"methods: {label}.local")
        for label, method in methods.items()
        if method.local
    }
    local = local_sgd(experiment.local)
    own = {label: local_sgd(section) for label, section in settings.items()}
    if experiment.privacy is not None and (examples := experiment.privacy.examples) is not None:
        noise = ExampleNoise(examples.noise_multiplier, examples.clip)
        local, own = replace(local, examples=noise), {k: replace(sgd, examples=noise) for k, sgd in own.items()}
    for sgd in (local, *own.values()):
        # raise ConfigError for a schedule that fails
        for t in (1, min(2, experiment.rounds), experiment.rounds):
            sgd.in_round(t, experiment.rounds)
        for step in range(2):
            sgd.lr_at(step, 2)
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
