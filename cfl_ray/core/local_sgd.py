"""Local training of one client by SGD or another optimiser: its steps, and the samples of each batch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

import numpy as np

from cfl_ray.core.augmentation import Augmentation
from cfl_ray.core.optimizers import LocalOptimizer
from cfl_ray.core.schedules import RateSchedule


@dataclass(frozen=True)
class ExampleNoise:
    """DP-SGD: gradients of single samples are clipped, and their sum has noise (`engine.example_gradients`)."""

    noise_multiplier: float  # z
    clip: float  # C, bound of the norm of a sample's gradient
    secret: bytes = field(default=b"", repr=False)  # of the random key of noise and batches; empty: no noise


@dataclass(frozen=True)
class LocalSGD:
    """SGD, or another optimiser, of one client: the keys of the section `local`, ready for use."""

    epochs: int = 1  # E
    steps: int | None = None  # instead of epochs
    batch_size: int | None = None  # B; None: all samples in one batch
    lr: float = 0.1  # eta
    momentum: float = 0.0  # rho
    weight_decay: float = 0.0
    persist: bool = False  # the momentum buffer is kept with the client state; False: every round starts from zero
    optimizer: LocalOptimizer | None = None  # None: SGD with the momentum and weight decay above
    schedule: RateSchedule | None = None  # factor of lr in each round (`in_round`); None: 1
    step_schedule: RateSchedule | None = None  # factor of lr in each local step; None: 1
    clip_norm: float | None = None  # largest norm of a step's gradient, proximal terms included; None: no limit
    # True: the samples of an epoch that fill no batch are left out; "single": a last batch of one sample is
    drop_last: bool | Literal["single"] = False
    examples: ExampleNoise | None = None  # privacy of single samples; None: none
    augment: tuple[Augmentation, ...] = ()  # changes of the samples in each epoch, one after another

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.clip_norm is not None and self.clip_norm < inf

    def one_gradient(self) -> "LocalSGD":
        """One step along the gradient over all samples: the start minus its result is `lr` times that gradient."""
        return replace(self, steps=1, batch_size=None, momentum=0.0)

    def in_round(self, round: int, rounds: int) -> "LocalSGD":
        """This local training with the learning rate of round `round` (from 1) of `rounds`, and without `schedule`."""
        if self.schedule is None:
            return self
        return replace(self, lr=self.lr * self.schedule(max(round, 1), rounds), schedule=None)

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of step `step` (counted from 0) of `steps`."""
        return self.lr if self.step_schedule is None else self.lr * self.step_schedule(step + 1, steps)

    def batch_of(self, size: int | np.ndarray, batches_per_step: int = 1) -> int | np.ndarray:
        """Batch size of a client with `size` samples.

        batches_per_step: batches that a local step needs; a client with fewer splits its samples into that many.
        """
        size = np.maximum(size, 1)
        batch = size if self.batch_size is None else np.minimum(self.batch_size, size)
        even = -(-size // batches_per_step)
        even = np.where(-(-size // even) < batches_per_step, np.maximum(size // batches_per_step, 1), even)
        return np.where(-(-size // batch) < batches_per_step, even, batch)

    def batches_of(self, size: int | np.ndarray, batches_per_step: int = 1) -> int | np.ndarray:
        """Batches of one epoch of a client with `size` samples, at least 1: n / B, rounded up.

        With `drop_last`, rounded down; "single": rounded down if one sample would be left.
        """
        batch = self.batch_of(size, batches_per_step)
        if not self.drop_last:
            return -(-size // batch)
        smallest = 2 if self.drop_last == "single" else batch  # of a last batch that is not left out
        return np.maximum(size // batch + (size % batch >= smallest), 1)

    def steps_of(
        self, num_samples_M: np.ndarray, epochs: float | np.ndarray | None = None, batches_per_step: int = 1
    ) -> np.ndarray:
        """Local steps, int64 (M,), of clients with `num_samples_M` samples: E * `batches_of`, at least 1.

        epochs: E, a number or a number per client; fractions are rounded to steps. None: `self.steps` or
            `self.epochs`.
        batches_per_step: batches of a local step; divides the number of steps, rounded down.
        """
        if epochs is None and self.steps is not None:
            return np.full(len(num_samples_M), self.steps, np.int64)
        per_epoch_M = self.batches_of(np.asarray(num_samples_M), batches_per_step) / batches_per_step
        epochs = self.epochs if epochs is None else epochs
        steps_M = np.floor(epochs * per_epoch_M + (0.5 if batches_per_step == 1 else 0))
        return np.maximum(steps_M, 1).astype(np.int64)

    def batches(
        self, size: int, count: int, draw: np.random.Generator, batches_per_step: int = 1
    ) -> Iterator[np.ndarray | None]:
        """Yields the sample indices of `count` batches; None stands for all samples.

        The samples are shuffled anew in every epoch, and the last batch of an epoch may be smaller (`drop_last`).
        A batch of all samples needs no draw. With privacy of single samples, every sample is in a batch by itself with
        the same chance, so that batches may be empty.
        """
        batch = int(self.batch_of(size, batches_per_step))
        if batch >= size and batches_per_step == 1:
            yield from (None for _ in range(count))
            return
        if self.examples is not None:
            yield from (np.flatnonzero(draw.random(size) < batch / size) for _ in range(count))
            return
        per_epoch = int(self.batches_of(size, batches_per_step))
        for number in range(count):
            if number % per_epoch == 0:
                order = draw.permutation(size)
            at = number % per_epoch * batch
            yield order[at : at + batch]
