"""Input and output of an engine: the local training of one client, and its result."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.local_sgd import LocalSGD, LocalStep
from cfl_ray.core.rng import secret_stream, stream, torch_stream, word
from cfl_ray.core.work import Address, Proximal

BatchIndex = np.ndarray | Tensor | None  # samples of a batch; None: all


@dataclass(frozen=True)
class TrainingTask:
    """Local training of one client: its start, its samples, and the address of its random draws."""

    client: int
    start_P: Tensor
    x: Tensor
    y: Tensor
    steps: int
    local: LocalSGD
    address: Address
    proximal: tuple[Proximal[Tensor], ...] = ()
    local_step: LocalStep | None = None
    objective: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # (loss, features, y) -> loss; None: the loss
    # a second model, followed by the client's share if that is learned; the local step may change both
    companion_P: Tensor | None = None
    trace: int = 0  # number of first steps whose losses are part of the result
    frozen_P: Tensor | None = None  # a frozen model whose logits are added
    velocity: Tensor | None = None  # initial momentum buffer (trained columns,); None: zeros
    weight_n: Tensor | None = None  # weights of the samples in the loss of a batch, on the CPU; None: 1 for all
    only_summed: bool = False  # whether the result is only summed; its row may then stay on the device

    @property
    def batches_per_step(self) -> int:
        """Number of batches of one step."""
        return self.local_step.batches_per_step if self.local_step else 1

    @property
    def tail(self) -> int:
        """Number of steps of one local epoch, at most all; the train loss is the mean over this many last steps."""
        per_epoch = int(self.local.batches_of(len(self.y), self.batches_per_step))
        return min(self.steps, max(per_epoch // self.batches_per_step, 1))

    def batches(self) -> Iterator[np.ndarray | None]:
        """Sample indices of the batches, `batches_per_step` of them per step; None stands for all samples."""
        at, examples = self.address, self.local.examples
        if examples is None or not examples.secret:
            draw = stream(at.seed, at.round, at.exchange, self.client, "batches")
        else:
            draw = secret_stream(examples.secret, at.round, at.exchange, self.client, "batches")
        return self.local.batches(len(self.y), self.steps * self.batches_per_step, draw, self.batches_per_step)

    def batches_on(self, device: torch.device) -> Iterator[BatchIndex]:
        """The indices of `batches`; for a device other than the CPU, as tensors on it, copied in one transfer."""
        batches = self.batches()
        if device.type == "cpu":
            return batches
        listed = list(batches)
        if any(batch is None for batch in listed):
            return iter(listed)
        whole = torch.from_numpy(np.concatenate(listed)).to(device)  # type: ignore[arg-type]  # none of them is None
        return iter(whole.split([len(batch) for batch in listed if batch is not None]))

    def noise(self) -> torch.Generator:
        """Random generator for draws of the network itself, such as dropout of attention."""
        return torch_stream(self.address.seed, self.address.round, self.address.exchange, self.client, "dropout")

    @property
    def mask_key(self) -> int:
        """Key of this client's dropout masks, below 2^64."""
        return word(self.address.seed, self.address.round, self.address.exchange, self.client, "dropout")


@dataclass(frozen=True)
class TrainingResult:
    """The result of task `index`. Engines reuse the memory of `row_P` for the next result."""

    index: int
    row_P: Tensor
    train_loss: float
    replacement_P: Tensor | None = None  # uploaded instead of the row: a moving anchor, or an attacker's forgery
    velocity: Tensor | None = None  # momentum buffer (trained columns,), if it persists
    companion_P: Tensor | None = None  # the second model, and the learned share, after the last step
    step_losses: Sequence[float] = ()  # of the first `task.trace` steps
    # largest absolute values of the row's weights and buffers, if the engine has computed them for many rows at once
    largest: tuple[float, float] | None = None

    @property
    def upload_P(self) -> Tensor:
        """The row (P,) that the client uploads."""
        return self.row_P if self.replacement_P is None else self.replacement_P
