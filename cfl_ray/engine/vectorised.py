"""The vectorised engine: trains many clients as a vmap batch, with their rows in a matrix and one `torch.func.vmap`.

The result equals that of `sequential` up to rounding.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from cfl_ray.engine import sequential
from cfl_ray.engine.local_steps import companion_arguments, companion_parts, whole_companion
from cfl_ray.engine.rows import ProximalRows, padded, rows_on
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.engine.vmap_batches import in_batches
from cfl_ray.nn.device_memory import copied_to
from cfl_ray.nn.network import Network

# On a CPU, a step of a vmap batch costs about 1 ms before any arithmetic, whatever its number of clients, and is slower
# than other engines if the arithmetic takes longer than the calls.
_BATCH_SECONDS, _LONG_STEP_SECONDS = 2e-3, 5e-4


def chunk_size(num_clients: int) -> int:
    """Clients of a chunk for a cohort: many, because the clients of a chunk share operations."""
    return min(max(num_clients // 16, min(-(-num_clients // 4), 8)), 64)


def no_gain(network: Network, seconds: float, clients: int) -> str | None:
    """Reason why a vmap batch of `clients` cannot beat another engine with `seconds` per step; None if it may."""
    if network.device.type != "cpu" or (seconds <= _LONG_STEP_SECONDS and seconds * clients >= _BATCH_SECONDS):
        return None
    return f"no gain on a CPU for {clients} clients in a chunk and {1e3 * seconds:.2f} ms per step"


def why_not(network: Network, tasks: Sequence[TrainingTask]) -> str | None:
    """Reason why the network or, with tasks, these clients together cannot be a vmap batch; None if they can.

    Batch statistics of unequal batches would include the padding. A forward pass that draws from PyTorch's generator
    draws for one client at a time.
    """
    modules = list(network.module.modules())
    # on a GPU, autocast normalises layers in float32
    layer_norm = network.device.type == "cpu" and any(isinstance(module, nn.LayerNorm) for module in modules)
    if network.precision == "bf16" and (network.batch_statistics or layer_norm):
        return "PyTorch has no batching rule for normalisation of bfloat16 activations"
    if network.random_forward:
        return "the forward pass draws random numbers outside dropout layers, such as functional dropout"
    if tasks and (reason := _why_not_optimizer(tasks)):
        return reason
    if not network.batch_statistics:
        return None
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.momentum is None for m in modules):
        return "cumulative batch statistics depend on a counter"
    sizes = {len(task.y) if batch is None else len(batch) for task in tasks for batch in task.batches()}
    steps = {task.steps for task in tasks}
    return "batch statistics need batches of one size and equal steps" if len(sizes) > 1 or len(steps) > 1 else None


def _why_not_optimizer(tasks: Sequence[TrainingTask]) -> str | None:
    """Reason why the local optimiser cannot work on the rows of several clients; None if it can."""
    local = tasks[0].local
    if local.optimizer is None:
        return None
    if not local.optimizer.elementwise:
        return "the local optimiser is not known to treat every number by itself (elementwise = True)"
    if local.step_schedule is not None and len({task.steps for task in tasks}) > 1:
        return "a local optimiser has one learning rate for all clients, but their steps and so their schedules differ"
    return None


def train(network: Network, tasks: Iterable[TrainingTask]) -> Iterator[TrainingResult]:
    """Trains all tasks: on a GPU in vmap batches as large as its memory allows, otherwise in one vmap batch.

    The client of a batch of one is trained by the sequential engine.
    """

    def trained(batch: list[TrainingTask]) -> list[TrainingResult]:
        return train_batch(network, batch) if len(batch) > 1 else list(sequential.train(network, batch))

    first = 0
    for batch, results in in_batches(network.memory, tasks, trained, "vectorised"):
        for result in results:
            yield replace(result, index=first + result.index)
        first += len(batch)


def train_batch(network: Network, tasks: Sequence[TrainingTask]) -> list[TrainingResult]:
    """Trains all tasks as one vmap batch. Clients with fewer steps or smaller batches are padded and masked.

    Results are copied from the device in one transfer, unless they are only summed.
    """
    plan = _Plan(network, tasks)
    rows_mP = rows_on(network.device, [task.start_P for task in tasks])
    proximal = [
        ProximalRows(network, [task.proximal[which] for task in tasks]) for which in range(len(tasks[0].proximal))
    ]
    velocity_mP = _initial_velocity(network, tasks) if tasks[0].local.momentum else None
    companions = zip(*(companion_parts(network, task) for task in tasks), strict=True)
    companion = [rows_on(network.device, parts, copies=True) for parts in companions]
    loss_m = _train_rows(network, tasks, plan, rows_mP, velocity_mP, proximal, companion)
    anchor_mP = next((moved for term in proximal if (moved := term.moved(rows_mP)) is not None), None)
    largest = _largest(rows_mP, network.spec.trained)
    if not all(task.only_summed for task in tasks):
        rows_mP = rows_mP.cpu()
        anchor_mP = None if anchor_mP is None else anchor_mP.cpu()
        velocity_mP = velocity_mP.cpu() if velocity_mP is not None and tasks[0].local.persist else None
    losses, results = loss_m.tolist(), []
    traces = torch.stack(plan.traced, 1).tolist() if plan.traced else [[]] * len(tasks)
    for index, task in enumerate(tasks):
        anchor_P = None if anchor_mP is None else anchor_mP[index]
        velocity = velocity_mP[index] if velocity_mP is not None and task.local.persist else None
        row_P, seconds = rows_mP[index], [second_mP[index].to(rows_mP.device) for second_mP in companion]
        companion_P = whole_companion(network, seconds, row_P) if seconds else None
        trace = traces[index][: task.steps]
        results.append(
            TrainingResult(index, row_P, losses[index], anchor_P, velocity, companion_P, trace, largest[index])
        )
    return results


def _largest(rows_mP: Tensor, trained: int) -> list[tuple[float, float]]:
    """Largest absolute values of each row's weights and buffers, in one transfer; NaN if any value is NaN."""
    parts = [part for part in (rows_mP[:, :trained], rows_mP[:, trained:]) if part.shape[1]]
    bounds = [torch.stack(torch.aminmax(part, dim=1)).abs().amax(0) for part in parts]
    if len(bounds) == 1:
        bounds.append(torch.zeros_like(bounds[0]))
    return [(weights, buffers) for weights, buffers in torch.stack(bounds, 1).tolist()]


class _Plan:
    """Padded samples (m, n, ...) and, for every batch, sample indices (m, B) and weights (m, B).

    A weight is 1 / batch size, or 0 for padding. Everything is copied to the device once.
    """

    def __init__(self, network: Network, tasks: Sequence[TrainingTask]):
        self.device = network.device
        self.x, self.y = (
            padded(parts, self.device) for parts in zip(*((task.x, task.y) for task in tasks), strict=True)
        )
        index, weight, self.size, active = _indices(tasks)
        self.index, self.weight, self.active = (
            copied_to(self.device, torch.from_numpy(array)) for array in (index, weight, active)
        )
        self.client = torch.arange(len(tasks), device=self.device)[:, None]
        self.step_counts = [task.steps for task in tasks]
        self.tail = torch.tensor([task.tail for task in tasks], device=self.device)
        self.steps = torch.tensor(self.step_counts, device=self.device)
        self.noise = [task.noise() for task in tasks] if network.dropouts else None
        self.frozen = sequential.padded_frozen_logits(network, tasks)
        self.traced: list[Tensor] = []  # losses (m,) of the first steps

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Samples, labels, weights and frozen logits of one batch of every client."""
        index = self.index[number]
        frozen = None if self.frozen is None else self.frozen[self.client, index]
        return self.x[self.client, index], self.y[self.client, index], self.weight[number], frozen

    def masks(self, network: Network, number: int, batch: int) -> dict[str, Tensor]:
        """Dropout masks of one batch, by buffer.

        Each client draws for its own batch, layer by layer, as with the sequential engine.
        """
        drawn: dict[str, list[Tensor]] = {name: [] for name in network.dropouts}
        for client, generator in enumerate(self.noise or ()):
            size = int(self.size[number, client])
            for name, layer in network.dropouts.items():
                mask = torch.ones(batch, *layer.sample_shape)
                if size:
                    mask[:size] = layer.draw(size, generator)
                drawn[name].append(mask)
        return {f"{name}.mask": copied_to(network.device, torch.stack(masks)) for name, masks in drawn.items()}


def _indices(tasks: Sequence[TrainingTask]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For all L batches: sample indices (L, m, B), their weights (L, m, B), numbers of samples (L, m), and whether the
    client has this batch, bool (L, m). A client without the batch has 0 samples.
    """
    per_client = [[np.arange(len(task.y)) if batch is None else batch for batch in task.batches()] for task in tasks]
    steps = max(map(len, per_client))
    width = max(len(batch) for batches in per_client for batch in batches)
    index = np.zeros((steps, len(tasks), width), np.int64)
    weight = np.zeros((steps, len(tasks), width), np.float32)
    size = np.zeros((steps, len(tasks)), np.int64)
    for client, batches in enumerate(per_client):
        weight_n = tasks[client].weight_n
        weights = None if weight_n is None else weight_n.numpy()
        for number in range(steps):
            batch = batches[min(number, len(batches) - 1)]
            index[number, client, : len(batch)] = batch
            weight[number, client, : len(batch)] = 1 / len(batch) if weights is None else weights[batch] / len(batch)
            size[number, client] = len(batch) if number < len(batches) else 0
    return index, weight, size, size > 0


def _initial_velocity(network: Network, tasks: Sequence[TrainingTask]) -> Tensor:
    """Initial momentum buffers (m, trained columns)."""
    fresh = torch.zeros(network.spec.trained)
    return torch.stack([fresh if task.velocity is None else task.velocity for task in tasks]).to(network.device)


def _train_rows(
    network: Network,
    tasks: Sequence[TrainingTask],
    plan: _Plan,
    rows_mP: Tensor,
    velocity: Tensor | None,
    proximal: list[ProximalRows],
    companion: list[Tensor],
) -> Tensor:
    """Takes the local steps in place on all rows, momentum buffers and second models (m, trained columns).

    Returns the mean loss (m,) over each client's last local epoch.
    """
    local, trained, local_step, batches_per_step = (
        tasks[0].local,
        network.spec.trained,
        tasks[0].local_step,
        tasks[0].batches_per_step,
    )
    network.module.train()
    gradient = _Gradient(network, plan, rows_mP)
    optimizer = None if local.optimizer is None else local.optimizer([rows_mP[:, :trained]], local.lr)
    total_m = torch.zeros(len(tasks), device=network.device)
    for number in range(len(plan.index) // batches_per_step):
        gradient.begin(number * batches_per_step)
        now_mP = rows_mP[:, :trained]
        active = plan.active[number * batches_per_step]
        before = [rows.clone() for rows in companion]
        arguments = companion_arguments(companion, number)
        step = gradient(now_mP, 0) if local_step is None else local_step(gradient, now_mP, *arguments)
        for rows, stay in zip(companion, before, strict=True):
            rows.copy_(torch.where(active[:, None], rows, stay))
        if local.weight_decay and not local.clips:
            step = step.add(now_mP, alpha=local.weight_decay)
        for term in proximal:
            term.add_to(step, rows_mP)
        if local.clip_norm is not None and local.clips:  # in the order of `sequential`
            norm_m = torch.linalg.vector_norm(step, dim=1, keepdim=True)
            step = step * (local.clip_norm / (norm_m + 1e-6)).clamp(max=1.0)
            if local.weight_decay:
                step = step.add(now_mP, alpha=local.weight_decay)
        if optimizer is not None:
            _optimizer_step(optimizer, step, active, local.lr_at(number, tasks[0].steps))
        elif velocity is not None:
            if local.persist:  # the buffer of a client without a further step is kept
                step = velocity.copy_(torch.where(active[:, None], local.momentum * velocity + step, velocity))
            else:
                step = velocity.mul_(local.momentum).add_(step)
        if optimizer is None:
            now_mP.sub_(step.mul(_learning_rate(tasks, number, network.device)).mul_(active[:, None]))
        for term in proximal:
            term.move(rows_mP, number, plan.step_counts)
        in_tail = active & (number >= plan.steps - plan.tail)
        assert gradient.loss_m is not None
        if number < tasks[0].trace:
            plan.traced.append(gradient.loss_m)
        total_m += torch.where(in_tail, gradient.loss_m, 0) / plan.tail
    del gradient.gradient  # it refers to `gradient`: samples and rows would stay until the garbage collector runs
    return total_m


def _learning_rate(tasks: Sequence[TrainingTask], number: int, device: torch.device) -> float | Tensor:
    """Learning rate of step `number`: a float for all clients, or (m, 1) if it depends on their numbers of steps."""
    local = tasks[0].local
    if local.step_schedule is None:
        return local.lr
    rates = [local.lr_at(min(number, task.steps - 1), task.steps) for task in tasks]
    return torch.tensor(rates, device=device)[:, None]


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

    def __init__(self, network: Network, plan: _Plan, rows_mP: Tensor):
        self.network, self.plan, self.spec = network, plan, network.spec
        tensors = list(network.spec.tensors(rows_mP).items())
        self.buffers = dict(tensors[network.spec.num_params :])  # views into the rows
        self.counters = {
            name: initial.repeat(len(rows_mP), *[1] * initial.ndim) for name, initial in network.counters.items()
        }
        in_dims = (0, 0, 0, 0, 0, None if plan.frozen is None else 0)
        self.gradient = vmap(grad_and_value(self._loss, has_aux=True), in_dims=in_dims)
        self.first = 0  # number of the first batch of the current step
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
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one client on one batch, and the buffers after it."""
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}  # the network updates buffers in place
        with self.network.autocast():
            logits_BC = functional_call(self.network.module, (params, buffers), (x_B,)).float()
        logits_BC = logits_BC if frozen_BC is None else logits_BC + frozen_BC
        return (self.network.task.loss(logits_BC, y_B) * weight_B).sum(), buffers

    def begin(self, first: int) -> None:
        """Begins a step that uses the batches from number `first` on."""
        self.first, self.loss_m, self.masks = first, None, {}

    def __call__(self, trained_mP: Tensor, batch: int) -> Tensor:
        """Gradients (m, trained columns) at these rows on one batch of the step."""
        x, y, weight, frozen = self.plan.batch(self.first + batch)
        if batch not in self.masks:  # the same in all gradients of a batch in a step, as in `sequential`
            self.masks[batch] = self.plan.masks(self.network, self.first + batch, x.shape[1])
        buffers = self.buffers | self.counters | self.masks[batch]
        grads, (loss_m, updated) = self.gradient(self.spec.tensors(trained_mP), buffers, x, y, weight, frozen)
        for name, buffer in self.buffers.items():
            buffer.copy_(updated[name])
        self.loss_m = loss_m if self.loss_m is None else self.loss_m
        return torch.cat([g.flatten(1) for g in grads.values()], 1)
