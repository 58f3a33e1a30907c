"""Client programs: what a client does between the rows that it receives and its result.

A program is a frozen dataclass of hyper-parameters with hooks, written for one client and sent to hosts by value.
Models and numbers of a client are not part of it: hooks find them in `held`, by name. They are

    given    models that clients received, and numbers of each client (`LocalTraining.given`)
    kept     numbers that the client keeps between rounds (`keeps`), and its kept model (`kept_model`)

`weigh`, `begin` and `finish` are called once per client, on the host that reads its data, with tensors on the CPU. A
client that trains several models (`Clients.train_mixture`) runs the program once for each, after a single `weigh`.
`step` and `loss` are called in every local step; an engine that trains m clients at once calls `step` with rows
(m, ...) in place of (...), and `loss` under `torch.func.vmap`. In both, models are given in their trained columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from cfl_ray.core.describing import ClientData
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import ParamSpec
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import call_plugin, described, no_dataclass, place_of

Held = dict[str, Tensor]  # by name: models and numbers of one client


class Need(StrEnum):
    """Part of local training beyond steps of plain SGD with fixed proximal terms, which an engine may lack."""

    STEP = "steps of its own, such as steps of several gradients"
    LOSS = "a loss of its own"
    BRANCHES = "a loss that branches on values (one_by_one)"
    TRACE = "the losses of single steps"
    MOMENTUM = "momentum that persists between rounds"
    MOVING_ANCHOR = "a proximal term whose anchor moves"
    OPTIMIZER = "more than plain SGD: another optimiser, clipped gradients or a learning rate by step"
    EXAMPLES = "clipped gradients of single samples"


class ProgramClient(ClientData, Protocol):
    """A client in `weigh`, `begin` and `finish`: its data, and how it trains."""

    @property
    def steps(self) -> int:
        """Local steps of this exchange; 0 in `Clients.fit_mixture`."""

    @property
    def local(self) -> LocalSGD:
        """Local training of this exchange; `local.lr` is eta."""


class Gradient(Protocol):
    """The gradient of the loss of a step's batches, at any row."""

    def __call__(self, w: Tensor, batch: int) -> Tensor:
        """Gradient at `w` (trained columns) on batch 0 .. `batches_per_step` - 1."""

    def forward(self, w: Tensor | str, batch: int) -> "Forward":
        """A forward pass of `w`, or of the held model of this name, on this batch in evaluation mode."""


@dataclass(frozen=True)
class Forward:
    """A forward pass of a model on a batch, without gradient in evaluation mode."""

    features: Tensor  # (B, F): inputs of the last layer
    outputs: Tensor  # (B, *output_shape)
    y: Tensor  # (B, ...): targets
    real_B: Tensor  # float32: 1, or 0 for a sample that only pads the batch


@dataclass(frozen=True)
class Batch:
    """A batch in `ClientProgram.loss`: the pass of the model that is trained, with its gradient."""

    loss: Tensor  # the task's mean loss
    features: Tensor  # (B, F), float32: inputs of the last layer
    outputs: Tensor  # (B, *output_shape), with those of a frozen model added
    y: Tensor  # (B, ...): targets
    real_B: Tensor  # float32: 1, or 0 for a sample that only pads the batch
    passed: Callable[[str], Forward] = field(repr=False)

    def mean(self, value_B: Tensor) -> Tensor:
        """Mean of a value of each sample, without samples that only pad the batch."""
        return (value_B * self.real_B).sum() / self.real_B.sum()

    def forward(self, model: str) -> Forward:
        """The pass of a held model on the same batch, without gradient in evaluation mode."""
        return self.passed(model)


@dataclass(frozen=True)
class ClientProgram:
    """Mini-batch SGD on the task's loss. A subclass overrides hooks and declares what they use.

    trace: number of leading steps whose mini-batch losses are returned (`Updates.step_loss_MS`).
    """

    batches_per_step: ClassVar[int] = 1  # new batches per step
    moves: ClassVar[tuple[str, ...]] = ()  # names of held tensors that `step` changes in place
    # Name under which `held` has the model that the client keeps (`ClientState`); empty: none. A client that keeps none
    # yet has the given model of this name there, or else the received model. Training starts from the received model.
    # If `step` moves the held model, the client keeps it; otherwise it keeps the trained model.
    kept_model: ClassVar[str] = ""
    only_tensors: ClassVar[bool] = False  # hooks are functions of their tensors alone: a GPU may record a step
    one_by_one: ClassVar[bool] = (
        False  # `loss` branches on values, so it cannot be computed for several clients at once
    )

    trace: int = field(default=0, kw_only=True)

    def __new__(cls, *options: Any, **named: Any) -> Self:
        if refusal := no_dataclass(cls):  # here, since the dataclass of its base refuses its options with other words
            raise TypeError(refusal)
        return super().__new__(cls)

    def keeps(self, spec: ParamSpec) -> Mapping[str, Tensor]:
        """Numbers that the client keeps between rounds beside the columns of its `ClientState`, with first values."""
        return {}

    def uploads(self, spec: ParamSpec) -> Mapping[str, int]:
        """Names and lengths, at most P, of further uploads, which are averaged with the weights of the models.

        They are in `held` after `finish` (`Updates.uploaded`).
        """
        return {}

    def reports(self, spec: ParamSpec) -> Mapping[str, int]:
        """Names and lengths of numbers that the server gets of each client.

        They are in `held` after `finish` (`Updates.reported`).
        """
        return {}

    def weigh(self, client: ProgramClient, loss_nK: Tensor, held: Held) -> Tensor:
        """Weights (n, K) of the client's samples in the loss of each of the K models that it received to train.

        The loss of a batch of model k is the mean of weight * loss over its samples. Called before `begin`; it may
        change numbers in `held`. The weights stay with the client.

        loss_nK: losses, float32, of the n samples under these models in evaluation mode; infinite in place of NaN.
        """
        return torch.ones_like(loss_nK)

    def begin(self, client: ProgramClient, start_P: Tensor, held: Held) -> Tensor:
        """The row (P,) that training starts from. start_P: the row it would start from. It may change `held`."""
        return start_P

    def step(self, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
        """Direction of step `number` (from 0) at `w`, in the trained columns, before momentum.

        number: with `only_tensors`, on a GPU a tensor (1,).
        """
        return gradient(w, 0)

    def loss(self, batch: Batch, held: Held) -> Tensor:
        """The loss of a batch, a number, whose gradient is taken; it is reported as the training loss."""
        return batch.loss

    def finish(self, client: ProgramClient, start_P: Tensor, row_P: Tensor, held: Held) -> None:
        """Writes what the client keeps, uploads and reports into `held`. row_P: the trained row (P,)."""

    def overrides(self, hook: str) -> bool:
        """Whether the program has this hook of its own."""
        return getattr(type(self), hook) is not getattr(ClientProgram, hook)

    @cached_property
    def needs(self) -> frozenset[Need]:
        """The needs of the steps of this program; cached, since every client of a round asks."""
        given = {
            Need.STEP: self.overrides("step"),
            Need.LOSS: self.overrides("loss"),
            Need.BRANCHES: self.overrides("loss") and self.one_by_one,
            Need.TRACE: self.trace > 0,
        }
        return frozenset(need for need, holds in given.items() if holds)


# ---- checks of a user's program


HOOKS = ("keeps", "uploads", "reports", "weigh", "begin", "step", "loss", "finish")


def check_attributes(program: ClientProgram) -> None:
    """Raises TypeError for class attributes of another type than the engines read."""
    expected = {
        "batches_per_step": (_is_count(program.batches_per_step, 1), "a whole number from 1 on"),
        "trace": (_is_count(program.trace, 0), "a whole number from 0 on"),
        "kept_model": (isinstance(program.kept_model, str), "a name"),
        "moves": (
            isinstance(program.moves, tuple) and all(isinstance(name, str) for name in program.moves),
            'a tuple of names, such as ("velocity",)',
        ),
    }
    for name, (holds, wanted) in expected.items():
        if not holds:
            raise TypeError(f"{place_of(program)}: {name} is {getattr(program, name)!r}, expected {wanted}")
    if program.only_tensors:  # recorded steps are found by the program
        try:
            hash(program)
        except TypeError as error:
            raise TypeError(
                f"{place_of(program)}: only_tensors = True needs fields that can be hashed ({error}); use tuples for "
                "lists, or set it to False"
            ) from None


def first_numbers(program: ClientProgram, spec: ParamSpec) -> dict[str, Tensor]:
    """First values, new float32 tensors, of `program.keeps`. Raises RunError if they are not numbers by name."""
    numbers = {}
    for name, value in _declared(program, "keeps", spec, "first values").items():
        number = as_numbers(value)
        if number is None:
            raise RunError(f"{place_of(program)}: keeps returned {described(value)} as {name!r}, expected numbers")
        numbers[name] = number.to(torch.float32, copy=True)
    return numbers


def lengths(program: ClientProgram, hook: Literal["uploads", "reports"], spec: ParamSpec) -> dict[str, int]:
    """The lengths that `program.uploads` or `program.reports` declares by name. Raises RunError for anything else."""
    declared = _declared(program, hook, spec, "lengths")
    for name, length in declared.items():
        if not _is_count(length, 0):
            raise RunError(
                f"{place_of(program)}: {hook} returned {described(length)} as {name!r}, expected a length, a whole "
                "number"
            )
    return {name: int(length) for name, length in declared.items()}


def as_numbers(value: Any) -> Tensor | None:
    """A tensor, array, number or list of numbers as a detached tensor of real numbers; None for anything else."""
    try:
        number = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):  # of PyTorch, by the type of the value
        return None
    return None if number.is_complex() else number


def _declared(program: ClientProgram, hook: str, spec: ParamSpec, values: str) -> Mapping[str, Any]:
    found = call_plugin(hook, getattr(program, hook), spec, where=" of a client program")
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise RunError(f"{place_of(program)}: {hook} returned {described(found)}, expected a dict of {values} by name")
    return found


def _is_count(value: Any, least: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least
