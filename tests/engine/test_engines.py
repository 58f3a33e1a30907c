"""Every entry of `ENGINES` keeps the protocol, and what an engine cannot train is said once."""

import re
from dataclasses import replace
from typing import get_args

import pytest
import torch
from federations import Stage, uneven
from torch import nn

from cfl_ray.config import RuntimeConfig
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.engine.engines import ENGINES
from cfl_ray.engine.task import TrainingTask
from cfl_ray.nn.network import Network

FLAT = (36,)


def mlp(rest=nn.ReLU):
    return lambda: nn.Sequential(nn.Linear(36, 8), rest(), nn.Linear(8, 3))


def tasks_of(network, local=LocalSGD(epochs=3)):
    federation, start_P = uneven([9, 6, 7], FLAT), network.new_model(0, 0)
    return [TrainingTask(i, start_P, *federation.train(i), 3, local, Address(0, 1, 1)) for i in range(3)]


def test_are_those_of_the_configuration():
    assert set(ENGINES) == set(get_args(RuntimeConfig.model_fields["engine"].annotation)) - {"auto"}


@pytest.mark.parametrize("name", ENGINES)
def test_train_the_same_rows_in_order(name):
    network = Network(mlp(), FLAT)
    tasks, engine = tasks_of(network), ENGINES[name]
    assert engine.applies(network, tasks) and 1 <= engine.chunk_size(3) <= 3
    expected = [result.row_P.clone() for result in ENGINES["sequential"].train(network, tasks)]
    results = [(result.index, result.row_P.clone()) for result in engine.train(network, iter(tasks))]
    assert [index for index, _ in results] == [0, 1, 2]
    assert torch.allclose(torch.stack([row_P for _, row_P in results]), torch.stack(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, engine in ENGINES.items() if engine.train_sums])
def test_sums_are_those_of_the_rows(name):
    network = Network(mlp(), FLAT)
    tasks = tasks_of(network)
    rows = [result.row_P.clone() for result in ENGINES["sequential"].train(network, tasks)]
    found = torch.zeros(network.spec.size)
    for first, batch in ENGINES[name].train_sums(network, iter(tasks)):
        found += batch.change(dict.fromkeys(range(len(batch.tasks)), 2.0))
        assert [task.client for task in batch.tasks] == [0, 1, 2][first : first + len(batch.tasks)]
    assert torch.allclose(found, 2 * (torch.stack(rows) - tasks[0].start_P).sum(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "engine, factory, local, reason",
    [
        ("manual", mlp(), LocalSGD(batch_size=300), "a batch has more than 256 samples"),
        ("span", mlp(), LocalSGD(batch_size=4), "batches are smaller than a client's data"),
        ("vectorised", mlp(lambda: nn.BatchNorm1d(8)), LocalSGD(), "batches of one size and equal steps"),
    ],
)
def test_clients_that_an_engine_cannot_train_are_trained_sequentially_with_the_reason(engine, factory, local, reason):
    stage, plain = (Stage(uneven([9, 6, 300] * 4, FLAT), factory, local, name) for name in (engine, "sequential"))
    sums = []
    for one in (stage, plain):
        clients = one.clients()
        updates = clients.train(clients.send(one.model()[None]), average=torch.ones(1, 12))
        sums.append(updates.averaged(default=torch.zeros(1, one.network.spec.size)))
    assert torch.allclose(*sums, rtol=0, atol=1e-6) and plain.stats.fallbacks == set()
    (line,) = stage.stats.fallbacks
    assert line.startswith(f"{engine} gives way to sequential for some clients: ")
    assert re.search(reason, line)


def test_an_engine_of_ones_own_is_one_entry(monkeypatch):
    """The worker asks the entry, whatever its name."""
    trained = []

    def train(network, tasks):
        for task in tasks:
            trained.append(task.client)
            yield from ENGINES["sequential"].train(network, [task])

    monkeypatch.setitem(ENGINES, "mine", replace(ENGINES["sequential"], train=train))
    stage = Stage(uneven([9, 6, 7], FLAT), mlp(), LocalSGD(), "mine")
    clients = stage.clients()
    clients.train(clients.send(stage.model()[None]), average=torch.ones(1, 3))
    assert trained == [0, 1, 2]
