"""Small federations whose answer is known, and a stage on which a method plays rounds without a server."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cfl_ray.config.attack import ATTACK_KINDS
from cfl_ray.core.aggregation.rules import AggregationRule, Mean
from cfl_ray.core.backend import Backend, ClientStateKey
from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method, Start
from cfl_ray.core.privacy import Protection
from cfl_ray.core.rng import Draws
from cfl_ray.core.server_optimizers import ServerMoments
from cfl_ray.core.state import State
from cfl_ray.core.tasks import CLASSIFICATION, Task
from cfl_ray.data import Federation, federation_from_arrays
from cfl_ray.data.replay import distinct_rounds
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.engine.attack import Attack, OwnAttack
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.engine.worker import Worker
from cfl_ray.nn.network import Network
from cfl_ray.setup.setup import Setup


class Planted(SyntheticFederation):
    """4x4 images of 4 kinds, drawn once for all tests of a process, of which many have the same federation."""

    def __init__(self, clients: int, groups: int, samples: int, seed: int):
        super().__init__(clients, input=(1, 4, 4), classes=4, groups=groups, samples=samples, seed=seed)

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        return _drawn(self._groups, self._samples, self._seed, client)


@cache
def _drawn(groups: int, samples: int, seed: int, client: int) -> tuple[Tensor, Tensor]:
    federation = SyntheticFederation(client + 1, input=(1, 4, 4), classes=4, groups=groups, samples=samples, seed=seed)
    return federation.train(client)


def planted(clients: int = 8, groups: int = 2, samples: int = 200, seed: int = 0) -> Planted:
    """Clients of group i mod `groups`. Groups see the same 4x4 images of 4 kinds and disagree about every label."""
    return Planted(clients, groups, samples, seed)


def linear() -> nn.Module:
    """A linear model of planted images: 64 weights and 4 biases."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


def uneven(sizes: Sequence[int], shape: tuple[int, ...] = (6,), classes: int = 3, seed: int = 0) -> Federation:
    """Client i has `sizes[i]` random training samples, and half as many test samples."""
    draw = np.random.default_rng(seed)
    test_sizes = [max(1, size // 2) for size in sizes]
    x, x_test = (draw.standard_normal((sum(counts), *shape)).astype(np.float32) for counts in (sizes, test_sizes))
    y, y_test = (draw.integers(0, classes, sum(counts)) for counts in (sizes, test_sizes))
    owner, tester = (np.repeat(np.arange(len(counts)), counts) for counts in (sizes, test_sizes))
    return federation_from_arrays(x, y, owner, x_test=x_test, y_test=y_test, test_clients=tester, num_classes=classes)


class Spoiled(Planted):
    """A planted federation in which the training samples of the clients `spoiled` are NaN."""

    def __init__(self, spoiled: Sequence[int], clients: int = 8, groups: int = 2, samples: int = 200):
        super().__init__(clients, groups, samples, 0)
        self.spoiled = set(spoiled)

    def data_version(self, client: int) -> Hashable:
        return super().data_version(client), client in self.spoiled

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        x, y = super().train(client)
        return (x * torch.nan if client in self.spoiled else x), y


def clients_of(setup: Setup, backend: Backend, ids: Sequence[int], round: int = 1, **changes: Any) -> Clients:
    """The clients `ids` of a prepared experiment in a round, on a backend."""
    ids_M = np.array(list(ids))
    samples_M, spec = setup.federation.num_samples_N[ids_M], setup.network().spec
    return Clients(ids_M, samples_M, spec, setup.local, backend, 0, round, RoundStats(), **changes)


def protected(clients: Clients, **protection: Any) -> Clients:
    """The same clients with these fields of `Protection`."""
    return replace(clients, protection=Protection(**protection))


@dataclass
class Stage:
    """The clients of a federation in this process, for calling a method's steps one by one."""

    federation: Federation
    factory: Callable[[], nn.Module]
    local: LocalSGD = LocalSGD(lr=0.5)
    engine: str = "manual"  # a third of the time of `sequential`; networks that it cannot train are trained by that
    seed: int = 0
    task: Task = CLASSIFICATION
    server: ServerMoments | None = None  # of the method that plays
    stats: RoundStats = field(default_factory=RoundStats)  # of the latest round

    def __post_init__(self):
        shape = self.federation.shape
        # functions build the same module each time; many tests have the same function
        key = (self.factory, shape.input, shape.dtype) if isinstance(self.factory, FunctionType) else None
        self.network = Network(self.factory, shape.input, dtype=shape.dtype, task=self.task, key=key)
        self.backend = InProcessBackend(Worker(self.network, self.federation, self.engine))

    def model(self, index: int = 0) -> Tensor:
        return self.network.new_model(self.seed, index)

    @property
    def client_states(self) -> dict[ClientStateKey, Tensor]:
        """A copy of every client state, by (name, client)."""
        store = self.backend.client_states
        keys = store.keys()
        return {key: store.tensor(store[key]) for key in keys}

    def start(self) -> Start:
        network = self.network
        return Start(self.federation.num_clients, network.spec, self.model, network.input_shape, network.output_shape)

    def clients(
        self, ids: Sequence[int] | None = None, round: int = 1, aggregation: AggregationRule = Mean()
    ) -> Clients:
        """The clients `ids` (None: all) in round `round`, with new `stats`."""
        ids = np.arange(self.federation.num_clients) if ids is None else np.asarray(ids, np.int64)
        self.stats = RoundStats()
        return Clients(
            ids,
            self.federation.at(round).num_samples_N[ids],
            self.network.spec,
            self.local,
            self.backend,
            self.seed,
            round,
            self.stats,
            history=partial(distinct_rounds, self.federation, round),
            aggregation=aggregation,
            server_moments=self.server,
        )

    def play(self, method: Method, *cohorts: Sequence[int] | None, state: State | None = None, first: int = 1) -> State:
        """The state after one round per cohort (None: all clients), from `state` or the method's own start."""
        state = method.init(self.start()) if state is None else state
        if self.server is None and method.server_step is not None:
            self.server = ServerMoments(method.server_step)
        for number, ids in enumerate(cohorts, first):
            if self.server is not None:
                self.server.begin()
            clients = replace(self.clients(ids, number), aggregation=method.aggregation_rule)
            state = method.round(state, clients, Draws(self.seed, number))
        return state


def attack_of(kind: Any, clients: Iterable[int], from_round: int = 1, **amounts: float) -> Attack:
    """The attack of a kind of the config, or a plugin; amounts that the kind does not have are ignored."""
    if not isinstance(kind, str):
        return Attack(OwnAttack(kind), frozenset(clients), from_round)
    code = ATTACK_KINDS.builtin[kind].load()
    names = [item.name for item in fields(code)]
    return Attack(code(**{k: v for k, v in amounts.items() if k in names}), frozenset(clients), from_round)
