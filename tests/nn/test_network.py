"""Networks that users bring: frozen parts, parts that a forward pass does not touch, counters."""

import pytest
import torch
import training_tasks
from closeness import close
from torch import nn
from training_tasks import results, rows

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import sequential, vectorised
from cfl_ray.engine.task import TrainingTask
from cfl_ray.errors import ConfigError
from cfl_ray.nn.network import Network, template_of
from cfl_ray.nn.shared import digest_of

ENGINES = [sequential, vectorised]


def tasks_of(network: Network) -> list[TrainingTask]:
    local = LocalSGD(2, None, 4, 0.1, weight_decay=0.1)
    return training_tasks.tasks_of(network, [8] * 3, local, start_P=network.new_model(0, 0))


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
def test_frozen_parameters_are_no_columns_and_stay(engine):
    network = Network(frozen, (6,))
    assert network.spec.size == network.spec.trained == 5 * 3 + 3
    before = {name: tensor.clone() for name, tensor in network.frozen.items()}
    assert list(before) == ["0.weight", "0.bias"]
    tasks = tasks_of(network)
    for trained in results(engine, network, tasks):
        assert not torch.equal(trained.row_P, tasks[trained.index].start_P)
    assert all(torch.equal(network.frozen[name], tensor) for name, tensor in before.items())


def test_engines_agree_on_a_network_with_frozen_parameters():
    network = Network(frozen, (6,), seed=3, template=template_of(frozen, 3, (6,)))
    assert close(*(rows(engine, network, tasks_of(network)) for engine in ENGINES), 1e-5)


@pytest.mark.cpu
def test_frozen_parameters_are_those_of_the_first_model_of_the_run():
    alone = Network(frozen, (6,), seed=3)
    network = Network(frozen, (6,), seed=3, template=template_of(frozen, 3, (6,)))
    assert digest_of(alone.frozen) == digest_of(network.frozen) != digest_of(Network(frozen, (6,), seed=4).frozen)
    assert network.module[0].weight.data_ptr() == network.template[0].weight.data_ptr(), "no copy"
    assert not torch.equal(network.new_model(3, 0), network.new_model(3, 1))


@pytest.mark.cpu
def test_convolutions_are_shared_in_the_layout_that_they_are_computed_in():
    def factory() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 32, 3).requires_grad_(False), nn.Flatten(), nn.Linear(32 * 4, 2))

    template = template_of(factory, 0, (3, 4, 4))
    shared, alone = Network(factory, (3, 4, 4), template=template), Network(factory, (3, 4, 4))
    assert shared.module[0].weight.data_ptr() == template[0].weight.data_ptr()
    assert shared.module[0].weight.stride() == alone.module[0].weight.stride() == (27, 1, 9, 3)


def test_a_network_without_frozen_parameters_has_no_template():
    assert template_of(Unused, 0, (6,)) is None and not Network(Unused, (6,)).frozen


def test_every_call_of_the_factory_freezes_the_same():
    calls = []

    def factory() -> nn.Module:
        module = frozen()
        calls.append(module[0].weight.requires_grad_(len(calls) > 0))
        return module

    network = Network(factory, (6,))
    with pytest.raises(ConfigError, match=r"other trained parameters .* in another call of its factory \(0.weight"):
        network.new_model(0, 0)


def test_requires_grad_stays():
    class Thawing(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if self.requires_grad_() else None

    with pytest.raises(ConfigError, match=r"other trained parameters .* after a forward pass \(0.bias differs"):
        Network(lambda: Thawing(*frozen()), (6,))


def test_a_frozen_parameter_that_a_forward_pass_writes_to_is_refused():
    def factory() -> nn.Module:
        table = nn.Embedding(5, 4, max_norm=0.1)
        table.weight.requires_grad_(False)
        return nn.Sequential(table, nn.Flatten(), nn.Linear(6 * 4, 3))

    with pytest.raises(ConfigError, match="writes to its frozen parameter 0.weight"):
        Network(factory, (6,), dtype=torch.int64)


@pytest.mark.parametrize("engine", ENGINES)
def test_unused_parameters_only_decay(engine):
    network = Network(Unused, (6,))
    tasks = tasks_of(network)
    for trained in results(engine, network, tasks):
        before, after = (
            network.spec.tensors(row)["unused.weight"] for row in (tasks[trained.index].start_P, trained.row_P)
        )
        assert close(after, before * (1 - 0.1 * 0.1) ** 4, 1e-5)  # (1 - lr * weight_decay) per step, no gradient


def test_a_client_does_not_see_how_often_others_trained():
    """BatchNorm with momentum=None averages over all batches so far, by an integer counter that no row holds."""
    network = Network(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)), (6,))
    tasks = tasks_of(network)
    assert torch.equal(*(rows(sequential, network, tasks) for _ in range(2)))
    assert "counter" in vectorised.why_not(network, tasks)
