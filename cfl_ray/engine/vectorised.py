"""Many clients at once: their rows stacked, one `torch.func.vmap` over them. Equal to `sequential` up to rounding."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from cfl_ray.engine.network import Network
from cfl_ray.engine.task import Task, Trained


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
    loss_m = _train_rows(network, tasks, plan, rows_mP)
    rows_mP = rows_mP.cpu()
    for index in range(len(tasks)):
        yield Trained(index, rows_mP[index], loss_m[index].item())


class _Plan:
    """Padded samples (m, n, ...) and, for every step, sample indices (m, B) with their weights: 1 / batch size, 0 for padding."""

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

    def step(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.from_numpy(self.index[number]).to(self.device)
        return self.x[self.client, index], self.y[self.client, index], torch.from_numpy(self.weight[number]).to(self.device)

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


def _train_rows(network: Network, tasks: Sequence[Task], plan: _Plan, rows_mP: Tensor) -> Tensor:
    """SGD on all rows in place. Returns the mean loss (m,) over each client's last local epoch."""
    local, spec, trained = tasks[0].local, network.spec, network.spec.trained
    pulls = [_StackedPull(network, [task.pulls[which] for task in tasks]) for which in range(len(tasks[0].pulls))]
    network.module.train()

    def loss_of(params, buffers, x_B, y_B, weight_B):
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}  # the network updates them in place
        logits = functional_call(network.module, (params, buffers), (x_B,))
        return (cross_entropy(logits, y_B, reduction="none") * weight_B).sum(), buffers

    counters = {name: first.repeat(len(tasks), *[1] * first.ndim) for name, first in network.counters.items()}
    gradient = vmap(grad_and_value(loss_of, has_aux=True))
    velocity = torch.zeros_like(rows_mP[:, :trained]) if local.momentum else None
    total_m = torch.zeros(len(tasks), device=network.device)
    for number in range(len(plan.index)):
        tensors = spec.tensors(rows_mP)
        params = dict(list(tensors.items())[: spec.num_params])
        buffers = dict(list(tensors.items())[spec.num_params :]) | counters
        x, y, weight = plan.step(number)
        buffers |= plan.masks(network, number, x.shape[1])
        grads, (loss_m, updated) = gradient(params, buffers, x, y, weight)
        step = torch.cat([g.flatten(1) for g in grads.values()], 1)
        if local.weight_decay:
            step.add_(rows_mP[:, :trained], alpha=local.weight_decay)
        for pull in pulls:
            pull.add_to(step, rows_mP)
        active = torch.from_numpy(plan.active[number]).to(network.device)
        if velocity is not None:
            step = velocity.mul_(local.momentum).add_(step)
        rows_mP[:, :trained].sub_(step.mul(local.lr).mul_(active[:, None]))
        for name in spec.names[spec.num_params :]:
            tensors[name].copy_(updated[name])
        in_tail = active & (number >= plan.steps - plan.tail)
        total_m += torch.where(in_tail, loss_m, 0) / plan.tail
    return total_m


class _StackedPull:
    """Gradient of one proximal term of every client."""

    def __init__(self, network: Network, pulls):
        self.weight = pulls[0].weight
        self.anchor_mP = torch.stack([pull.anchor_P for pull in pulls]).to(network.device)
        whole = ((0, network.spec.trained),)
        self.ranges = whole if pulls[0].columns is None else pulls[0].columns.ranges

    def add_to(self, step: Tensor, rows_mP: Tensor) -> None:
        for start, stop in self.ranges:
            stop = min(stop, step.shape[1])
            step[:, start:stop] += self.weight * (rows_mP[:, start:stop] - self.anchor_mP[:, start:stop])
