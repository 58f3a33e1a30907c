"""Small federations whose answer is known, and a stage on which a method is played without a server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from cfl_ray.core.clients import Clients, Round
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.method import Method, Start
from cfl_ray.core.rng import Draws
from cfl_ray.core.robust import Mean, Rule
from cfl_ray.core.state import State
from cfl_ray.core.work import OwnedKey
from cfl_ray.data import Federation, federation_from_arrays
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.engine.local import InProcess
from cfl_ray.engine.network import Network
from cfl_ray.engine.worker import Worker


def planted(clients: int = 8, groups: int = 2, samples: int = 200, seed: int = 0) -> SyntheticFederation:
    """Clients of group i mod `groups`. Groups see the same 4x4 images of 4 kinds and disagree about the label of every one."""
    return SyntheticFederation(clients, input=(1, 4, 4), classes=4, groups=groups, samples=samples, seed=seed)


def uneven(sizes: Sequence[int], shape: tuple[int, ...] = (6,), classes: int = 3, seed: int = 0) -> Federation:
    """Client i holds `sizes[i]` random samples, and half as many to be tested on."""
    draw = np.random.default_rng(seed)
    held = [max(1, size // 2) for size in sizes]
    x, x_test = (draw.standard_normal((sum(counts), *shape)).astype(np.float32) for counts in (sizes, held))
    y, y_test = (draw.integers(0, classes, sum(counts)) for counts in (sizes, held))
    owner, tester = (np.repeat(np.arange(len(counts)), counts) for counts in (sizes, held))
    return federation_from_arrays(x, y, owner, x_test=x_test, y_test=y_test, test_clients=tester, num_classes=classes)


class Spoiled(SyntheticFederation):
    """A planted federation in which the training samples of some clients are NaN."""

    def __init__(self, spoiled: Sequence[int], clients: int = 8, groups: int = 2, samples: int = 200):
        super().__init__(clients, input=(1, 4, 4), classes=4, groups=groups, samples=samples)
        self.spoiled = set(spoiled)

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        x, y = super().train(client)
        return (x * torch.nan if client in self.spoiled else x), y


@dataclass
class Stage:
    """The clients of a federation in this process, asked as a method asks them."""

    federation: Federation
    factory: Callable[[], nn.Module]
    local: LocalSGD = LocalSGD(lr=0.5)
    engine: str = "sequential"
    seed: int = 0
    books: Round = field(default_factory=Round)  # of the latest round

    def __post_init__(self):
        self.network = Network(self.factory, self.federation.shape.input)
        self.backend = InProcess(Worker(self.network, self.federation, self.engine))

    def model(self, index: int = 0) -> Tensor:
        return self.network.new_model(self.seed, index)

    @property
    def memory(self) -> dict[OwnedKey, Tensor]:
        """What every client owns now, by (name, client)."""
        return {key: self.backend.memory[key] for key in self.backend.memory.keys()}

    def start(self) -> Start:
        return Start(self.federation.num_clients, self.network.spec, self.model, self.federation.shape.input)

    def clients(self, ids: Sequence[int] | None = None, number: int = 1, rule: Rule = Mean()) -> Clients:
        ids = np.arange(self.federation.num_clients) if ids is None else np.asarray(ids, np.int64)
        self.books = Round()
        return Clients(ids, self.federation.size_N[ids], self.network.spec, self.local, self.backend, self.seed, number, self.books, aggregation=rule)

    def play(self, method: Method, *cohorts: Sequence[int] | None, state: State | None = None, first: int = 1) -> State:
        """The state after one round per cohort (None: everybody), from `state` or the method's own start."""
        state = method.init(self.start()) if state is None else state
        for number, ids in enumerate(cohorts, first):
            clients = replace(self.clients(ids, number), aggregation=method.rule)
            state = method.round(state, clients, Draws(self.seed, number))
        return state
