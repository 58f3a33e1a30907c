"""Input and output of an engine: the local training of one client, and its result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.client_program import ClientProgram, Need
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import secret_stream, stream, torch_stream, word
from cfl_ray.core.work import Address, Proximal

BatchIndex = np.ndarray | Tensor | None  # samples of a batch; None: all


@dataclass(frozen=True)
class HeldByClient:
    """The tensors that a client holds for its local training, beside its start and its samples."""

    models: Mapping[str, Tensor] = field(default_factory=dict)  # rows (P,) by name, for the program's hooks
    numbers: Mapping[str, Tensor] = field(default_factory=dict)  # by name, for the program's hooks
    proximal: tuple[Proximal[Tensor], ...] = ()
    frozen_P: Tensor | None = None  # a frozen model whose logits are added
    velocity: Tensor | None = None  # initial momentum buffer (trained columns,); None: zeros
    weight_n: Tensor | None = None  # weights of the samples in the loss of a batch, on the CPU; None: 1 for all

    def for_steps(self, trained: int) -> dict[str, Tensor]:
        """The models, in their trained columns, and the numbers, as hooks find them."""
        return {name: row_P[:trained] for name, row_P in self.models.items()} | dict(self.numbers)


@dataclass(frozen=True)
class WeighedSamples:
    """The samples of a client as its program has weighed them (`ClientProgram.weigh`)."""

    weight_nK: Tensor  # float32, on the CPU: weight of each sample in the loss of each of K models
    changed: Mapping[str, Tensor]  # numbers that the program has changed

    @property
    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        return bool(torch.isfinite(self.weight_nK).all())

    @property
    def mean_K(self) -> np.ndarray:
        """Mean weights over the samples, float64 (K,)."""
        mean_K: np.ndarray = self.weight_nK.double().mean(0).numpy()
        return mean_K

    def held(self, held: HeldByClient, model: int) -> HeldByClient:
        """The tensors that the client holds for the training of this model."""
        weight_n = self.weight_nK[:, model].contiguous()
        plain = self.weight_nK.shape[1] == 1 and bool((weight_n == 1).all())  # such as the mixture of one model
        numbers = {**held.numbers, **self.changed}
        return replace(held, numbers=numbers, weight_n=None if plain else weight_n)


@dataclass(frozen=True)
class TrainingTask:
    """Local training of one client: its start, its samples, its program, and the address of its random draws."""

    client: int
    start_P: Tensor
    x: Tensor
    y: Tensor
    steps: int
    local: LocalSGD
    address: Address
    program: ClientProgram = ClientProgram()
    held: HeldByClient = HeldByClient()
    black: Tensor | None = None  # (C, 1, 1): of the samples, if they are images and `local.augment` changes them
    copies: int = 1  # copies of the client's samples in x and y, one after another, for one local epoch each
    only_summed: bool = False  # whether the result is only summed; its row may then stay on the device
    last_batch: int = 0  # samples of the batches of a second program of `compiled` (`EngineChoice.last_batch`)

    @property
    def batches_per_step(self) -> int:
        """Number of batches of one step."""
        return self.program.batches_per_step

    @property
    def size(self) -> int:
        """n, number of samples of the client."""
        return len(self.y) // self.copies

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of one local epoch."""
        return int(self.local.batches_of(self.size, self.batches_per_step))

    @property
    def epochs(self) -> int:
        """Number of local epochs that the steps reach."""
        return -(-self.steps * self.batches_per_step // self.batches_per_epoch)

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of this training beside steps of SGD with fixed proximal terms."""
        local = self.local
        of_training = {
            Need.EXAMPLES: local.examples is not None,
            Need.OPTIMIZER: local.optimizer is not None or local.step_schedule is not None or local.clips,
            Need.MOMENTUM: local.persist,
            Need.MOVING_ANCHOR: any(term.follow for term in self.held.proximal),
        }
        return self.program.needs | {need for need, holds in of_training.items() if holds}

    @property
    def tail(self) -> int:
        """Number of steps of one local epoch, at most all; the train loss is the mean over this many last steps."""
        return min(self.steps, max(self.batches_per_epoch // self.batches_per_step, 1))

    def batches(self) -> Iterator[np.ndarray | None]:
        """Sample indices of the batches, `batches_per_step` of them per step; None stands for all samples."""
        at, examples = self.address, self.local.examples
        if examples is None or not examples.secret:
            draw = stream(at.seed, at.round, at.exchange, self.client, "batches")
        else:
            draw = secret_stream(examples.secret, at.round, at.exchange, self.client, "batches")
        count = self.steps * self.batches_per_step
        batches = self.local.batches(self.size, count, draw, self.batches_per_step)
        return batches if self.copies == 1 else self._of_copies(batches)

    def _of_copies(self, batches: Iterator[np.ndarray | None]) -> Iterator[np.ndarray]:
        """The same batches, each from the copy of its epoch."""
        size, per_epoch = self.size, self.batches_per_epoch
        for number, batch in enumerate(batches):
            first = number // per_epoch * size
            yield np.arange(first, first + size) if batch is None else batch + first

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


def lacking(tasks: Sequence[TrainingTask], does: frozenset[Need]) -> str | None:
    """Reason, a line, why an engine that does no more than `does` cannot train these clients; None if it can."""
    needs = frozenset[Need]().union(*(task.needs for task in tasks)) - does
    if not needs:  # as a rule; the order of `Need` is that of the reasons
        return None
    return next(f"local training has {need}, which it does not do" for need in Need if need in needs)


@dataclass(frozen=True)
class TrainingResult:
    """The result of task `index`. Engines reuse the memory of `row_P` for the next result."""

    index: int
    row_P: Tensor
    train_loss: float
    replacement_P: Tensor | None = None  # uploaded instead of the row: a moving anchor, or an attacker's forgery
    velocity: Tensor | None = None  # momentum buffer (trained columns,), if it persists
    # held tensors that the program's steps move, after the last step; of a model the whole row
    moved: Mapping[str, Tensor] = field(default_factory=dict)
    step_losses: Sequence[float] = ()  # of the first `task.program.trace` steps
    # largest absolute values of the row's weights and buffers, if the engine has computed them for many rows at once
    largest: tuple[float, float] | None = None

    @property
    def upload_P(self) -> Tensor:
        """The row (P,) that the client uploads."""
        return self.row_P if self.replacement_P is None else self.replacement_P
