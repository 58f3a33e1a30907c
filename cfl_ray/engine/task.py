"""The local training of one client, as both engines take it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.local import LocalSGD, Rule
from cfl_ray.core.params import Columns
from cfl_ray.core.rng import stream, torch_stream
from cfl_ray.core.work import Address


@dataclass(frozen=True)
class Pulled:
    """(weight / 2) * ||w - anchor||^2 over some columns; the anchor may move (`core.clients.Pull`)."""

    weight: float
    anchor_P: Tensor
    columns: Columns | None
    follow: float = 0.0
    every: int = 1

    def moves_after(self, step: int, steps: int) -> bool:
        """Whether the anchor moves after step number `step` (from 0) of `steps`."""
        return self.follow > 0 and ((step + 1) % self.every == 0 or step + 1 == steps)


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
    rule: Rule | None = None
    beside_P: Tensor | None = None  # a frozen model whose logits are added
    velocity: Tensor | None = None  # momentum buffer (trained columns,) from which it goes on; None: a fresh one

    @property
    def parts(self) -> int:
        """Batches of one step."""
        return self.rule.batches if self.rule else 1

    @property
    def tail(self) -> int:
        """Steps of the last local epoch: the train loss is their mean."""
        per_epoch = -(-len(self.y) // int(self.local.batch_of(len(self.y), self.parts)))
        return min(self.steps, max(per_epoch // self.parts, 1))

    def batches(self) -> Iterator[np.ndarray | None]:
        """Sample indices of the batches, `parts` of them for each step; None: all samples."""
        draw = stream(self.address.seed, self.address.round, self.address.exchange, self.client, "batches")
        return self.local.batches(len(self.y), self.steps * self.parts, draw, self.parts)

    def noise(self) -> torch.Generator:
        """Source of this client's dropout masks."""
        return torch_stream(self.address.seed, self.address.round, self.address.exchange, self.client, "dropout")


@dataclass(frozen=True)
class Trained:
    """The result of task `index`: the row is valid until the next result is asked for."""

    index: int
    row_P: Tensor
    train_loss: float
    anchor_P: Tensor | None = None  # what the client uploads instead: an anchor that moved along, or an attacker's forgery
    velocity: Tensor | None = None  # its momentum buffer (trained columns,), where that persists

    @property
    def upload_P(self) -> Tensor:
        return self.row_P if self.anchor_P is None else self.anchor_P
