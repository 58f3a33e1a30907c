"""Networks that users bring: frozen parts, parts that a forward pass does not touch, counters."""

import pytest
import torch
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.engine import sequential, vectorised
from cfl_ray.engine.task import TrainingTask
from cfl_ray.nn.network import Network

ENGINES = {"sequential": sequential.train, "vectorised": vectorised.train}


def tasks_of(network: Network, clients: int = 3) -> list[TrainingTask]:
    draw = torch.Generator().manual_seed(0)
    samples = [(torch.randn(8, 6, generator=draw), torch.randint(0, 3, (8,), generator=draw)) for _ in range(clients)]
    start = network.new_model(0, 0)
    return [
        TrainingTask(client, start, x, y, 4, LocalSGD(2, None, 4, 0.1, weight_decay=0.1), Address(0, 1, 1))
        for client, (x, y) in enumerate(samples)
    ]


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    return module


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_parameters_travel_and_stay(engine):
    network = Network(frozen, (6,))
    assert network.spec.trained == 5 * 3 + 3 and network.spec.size == network.spec.trained + 6 * 5 + 5
    tasks = tasks_of(network)
    for trained in ENGINES[engine](network, tasks):
        start = tasks[trained.index].start_P
        assert torch.equal(trained.row_P[network.spec.trained :], start[network.spec.trained :])
        assert not torch.equal(trained.row_P[: network.spec.trained], start[: network.spec.trained])


@pytest.mark.parametrize("engine", ENGINES)
def test_unused_parameters_only_decay(engine):
    network = Network(Unused, (6,))
    tasks = tasks_of(network)
    for trained in ENGINES[engine](network, tasks):
        before, after = (
            network.spec.tensors(row)["unused.weight"] for row in (tasks[trained.index].start_P, trained.row_P)
        )
        torch.testing.assert_close(
            after, before * (1 - 0.1 * 0.1) ** 4
        )  # (1 - lr * weight_decay) per step, no gradient


def test_a_client_does_not_see_how_often_others_trained():
    """BatchNorm with momentum=None averages over all batches so far, by an integer counter that no row holds."""
    network = Network(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)), (6,))
    tasks = tasks_of(network)
    first, again = ([trained.row_P.clone() for trained in sequential.train(network, tasks)] for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert "counter" in vectorised.why_not(network, tasks)
