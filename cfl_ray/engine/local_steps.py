"""Local steps of one client, shared by the engines that train one client at a time.

An engine provides its gradient (`LocalGradient`) and the tensors that it updates: all parameters as a list of tensors,
or as a flat row. One that takes whole steps at once needs their batches and draws alone (`LocalBatches`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.client_program import Batch, ClientProgram, Forward, Gradient, Held
from cfl_ray.core.global_generators import is_users
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Proximal
from cfl_ray.engine.failure import may_be_machine
from cfl_ray.engine.task import BatchIndex, TrainingResult, TrainingTask
from cfl_ray.errors import RunError, UserError, did_you_mean, text_of
from cfl_ray.nn.network import Network
from cfl_ray.nn.splitmix import keys_on, split_each
from cfl_ray.plugins.calling import described, failure_of, place_of

_DRAWN = 1 << 15  # values of masks that are drawn together, for several batches


class LocalBatches:
    """The batches of one client's local steps, with the draws and the losses that belong to them.

    All that is computed of a batch in a step uses the same dropout masks and other draws: it is of the same function.
    """

    def __init__(self, network: Network, task: TrainingTask):
        self.network, self.task = network, task
        self.noise = task.noise() if network.random_forward else None
        self.mask_keys = keys_on(network.device, [task.mask_key]) if network.dropouts else None
        self.first = -task.batches_per_step  # number of the first batch of the current step
        self.losses: list[Any] = []  # one per step
        self.batches: list[BatchIndex] = []  # of the current step
        # (batches, samples, ...) of each dropout layer, for some batches from number `_drawn` on
        self._masks: list[Tensor] = []
        self._drawn = 0
        self._seeds: dict[int, int] = {}  # by batch of the current step
        held = task.held.for_steps(network.spec.trained)
        self.held = {name: value.to(network.device, copy=True) for name, value in held.items()}

    def begin(self, batches: list[BatchIndex]) -> None:
        """Begins a step that uses these batches."""
        self.batches, self._seeds = batches, {}
        self.first += len(batches)

    def result(
        self, index: int, row_P: Tensor, loss: float, proximal: Sequence["ProximalGradient"], velocity: Tensor | None
    ) -> TrainingResult:
        """The result of task `index` after the steps."""
        anchor_P = moved_anchor(proximal, self.network, row_P)
        moved = moved_by_steps(self.network, self.task, self.held, row_P)
        losses = [float(loss) for loss in self.losses[: self.task.program.trace]]
        return TrainingResult(index, row_P, loss, anchor_P, velocity, moved, losses)

    def masks(self, batch: int, samples: int) -> list[Tensor]:
        """The masks of the dropout layers for a batch with this number of samples."""
        if self.mask_keys is None:
            return []
        at = self.first + batch - self._drawn
        if not self._masks or not (0 <= at < len(self._masks[0]) and samples <= self._masks[0].shape[1]):
            self._draw(self.first + batch, max(samples, 1))  # a Poisson sample may be empty
            at = 0
        return [mask[at, :samples] for mask in self._masks]

    def _draw(self, first: int, samples: int) -> None:
        """Draws the masks of this batch and, if they are small, of those after it."""
        assert self.mask_keys is not None
        layers = list(self.network.dropouts.values())
        widest = max(prod(layer.sample_shape or ()) for layer in layers)
        last = self.task.steps * self.task.batches_per_step
        stop = max(min(first + _DRAWN // max(samples * widest, 1), last), first + 1)
        numbers = range(first * len(layers), stop * len(layers))  # of the masks: layer by layer in every batch
        keys = [split_each(self.mask_keys, numbers[i :: len(layers)]) for i in range(len(layers))]
        self._masks = [layer.draw(keys_of, samples) for layer, keys_of in zip(layers, keys, strict=True)]
        self._drawn = first

    def draws(self, batch: int) -> AbstractContextManager[object]:
        """Context for a forward pass, which seeds PyTorch's generators if the pass draws from them."""
        if not self.network.random_forward:
            return nullcontext()
        if batch not in self._seeds:
            self._seeds[batch] = int(torch.randint(2**62, (), generator=self.noise))
        return self.network.draws_from(self._seeds[batch])


class LocalGradient(LocalBatches, ABC):
    """Gradients of one client's loss on the batches of the current step."""

    def w_P(self) -> Tensor:
        """The current trained parameters."""
        return self.network.row()[: self.network.spec.trained]

    def row_P(self) -> Tensor:
        """The current row (P,), with the buffers."""
        return self.network.row()

    def load(self, row_P: Tensor) -> None:
        """Replaces the trained parameters."""
        self.network.load_trained(row_P)

    def parts_of(self, row_P: Tensor) -> list[Tensor]:
        """Splits a row of trained parameters into the tensors that a step updates."""
        return self.network.views(row_P)

    @abstractmethod
    def of_batch(self, batch: int) -> list[Tensor]:
        """Gradient at the current parameters on one batch of the step. The next gradient may reuse its memory."""

    def step(self, number: int) -> list[Tensor]:
        """The direction of step `number` of the program. The loss of the step is the loss of its first gradient."""
        program = self.task.program
        if not program.overrides("step"):
            return self.of_batch(0)
        w_P, past = self.w_P().clone(), len(self.losses)
        direction_P = direction(program, self, w_P, self.held, number)
        if len(self.losses) == past:
            raise without_gradient(program)
        del self.losses[past + 1 :]
        self.load(w_P)
        return self.parts_of(direction_P)

    def __call__(self, w: Tensor, batch: int) -> Tensor:
        """As `core.client_program.Gradient`."""
        check_batch(self.task.program, batch)
        self.load(w)
        return torch.cat([part.reshape(-1) for part in self.of_batch(batch)])

    def forward(self, w: Tensor | str, batch: int) -> Forward:
        """As `core.client_program.Gradient`."""
        check_batch(self.task.program, batch)
        index_B, x, y = self.batches[batch], self.task.x, self.task.y
        x_B, y_B = (x, y) if index_B is None else (x[index_B], y[index_B])
        return forward_of(self.network, self.whole(w), self.network.input(x_B), y_B.to(self.network.device))

    def whole(self, model: Tensor | str) -> Tensor:
        """The row (P,), on the device, of trained columns or of the held model of this name.

        Trained columns and models that steps move have the buffers of the model that is trained.
        """
        if isinstance(model, str) and model not in self.task.program.moves:
            return held_model(self.task.program, self.task.held.models, model).to(self.network.device)
        trained_P = self.held[model] if isinstance(model, str) else model
        return torch.cat([trained_P, self.row_P()[self.network.spec.trained :]])


def forward_of(network: Network, row_P: Tensor, x_B: Tensor, y_B: Tensor, real_B: Tensor | None = None) -> Forward:
    """A forward pass of a row in evaluation mode, without gradient; it may be called under vmap."""
    features, outputs = network.evaluated(row_P, x_B)
    return Forward(features, outputs, y_B, x_B.new_ones(len(y_B), dtype=torch.float32) if real_B is None else real_B)


def held_model(program: ClientProgram, models: Mapping[str, Tensor], name: str) -> Tensor:
    """The held model of this name. Raises RunError if the client holds none."""
    if name not in models:
        known = ", ".join(map(repr, models)) or "none"
        raise RunError(f"{place_of(program)}: forward of {name!r}, but the models that the client holds are {known}")
    return models[name]


def check_batch(program: ClientProgram, batch: int) -> None:
    """Raises RunError for a batch that a step of the program does not have."""
    if not 0 <= batch < program.batches_per_step:
        raise RunError(
            f"{place_of(program)}: batch {batch} in step, which has batches 0 .. {program.batches_per_step - 1} "
            f"(batches_per_step = {program.batches_per_step})"
        )


def without_gradient(program: ClientProgram) -> RunError:
    """The error of a step that computes no gradient, and so has no loss."""
    return RunError(f"{place_of(program)}: step did not call gradient(w, b), whose loss is the loss of the step")


def check_moves(program: ClientProgram, held: Mapping[str, Tensor]) -> None:
    """Raises RunError if `moves` has a name that clients do not hold after their steps."""
    if missing := next((name for name in program.moves if name not in held), None):
        hint = did_you_mean(missing, held) if held else "; they hold nothing"
        raise RunError(f"{place_of(program)}: moves has {missing!r}, which clients do not hold{hint}")


def moved_by_steps(network: Network, task: TrainingTask, held: Held, row_P: Tensor) -> dict[str, Tensor]:
    """The held tensors that the steps of a program move, after them; models with the buffers of `row_P`."""
    check_moves(task.program, held)
    moved = {name: held[name] for name in task.program.moves}
    buffers = row_P[network.spec.trained :]
    return {
        name: torch.cat([values, buffers]) if name in task.held.models else values for name, values in moved.items()
    }


def scalar_loss(program: ClientProgram, batch: Batch, held: Held) -> Tensor:
    """The program's own loss of a batch. Raises RunError if it is not one number."""
    own = dict(held)
    loss = _returned(program, "loss", batch.loss.device, batch, own)
    if not isinstance(loss, Tensor) or loss.shape:
        raise RunError(f"{place_of(program)}: loss returned {described(loss)}, expected one number")
    if not loss.requires_grad:
        raise RunError(
            f"{place_of(program)}: loss returned a constant, a number without a gradient; compute it from batch.loss, "
            "batch.outputs or batch.features without detach(), item() or argmax (a loss of zero: 0 * batch.loss)"
        )
    if changed := [name for name in own.keys() | held.keys() if own.get(name) is not held.get(name)]:
        raise RunError(
            f"{place_of(program)}: loss changed held{sorted(changed)}; only begin, step and finish change values"
        )
    return loss


def _returned(program: ClientProgram, hook: str, device: torch.device, *arguments: Any) -> Any:
    """The result of a hook. An exception in it becomes a RunError that names the program and its line.

    On a GPU errors of PyTorch stay what they are: they may be due to its memory, or say that a step is not recorded.
    """
    try:
        return getattr(program, hook)(*arguments)
    except UserError:
        raise
    except Exception as error:
        if may_be_machine(error) or (isinstance(error, RuntimeError) and device.type != "cpu"):
            raise
        hint = "; set one_by_one = True if it cannot be computed under vmap" if "vmap" in text_of(error) else ""
        if hook == "step" and "must match" in text_of(error):
            hint = _shapes_hint(*arguments)
        held = next((each for each in arguments if isinstance(each, dict)), {})
        if isinstance(error, KeyError) and text_of(error).strip("'") not in held:
            hint = f"; held has {', '.join(held) or 'nothing'}: `given` of LocalTraining and `keeps` name its values"
        raise RunError(f"client program {failure_of(program, error, f' in {hook}')}{hint}") from error


def _shapes_hint(gradient: Gradient, w: Tensor, held: Held, number: Any) -> str:
    """The remedy for shapes that differ in `step`, if the clients of a vmap batch hold single numbers."""
    name = next((name for name, value in held.items() if w.ndim > 1 and value.shape == w.shape[:1]), None)
    if name is None:
        return ""
    return f"; a number of each of the m clients trained at once has the shape (m,): write held[{name!r}][..., None]"


def direction(program: ClientProgram, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
    """The direction of a program's own step. Raises RunError if it lacks the shape of `w`, or a user's changes `w`."""
    # compared on the CPU alone, where no value waits for a device
    before, version = (w.clone() if is_users(program) and not w.is_cuda else None), w._version
    step = _returned(program, "step", w.device, gradient, w, held, number)
    # a gradient writes statistics of BatchNorm beside `w`, which changes the version as well
    if before is not None and w._version != version and not w.allclose(before, rtol=0, atol=0, equal_nan=True):
        raise RunError(
            f"{place_of(program)}: step changed w in place; return the direction, which is subtracted from w after it"
        )
    if not isinstance(step, Tensor) or step.shape != w.shape:
        raise RunError(
            f"{place_of(program)}: step returned {described(step)}, expected a direction of shape {tuple(w.shape)}"
        )
    return step


class RowGradient(LocalGradient):
    """Gradients as a single row, or tensor by tensor for an optimiser that may treat each separately.

    row: the row (P,) that is trained, from the start of the task. trained: its trained columns, which share its memory.
    """

    def __init__(self, network: Network, task: TrainingTask, row: Tensor, trained: Tensor):
        super().__init__(network, task)
        self.row, self.trained, optimizer = row, trained, task.local.optimizer
        self.by_tensor = optimizer is not None and not optimizer.elementwise
        self.row.copy_(task.start_P)

    def w_P(self) -> Tensor:
        return self.trained

    def row_P(self) -> Tensor:
        return self.row

    def load(self, row_P: Tensor) -> None:
        self.trained.copy_(row_P)

    def parts_of(self, row_P: Tensor) -> list[Tensor]:
        return super().parts_of(row_P) if self.by_tensor else [row_P]


def train_row(gradient: RowGradient, index: int) -> TrainingResult:
    """Trains one client on its row, and returns the result of task `index`."""
    network, task, w_P, velocity = gradient.network, gradient.task, gradient.trained, None
    local, params = task.local, gradient.parts_of(w_P)
    if gradient.by_tensor:
        proximal = [ProximalGradient.of_tensors(network, term, params) for term in task.held.proximal]
    else:
        proximal = [ProximalGradient.of_row(network, term, w_P) for term in task.held.proximal]
    update: LocalUpdate
    if local.optimizer is not None:
        update = OptimizerUpdate(local, params)
    else:
        kept = task.held.velocity
        velocity = torch.zeros_like(w_P) if kept is None else kept.clone()
        update = SGDUpdate(local, [velocity])
    take_steps(gradient, update, params, proximal)
    loss = float(np.mean(gradient.losses[-task.tail :]))
    return gradient.result(index, gradient.row, loss, proximal, velocity if local.persist and local.momentum else None)


def take_steps(
    gradient: LocalGradient, update: "LocalUpdate", params: list[Tensor], proximal: Sequence["ProximalGradient"]
) -> None:
    """Takes the local steps of one client on `params`, in place."""
    task = gradient.task
    local, batches = task.local, task.batches_on(gradient.network.device)
    exact = local.optimizer is not None
    for number in range(task.steps):
        gradient.begin([next(batches) for _ in range(task.batches_per_step)])
        step = gradient.step(number)
        with torch.no_grad():
            if local.clips:  # weight decay belongs to the optimiser's step, proximal terms to the gradient
                for term in proximal:
                    term.add_to(step, exact)
                assert local.clip_norm is not None
                # as `torch.nn.utils.clip_grad_norm_` does
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in step]))
                torch._foreach_mul_(step, (local.clip_norm / (norm + 1e-6)).clamp(max=1.0))
                update.decay(step, params)
            else:
                update.decay(step, params)
                for term in proximal:
                    term.add_to(step, exact)
            update.apply(params, step, local.lr_at(number, task.steps))
            for term in proximal:
                if term.term.moves_after(number, task.steps):
                    term.move()


class OptimizerUpdate:
    """Steps of a `torch.optim` optimiser on `params`. Weight decay is an option of the optimiser."""

    def __init__(self, local: LocalSGD, params: list[Tensor]):
        assert local.optimizer is not None
        self.optimizer = local.optimizer(params, local.lr)

    def decay(self, step: list[Tensor], params: list[Tensor]) -> None:
        """No effect."""

    def apply(self, params: list[Tensor], step: list[Tensor], lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(params, step, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for parameter in params:
            parameter.grad = None


class SGDUpdate:
    """SGD with momentum and weight decay over lists of tensors, as `torch.optim.SGD` computes it.

    velocity: initial momentum buffer; None: zeros.
    """

    def __init__(self, local: LocalSGD, velocity: list[Tensor] | None = None):
        self.local, self.velocity = local, velocity

    def decay(self, step: list[Tensor], params: list[Tensor]) -> None:
        """Adds weight decay to the gradients, in place."""
        if self.local.weight_decay:
            torch._foreach_add_(step, params, alpha=self.local.weight_decay)

    def apply(self, params: list[Tensor], step: list[Tensor], lr: float | None = None) -> None:
        """Updates the parameters, in place. lr: None: `local.lr`."""
        if self.local.momentum:
            if self.velocity is None:
                self.velocity = step
            else:
                torch._foreach_mul_(self.velocity, self.local.momentum)
                torch._foreach_add_(self.velocity, step)
            step = self.velocity
        torch._foreach_add_(params, step, alpha=-(self.local.lr if lr is None else lr))


LocalUpdate = OptimizerUpdate | SGDUpdate


@dataclass(frozen=True)
class ProximalGradient:
    """Gradient of (weight / 2) ||w - anchor||^2 on some parts of the parameters."""

    term: Proximal[Tensor]
    anchor_P: Tensor  # row of the anchor; a copy if `term.follow` is not 0, because the anchor then moves in place
    params: list[Tensor]  # these parts of the parameters
    anchors: list[Tensor]  # and of the anchor
    parts_of: Callable[[list[Tensor]], list[Tensor]]  # returns the same parts of a step

    @classmethod
    def of_tensors(cls, network: Network, term: Proximal[Tensor], params: Sequence[Tensor]) -> "ProximalGradient":
        """For steps that are lists of tensors, parallel to `params`."""
        inside = network.tensors_in(term.columns)
        anchor_P = term.anchor.to(network.device, copy=term.follow > 0)
        anchors, parts = network.views(anchor_P), [params[i].detach() for i in inside]
        return cls(term, anchor_P, parts, [anchors[i] for i in inside], lambda step: [step[i] for i in inside])

    @classmethod
    def of_row(cls, network: Network, term: Proximal[Tensor], w_P: Tensor, first: int = 0) -> "ProximalGradient":
        """For steps that are a single row.

        w_P: the parameters from column `first` on; columns before it are left out.
        """
        columns = (term.columns or network.spec.trainable).within(first, network.spec.trained)
        ranges = [slice(start - first, stop - first) for start, stop in columns.ranges]
        anchor_P = term.anchor.clone() if term.follow else term.anchor
        anchors = [anchor_P[first:][part] for part in ranges]
        return cls(term, anchor_P, [w_P[part] for part in ranges], anchors, lambda step: [step[0][p] for p in ranges])

    def add_to(self, step: list[Tensor], exact: bool = False) -> None:
        """Adds the gradient to `step`, in place.

        exact: the gradient is exactly 0 at the anchor: Adam would make a whole step of a rest that is due to rounding.
            False: nothing is allocated, and the rest is below the rounding of a step of SGD.
        """
        if not (parts := self.parts_of(step)):  # PyTorch's functions refuse empty lists
            return
        if exact:
            torch._foreach_add_(parts, torch._foreach_sub(self.params, self.anchors), alpha=self.term.weight)
        else:
            torch._foreach_add_(parts, self.params, alpha=self.term.weight)
            torch._foreach_sub_(parts, self.anchors, alpha=self.term.weight)

    def move(self) -> None:
        """Moves the anchor: anchor <- anchor - follow * weight * (anchor - w)."""
        if self.anchors:
            torch._foreach_lerp_(self.anchors, self.params, self.term.follow * self.term.weight)


def moved_anchor(proximal: Sequence[ProximalGradient], network: Network, row_P: Tensor) -> Tensor | None:
    """The moved anchor (P,), with the buffers of `row_P`; None if no anchor moves."""
    trained = network.spec.trained
    moving = (term.anchor_P for term in proximal if term.term.follow)
    return next((torch.cat([anchor_P[:trained], row_P[trained:]]) for anchor_P in moving), None)
