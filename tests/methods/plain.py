"""Local training in plain PyTorch, with the batches of the engines, for re-enactments of a method's equations."""

import torch
from federations import Stage
from torch import nn
from torch.nn.functional import cross_entropy

from cfl_ray.core.rng import stream


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
