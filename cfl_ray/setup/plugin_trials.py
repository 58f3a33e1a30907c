"""Trials of plugins before a run, so that their mistakes do not end the run after its first rounds.

Each plugin is called once, as the run calls it, with random numbers of the run's shapes; a result of the wrong type or
shape and an exception are errors of the config. A copy is called, so that a plugin that counts its calls begins at 0.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cfl_ray.core.aggregation.apply import try_rule
from cfl_ray.core.aggregation.rules import RULES, AggregationRule, Mean
from cfl_ray.core.metrics import METRICS
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.tasks import TARGETS, Task
from cfl_ray.core.work import Address
from cfl_ray.data.federation import DataShape
from cfl_ray.engine.attack import Attack
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.models import ModelRecipe
from cfl_ray.population.availability import Availability, OwnAvailability

_MOST_RESULTS = 1000  # the distances between them are then 8 MB
_ADDRESS = Address(seed=0, round=1, exchange=0)


def try_aggregation(rule: AggregationRule, results: int) -> None:
    """Calls a plugin rule with the results of a round. results: number of clients in a round."""
    if not isinstance(rule, Mean) and type(rule) not in RULES.values():
        with _as_config_error():
            try_rule(_copy(rule), min(results, _MOST_RESULTS))


def try_attack(kind: Any, recipe: ModelRecipe, shape: DataShape) -> None:
    """Calls a plugin attack with an upload as long as the model, and two labels of every class."""
    if isinstance(kind, str):
        return
    attack = Attack(_copy(kind), frozenset({0}))
    with torch.random.fork_rng(devices=[]):
        columns = ParamSpec.of(recipe()).size
    draw = torch.Generator().manual_seed(0)
    sent_P = torch.randn(columns, generator=draw)
    with _as_config_error():
        attack.upload(0, sent_P + 0.01 * torch.randn(columns, generator=draw), sent_P, _ADDRESS)
        if shape.targets == "class":
            attack.labels(0, torch.arange(2 * shape.num_classes) % shape.num_classes, shape.num_classes, _ADDRESS)


def try_availability(availability: Availability, num_clients: int) -> None:
    """Calls a plugin as in the first round."""
    if isinstance(availability, OwnAvailability):
        with _as_config_error():
            _copy(availability).reachable(1, num_clients)


def try_metrics(task: Task, shape: DataShape) -> None:
    """Calls plugin metrics with the outputs and targets of a few samples, among them every class."""
    own = [metric for metric in task.metrics if metric not in METRICS.builtin.values()]
    if own:
        outputs, targets = _samples(shape)
        given = f"; it gets outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} of {targets.dtype}"
        for metric in own:
            with _as_config_error(given), torch.no_grad():
                _copy(metric)(outputs.clone(), targets.clone())


def _samples(shape: DataShape) -> tuple[Tensor, Tensor]:
    """Outputs and targets of at least 4 samples."""
    draw = torch.Generator().manual_seed(0)
    count = max(4, 2 * shape.num_classes) if shape.targets == "class" else 4
    outputs = torch.randn(count, *shape.outputs, generator=draw)
    sizes = (count, *shape.target_shape)
    if shape.targets == "real":
        return outputs, torch.randn(sizes, generator=draw)
    dtype = TARGETS[shape.targets].dtype
    if shape.targets == "binary":  # every label occurs, and not with every sample
        return outputs, (torch.arange(count) % 2).to(dtype)[:, None].expand(sizes).contiguous()
    numbers = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    return outputs, (numbers % shape.num_classes).to(dtype)


def _copy(part: Any) -> Any:
    """A copy of the plugin; the plugin itself if it cannot be copied."""
    try:
        return copy.deepcopy(part)
    except Exception:
        return part


@contextmanager
def _as_config_error(given: str = "") -> Iterator[None]:
    """Context that turns a RunError into a ConfigError. given: the arguments of the plugin, for the message."""
    try:
        yield
    except RunError as error:
        raise ConfigError(f"{error}{given} (tried on random numbers, before the run)") from error
