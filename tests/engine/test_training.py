"""The sequential engine equals PyTorch's optimiser, and every other engine equals the sequential one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, uneven
from torch import nn
from training_tasks import (
    ADDRESS,
    FLAT,
    IMAGE,
    LONG,
    assert_same,
    by_torch,
    long_mlp,
    mlp,
    results,
    rows,
    tasks_of,
    wide_cnn,
    with_batch_norm,
    with_dropout,
    with_fields,
)

from cfl_ray.core.clients import ClientState, LocalTraining, Proximal
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns
from cfl_ray.engine import sequential, span, vectorised
from cfl_ray.nn.network import Network
from cfl_ray.nn.splitmix import keys_on


def cnn():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def channel_dropout():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(64, 3))


def group_norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


LOCALS = {
    "full batch": LocalSGD(epochs=4, lr=0.3),
    "mini-batches, the last one partial": LocalSGD(epochs=3, batch_size=4, lr=0.2),
    "momentum": LocalSGD(epochs=3, batch_size=4, lr=0.1, momentum=0.9),
    "weight decay": LocalSGD(epochs=3, batch_size=4, lr=0.2, weight_decay=0.05),
    "all of it, steps ending within an epoch": LocalSGD(steps=7, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01),
}

TERMS = ((0.3, None), (0.15, None))  # weights and columns of two proximal terms
EXTREMES = ["full batch", "all of it, steps ending within an epoch"]


class TestSequentialIsTorchSGD:
    @pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
    @pytest.mark.parametrize("proximal", [(), TERMS], ids=["plain", "proximal"])
    def test_of_one_client(self, local, proximal):
        """torch.optim.SGD on the same batches, from an empty momentum buffer; the loss is that of the last epoch."""
        network = Network(mlp, FLAT)
        (task,) = tasks_of(network, [10], local, proximal)
        expected, losses = by_torch(mlp, network, task)
        plain, _ = by_torch(mlp, network, with_fields(task, proximal=()))
        assert close(expected, plain, 1e-3) == (not proximal), "the proximal terms have an effect"
        (result,) = results(sequential, network, [task])
        assert close(result.row_P, expected, 1e-5)
        per_epoch = -(-10 // (local.batch_size or 10))
        assert result.train_loss == pytest.approx(np.mean(losses[-per_epoch:]), rel=1e-5), "that of the data alone"

    def test_the_momentum_of_one_client_does_not_reach_the_next(self):
        network = Network(mlp, FLAT)
        tasks = tasks_of(network, [10, 10, 10], LOCALS["momentum"])
        together = rows(sequential, network, tasks)
        alone = torch.cat([rows(sequential, network, [task]) for task in reversed(tasks)]).flip(0)
        assert torch.equal(together, alone)


class TestVectorisedIsSequential:
    @pytest.mark.parametrize(
        "factory, shape, names",
        [
            (mlp, FLAT, LOCALS),
            (with_dropout, FLAT, LOCALS),
            (cnn, IMAGE, EXTREMES),
            (wide_cnn, IMAGE, EXTREMES),
            (group_norm, IMAGE, EXTREMES),
            (channel_dropout, IMAGE, EXTREMES),
        ],
    )
    def test_for_clients_of_different_sizes(self, factory, shape, names):
        network = Network(factory, shape)
        for name in names:
            assert_same(network, tasks_of(network, [10, 3, 7, 16], LOCALS[name]), vectorised)

    @pytest.mark.parametrize("columns", ["all", "head", "base"])
    @pytest.mark.parametrize("name", ["full batch", "momentum"])
    def test_with_proximal_terms(self, name, columns):
        network = Network(mlp, FLAT)
        terms = [(weight, getattr(network.spec, columns)) for weight, _ in TERMS]
        assert_same(network, tasks_of(network, [10, 3, 7], LOCALS[name], terms), vectorised)

    @pytest.mark.parametrize("factory", [mlp, with_dropout])
    def test_with_different_steps_per_client(self, factory):
        network = Network(factory, FLAT)
        tasks = tasks_of(network, [10, 3, 7], LOCALS["momentum"])
        assert_same(network, [replace(task, steps=n) for task, n in zip(tasks, [1, 9, 4])], vectorised)

    def test_with_batch_statistics_where_batches_are_equal(self):
        network = Network(with_batch_norm, FLAT)
        tasks = tasks_of(network, [12, 12, 12], replace(LOCALS["momentum"], batch_size=4))
        assert_same(network, tasks, vectorised)
        moved = rows(sequential, network, tasks) - torch.stack([task.start_P for task in tasks])
        assert moved[:, network.spec.trained :].all(), "statistics moved"

    @pytest.mark.parametrize("sizes, steps", [([12, 11], (4, 4)), ([12, 12], (3, 4))])
    def test_batch_statistics_of_unequal_batches_are_refused(self, sizes, steps):
        network = Network(with_batch_norm, FLAT)
        tasks = [replace(t, steps=n) for t, n in zip(tasks_of(network, sizes, LOCALS["full batch"]), steps)]
        assert "batches of one size and equal steps" in vectorised.why_not(network, tasks)
        assert vectorised.why_not(Network(mlp, FLAT), tasks) is None


@pytest.mark.parametrize(
    "factory, shape, size, local",
    [
        (cnn, IMAGE, 3, LocalSGD(epochs=2)),  # does not begin with a linear layer
        (mlp, FLAT, 4, LocalSGD(epochs=2)),  # more than half as many samples as inputs
        (mlp, FLAT, 3, LocalSGD(epochs=2, batch_size=2)),  # not full-batch
        (with_dropout, FLAT, 3, LocalSGD(epochs=2)),
    ],
)
def test_span_does_not_apply_elsewhere(factory, shape, size, local):
    network = Network(factory, shape)
    assert span.why_not(network, tasks_of(network, [size], local))
    assert span.why_not(Network(mlp, FLAT), tasks_of(Network(mlp, FLAT), [3], LocalSGD(epochs=2))) is None


class TestDropout:
    def test_masks_have_addresses(self):
        """Masks depend on the client and the address, not on other clients; the global generator is not used."""
        network = Network(with_dropout, FLAT)
        tasks = tasks_of(network, [10, 7], LOCALS["mini-batches, the last one partial"])
        state = torch.random.get_rng_state()
        together = rows(sequential, network, tasks)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.equal(rows(sequential, network, tasks[1:])[0], together[1])
        one = replace(tasks[1], local=LocalSGD(epochs=2), steps=2)
        other = replace(one, address=replace(ADDRESS, exchange=2))
        assert not torch.equal(*rows(sequential, network, [one, other]))

    def test_keeps_the_mean_and_drops_the_share(self):
        network = Network(with_dropout, FLAT)
        (mask,) = network.module[2].draw(keys_on(network.device, [3]), 5000)
        assert mask.shape == (5000, 16) and set(mask.unique().tolist()) == {0.0, 2.0}
        assert abs((mask == 0).float().mean().item() - 0.5) < 5 * 0.5 / np.sqrt(mask.numel())

    def test_of_channels_drops_whole_channels(self):
        network = Network(channel_dropout, IMAGE)
        (mask,) = network.module[1].draw(keys_on(network.device, [3]), 100)
        whole = mask.expand(100, 4, 4, 4)
        assert torch.equal(whole.amin((2, 3)), whole.amax((2, 3))) and set(mask.unique().tolist()) == {0.0, 2.0}

    def test_does_nothing_when_testing(self):
        network = Network(with_dropout, FLAT)
        for layer in network.dropouts.values():
            (layer.mask,) = layer.draw(keys_on(network.device, [3]), 1)
        x = torch.ones(3, 6)
        plain = network._build(0, 0).eval().to(network.device)
        network.load(network.spec.row_of(plain))
        assert torch.equal(network.logits(x), plain(network.input(x)))


class TestNetwork:
    @pytest.mark.parametrize("factory, shape", [(mlp, FLAT), (wide_cnn, IMAGE), (with_batch_norm, FLAT)])
    def test_a_row_goes_in_and_comes_out(self, factory, shape):
        network = Network(factory, shape)
        rows = [network.new_model(5, index) for index in (0, 1)]
        assert not torch.equal(*rows)
        for row_P in rows:
            network.load(row_P)
            assert torch.equal(network.row().cpu(), row_P)
            assert torch.equal(network.spec.row_of(network.module).cpu(), row_P)

    def test_initial_models_have_addresses(self):
        state = torch.random.get_rng_state()
        one, other = Network(mlp, FLAT), Network(mlp, FLAT)
        assert torch.equal(one.new_model(3, 2), other.new_model(3, 2))
        assert not torch.equal(one.new_model(3, 2), one.new_model(3, 1)) and not torch.equal(
            one.new_model(3, 2), one.new_model(4, 2)
        )
        assert torch.equal(torch.random.get_rng_state(), state)

    def test_columns_name_tensors(self):
        network = Network(mlp, FLAT)
        assert network.tensors_in(None) == [0, 1, 2, 3] and network.tensors_in(network.spec.head) == [2, 3]
        assert network.tensors_in(Columns(((0, 48),))) == [0]
        row_P = torch.arange(network.spec.size).float()
        assert [network.views(row_P)[i].shape for i in network.tensors_in(network.spec.head)] == [(3, 8), (3,)]


def test_engines_of_a_worker_agree_on_sums_losses_and_client_states():
    """Through the port: weighted sums, kept columns, a private head and P-local, with every engine."""
    found = {}
    for engine in ("sequential", "vectorised", "span", "manual"):
        stage = Stage(uneven([10, 6, 14, 9, 5], LONG), long_mlp, LocalSGD(epochs=3, lr=0.2), engine)
        found[engine] = port_results(stage)
    for engine in ("vectorised", "span", "manual"):
        for name, value in found["sequential"].items():
            assert close(found[engine][name], value, 1e-5), (engine, name)


def port_results(stage: Stage) -> dict[str, torch.Tensor]:
    head = ClientState("head", stage.network.spec.head)
    start_KP = torch.stack([stage.model(0), stage.model(1)])
    weight_RM = torch.tensor([[1.0, 2, 0, 0, 1], [0, 0, 3, 1, 1]])
    for number in (1, 2):  # the second time from the heads of the first
        clients = replace(stage.clients(round=number), local_test_samples=100)
        sent = clients.send(start_KP, np.array([0, 0, 1, 1, 0]))
        updates = clients.train(
            sent,
            how=LocalTraining(proximal=[Proximal(0.1, sent)]),
            average=weight_RM,
            client_state=head,
            features=stage.network.spec.head,
        )
    kept = torch.stack([stage.client_states["head", client] for client in range(5)])
    assert torch.equal(kept, updates.features_MF)
    local_scores = torch.tensor([stage.stats.local_scores[client] for client in range(5)])
    return {
        "averaged": updates.averaged(default=start_KP),
        "features": updates.features_MF,
        "loss": torch.tensor(updates.train_loss_M),
        "local_scores": local_scores,
    }
