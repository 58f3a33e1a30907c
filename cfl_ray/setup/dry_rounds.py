"""Rounds of a method without training, which count the numbers that its clients receive, train and upload."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.clock.devices import Load
from cfl_ray.core.aggregation.rules import Mean
from cfl_ray.core.backend import ClientStateKey, SavedState
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method, Start
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.privacy import Protection
from cfl_ray.core.rng import Draws
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.core.state import State
from cfl_ray.core.versions import NotAsynchronous, Received, Versions
from cfl_ray.core.work import Describe, FitMixture, Losses, Outcome, Train, Work
from cfl_ray.data.federation import DataShape
from cfl_ray.engine.client_state import ClientStateStore
from cfl_ray.privacy.noisy_sums import PrivateRun
from cfl_ray.system.threads import one_thread

MIXTURE_WEIGHTS = "mixture weights"  # among the names of the values that a client keeps


@dataclass(frozen=True)
class DryBackend:
    """Backend that trains nothing and has no data: every result consists of ones, so that only traffic is counted."""

    spec: ParamSpec
    shape: DataShape
    deferred: set[int] = field(default_factory=set)  # number of clients of each exchange with deferred results
    client_states: ClientStateStore = field(default_factory=ClientStateStore)  # stays empty
    work: Counter[str] = field(default_factory=Counter)  # samples "trained" and "tested", of clients with one sample
    kept: dict[str, int] = field(default_factory=dict)  # floats that a client keeps between rounds, by name

    def run(self, work: Work) -> Outcome:
        num_clients = len(work.ids_M)
        if isinstance(work, Train):
            self.work["trained"] += int(work.cost_M(np.ones(num_clients)).sum())
            if work.defer_aggregation:
                self.deferred.add(num_clients)
        elif isinstance(work, Losses | FitMixture):
            self.work["tested"] += num_clients * len(work.tables[0])
        if (state := work.client_state) is not None and isinstance(work, Train):
            columns = self.spec.size if state.columns is None else state.columns.count
            floats = columns + (self.spec.trained if work.local.persist else 0)
            self.kept[state.name] = work.models_per_client * floats
        if isinstance(work, Train | FitMixture) and work.mixture is not None:
            self.kept[MIXTURE_WEIGHTS] = work.mixture.num_models
        arrays = {name: np.ones_like(array) for name, array in work.empty_result(self.shape.num_classes).items()}
        if isinstance(work, Describe):
            length = self.num_features(work)
            arrays["features"] = np.ones((num_clients, min(work.sketch or length, length)), np.float32)
            arrays["floats"] = np.full(num_clients, length)
        return Outcome(arrays, {}, None if work.averaging is None else np.zeros(work.averaging.num_rows))

    def num_features(self, work: Describe) -> int:
        """Number of floats that the function of `work` returns: by its attribute `floats`, else as in a gradient."""
        floats = getattr(work.function, "floats", None)
        return self.spec.trained if floats is None else floats(math.prod(self.shape.input), self.shape.num_classes)

    def use(self, federation: Any) -> None:
        """No effect: results do not depend on data."""

    def forget(self, ids: np.ndarray) -> None:
        """No effect: there are no client states."""

    def client_state(self, name: str, client: int) -> Tensor | None:
        return None

    def restore(self, entries: Iterable[tuple[ClientStateKey, SavedState]]) -> None:
        """No effect: client states are not kept."""


def dry_rounds(
    method: Method[Any],
    num_clients: int,
    cohort: int,
    local: LocalSGD,
    backend: DryBackend,
    private: PrivateRun | None = None,
    rounds: int = 2,
    secure: SecureAggregation | None = None,
    size: int = 1,
    latecomers: bool = False,
) -> Iterator[tuple[State, RoundStats]]:
    """Yields the state and statistics after each round of a method without training.

    The whole method is called: first state, rounds, and the models that clients predict with. Raises RunError for a
    result of the wrong type or shape. size: samples of every client. latecomers: try a client that joins after them.
    """
    spec, shape = backend.spec, backend.shape
    steps = CheckedMethod(method, spec.size)
    state = steps.init(Start(num_clients, spec, lambda index: torch.zeros(spec.size), shape.input, shape.outputs))
    for round in range(1, rounds + 1):
        stats = RoundStats()
        clients = Clients(
            np.arange(cohort),
            np.full(cohort, size),
            spec,
            local,
            backend,
            seed=0,
            round=round,
            stats=stats,
            reachable=lambda: (np.arange(num_clients), np.full(num_clients, size)),
            protection=Protection(private, secure),
        )
        state = steps.round(state, clients, Draws(0, round))
        yield state, stats
    if private is not None or secure is not None or local.examples is not None:
        # a round after a change of data may read other uploads
        steps.round(steps.drift(state, clients), clients, Draws(0, rounds))
    if latecomers:
        late = replace(clients, ids_M=np.array([num_clients - 1]), num_samples_M=np.array([size]))
        absent = steps.leave(state, late.ids_M)
        for before in (absent, steps.join(absent, late)):
            steps.round(before, late, Draws(0, rounds))
    steps.serve(state, replace(clients, evaluated=True, stats=RoundStats()))


@dataclass(frozen=True)
class TrafficEstimate:
    """Traffic of a method in Mbit per client of the federation, as (download, upload), and the number of its models."""

    first_round: tuple[float, float]
    later_round: tuple[float, float]
    models: int  # cluster models after the second round
    deferred: int  # results that stay in the object store until they can be averaged
    load: Load  # of a client in a later round
    kept: dict[str, int]  # floats that a client keeps between rounds, by name

    @property
    def mixed(self) -> int:
        """Number of models that a client mixes; 0 if it mixes none."""
        return self.kept.get(MIXTURE_WEIGHTS, 0)


def traffic(
    method: Method[Any],
    num_clients: int,
    cohort: int,
    spec: ParamSpec,
    local: LocalSGD,
    shape: DataShape,
    secure: SecureAggregation | None = None,
) -> TrafficEstimate:
    """The traffic of a round, counted in the first two of `dry_rounds`."""
    mbit, models, backend = [], 0, DryBackend(spec, shape)
    with one_thread():  # as the server
        for state, stats in dry_rounds(method, num_clients, cohort, local, backend, secure=secure):
            mbit.append((stats.traffic.down_bits / num_clients / 1e6, stats.traffic.up_bits / num_clients / 1e6))
            models, work = state.num_clusters, dict(backend.work)
            backend.work.clear()
    load = Load(
        stats.traffic.down_bits / cohort,
        stats.traffic.up_bits / cohort,
        work.get("trained", 0.0) / cohort / float(local.steps_of(np.ones(1))[0]),
        work.get("tested", 0.0) / cohort,
    )
    if isinstance(method.aggregation_rule, Mean):
        deferred = max(backend.deferred, default=0)
    else:
        deferred = cohort * backend.kept.get(MIXTURE_WEIGHTS, 1)  # a robust rule needs all results together
    return TrafficEstimate(
        first_round=mbit[0], later_round=mbit[1], models=models, deferred=deferred, load=load, kept=backend.kept
    )


def why_synchronous(method: Method[Any], spec: ParamSpec, local: LocalSGD, shape: DataShape, rounds: int) -> str:
    """Why rounds of the method cannot be asynchronous, by rounds without training; empty: they can.

    rounds: of the run. Three rounds of the method's last phase are played, if it comes to that.
    """
    if not isinstance(method.aggregation_rule, Mean):
        return f"aggregation {method.aggregation} compares results of clients that start from the same model"
    if method.only_synchronous:
        return method.only_synchronous
    count, models = 12, ChangingBackend(spec, shape)
    steps, first_KP = CheckedMethod(method, spec.size), models.random(count, spec.size)
    state = steps.init(Start(count, spec, lambda k: first_KP[k % count] + k // count, shape.input, shape.outputs))
    versions, sizes = Versions(strict=True), np.ones(4, np.int64)
    left = 3
    for round in range(1, rounds + 1):
        new = 2 + 2 * (round - 1) % (count - 2)
        ids = np.array([0, 1, new, new + 1])  # at first, two of them for the first time
        # all of them have received the version before the present version
        received = Received(versions, dict.fromkeys(range(count), round - 2), round - 1)
        clients = Clients(ids, sizes, spec, local, models, seed=0, round=round, received=received)
        try:
            after = steps.round(state, clients, Draws(0, round))
        except NotAsynchronous as error:
            return str(error)
        versions.advance(round - 1, state, after, {round - 1})
        state, left = after, left - (not method.phases[after.phase])
        if not left:
            break
    return ""


@dataclass(frozen=True)
class ChangingBackend(DryBackend):
    """A backend without training whose results are random, so that models change and clients differ."""

    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def random(self, *shape: int) -> Tensor:
        """Standard normals."""
        return torch.randn(shape, generator=self.draw)

    def run(self, work: Work) -> Outcome:
        outcome = super().run(work)
        if "features" in outcome.arrays:
            outcome.arrays["features"] = self.random(*outcome.arrays["features"].shape).abs().numpy()
        if work.averaging is None:
            return outcome
        rows = np.unique(work.averaging.out_E).tolist()
        arrived_R = np.isin(np.arange(work.averaging.num_rows), rows).astype(float)
        return replace(outcome, means={row: self.random(self.spec.size) for row in rows}, arrived_R=arrived_R)
