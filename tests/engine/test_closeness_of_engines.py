"""`assert_same` leaves out clients at a kink, but no fault of an engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training_tasks import FLAT, IMAGE, assert_same, mlp, tasks_of, wide_cnn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import sequential
from cfl_ray.nn.network import Network

LOCAL = LocalSGD(steps=6, batch_size=4, lr=0.1, momentum=0.9)


def engine_with(change):
    """The sequential engine, with results that `change(task, result)` makes of its own."""

    def train(network, tasks):
        for task, result in zip(tasks, sequential.train(network, tasks)):
            yield replace(result, row_P=change(task, result.row_P.clone()))

    return SimpleNamespace(why_not=lambda network, tasks: None, train=train)


@pytest.mark.parametrize("factory, shape", [(mlp, FLAT), (wide_cnn, IMAGE)])
@pytest.mark.parametrize("clients", [1, 3])
def test_a_fault_of_a_thousandth_of_a_step_is_found(factory, shape, clients):
    network = Network(factory, shape)
    tasks = tasks_of(network, [10, 7, 5][:clients], LOCAL)
    assert_same(network, tasks, engine_with(lambda task, row_P: row_P))
    faulty = engine_with(lambda task, row_P: row_P + 1e-3 * (row_P - task.start_P) * (task.client == clients - 1))
    with pytest.raises(AssertionError):
        assert_same(network, tasks, faulty)


def at_a_kink(network, client):
    """A task whose first ReLU has inputs that are 0 up to rounding, for every sample."""
    (task,) = tasks_of(network, [8], LocalSGD(epochs=1, lr=0.5))
    x = torch.ones_like(task.x)
    row_P = task.start_P.clone()
    first = network.spec.tensors(row_P)["0.weight"]
    first[:] = torch.tensor([0.7, 0.1, 0.2, -0.3, -0.4, -0.3])
    network.spec.tensors(row_P)["0.bias"][:] = 0
    return replace(task, client=client, start_P=row_P, x=x)


def kinked():
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def moved(by):
    """Results of starts that differ by rounding; `by` times as far."""

    def change(task, row_P):
        if task.client != 9:
            return row_P
        network = Network(kinked, FLAT)
        noise_P = 3e-7 * torch.randn(task.start_P.shape, generator=torch.Generator().manual_seed(5))
        (other,) = [
            r.row_P.clone() for r in sequential.train(network, [replace(task, start_P=task.start_P * (1 + noise_P))])
        ]
        return row_P + by * (other - row_P)

    return engine_with(change)


def test_a_client_at_a_kink_may_differ_by_what_the_kink_explains():
    network = Network(kinked, FLAT)
    others, kink = tasks_of(network, [10, 7], LOCAL), at_a_kink(network, 9)
    assert_same(network, [*others, kink], moved(1))
    with pytest.raises(AssertionError, match="row_P"):
        assert_same(network, [*others, kink], moved(10))
    with pytest.raises(AssertionError, match=r"clients \[9\] of 1 are at a kink"):
        assert_same(network, [kink], moved(1))
