"""Local training of one client: how many steps, on which samples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor


class Rule(Protocol):
    """How one local step is made of gradients, where it is more than the gradient of one batch.

    Written for one client; an engine that trains many at once passes their rows stacked, (m, P) instead of (P,).
    """

    batches: int  # fresh batches that a step uses

    def __call__(self, gradient: Callable[[Tensor, int], Tensor], w: Tensor) -> Tensor:
        """The direction of the step at `w`, trained columns only. `gradient(w, b)` is that of batch b = 0 .. batches - 1."""


@dataclass(frozen=True)
class LocalSGD:
    """SGD of one client in one round, from a fresh momentum buffer unless that persists."""

    epochs: int = 1  # E
    steps: int | None = None  # instead of epochs
    batch_size: int | None = None  # B; None: all samples in one batch
    lr: float = 0.1  # eta
    momentum: float = 0.0  # rho
    weight_decay: float = 0.0
    persist: bool = False  # the client keeps the momentum buffer, beside what else it owns, and goes on from it

    def batch_of(self, size: int | np.ndarray, parts: int = 1) -> int | np.ndarray:
        """Samples of a batch of a client with `size` samples. One with fewer than `parts` batches splits its samples into that many."""
        size = np.maximum(size, 1)
        batch = size if self.batch_size is None else np.minimum(self.batch_size, size)
        even = -(-size // parts)
        even = np.where(-(-size // even) < parts, np.maximum(size // parts, 1), even)
        return np.where(-(-size // batch) < parts, even, batch)

    def steps_of(self, size_M: np.ndarray, epochs: float | np.ndarray | None = None, parts: int = 1) -> np.ndarray:
        """Steps (M,) of clients with `size_M` samples: E * ceil(n / B), rounded for fractional epochs (at least 1).

        parts: batches of one step; that many times fewer steps.
        """
        if epochs is None and self.steps is not None:
            return np.full(len(size_M), self.steps, np.int64)
        per_epoch_M = -(-np.asarray(size_M) // self.batch_of(size_M, parts)) / parts
        return np.maximum(np.floor((self.epochs if epochs is None else epochs) * per_epoch_M + (0.5 if parts == 1 else 0)), 1).astype(np.int64)

    def batches(self, size: int, count: int, draw: np.random.Generator, parts: int = 1) -> Iterator[np.ndarray | None]:
        """Sample indices of `count` batches: shuffled anew every epoch, the last partial batch kept; None means all samples."""
        batch = int(self.batch_of(size, parts))
        if batch >= size and parts == 1:
            yield from (None for _ in range(count))
            return
        per_epoch = -(-size // batch)
        for number in range(count):
            if number % per_epoch == 0:
                order = draw.permutation(size)
            at = number % per_epoch * batch
            yield order[at : at + batch]
