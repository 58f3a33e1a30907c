"""Local training and task of an experiment, resolved from its config."""

from dataclasses import replace
from typing import Any

from cfl_ray.config import Experiment, LocalConfig, changed_local
from cfl_ray.core.local_sgd import ExampleNoise, LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.core.optimizers import resolve_optimizer
from cfl_ray.core.schedules import resolve_schedule
from cfl_ray.core.tasks import Task, resolve_task
from cfl_ray.errors import ConfigError
from cfl_ray.tracking.record import check_score_name


def local_training(settings: LocalConfig) -> LocalSGD:
    """The local training of these settings. Raises ConfigError for an optimiser or a schedule that cannot be used."""
    keys = settings.model_dump(exclude={"optimizer", "optimizer_options", "schedule", "step_schedule"})
    return LocalSGD(
        **keys,
        optimizer=resolve_optimizer(settings.optimizer, settings.optimizer_options),
        schedule=resolve_schedule("local.schedule", settings.schedule),
        step_schedule=resolve_schedule("local.step_schedule", settings.step_schedule),
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
    if experiment.attack.kind == "label_flip" and task.targets != "class":
        raise ConfigError(f"attack.kind: label_flip needs classes, the targets of the task are {task.targets!r}")
    settings = {
        label: changed_local(experiment.local, method.local, f"methods: {label}.local")
        for label, method in methods.items()
        if method.local
    }
    local = local_training(experiment.local)
    own = {label: local_training(section) for label, section in settings.items()}
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
