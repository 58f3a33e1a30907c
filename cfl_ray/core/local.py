"""Local training of one client: how many steps, on which samples."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LocalSGD:
    """SGD of one client in one round, from a fresh momentum buffer."""

    epochs: int = 1  # E
    steps: int | None = None  # instead of epochs
    batch_size: int | None = None  # B; None: all samples in one batch
    lr: float = 0.1  # eta
    momentum: float = 0.0  # rho
    weight_decay: float = 0.0

    def steps_of(self, size_M: np.ndarray, epochs: float | np.ndarray | None = None) -> np.ndarray:
        """Steps (M,) of clients with `size_M` samples: E * ceil(n / B), rounded for fractional epochs (at least 1)."""
        if epochs is None and self.steps is not None:
            return np.full(len(size_M), self.steps, np.int64)
        per_epoch_M = -(-np.asarray(size_M) // (self.batch_size or np.maximum(size_M, 1)))
        return np.maximum(np.floor((self.epochs if epochs is None else epochs) * per_epoch_M + 0.5), 1).astype(np.int64)

    def batches(self, size: int, steps: int, draw: np.random.Generator) -> Iterator[np.ndarray | None]:
        """Sample indices of each step: shuffled anew every epoch, the last partial batch kept; None means all samples."""
        if self.batch_size is None or self.batch_size >= size:
            yield from (None for _ in range(steps))
            return
        per_epoch = -(-size // self.batch_size)
        for step in range(steps):
            if step % per_epoch == 0:
                order = draw.permutation(size)
            at = step % per_epoch * self.batch_size
            yield order[at : at + self.batch_size]
