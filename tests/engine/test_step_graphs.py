"""Recorded steps of vmap batches: the same results as one operation after another, and when they are used.

On a CPU, a record is the step itself, on the tensors of the record. With `--device cuda`, it is a CUDA graph.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from federations import Stage, planted
from torch import nn
from training_tasks import FLAT, mlp, tasks_of, with_batch_norm, with_dropout, with_fields

from cfl_ray.core.clients import ClientProgram
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.optimizers import resolve_optimizer
from cfl_ray.core.params import Columns
from cfl_ray.engine import step_graphs
from cfl_ray.engine.step_graphs import StepGraphs
from cfl_ray.engine.vmap_steps import VmapSteps
from cfl_ray.methods.per_fedavg import FirstOrder
from cfl_ray.methods.pfedgraph import Aligned
from cfl_ray.methods.pfedme import KeptTheta
from cfl_ray.nn.network import Network

SGD = LocalSGD(epochs=4, batch_size=4, lr=0.1)
SIZES = [9, 12, 3]


def record(step, memory):
    """A first call, as libraries need it, and the step."""
    if memory.device.type == "cuda":
        return step_graphs.record(step, memory)
    step()
    return step, 100


@pytest.fixture
def graphs():
    """Returns a function: network -> its graphs, with the number of steps recorded in `recorded`."""

    def of(network: Network) -> StepGraphs:
        made = StepGraphs(network.memory, counted)
        if network.device.type == "cpu":
            network.memory.free = lambda: 10**6
        return made

    def counted(step, memory):
        of.recorded += 1
        return record(step, memory)

    of.recorded = 0
    return of


def trained(graphs: StepGraphs, network: Network, tasks) -> VmapSteps:
    steps = VmapSteps(network, tasks)
    graphs.take_all(steps)
    return steps


def assert_as_without(graphs: StepGraphs, network: Network, tasks) -> None:
    found, expected = trained(graphs, network, tasks), VmapSteps(network, tasks)
    start_mP = expected.rows_mP.clone()
    expected.take_all()
    assert (expected.rows_mP - start_mP).abs().max() > 1e-3, "nothing was trained"
    values = ((steps.rows_mP, steps.velocity_mP, steps.loss_m, *steps.held.values()) for steps in (found, expected))
    for value, other in zip(*values, strict=True):
        assert (value is None) == (other is None) and (value is None or torch.equal(value, other))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.9, "persist": True},
        {"clip_norm": 0.05, "weight_decay": 0.01},
        {"step_schedule": lambda step, steps: 1 / step},
        {"batch_size": None, "epochs": 20},
    ],
    ids=lambda changes: ", ".join(changes) or "plain",
)
def test_the_results_are_those_of_single_operations(changes, graphs):
    network, local = Network(mlp, FLAT), replace(SGD, **changes)
    recorded = graphs(network)
    for sizes in (SIZES, [12, 2, 10], [5, 12, 12]):
        assert_as_without(recorded, network, tasks_of(network, sizes, replace(local, epochs=2 * local.epochs)))
    assert graphs.recorded == 1, "batches of one kind share a record"


@pytest.mark.parametrize("factory", [with_dropout, with_batch_norm])
def test_masks_and_batch_statistics(factory, graphs):
    network = Network(factory, FLAT)
    if network.dropouts and network.device.type == "cpu":
        pytest.skip("on a CPU, masks are drawn by NumPy")
    recorded = graphs(network)
    for lr in (0.1, 0.2):
        local = replace(SGD, lr=lr, step_schedule=lambda step, steps: 1 / step)
        assert_as_without(recorded, network, tasks_of(network, [16] * 3, local))
    assert graphs.recorded == 1, "rates by step are no part of a record"


def test_proximal_terms_and_frozen_models(graphs):
    network = Network(mlp, FLAT)
    recorded, head = graphs(network), Columns(((56, 83),))
    for seed in (1, 2):
        frozen = network.new_model(seed, 5)
        tasks = tasks_of(network, SIZES, replace(SGD, epochs=8), [(0.3, head), (0.1,)], frozen_P=frozen)
        assert_as_without(recorded, network, tasks)
    first, second = tasks[0].held.proximal
    tasks[0] = with_fields(tasks[0], proximal=(replace(first, weight=0.5), second))
    assert_as_without(recorded, network, tasks)
    assert graphs.recorded == 2, "weights that differ between clients are another kind"


@dataclass(frozen=True)
class _Near(ClientProgram):
    """A loss on the features of the model and of another one, and a step with a pass of that."""

    mu: float
    only_tensors: ClassVar = True

    def loss(self, batch, held):
        other = batch.forward("a")
        return batch.loss + self.mu * batch.mean((batch.features - other.features).square().sum(1))

    def step(self, gradient, w, held, number):
        return gradient(w, 0) + 0.1 * (gradient.forward("a", 0).outputs.mean((-2, -1)))[..., None]


@pytest.mark.parametrize(
    "program, model",
    [(FirstOrder(0.1), ""), (KeptTheta(1.0, 2, 0.1, 0.0), "theta"), (Aligned(0.3), "a"), (_Near(0.5), "a")],
    ids=["per_fedavg", "pfedme", "pfedgraph", "a loss on features"],
)
def test_steps_of_methods_and_second_models(program, model, graphs):
    network = Network(mlp, FLAT)
    recorded = graphs(network)
    for seed in (1, 2):
        models = {model: network.new_model(seed, 5)} if model else {}
        tasks = tasks_of(network, SIZES, replace(SGD, epochs=16), program=program, models=models)
        assert_as_without(recorded, network, tasks)
    assert graphs.recorded == 1


def test_a_few_steps_are_recorded_when_their_kind_comes_again(graphs):
    network = Network(mlp, FLAT)
    recorded, tasks = graphs(network), tasks_of(network, SIZES, SGD)
    trained(recorded, network, tasks[:2])
    trained(recorded, network, tasks)
    assert graphs.recorded == 0
    trained(recorded, network, tasks)
    assert graphs.recorded == 1
    trained(recorded, network, tasks_of(network, SIZES, replace(SGD, epochs=8)))
    assert graphs.recorded == 2, "more steps than there is room for"
    network.memory.measuring = True
    trained(recorded, network, tasks_of(network, SIZES, replace(SGD, epochs=16)))
    assert graphs.recorded == 2, "not while the need of clients is measured"


def test_steps_with_something_on_the_host_are_not_recorded(graphs):
    network = Network(mlp, FLAT)
    recorded, local = graphs(network), replace(SGD, epochs=8)
    adam = replace(local, optimizer=resolve_optimizer("adam", {}))
    moving = tasks_of(network, SIZES, local, [(0.3, None, 0.5)])
    own = tasks_of(network, SIZES, local, program=_Half())
    traced = tasks_of(network, SIZES, local, program=ClientProgram(trace=3))
    for tasks in (tasks_of(network, SIZES, adam), moving, own, traced):
        assert_as_without(recorded, network, tasks)
        assert VmapSteps(network, tasks).kind() is None
    assert graphs.recorded == 0


class _Half(ClientProgram):
    def step(self, gradient, w, held, number):
        return gradient(w, 0) / 2


def test_a_step_that_cannot_be_recorded_is_taken_without(graphs):
    """Its reason is kept, and it is not tried again; the same with records that would hold much memory."""
    network, tries = Network(mlp, FLAT), []

    def refuse(step, memory):
        step()
        tries.append(1)
        raise RuntimeError("a value is read\nsomewhere")

    graphs(network)
    tasks, held = tasks_of(network, SIZES, replace(SGD, epochs=8)), lambda step, memory: (step, memory.free() // 3)
    for recorder, reason in ((refuse, "a value is read"), (held, "its intermediate results would hold ")):
        recorded = StepGraphs(network.memory, recorder)
        for _ in range(2):
            assert_as_without(recorded, network, tasks)
        ((_, found),) = recorded.refused.items()
        assert found.startswith(reason) and network.memory.held == 0
    assert len(tries) == 1


def test_few_records_are_kept_and_given_back(graphs):
    network = Network(mlp, FLAT)
    recorded = graphs(network)
    for size in (2, 3, 4, 5, 6, 7):
        trained(recorded, network, tasks_of(network, [16] * size, replace(SGD, epochs=8)))
    held = network.memory.held
    assert graphs.recorded == 6 and (held == 400 or network.device.type == "cuda")
    trained(recorded, network, tasks_of(network, [16] * 7, replace(SGD, epochs=8)))
    assert graphs.recorded == 6
    network.memory.drop_caches()
    assert network.memory.held == 0
    assert_as_without(recorded, network, tasks_of(network, [16] * 7, replace(SGD, epochs=8)))
    assert graphs.recorded == 7


def test_engines_use_them_on_a_gpu_alone():
    network = Network(lambda: nn.Linear(6, 3), FLAT)
    graphs = step_graphs.graphs_of(network)
    assert graphs is step_graphs.graphs_of(network)
    assert graphs.record is (step_graphs.record if network.device.type == "cuda" else None)


def test_a_batch_whose_copy_does_not_fit_is_trained_without(graphs, monkeypatch):
    """It is not halved: the batch itself fits."""
    network = Network(mlp, FLAT)
    recorded = graphs(network)

    def full(steps):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(VmapSteps, "on_static_tensors", full)
    assert_as_without(recorded, network, tasks_of(network, SIZES, replace(SGD, epochs=8)))
    assert list(recorded.refused.values()) == ["CUDA out of memory."] and graphs.recorded == 0


def test_a_round_says_why_steps_are_not_recorded(monkeypatch):
    def refusing(step, memory):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    def factory():
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))

    one = Stage(planted(16, samples=20), factory, SGD, engine="vectorised")
    monkeypatch.setitem(step_graphs._GRAPHS, one.network, StepGraphs(one.network.memory, refusing))
    monkeypatch.setattr(one.network.memory, "free", lambda: 10**6)
    clients = one.clients()
    w = one.model()[None]
    for _ in range(2):
        clients.train(clients.send(w), average=torch.ones(1, len(clients))).averaged(w)
    (line,) = clients.stats.fallbacks
    assert line.endswith("which is slower: operation not permitted when stream is capturing")
