"""The vectorised engine: trains many clients as a vmap batch, with their rows in a matrix and one `torch.func.vmap`.

The result equals that of `sequential` up to rounding.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from cfl_ray.core.client_program import Need
from cfl_ray.engine import rule, sequential
from cfl_ray.engine.engine import Engine
from cfl_ray.engine.local_steps import check_moves, moved_by_steps
from cfl_ray.engine.step_graphs import graphs_of
from cfl_ray.engine.task import TrainingResult, TrainingTask, lacking
from cfl_ray.engine.vmap_batches import in_batches
from cfl_ray.engine.vmap_steps import VmapSteps
from cfl_ray.nn.network import Network

_DOES = frozenset(Need) - {Need.BRANCHES, Need.EXAMPLES}


def chunk_size(num_clients: int) -> int:
    """Clients of a chunk for a cohort: many, because the clients of a chunk share operations."""
    return min(max(num_clients // 16, min(-(-num_clients // 4), 8)), 64)


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
        return "the forward pass draws random numbers besides dropout of activations, such as dropout of attention"
    if network.side_effect:
        return network.side_effect
    if reason := lacking(tasks, _DOES):
        return reason
    if tasks and (reason := _why_not_optimizer(tasks) or _why_not_held(tasks)):
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


def _why_not_held(tasks: Sequence[TrainingTask]) -> str | None:
    """Reason why what the clients hold for their program cannot be stacked; None if it can."""
    first, *others = ({name: value.shape for name, value in task.held.numbers.items()} for task in tasks)
    return None if all(other == first for other in others) else "clients hold numbers of different shapes"


def train(network: Network, tasks: Iterable[TrainingTask]) -> Iterator[TrainingResult]:
    """Trains all tasks: on a GPU in vmap batches as large as its memory allows, otherwise in one vmap batch.

    A batch of one client is trained by the sequential engine.
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
    steps = VmapSteps(network, tasks)
    graphs_of(network).take_all(steps)
    check_moves(steps.program, steps.held)
    rows_mP, velocity_mP = steps.rows_mP, steps.velocity_mP
    anchor_mP = next((moved for term in steps.proximal if (moved := term.moved(rows_mP)) is not None), None)
    largest = _largest(rows_mP, network.spec.trained)
    if not all(task.only_summed for task in tasks):
        rows_mP = rows_mP.cpu()
        anchor_mP = None if anchor_mP is None else anchor_mP.cpu()
        velocity_mP = velocity_mP.cpu() if velocity_mP is not None and tasks[0].local.persist else None
    losses, results = steps.loss_m.tolist(), []
    traces = torch.stack(steps.traced, 1).tolist() if steps.traced else [[]] * len(tasks)
    for index, task in enumerate(tasks):
        anchor_P = None if anchor_mP is None else anchor_mP[index]
        velocity = velocity_mP[index] if velocity_mP is not None and task.local.persist else None
        row_P, names = rows_mP[index], task.program.moves
        held = {name: steps.held[name][index].to(rows_mP.device) for name in names}
        changed = moved_by_steps(network, task, held, row_P)
        trace = traces[index][: task.steps]
        results.append(TrainingResult(index, row_P, losses[index], anchor_P, velocity, changed, trace, largest[index]))
    return results


def _largest(rows_mP: Tensor, trained: int) -> list[tuple[float, float]]:
    """Largest absolute values of each row's weights and buffers, in one transfer; NaN if any value is NaN."""
    parts = [part for part in (rows_mP[:, :trained], rows_mP[:, trained:]) if part.shape[1]]
    bounds = [torch.stack(torch.aminmax(part, dim=1)).abs().amax(0) for part in parts]
    if len(bounds) == 1:
        bounds.append(torch.zeros_like(bounds[0]))
    return [(weights, buffers) for weights, buffers in torch.stack(bounds, 1).tolist()]


ENGINE = Engine(
    why_not,
    train,
    rule.vectorised,
    together=True,
    tried_steps=1,
    chunk_size=chunk_size,
    not_alone="clients of a chunk of their own are no vmap batch (on a CPU, all clients of rounds of at most 4)",
)
