"""Trials before a run, which would otherwise find mistakes after its first rounds.

`dry_rounds` makes rounds of a method without training. Each of the user's own parts is called once, as the run calls
it, with random numbers of the run's shapes; a result of the wrong type or shape and an exception are errors of the
config. A copy is called, so that a part that counts its calls begins at 0.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.aggregation import RULES, AggregationRule, Mean
from cfl_ray.core.aggregation.rule import try_rule
from cfl_ray.core.availability import Availability, OwnAvailability
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method, Start
from cfl_ray.core.metrics import METRICS, Metric
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.privacy import PrivateRun
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State
from cfl_ray.core.tasks import TARGETS, Task
from cfl_ray.core.work import Address, ClientStateKey, Describe, FitMixture, Losses, Outcome, SavedState, Train, Work
from cfl_ray.data.federation import DataShape
from cfl_ray.engine.attack import Attack
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.models import ModelRecipe

_MOST_RESULTS = 1000  # the distances between them are then 8 MB
_ADDRESS = Address(seed=0, round=1, exchange=0)


@dataclass(frozen=True)
class DryBackend:
    """Backend that trains nothing and has no data: every result consists of ones, so that only traffic is counted."""

    spec: ParamSpec
    inputs: int  # floats of one sample
    classes: int
    deferred: set[int] = field(default_factory=set)  # numbers of clients of the exchanges whose results were deferred
    work: Counter[str] = field(default_factory=Counter)  # samples "trained" and "tested", of clients with one sample

    @classmethod
    def of(cls, spec: ParamSpec, shape: DataShape) -> Self:
        return cls(spec, math.prod(shape.input), shape.num_classes)

    def run(self, work: Work) -> Outcome:
        num_clients = len(work.ids_M)
        if isinstance(work, Train):
            self.work["trained"] += int(work.cost_M(np.ones(num_clients)).sum())
        elif isinstance(work, Losses | FitMixture):
            self.work["tested"] += num_clients * len(work.tables[0])
        if work.defers_results:
            self.deferred.add(num_clients)
        arrays = {name: np.ones_like(array) for name, array in work.empty_result(self.classes).items()}
        if isinstance(work, Describe):
            length = self.num_features(work)
            arrays["features"] = np.ones((num_clients, min(work.sketch or length, length)), np.float32)
            arrays["floats"] = np.full(num_clients, length)
        return Outcome(arrays, {}, None if work.averaging is None else np.zeros(work.averaging.num_rows))

    def num_features(self, work: Describe) -> int:
        """Floats that the function of `work` returns: by its attribute `floats`, otherwise those of a gradient."""
        floats = getattr(work.function, "floats", None)
        return self.spec.trained if floats is None else floats(self.inputs, self.classes)

    def use(self, federation: Any) -> None:
        """No effect: results do not depend on data."""

    def forget(self, ids: np.ndarray) -> None:
        """No effect: there are no client states."""

    def client_state(self, name: str, client: int) -> Tensor | None:
        return None

    def changed(self, everything: bool = False) -> Iterator[tuple[ClientStateKey, Tensor]]:
        return iter(())

    def forgotten(self) -> set[ClientStateKey]:
        return set()

    def restore(self, entries: Iterable[tuple[ClientStateKey, SavedState]]) -> None:
        """No effect: client states are not kept."""


def dry_rounds(
    method: Method[Any],
    num_clients: int,
    cohort: int,
    spec: ParamSpec,
    local: LocalSGD,
    shape: DataShape,
    backend: DryBackend,
    private: PrivateRun | None = None,
    rounds: int = 2,
) -> Iterator[tuple[State, RoundStats]]:
    """The state and statistics after each of some rounds of a method without training.

    It is tried as a whole: its first state, rounds, and the models that clients predict with. Raises RunError for a
    result that is not as agreed.
    """
    steps = CheckedMethod(method, spec.size)
    state = steps.init(Start(num_clients, spec, lambda index: torch.zeros(spec.size), shape.input, shape.outputs))
    for round in range(1, rounds + 1):
        stats = RoundStats()
        clients = Clients(
            np.arange(cohort),
            np.ones(cohort, np.int64),
            spec,
            local,
            backend,
            seed=0,
            round=round,
            stats=stats,
            reachable=lambda: (np.arange(num_clients), np.ones(num_clients, np.int64)),
            private=private,
        )
        state = steps.round(state, clients, Draws(0, round))
        yield state, stats
    if private is not None:
        steps.round(steps.drift(state, clients), clients, Draws(0, rounds))  # which may read other uploads
    steps.serve(state, replace(clients, evaluated=True, stats=RoundStats()))


def try_aggregation(rule: AggregationRule, results: int) -> None:
    """results: number of clients in a round."""
    if not isinstance(rule, Mean) and type(rule) not in RULES.values():
        with _as_config_error():
            try_rule(_copy(rule), min(results, _MOST_RESULTS))


def try_attack(kind: Any, recipe: ModelRecipe, shape: DataShape) -> None:
    """An attack of the user's is passed an upload as long as the model, and labels of which every class has two."""
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
    """The call of the first round."""
    if isinstance(availability, OwnAvailability):
        with _as_config_error():
            _copy(availability).named(1, num_clients)


def try_metrics(task: Task, shape: DataShape) -> None:
    """Metrics of the user's get the outputs and targets of a few samples, among them every class."""
    own = [metric for metric in task.metrics if metric not in METRICS.builtin.values()]
    if own:
        outputs, targets = _samples(shape)
        for metric in own:
            _try_metric(metric, outputs, targets)


def _try_metric(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    given = f"; it gets outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} of {targets.dtype}"
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
    """A copy of the part; the part itself if it cannot be copied."""
    try:
        return copy.deepcopy(part)
    except Exception:
        return part


@contextmanager
def _as_config_error(given: str = "") -> Iterator[None]:
    """given: what the part was passed, for messages."""
    try:
        yield
    except RunError as error:
        raise ConfigError(f"{error}{given} (tried on random numbers, before the run)") from error
