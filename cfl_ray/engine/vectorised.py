"""Many clients at once: their rows stacked, one `torch.func.vmap` over them. Equal to `sequential` up to rounding."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from cfl_ray.engine import sequential
from cfl_ray.engine.network import Network
from cfl_ray.engine.task import Pulled, Task, Trained


def refusal(network: Network, tasks: Sequence[Task]) -> str | None:
    """Why these tasks cannot be stacked, or None. Batch statistics would see the padding of unequal batches."""
    if not network.batch_statistics:
        return None
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.momentum is None for m in network.module.modules()):
        return "cumulative batch statistics depend on a counter"
    sizes = {len(task.y) if batch is None else len(batch) for task in tasks for batch in task.batches()}
    steps = {task.steps for task in tasks}
    return "batch statistics need batches of one size and equal steps" if len(sizes) > 1 or len(steps) > 1 else None


def train(network: Network, tasks: Sequence[Task]) -> Iterator[Trained]:
    """Trains all tasks together. Clients with fewer steps or smaller batches are padded and masked."""
    plan = _Plan(network, tasks)
    rows_mP = torch.stack([task.start_P for task in tasks]).to(network.device)
    pulls = [_StackedPull(network, [task.pulls[which] for task in tasks]) for which in range(len(tasks[0].pulls))]
    velocity = _velocity(network, tasks) if tasks[0].local.momentum else None
    loss_m = _train_rows(network, tasks, plan, rows_mP, velocity, pulls)
    anchor_mP = next((moved for pull in pulls if (moved := pull.moved(rows_mP)) is not None), None)
    rows_mP = rows_mP.cpu()
    for index in range(len(tasks)):
        anchor_P, kept = None if anchor_mP is None else anchor_mP[index], velocity[index] if tasks[index].local.persist else None
        yield Trained(index, rows_mP[index], loss_m[index].item(), anchor_P, kept)


class _Plan:
    """Padded samples (m, n, ...) and, for every batch, sample indices (m, B) with their weights: 1 / batch size, 0 for padding."""

    def __init__(self, network: Network, tasks: Sequence[Task]):
        most = max(len(task.y) for task in tasks)
        self.x = torch.zeros(len(tasks), most, *network.input_shape)
        self.y = torch.zeros(len(tasks), most, dtype=torch.long)
        for index, task in enumerate(tasks):
            self.x[index, : len(task.y)] = task.x
            self.y[index, : len(task.y)] = task.y
        self.x, self.y = self.x.to(network.device), self.y.to(network.device)
        self.index, self.weight, self.active = _indices(tasks)
        self.client = torch.arange(len(tasks), device=network.device)[:, None]
        self.tail = torch.tensor([task.tail for task in tasks], device=network.device)
        self.steps = torch.tensor([task.steps for task in tasks], device=network.device)
        self.noise = [task.noise() for task in tasks] if network.dropouts else None
        self.device = network.device
        self.offset = self._offsets(network, tasks, most)

    def _offsets(self, network: Network, tasks: Sequence[Task], most: int) -> Tensor | None:
        """Logits (m, n, C) of the frozen models beside the trained ones."""
        if tasks[0].beside_P is None:
            return None
        offset = torch.zeros(len(tasks), most, network.num_outputs, device=network.device)
        for index, task in enumerate(tasks):
            offset[index, : len(task.y)] = sequential.offsets(network, task)
        return offset

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Samples, labels, weights and offsets of one batch of every client."""
        index = torch.from_numpy(self.index[number]).to(self.device)
        weight = torch.from_numpy(self.weight[number]).to(self.device)
        offset = None if self.offset is None else self.offset[self.client, index]
        return self.x[self.client, index], self.y[self.client, index], weight, offset

    def masks(self, network: Network, number: int, batch: int) -> dict[str, Tensor]:
        """Dropout masks of one step: each client draws for its own batch, as it would alone, layer by layer."""
        drawn: dict[str, list[Tensor]] = {name: [] for name in network.dropouts}
        for client, generator in enumerate(self.noise or ()):
            size = int((self.weight[number][client] > 0).sum())
            for name, layer in network.dropouts.items():
                mask = torch.ones(batch, *layer.sample_shape)
                if size and self.active[number][client]:
                    mask[:size] = layer.draw(size, generator)
                drawn[name].append(mask)
        return {f"{name}.mask": torch.stack(masks).to(network.device) for name, masks in drawn.items()}


def _indices(tasks: Sequence[Task]) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    per_client = [[np.arange(len(task.y)) if batch is None else batch for batch in task.batches()] for task in tasks]
    steps = max(map(len, per_client))
    width = max(len(batch) for batches in per_client for batch in batches)
    index, weight, active = [], [], []
    for number in range(steps):
        index_mB = np.zeros((len(tasks), width), np.int64)
        weight_mB = np.zeros((len(tasks), width), np.float32)
        for client, batches in enumerate(per_client):
            batch = batches[min(number, len(batches) - 1)]
            index_mB[client, : len(batch)] = batch
            weight_mB[client, : len(batch)] = 1 / len(batch)
        index.append(index_mB)
        weight.append(weight_mB)
        active.append(np.array([number < len(batches) for batches in per_client]))
    return index, weight, active


def _velocity(network: Network, tasks: Sequence[Task]) -> Tensor:
    """Momentum buffers (m, trained columns) to begin with."""
    fresh = torch.zeros(network.spec.trained)
    return torch.stack([fresh if task.velocity is None else task.velocity for task in tasks]).to(network.device)


def _train_rows(network: Network, tasks: Sequence[Task], plan: _Plan, rows_mP: Tensor, velocity: Tensor | None, pulls: list["_StackedPull"]) -> Tensor:
    """SGD on all rows, and their momentum buffers, in place. Returns the mean loss (m,) over each client's last local epoch."""
    local, trained, rule, parts = tasks[0].local, network.spec.trained, tasks[0].rule, tasks[0].parts
    network.module.train()
    gradient = _Gradient(network, plan, rows_mP)
    total_m = torch.zeros(len(tasks), device=network.device)
    for number in range(len(plan.index) // parts):
        gradient.begin(number * parts)
        now_mP = rows_mP[:, :trained]
        step = gradient(now_mP, 0) if rule is None else rule(gradient, now_mP)
        if local.weight_decay:
            step = step.add(now_mP, alpha=local.weight_decay)
        for pull in pulls:
            pull.add_to(step, rows_mP)
        active = torch.from_numpy(plan.active[number * parts]).to(network.device)
        if velocity is not None:
            if local.persist:  # clients that are done keep theirs
                step = velocity.copy_(torch.where(active[:, None], local.momentum * velocity + step, velocity))
            else:
                step = velocity.mul_(local.momentum).add_(step)
        now_mP.sub_(step.mul(local.lr).mul_(active[:, None]))
        for pull in pulls:
            pull.move(rows_mP, number, plan.steps)
        in_tail = active & (number >= plan.steps - plan.tail)
        total_m += torch.where(in_tail, gradient.loss_m, 0) / plan.tail
    return total_m


class _Gradient:
    """Gradients of all clients' losses on the batches of the present step, by one `vmap`."""

    def __init__(self, network: Network, plan: _Plan, rows_mP: Tensor):
        self.network, self.plan, self.spec = network, plan, network.spec
        self.buffers = dict(list(network.spec.tensors(rows_mP).items())[network.spec.num_params :])  # views: kept up to date
        self.counters = {name: first.repeat(len(rows_mP), *[1] * first.ndim) for name, first in network.counters.items()}
        self.gradient = vmap(grad_and_value(self._loss, has_aux=True), in_dims=(0, 0, 0, 0, 0, None if plan.offset is None else 0))
        self.loss_m: Tensor | None = None

    def _loss(self, params, buffers, x_B, y_B, weight_B, offset_BC):
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}  # the network updates them in place
        logits_BC = functional_call(self.network.module, (params, buffers), (x_B,))
        logits_BC = logits_BC if offset_BC is None else logits_BC + offset_BC
        return (cross_entropy(logits_BC, y_B, reduction="none") * weight_B).sum(), buffers

    def begin(self, first: int) -> None:
        """The next step uses the batches from number `first` on."""
        self.first, self.loss_m, self.masks = first, None, {}

    def __call__(self, trained_mP: Tensor, batch: int) -> Tensor:
        """(m, trained columns) at these rows."""
        x, y, weight, offset = self.plan.batch(self.first + batch)
        if batch not in self.masks:  # one per batch and step, as in `sequential`
            self.masks[batch] = self.plan.masks(self.network, self.first + batch, x.shape[1])
        buffers = self.buffers | self.counters | self.masks[batch]
        grads, (loss_m, updated) = self.gradient(self.spec.tensors(trained_mP), buffers, x, y, weight, offset)
        for name, buffer in self.buffers.items():
            buffer.copy_(updated[name])
        self.loss_m = loss_m if self.loss_m is None else self.loss_m
        return torch.cat([g.flatten(1) for g in grads.values()], 1)


class _StackedPull:
    """Gradient of one proximal term of every client."""

    def __init__(self, network: Network, pulls: Sequence[Pulled]):
        self.pull, self.weight = pulls[0], pulls[0].weight
        self.anchor_mP = torch.stack([pull.anchor_P for pull in pulls]).to(network.device)
        whole = ((0, network.spec.trained),)
        self.ranges = whole if pulls[0].columns is None else pulls[0].columns.ranges
        self.trained = network.spec.trained

    def add_to(self, step: Tensor, rows_mP: Tensor) -> None:
        for start, stop in self.ranges:
            stop = min(stop, step.shape[1])
            step[:, start:stop] += self.weight * (rows_mP[:, start:stop] - self.anchor_mP[:, start:stop])

    def move(self, rows_mP: Tensor, number: int, steps_m: Tensor) -> None:
        """Moves the anchors of the clients for which it is time."""
        now = torch.tensor([number < steps and self.pull.moves_after(number, steps) for steps in steps_m.tolist()], device=rows_mP.device)
        if not now.any():
            return
        for start, stop in self.ranges:
            stop = min(stop, self.trained)
            moved = self.anchor_mP[:, start:stop].lerp(rows_mP[:, start:stop], self.pull.follow * self.weight)
            self.anchor_mP[:, start:stop] = torch.where(now[:, None], moved, self.anchor_mP[:, start:stop])

    def moved(self, rows_mP: Tensor) -> Tensor | None:
        """The anchors as they are now, with the buffers of `rows_mP`; None where they do not move."""
        return torch.cat([self.anchor_mP[:, : self.trained], rows_mP[:, self.trained :]], 1).cpu() if self.pull.follow else None
