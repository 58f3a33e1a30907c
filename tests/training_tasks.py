"""Training of clients by an engine, by another engine, and in plain PyTorch, for tests that compare them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from closeness import close
from federations import uneven
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, Proximal
from cfl_ray.engine import sequential
from cfl_ray.engine.task import HeldByClient, TrainingResult, TrainingTask
from cfl_ray.nn.network import Network
from cfl_ray.nn.recording import RecordedFunction

ADDRESS = Address(seed=0, round=3, exchange=1)
FLAT, LONG, IMAGE = (6,), (36,), (1, 6, 6)  # shapes of a sample


def mlp():
    """On FLAT."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def long_mlp():
    """On LONG, with few enough samples for `span`."""
    return nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def with_dropout(dropout=nn.Dropout):
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), dropout(0.5), nn.Linear(16, 8), dropout(0.25), nn.Linear(8, 3))


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def wide_cnn():
    """32 channels, which the engine keeps channels-last on the CPU."""
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3), nn.Flatten(), nn.Linear(16, 3))


class Replayed:
    """A program of the engine `compiled` that carries out the operations that another process would compile."""

    def __init__(self, recording: RecordedFunction):
        self.recording = RecordedFunction.of(recording.text)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self.recording.run(inputs)


def tasks_of(
    network: Network, sizes: Sequence[int], local: LocalSGD, proximal: Sequence[tuple[Any, ...]] = (), **fields: Any
) -> list[TrainingTask]:
    """Training of clients with `sizes[i]` random samples, each from its own model, for the steps that `local` says.

    proximal: (weight, columns, follow, every) of each term, whose anchor differs between clients.
    fields: of all tasks, or of what their clients hold, in place of these.
    """
    federation, tasks = uneven(sizes, network.input_shape), []
    per_step = getattr(fields.get("program"), "batches_per_step", 1)
    for client, steps in enumerate(local.steps_of(np.array(sizes), batches_per_step=per_step).tolist()):
        anchors = [network.new_model(9, 10 * client + which) for which in range(len(proximal))]
        terms = tuple(Proximal(weight, anchor, *rest) for (weight, *rest), anchor in zip(proximal, anchors))
        start_P, samples = network.new_model(1, client), federation.train(client)
        task = TrainingTask(client, start_P, *samples, steps, local, ADDRESS, held=HeldByClient(proximal=terms))
        tasks.append(with_fields(task, **fields))
    return tasks


def with_fields(task: TrainingTask, **fields: Any) -> TrainingTask:
    """The task with other fields, of its own or of what its client holds."""
    held = {name: value for name, value in fields.items() if name in vars(task.held)}
    own = {name: value for name, value in fields.items() if name not in held}
    return replace(task, held=replace(task.held, **held), **own)


def results(engine, network: Network, tasks: Iterable[TrainingTask]) -> list[TrainingResult]:
    """The results, on the CPU; rows are copies, because an engine reuses their memory."""
    return [_copied(result) for result in engine.train(network, tasks)]


def _copied(result: TrainingResult) -> TrainingResult:
    tensors = {name: value.cpu() for name, value in vars(result).items() if isinstance(value, Tensor)}
    return replace(result, **tensors | {"row_P": tensors["row_P"].clone()})


def rows(engine, network: Network, tasks: Iterable[TrainingTask]) -> Tensor:
    return torch.stack([result.row_P for result in results(engine, network, tasks)])


def assert_same(network: Network, tasks: Sequence[TrainingTask], engine, bound: float = 1e-5) -> None:
    """Whether an engine trains these clients, together, as the sequential engine does.

    bound: of the largest difference, relative to the largest value (`closeness.close`). A client that is at a kink on
    this CPU may differ more, by no more than the kink explains; at most half of the clients are.
    """
    assert engine.why_not(network, tasks) is None
    found, kinks = results(engine, network, tasks), []
    assert [result.index for result in found] == list(range(len(tasks)))
    for task, one, expected in zip(tasks, found, results(sequential, network, tasks)):
        assert (expected.row_P - task.start_P).abs().max() > 1e-3, "nothing was trained"
        if differing := _differences(one, expected, bound):
            assert _is_at_a_kink(network, task, one, expected, bound), (task.client, differing)
            kinks.append(task.client)
    assert 2 * len(kinks) <= len(tasks), f"clients {kinks} of {len(tasks)} are at a kink"


def _differences(one: TrainingResult, expected: TrainingResult, bound: float) -> dict[str, float | Tensor]:
    found = {}
    if one.train_loss != pytest.approx(expected.train_loss, rel=5e-5, abs=bound):
        found["train_loss"] = one.train_loss - expected.train_loss
    for name in ("row_P", "replacement_P", "velocity"):
        values, others = getattr(one, name), getattr(expected, name)
        assert (values is None) == (others is None), name
        if values is not None and not close(values, others, bound):
            found[name] = values - others
    return found


def _is_at_a_kink(
    network: Network, task: TrainingTask, one: TrainingResult, expected: TrainingResult, bound: float
) -> bool:
    """Whether rounding decides the sequential result itself, and explains how far another engine's result is from it.

    The largest two inputs of a max-pool, or an input of a ReLU and 0, are then equal up to rounding, which differs
    between CPUs, and the gradient goes one way or the other: so do the results from starts that differ by rounding.
    """
    draw, moves = torch.Generator().manual_seed(0), [0.0]
    for _ in range(8):
        noise_P = 3e-7 * torch.randn(task.start_P.shape, generator=draw).to(task.start_P.device)
        (moved,) = results(sequential, network, [replace(task, start_P=task.start_P * (1 + noise_P))])
        if not close(moved.row_P, expected.row_P, bound):
            moves.append(float((moved.row_P - expected.row_P).abs().max()))
    return float((one.row_P - expected.row_P).abs().max()) <= 2 * max(moves) > 0


def loaded(factory: Callable[[], nn.Module], network: Network, row_P: Tensor) -> nn.Module:
    """A new module with the trained parameters of a row."""
    module = factory()
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), network.spec.tensors(row_P).values()):
            parameter.copy_(value)
    return module


def logits_of(network: Network, row_P: Tensor, x: Tensor) -> Tensor:
    """Outputs (n, *output_shape) of a row in evaluation mode. The row stays loaded."""
    network.load(row_P)
    return network.logits(x)


def by_torch(
    factory: Callable[[], nn.Module], network: Network, task: TrainingTask, optimizer=None
) -> tuple[Tensor, list[float]]:
    """The row of one client, and its loss in every step, in plain PyTorch, with proximal terms as part of the loss.

    optimizer: makes an optimiser of parameters; None: `torch.optim.SGD` with the settings of the task.
    """
    module, local, losses = loaded(factory, network, task.start_P), task.local, []
    if optimizer is None:
        options = {"lr": local.lr, "momentum": local.momentum, "weight_decay": local.weight_decay}
        updates = torch.optim.SGD(module.parameters(), **options)
    else:
        updates = optimizer(module.parameters())
    for number, batch in enumerate(task.batches(), 1):
        x, y = (task.x, task.y) if batch is None else (task.x[batch], task.y[batch])
        logits = module(x)
        if task.held.frozen_P is not None:
            logits = logits + loaded(factory, network, task.held.frozen_P).eval()(x).detach()
        loss = cross_entropy(logits, y)
        losses.append(loss.item())
        for term in task.held.proximal:
            anchors = network.spec.tensors(term.anchor).values()
            loss = loss + term.weight / 2 * sum(((p - a) ** 2).sum() for p, a in zip(module.parameters(), anchors))
        updates.zero_grad()
        loss.backward()
        if local.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), local.clip_norm)
        if local.step_schedule is not None:
            updates.param_groups[0]["lr"] = local.lr * local.step_schedule(number, task.steps)
        updates.step()
    return network.spec.row_of(module), losses
