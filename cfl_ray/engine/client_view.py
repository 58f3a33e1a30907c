"""The client as it is passed to a function given to `Clients.describe`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.work import Address
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.nn.network import Network


@dataclass(frozen=True)
class ClientView:
    """A client and its data, on the host that reads the data: a `core.describing.ClientData`."""

    client: int
    x: Tensor  # float32 (n, *shape): normalised training samples
    y: Tensor  # (n, *target_shape)
    network: Network
    address: Address
    local: LocalSGD  # the experiment's
    train_one: Callable[[TrainingTask], TrainingResult]

    @property
    def spec(self) -> ParamSpec:
        return self.network.spec

    def gradient(self, row_P: Tensor, batch: int = 2048, samples: slice = slice(None)) -> Tensor:
        """As there, in passes of `batch` samples; fewer if the memory of the device is too small."""
        self.network.load(row_P)
        self.network.module.eval()
        x, y = self.x[samples], self.y[samples]
        return self.network.memory.in_batches_of("gradient", batch, lambda batch: self._gradient(x, y, batch))

    def features(self, row_P: Tensor) -> Tensor:
        self.network.load(row_P)
        return self.network.memory.in_batches_of("features", 2048, self._features)

    @torch.no_grad()
    def _features(self, batch: int) -> Tensor:
        self.network.module.eval()
        with self.network.kept_features() as features:
            for x_B in self.x.split(batch):
                self.network.module(self.network.input(x_B))
        return torch.cat(features).float().cpu()

    def _gradient(self, x: Tensor, y: Tensor, batch: int) -> Tensor:
        total: Tensor | None = None
        for x_B, y_B in zip(x.split(batch), y.split(batch), strict=True):
            with self.network.without_cudnn():
                logits_BC = self.network.module(self.network.input(x_B))
            loss = self.network.task.total_loss(logits_BC, y_B.to(self.network.device)) / len(y)
            grads = torch.autograd.grad(loss, self.network.params, materialize_grads=True)
            part = torch.cat([g.reshape(-1) for g in grads])
            total = part if total is None else total.add_(part)
        assert total is not None  # a client without samples was excluded earlier
        return total.cpu()

    def outputs(self, row_P: Tensor) -> Tensor:
        return self.network.logits_of(row_P, self.x).cpu()

    def train(self, row_P: Tensor, local: LocalSGD | None = None, **changes: Any) -> Tensor:
        local = replace(local or self.local, **changes)
        steps = int(local.steps_of(np.array([len(self.y)]))[0])
        task = TrainingTask(self.client, row_P, self.x, self.y, steps, local, self.address)
        return self.train_one(task).row_P.cpu().clone()
