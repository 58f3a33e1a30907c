"""Every entry of `ENGINES` keeps the protocol, and what an engine cannot train is said once."""

import re
from dataclasses import replace
from typing import get_args

import pytest
import torch
from closeness import close
from federations import Stage, uneven
from torch import nn
from training_tasks import LONG, assert_same, long_mlp, rows, tasks_of

from cfl_ray.config import RuntimeConfig
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import sequential
from cfl_ray.engine.engines import ENGINES
from cfl_ray.nn.network import Network


def long_batch_norm():
    return nn.Sequential(nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_are_those_of_the_configuration():
    assert set(ENGINES) == set(get_args(RuntimeConfig.model_fields["engine"].annotation)) - {"auto"}


ON_CPU = "manual", "compiled"


@pytest.mark.parametrize("name", [pytest.param(e, marks=pytest.mark.cpu) if e in ON_CPU else e for e in ENGINES])
def test_train_the_same_rows_in_order(name):
    network, engine = Network(long_mlp, LONG), ENGINES[name]
    assert 1 <= engine.chunk_size(3) <= 3
    local = LocalSGD(epochs=3, batch_size=4 if name == "compiled" else None)
    assert_same(network, tasks_of(network, [9, 6, 7], local), engine)


@pytest.mark.parametrize("name", [name for name, engine in ENGINES.items() if engine.train_sums])
def test_sums_are_those_of_the_rows(name):
    network = Network(long_mlp, LONG)
    tasks = tasks_of(network, [9, 6, 7], LocalSGD(epochs=3))
    change_mP = rows(sequential, network, tasks) - torch.stack([task.start_P for task in tasks])
    found = torch.zeros(network.spec.size)
    for first, batch in ENGINES[name].train_sums(network, iter(tasks)):
        found += batch.change(dict.fromkeys(range(len(batch.tasks)), 2.0)).cpu()
        assert [task.client for task in batch.tasks] == [0, 1, 2][first : first + len(batch.tasks)]
    assert close(found, 2 * change_mP.sum(0), 2e-5)


@pytest.mark.parametrize(
    "engine, factory, local, reason",
    [
        pytest.param("manual", long_mlp, LocalSGD(batch_size=300), "more than 256 samples", marks=pytest.mark.cpu),
        pytest.param("compiled", long_mlp, LocalSGD(), "a batch has all samples", marks=pytest.mark.cpu),
        ("span", long_mlp, LocalSGD(batch_size=4), "batches are smaller than a client's data"),
        ("vectorised", long_batch_norm, LocalSGD(), "batches of one size and equal steps"),
    ],
)
def test_clients_that_an_engine_cannot_train_are_trained_sequentially_with_the_reason(engine, factory, local, reason):
    stage, plain = (Stage(uneven([9, 6, 300] * 4, LONG), factory, local, name) for name in (engine, "sequential"))
    sums = []
    for one in (stage, plain):
        clients = one.clients()
        updates = clients.train(clients.send(one.model()[None]), average=torch.ones(1, 12))
        sums.append(updates.averaged(default=torch.zeros(1, one.network.spec.size)))
    assert close(*sums, 1e-6) and plain.stats.fallbacks == set()
    (line,) = stage.stats.fallbacks
    assert line.startswith(f"{engine} gives way to sequential for some or all clients: ")
    assert re.search(reason, line)


def test_an_engine_of_ones_own_is_one_entry(monkeypatch):
    """The worker asks the entry, whatever its name."""
    trained = []

    def train(network, tasks):
        for task in tasks:
            trained.append(task.client)
            yield from ENGINES["sequential"].train(network, [task])

    monkeypatch.setitem(ENGINES, "mine", replace(ENGINES["sequential"], train=train))
    stage = Stage(uneven([9, 6, 7], LONG), long_mlp, LocalSGD(), "mine")
    clients = stage.clients()
    clients.train(clients.send(stage.model()[None]), average=torch.ones(1, 3))
    assert trained == [0, 1, 2]
