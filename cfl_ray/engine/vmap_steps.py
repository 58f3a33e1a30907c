"""The local steps of a vmap batch: the clients' rows in a matrix, and their gradients by one `torch.func.vmap`."""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from cfl_ray.core.client_program import Batch, Forward, Held
from cfl_ray.engine import sequential
from cfl_ray.engine.local_steps import (
    check_batch,
    direction,
    forward_of,
    held_model,
    scalar_loss,
    without_gradient,
)
from cfl_ray.engine.rows import ProximalRows, padded, rows_on, stacked_on
from cfl_ray.engine.task import TrainingTask
from cfl_ray.nn.device_memory import copied_to
from cfl_ray.nn.network import Network
from cfl_ray.nn.splitmix import keys_on

Number = int | Tensor  # of a step or batch: a tensor (1,) on the device in a recorded step


def at(tensor: Tensor, number: Number) -> Tensor:
    """Entry `number` of the first axis."""
    return tensor[number] if isinstance(number, int) else tensor.index_select(0, number)[0]


class VmapSteps:
    """The steps of all clients of a vmap batch, which change rows, momentum buffers and moved tensors in place.

    A step reads no value on the host, except with an optimiser of `torch.optim`, a moving anchor, traced losses, or a
    client program with hooks that are not of tensors alone.
    """

    def __init__(self, network: Network, tasks: Sequence[TrainingTask]):
        first = tasks[0]
        self.network, self.local, self.program = network, first.local, first.program
        self.batches_per_step, self.first_steps = first.batches_per_step, first.steps
        self.plan = _Plan(network, tasks)
        self.rows_mP = rows_on(network.device, [task.start_P for task in tasks])
        self.velocity_mP = _initial_velocity(network, tasks) if self.local.momentum else None
        terms = range(len(first.held.proximal))
        self.proximal = [ProximalRows(network, [task.held.proximal[which] for task in tasks]) for which in terms]
        of_tasks = [task.held.for_steps(network.spec.trained) for task in tasks]
        # of the client program, by name: (m, ...)
        own = self.program.overrides("loss") or self.program.overrides("step")
        names = of_tasks[0] if own else ()
        self.held = {name: stacked_on(network.device, [held[name] for held in of_tasks]) for name in names}
        self.models = set(first.held.models)
        self.whole: Held = {}  # the models (m, P) that do not move, if the program may pass batches through them
        if own:
            still = [name for name in first.held.models if name not in first.program.moves]
            self.whole = {name: rows_on(network.device, [task.held.models[name] for task in tasks]) for name in still}
        # mean loss (m,) over each client's last local epoch, after the last step
        self.loss_m = torch.zeros(len(tasks), device=network.device)
        self.traced: list[Tensor] = []  # losses (m,) of the first steps
        self.count = len(self.plan.index) // self.batches_per_step  # steps of the client with the most

    def take_all(self) -> None:
        """Takes all steps, one operation after another."""
        self.begin()
        for number in range(self.count):
            self.take(number)
        self.end()

    def begin(self) -> None:
        """Before the first step."""
        self.network.module.train()
        rows_mP, trained = self.rows_mP, self.network.spec.trained
        self.gradient = _Gradient(self, rows_mP)
        optimizer = self.local.optimizer
        self.optimizer = None if optimizer is None else optimizer([rows_mP[:, :trained]], self.local.lr)

    def end(self) -> None:
        """After the last step."""
        # they refer to `gradient`: samples and rows would stay until the garbage collector
        del self.gradient.gradient, self.gradient.steps

    def take(self, number: Number) -> None:
        """Takes step `number`, counted from 0."""
        local, gradient, plan = self.local, self.gradient, self.plan
        first = number * self.batches_per_step
        gradient.begin(first)
        now_mP, active = self.rows_mP[:, : self.network.spec.trained], at(plan.active, first)
        step = self._direction(now_mP, active, number)
        if local.weight_decay and not local.clips:
            step = step.add(now_mP, alpha=local.weight_decay)
        for term in self.proximal:
            term.add_to(step, self.rows_mP)
        if local.clip_norm is not None and local.clips:  # in the order of `sequential`
            norm_m = torch.linalg.vector_norm(step, dim=1, keepdim=True)
            step = step * (local.clip_norm / (norm_m + 1e-6)).clamp(max=1.0)
            if local.weight_decay:
                step = step.add(now_mP, alpha=local.weight_decay)
        if self.optimizer is not None:
            assert isinstance(number, int)
            _optimizer_step(self.optimizer, step, active, local.lr_at(number, self.first_steps))
        else:
            if self.velocity_mP is not None:
                step = self._with_momentum(step, active, self.velocity_mP)
            rate = local.lr if plan.rate is None else at(plan.rate, number)[:, None]
            now_mP.sub_(step.mul(rate).mul_(active[:, None]))
        for term in self.proximal:
            if term.term.follow:
                term.move(self.rows_mP, int(number), plan.step_counts)
        assert gradient.loss_m is not None
        if self.program.trace > len(self.traced):
            self.traced.append(gradient.loss_m)
        in_tail = active & (number >= plan.steps - plan.tail)
        self.loss_m += torch.where(in_tail, gradient.loss_m, 0) / plan.tail

    def _direction(self, now_mP: Tensor, active_m: Tensor, number: Number) -> Tensor:
        """Direction (m, trained columns) of a step. Moved tensors of clients without a further step are kept."""
        if not self.program.overrides("step"):
            return self.gradient(now_mP, 0)
        moved = [self.held[name] for name in self.program.moves if name in self.held]
        before = [values.clone() for values in moved]
        step = direction(self.program, self.gradient, now_mP, self.held, number)
        if self.gradient.loss_m is None:
            raise without_gradient(self.program)
        for values, stay in zip(moved, before, strict=True):
            values.copy_(torch.where(active_m.view(-1, *[1] * (values.ndim - 1)), values, stay))
        return step

    def _with_momentum(self, step: Tensor, active_m: Tensor, velocity_mP: Tensor) -> Tensor:
        if not self.local.persist:
            return velocity_mP.mul_(self.local.momentum).add_(step)
        # the buffer of a client without a further step is kept
        moved = self.local.momentum * velocity_mP + step
        return velocity_mP.copy_(torch.where(active_m[:, None], moved, velocity_mP))

    # ---- the same steps on static tensors, for a recorded step

    def kind(self) -> Hashable | None:
        """Key of the operations of a step and of the room for samples and steps; None if a step works on the host."""
        program = self.program
        own = program.overrides("step") or program.overrides("loss")
        if (own and not program.only_tensors) or self.local.optimizer is not None or program.trace:
            return None
        if any(term.term.follow for term in self.proximal):
            return None
        local = replace(self.local, schedule=None, step_schedule=None)
        local = local if self.plan.rate is None else replace(local, lr=0.0)
        of_plan = zip(self._of_plan(), _Plan.TENSORS.values(), strict=True)
        plan = [None if tensor is None else (_with_room(tensor, axis), tensor.dtype) for tensor, axis in of_plan]
        terms = [(term.ranges, None if isinstance(term.weight, Tensor) else term.weight) for term in self.proximal]
        held = tuple((name, values.shape) for name, values in self.held.items())
        return local, program if own else None, held, self.rows_mP.shape, tuple(plan), tuple(terms)

    def _of_plan(self) -> list[Tensor | None]:
        return [getattr(self.plan, name) for name in _Plan.TENSORS]

    def tensors(self) -> list[Tensor]:
        """All tensors on the device that a step reads or changes, in a fixed order."""
        weights = [term.weight for term in self.proximal if isinstance(term.weight, Tensor)]
        anchors = [term.anchor_mP for term in self.proximal]
        changed = [self.rows_mP, self.velocity_mP, self.loss_m, *self.held.values(), *self.whole.values()]
        tensors = [*self._of_plan(), *changed, *weights, *anchors]
        return [tensor for tensor in tensors if tensor is not None]

    def on_static_tensors(self) -> "VmapSteps":
        """A copy with its own tensors, with room for all batches of the kind."""
        other = copy(self)
        other.plan, other.proximal = copy(self.plan), [copy(term) for term in self.proximal]
        for (name, axis), tensor in zip(_Plan.TENSORS.items(), self._of_plan(), strict=True):
            if tensor is not None:
                setattr(other.plan, name, tensor.new_zeros(_with_room(tensor, axis)))
        for term in other.proximal:
            term.anchor_mP = torch.empty_like(term.anchor_mP, memory_format=torch.contiguous_format)
            term.weight = torch.empty_like(term.weight) if isinstance(term.weight, Tensor) else term.weight
        other.rows_mP, other.loss_m = torch.empty_like(self.rows_mP), torch.empty_like(self.loss_m)
        other.velocity_mP = None if self.velocity_mP is None else torch.empty_like(self.velocity_mP)
        other.held = {name: torch.empty_like(values) for name, values in self.held.items()}
        other.whole = {name: torch.empty_like(rows_mP) for name, rows_mP in self.whole.items()}
        return other

    def copy_inputs(self, other: "VmapSteps") -> None:
        """Copies the values of all tensors of other steps into these tensors, which may be larger."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine[tuple(map(slice, theirs.shape))].copy_(theirs)

    def copy_results_to(self, other: "VmapSteps") -> None:
        """Copies the results into other steps."""
        other.rows_mP.copy_(self.rows_mP)
        other.loss_m.copy_(self.loss_m)
        for name in self.program.moves:
            if name in self.held:
                other.held[name].copy_(self.held[name])
        if self.velocity_mP is not None and other.velocity_mP is not None:
            other.velocity_mP.copy_(self.velocity_mP)


def _with_room(tensor: Tensor, axis: int | None) -> tuple[int, ...]:
    """The shape with this axis rounded up to a power of two, at least 16."""
    return tuple(max(16, 1 << (size - 1).bit_length()) if i == axis else size for i, size in enumerate(tensor.shape))


class _Plan:
    """Padded samples (m, n, ...) and, for every batch, sample indices (m, B) and weights (m, B).

    A weight is 1 / batch size, or 0 for padding. Everything is copied to the device once.
    """

    # the tensors on the device, each with the axis along which clients with more samples or steps need more
    TENSORS = {
        "x": 1,
        "y": 1,
        "index": 0,
        "weight": 0,
        "active": 0,
        "tail": None,
        "steps": None,
        "rate": 0,
        "mask_key": None,
        "frozen": 1,
    }

    def __init__(self, network: Network, tasks: Sequence[TrainingTask]):
        self.device = network.device
        self.x, self.y = (
            padded(parts, self.device) for parts in zip(*((task.x, task.y) for task in tasks), strict=True)
        )
        self.index, self.weight, self.active = (
            copied_to(self.device, torch.from_numpy(array)) for array in _indices(tasks)
        )
        self.client = torch.arange(len(tasks), device=self.device)[:, None]
        self.step_counts = [task.steps for task in tasks]
        self.tail = torch.tensor([task.tail for task in tasks], device=self.device)
        self.steps = torch.tensor(self.step_counts, device=self.device)
        self.rate = _learning_rates(tasks, self.device)
        self.mask_key = keys_on(self.device, [task.mask_key for task in tasks]) if network.dropouts else None
        self.frozen = sequential.padded_frozen_logits(network, tasks)

    def batch(self, number: Number) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Samples, labels, weights and frozen logits of one batch of every client."""
        index = at(self.index, number)
        frozen = None if self.frozen is None else self.frozen[self.client, index]
        return self.x[self.client, index], self.y[self.client, index], at(self.weight, number), frozen

    def masks(self, network: Network, number: Number, batch: int) -> dict[str, Tensor]:
        """Dropout masks of one batch, by buffer. Each client has those of the sequential engine."""
        if self.mask_key is None:
            return {}
        masks = network.masks(self.mask_key, number, batch)
        return {f"{name}.mask": mask for name, mask in zip(network.dropouts, masks, strict=True)}


def _indices(tasks: Sequence[TrainingTask]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For all L batches: sample indices (L, m, B), their weights (L, m, B), and whether the client has this batch and
    a sample in it, bool (L, m).
    """
    per_client = [[np.arange(len(task.y)) if batch is None else batch for batch in task.batches()] for task in tasks]
    steps = max(map(len, per_client))
    width = max(len(batch) for batches in per_client for batch in batches)
    index = np.zeros((steps, len(tasks), width), np.int64)
    weight = np.zeros((steps, len(tasks), width), np.float32)
    active = np.zeros((steps, len(tasks)), bool)
    for client, batches in enumerate(per_client):
        weight_n = tasks[client].held.weight_n
        weights = None if weight_n is None else weight_n.numpy()
        for number in range(steps):
            batch = batches[min(number, len(batches) - 1)]
            index[number, client, : len(batch)] = batch
            weight[number, client, : len(batch)] = 1 / len(batch) if weights is None else weights[batch] / len(batch)
            active[number, client] = number < len(batches) and len(batch) > 0
    return index, weight, active


def _initial_velocity(network: Network, tasks: Sequence[TrainingTask]) -> Tensor:
    """Initial momentum buffers (m, trained columns)."""
    fresh = torch.zeros(network.spec.trained)
    kept = [task.held.velocity for task in tasks]
    return torch.stack([fresh if velocity is None else velocity for velocity in kept]).to(network.device)


def _learning_rates(tasks: Sequence[TrainingTask], device: torch.device) -> Tensor | None:
    """Learning rates (L, m) of all steps; None: `local.lr` for all, on a CPU."""
    local = tasks[0].local
    if local.optimizer is not None or (local.step_schedule is None and device.type == "cpu"):
        return None
    most = max(task.steps for task in tasks)
    rates = [[local.lr_at(min(number, task.steps - 1), task.steps) for task in tasks] for number in range(most)]
    return torch.tensor(rates, device=device)


def _optimizer_step(optimizer: torch.optim.Optimizer, step_mP: Tensor, active_m: Tensor, lr: float) -> None:
    """Takes a step on all rows, the optimiser's parameter; rows of clients without a further step are kept."""
    (group,) = optimizer.param_groups
    (rows_mP,) = group["params"]
    before_mP = rows_mP.clone()
    group["lr"], rows_mP.grad = lr, step_mP
    optimizer.step()
    rows_mP.copy_(torch.where(active_m[:, None], rows_mP, before_mP))


class _Gradient:
    """Gradients of all clients' losses on the batches of the current step, by one `vmap`."""

    def __init__(self, steps: VmapSteps, rows_mP: Tensor):
        network, plan = steps.network, steps.plan
        self.network, self.plan, self.spec, self.steps = network, plan, network.spec, steps
        self.own_loss = steps.program.overrides("loss")
        tensors = list(network.spec.tensors(rows_mP).items())
        self.buffers = dict(tensors[network.spec.num_params :])  # views into the rows
        self.counters = {
            name: initial.repeat(len(rows_mP), *[1] * initial.ndim) for name, initial in network.counters.items()
        }
        in_dims = (0, 0, 0, 0, 0, None if plan.frozen is None else 0, 0, 0)
        self.gradient = vmap(grad_and_value(self._loss, has_aux=True), in_dims=in_dims)
        self.first: Number = 0  # number of the first batch of the current step
        self.loss_m: Tensor | None = None  # of the first gradient of the current step
        self.masks: dict[int, dict[str, Tensor]] = {}  # dropout masks of the current step, by batch

    def _loss(
        self,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        x_B: Tensor,
        y_B: Tensor,
        weight_B: Tensor,
        frozen_BC: Tensor | None,
        held: Held,
        whole: Held,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one client on one batch, and the buffers after it. held, whole: for the program's own loss."""
        network = self.network
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}  # the network updates buffers in place
        kept: AbstractContextManager[list[Tensor]] = network.kept_features() if self.own_loss else nullcontext([])
        with network.without_cudnn(), kept as features:
            logits_BC = network.trained_outputs(x_B, params | buffers)
        logits_BC = logits_BC if frozen_BC is None else logits_BC + frozen_BC
        loss = (network.task.loss(logits_BC, y_B) * weight_B).sum()
        if self.own_loss:
            real_B = (weight_B > 0).float()

            def passed(model: str) -> Forward:
                return forward_of(network, held_model(self.steps.program, whole, model), x_B, y_B, real_B)

            seen = Batch(loss, features[-1].float(), logits_BC, y_B, real_B, passed)
            loss = scalar_loss(self.steps.program, seen, held)
        return loss, buffers

    def begin(self, first: Number) -> None:
        """Begins a step that uses the batches from number `first` on."""
        self.first, self.loss_m, self.masks = first, None, {}

    def __call__(self, w: Tensor, batch: int) -> Tensor:
        """Gradients (m, trained columns) at these rows on one batch of the step."""
        check_batch(self.steps.program, batch)
        x, y, weight, frozen = self.plan.batch(self.first + batch)
        if batch not in self.masks:  # the same in all gradients of a batch in a step, as in `sequential`
            self.masks[batch] = self.plan.masks(self.network, self.first + batch, x.shape[1])
        buffers = self.buffers | self.counters | self.masks[batch]
        params, held, whole = self.spec.tensors(w), Held(), Held()
        if self.own_loss:
            held, whole = self.steps.held, {name: self.whole(name) for name in self.steps.held if self.is_model(name)}
        grads, (loss_m, updated) = self.gradient(params, buffers, x, y, weight, frozen, held, whole)
        for name, buffer in self.buffers.items():
            buffer.copy_(updated[name])
        self.loss_m = loss_m if self.loss_m is None else self.loss_m
        return torch.cat([g.reshape(len(g), -1) for g in grads.values()], 1)  # a number of a client has no axis 1

    def is_model(self, name: str) -> bool:
        """Whether this held tensor is a model of each client."""
        return name in self.steps.models

    def whole(self, model: Tensor | str) -> Tensor:
        """Rows (m, P) of trained columns or of the held model of this name; see `LocalGradient.whole`."""
        if isinstance(model, str) and model in self.steps.whole:
            return self.steps.whole[model]
        if isinstance(model, str):
            model = held_model(self.steps.program, {name: self.steps.held[name] for name in self.steps.models}, model)
        return torch.cat([model, self.steps.rows_mP[:, self.spec.trained :]], 1)

    def forward(self, w: Tensor | str, batch: int) -> Forward:
        """As `core.client_program.Gradient`, of all clients."""
        check_batch(self.steps.program, batch)
        x, y, weight, _ = self.plan.batch(self.first + batch)
        features, outputs = vmap(self.network.evaluated)(self.whole(w), x)
        return Forward(features, outputs, y, (weight > 0).float())
