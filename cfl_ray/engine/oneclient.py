"""What a function given to `Clients.describe` may use of one client."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cfl_ray.core.local import LocalSGD
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.work import Address
from cfl_ray.engine import span
from cfl_ray.engine.network import Network
from cfl_ray.engine.task import Task


@dataclass(frozen=True)
class OneClient:
    """One client and its data, where they are."""

    client: int
    x: Tensor  # float32 (n, *shape): normalised training samples
    y: Tensor  # int64 (n,)
    network: Network
    address: Address
    local: LocalSGD  # how it would train
    engine: str = "sequential"

    @property
    def spec(self) -> ParamSpec:
        return self.network.spec

    def gradient(self, row_P: Tensor, batch: int = 2048) -> Tensor:
        """Gradient (trained columns,) of the mean loss over the whole training data at a model; without dropout."""
        self.network.load(row_P)
        self.network.module.eval()
        total = None
        for x_B, y_B in zip(self.x.split(batch), self.y.split(batch)):
            loss = cross_entropy(self.network.module(self.network.input(x_B)), y_B.to(self.network.device), reduction="sum") / len(self.y)
            grads = torch.autograd.grad(loss, self.network.params, materialize_grads=True)
            part = torch.cat([g.reshape(-1) for g in grads])
            total = part if total is None else total.add_(part)
        return total.cpu()

    def train(self, row_P: Tensor, local: LocalSGD | None = None, **changes) -> Tensor:
        """The row (P,) after local training from `row_P` with this round's settings, or with `changes` to them."""
        local = replace(local or self.local, **changes)
        steps = int(local.steps_of(torch.tensor([len(self.y)]).numpy())[0])
        task = Task(self.client, row_P, self.x, self.y, steps, local, self.address)
        return span.train_one(self.engine, self.network, task).row_P.cpu().clone()
