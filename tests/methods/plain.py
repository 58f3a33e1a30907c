"""Local training in plain PyTorch, with the batches of the engines, for re-enactments of a method's equations."""

from collections.abc import Callable
from dataclasses import replace

import torch
from federations import Stage, uneven
from torch import nn
from torch.nn.functional import cross_entropy

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import stream

SIZES = [9, 4, 14, 7, 5, 11, 8, 6]  # partial batches, and different numbers of steps; chunks of two clients
ALL = list(range(len(SIZES)))
COHORTS = [ALL, [0, 2, 3, 4, 7], [1, 2, 3, 5, 6, 7]]
LOCAL = LocalSGD(epochs=2, batch_size=4, lr=0.2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def stage(engine: str = "sequential", factory: Callable[[], nn.Module] = mlp, sizes=SIZES, **changes) -> Stage:
    """Clients of these sizes with random samples; changes: of LOCAL."""
    return Stage(uneven(sizes), factory, replace(LOCAL, **changes), engine)


def mean_by_samples(one: Stage, rows: list[torch.Tensor], cohort) -> torch.Tensor:
    """The mean of the rows of these clients, weighted by their numbers of samples."""
    sizes = torch.tensor([float(len(one.federation.train(i)[1])) for i in cohort])
    return (sizes / sizes.sum()) @ torch.stack(rows)


class Torch:
    """Clients trained in plain PyTorch; a model is a sequence of layers, a row of its parameters."""

    def __init__(self, one: Stage):
        self.one, self.module = one, one.factory()

    def load(self, w: torch.Tensor) -> None:
        with torch.no_grad():
            nn.utils.vector_to_parameters(w.clone(), self.module.parameters())

    def gradient(self, w, client, index_B=slice(None), extra=lambda features, loss: loss):
        self.load(w)
        x, y = self.one.federation.train(client)
        features = self.module[:-1](x[index_B])
        loss = extra(features, cross_entropy(self.module[-1](features), y[index_B]))
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(self.module.parameters()))])

    def features(self, w, client, index_B=slice(None)):
        self.load(w)
        x, _ = self.one.federation.train(client)
        return self.module[:-1](x[index_B]).detach()

    def batches(self, client: int, round: int, exchange: int = 1, epochs: int | None = None):
        draw = stream(self.one.seed, round, exchange, client, "batches")
        size = len(self.one.federation.train(client)[1])
        for _ in range(self.one.local.epochs if epochs is None else epochs):
            yield from torch.from_numpy(draw.permutation(size)).split(self.one.local.batch_size)
