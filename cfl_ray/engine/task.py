"""The local training of one client, as both engines take it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.local import LocalSGD
from cfl_ray.core.params import Columns
from cfl_ray.core.rng import stream, torch_stream
from cfl_ray.core.work import Address


@dataclass(frozen=True)
class Pulled:
    """(weight / 2) * ||w - anchor||^2 over some columns."""

    weight: float
    anchor_P: Tensor
    columns: Columns | None


@dataclass(frozen=True)
class Task:
    """One client: where it starts, its samples, and the addresses of its draws."""

    client: int
    start_P: Tensor
    x: Tensor
    y: Tensor
    steps: int
    local: LocalSGD
    address: Address
    pulls: tuple[Pulled, ...] = ()

    @property
    def tail(self) -> int:
        """Steps of the last local epoch: the train loss is their mean."""
        batch = self.local.batch_size or len(self.y)
        return min(self.steps, -(-len(self.y) // batch))

    def batches(self) -> Iterator[np.ndarray | None]:
        """Sample indices of each step; None: all samples."""
        draw = stream(self.address.seed, self.address.round, self.address.exchange, self.client, "batches")
        return self.local.batches(len(self.y), self.steps, draw)

    def noise(self) -> torch.Generator:
        """Source of this client's dropout masks."""
        return torch_stream(self.address.seed, self.address.round, self.address.exchange, self.client, "dropout")


@dataclass(frozen=True)
class Trained:
    """The result of task `index`: the row is valid until the next result is asked for."""

    index: int
    row_P: Tensor
    train_loss: float
