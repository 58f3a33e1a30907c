"""The sequential engine equals PyTorch's optimiser, and every other engine equals the sequential one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import Stage, uneven
from torch import nn
from torch.nn.functional import cross_entropy

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns
from cfl_ray.core.work import Address, Proximal
from cfl_ray.engine import sequential, span, vectorised
from cfl_ray.engine.task import TrainingTask
from cfl_ray.nn.network import Network

ADDRESS = Address(seed=0, round=3, exchange=1)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def cnn():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def wide_cnn():
    """32 channels, which the engine keeps channels-last on the CPU."""
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3), nn.Flatten(), nn.Linear(16, 3))


def dropout():
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.25), nn.Linear(8, 3)
    )


def channel_dropout():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(64, 3))


def batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def group_norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


IMAGE, FLAT = (1, 6, 6), (6,)
LOCALS = {
    "full batch": LocalSGD(epochs=4, lr=0.3),
    "mini-batches, the last one partial": LocalSGD(epochs=3, batch_size=4, lr=0.2),
    "momentum": LocalSGD(epochs=3, batch_size=4, lr=0.1, momentum=0.9),
    "weight decay": LocalSGD(epochs=3, batch_size=4, lr=0.2, weight_decay=0.05),
    "all of it, steps ending within an epoch": LocalSGD(steps=7, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01),
}

EXTREMES = ["full batch", "all of it, steps ending within an epoch"]


def tasks_of(network: Network, sizes, local: LocalSGD, steps=None, proximal=0, columns=None) -> list[TrainingTask]:
    federation = uneven(sizes, network.input_shape)
    tasks = []
    for client, size in enumerate(sizes):
        count = int(local.steps_of(np.array([size]))[0]) if steps is None else steps[client]
        anchors = tuple(
            Proximal(0.3 / (1 + which), network.new_model(9, 10 * client + which), columns) for which in range(proximal)
        )
        tasks.append(
            TrainingTask(
                client, network.new_model(1, client), *federation.train(client), count, local, ADDRESS, anchors
            )
        )
    return tasks


def results(engine, network: Network, tasks) -> tuple[torch.Tensor, list[float]]:
    found = [(trained.index, trained.row_P.clone(), trained.train_loss) for trained in engine.train(network, tasks)]
    assert [index for index, _, _ in found] == list(range(len(tasks)))
    return torch.stack([row for _, row, _ in found]), [loss for _, _, loss in found]


def assert_same(network, tasks, engine=vectorised):
    rows, losses = results(sequential, network, tasks)
    starts = torch.stack([task.start_P for task in tasks])
    assert (rows - starts).abs().max(1).values.min() > 1e-3, "nothing was trained"
    others, other_losses = results(engine, network, tasks)
    assert torch.allclose(others, rows, rtol=0, atol=1e-5), (others - rows).abs().max()
    assert other_losses == pytest.approx(losses, abs=1e-5)


class TestSequentialIsTorchSGD:
    @pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
    def test_of_one_client(self, local):
        """torch.optim.SGD on the same batches, from an empty momentum buffer; the loss is that of the last epoch."""
        network = Network(mlp, FLAT)
        (task,) = tasks_of(network, [10], local)
        expected, last_epoch = self.torch_sgd(network, task)
        rows, losses = results(sequential, network, [task])
        assert torch.allclose(rows[0], expected, rtol=0, atol=1e-6)
        assert losses[0] == pytest.approx(np.mean(last_epoch), abs=1e-6)

    @pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
    def test_with_the_proximal_term_added_to_the_loss(self, local):
        network = Network(mlp, FLAT)
        (task,) = tasks_of(network, [10], local, proximal=2)
        expected, last_epoch = self.torch_sgd(network, task)
        assert not torch.allclose(expected, self.torch_sgd(network, replace(task, proximal=()))[0], atol=1e-3), (
            "the proximal terms have no effect"
        )
        rows, losses = results(sequential, network, [task])
        assert torch.allclose(rows[0], expected, rtol=0, atol=1e-6)
        assert losses[0] == pytest.approx(np.mean(last_epoch), abs=1e-6), "the train loss is that of the data alone"

    def torch_sgd(self, network: Network, task: TrainingTask) -> tuple[torch.Tensor, list[float]]:
        module = mlp()
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), network.spec.tensors(task.start_P).values()):
                parameter.copy_(value)
        local = task.local
        optimiser = torch.optim.SGD(
            module.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
        )
        losses = []
        for batch in task.batches():
            x, y = (task.x, task.y) if batch is None else (task.x[batch], task.y[batch])
            data_loss = cross_entropy(module(x), y)
            losses.append(data_loss.item())
            loss = data_loss
            for term in task.proximal:
                anchors = network.spec.tensors(term.anchor).values()
                loss = loss + term.weight / 2 * sum(((p - a) ** 2).sum() for p, a in zip(module.parameters(), anchors))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        per_epoch = -(-len(task.y) // (local.batch_size or len(task.y)))
        return network.spec.row_of(module), losses[-per_epoch:]

    def test_the_momentum_of_one_client_does_not_reach_the_next(self):
        network = Network(mlp, FLAT)
        tasks = tasks_of(network, [10, 10, 10], LOCALS["momentum"])
        together = results(sequential, network, tasks)[0]
        alone = torch.cat([results(sequential, network, [task])[0] for task in reversed(tasks)]).flip(0)
        assert torch.equal(together, alone)


class TestVectorisedIsSequential:
    @pytest.mark.parametrize(
        "factory, shape, names",
        [
            (mlp, FLAT, LOCALS),
            (dropout, FLAT, LOCALS),
            (cnn, IMAGE, EXTREMES),
            (wide_cnn, IMAGE, EXTREMES),
            (group_norm, IMAGE, EXTREMES),
            (channel_dropout, IMAGE, EXTREMES),
        ],
    )
    def test_for_clients_of_different_sizes(self, factory, shape, names):
        network = Network(factory, shape)
        for name in names:
            assert_same(network, tasks_of(network, [10, 3, 7, 16], LOCALS[name]))

    @pytest.mark.parametrize("columns", [None, "head", "base"])
    @pytest.mark.parametrize("name", ["full batch", "momentum"])
    def test_with_proximal_terms(self, name, columns):
        network = Network(mlp, FLAT)
        assert_same(
            network,
            tasks_of(network, [10, 3, 7], LOCALS[name], proximal=2, columns=columns and getattr(network.spec, columns)),
        )

    def test_with_different_steps_per_client(self):
        network = Network(mlp, FLAT)
        assert_same(network, tasks_of(network, [10, 3, 7], LOCALS["momentum"], steps=[1, 9, 4]))

    def test_with_dropout_and_different_steps_per_client(self):
        network = Network(dropout, FLAT)
        assert_same(network, tasks_of(network, [10, 3, 7], LOCALS["momentum"], steps=[1, 9, 4]))

    def test_with_batch_statistics_where_batches_are_equal(self):
        network = Network(batch_norm, FLAT)
        tasks = tasks_of(network, [12, 12, 12], replace(LOCALS["momentum"], batch_size=4))
        assert vectorised.why_not(network, tasks) is None
        assert_same(network, tasks)
        statistics = results(sequential, network, tasks)[0][:, network.spec.trained :]
        assert (statistics != torch.stack([task.start_P for task in tasks])[:, network.spec.trained :]).all(), (
            "statistics moved"
        )

    @pytest.mark.parametrize("sizes, steps", [([12, 11], None), ([12, 12], [3, 4])])
    def test_batch_statistics_of_unequal_batches_are_refused(self, sizes, steps):
        network = Network(batch_norm, FLAT)
        assert "batches of one size and equal steps" in vectorised.why_not(
            network, tasks_of(network, sizes, LOCALS["full batch"], steps=steps)
        )
        assert (
            vectorised.why_not(Network(mlp, FLAT), tasks_of(network, sizes, LOCALS["full batch"], steps=steps)) is None
        )


class TestSpanIsSequential:
    @pytest.mark.parametrize("proximal", [0, 2])
    @pytest.mark.parametrize(
        "local", [LocalSGD(epochs=5, lr=0.3), LocalSGD(epochs=5, lr=0.1, momentum=0.9, weight_decay=0.05)]
    )
    def test_where_it_applies(self, local, proximal):
        network = Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)), IMAGE)
        tasks = tasks_of(network, [10, 3, 18], local, proximal=proximal)
        assert span.why_not(network, tasks) is None
        assert_same(network, tasks, span)

    @pytest.mark.parametrize("columns", ["head", "base"])
    def test_with_proximal_terms_on_columns(self, columns):
        network = Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)), IMAGE)
        assert_same(
            network,
            tasks_of(network, [10, 3], LocalSGD(epochs=5, lr=0.3), proximal=2, columns=getattr(network.spec, columns)),
            span,
        )

    @pytest.mark.parametrize(
        "rest",
        [
            lambda: [nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)],
            lambda: [nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)],
            lambda: [nn.Tanh(), nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 3)],
        ],
        ids=["differentiated by autograd", "with buffers", "written out"],
    )
    def test_with_any_layers_after_the_first(self, rest):
        for bias in (True, False):
            network = Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8, bias), *rest()), IMAGE)
            local = LocalSGD(epochs=5, lr=0.1, momentum=0.9, weight_decay=0.05)
            assert_same(network, tasks_of(network, [10, 3], local, proximal=1), span)

    @pytest.mark.parametrize(
        "factory, shape, size, local",
        [
            (cnn, IMAGE, 3, LocalSGD(epochs=2)),  # does not begin with a linear layer
            (mlp, FLAT, 4, LocalSGD(epochs=2)),  # more than half as many samples as inputs
            (mlp, FLAT, 3, LocalSGD(epochs=2, batch_size=2)),  # not full-batch
            (dropout, FLAT, 3, LocalSGD(epochs=2)),
        ],
    )
    def test_elsewhere_it_does_not_apply(self, factory, shape, size, local):
        network = Network(factory, shape)
        assert span.why_not(network, tasks_of(network, [size], local))
        assert span.why_not(Network(mlp, FLAT), tasks_of(Network(mlp, FLAT), [3], LocalSGD(epochs=2))) is None


class TestDropout:
    def test_masks_have_addresses(self):
        """Masks depend on the client and the address, not on other clients; the global generator is not used."""
        network = Network(dropout, FLAT)
        tasks = tasks_of(network, [10, 7], LOCALS["mini-batches, the last one partial"])
        state = torch.random.get_rng_state()
        rows = results(sequential, network, tasks)[0]
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.equal(results(sequential, network, tasks[1:])[0][0], rows[1])
        other = replace(tasks[1], address=replace(ADDRESS, exchange=2))
        full = LocalSGD(epochs=2)
        assert not torch.equal(
            *(results(sequential, network, [replace(task, local=full, steps=2)])[0][0] for task in (tasks[1], other))
        )

    def test_keeps_the_mean_and_drops_the_share(self):
        network = Network(dropout, FLAT)
        layer = network.module[2]
        mask = layer.draw(5000, torch.Generator().manual_seed(0))
        assert mask.shape == (5000, 16) and set(mask.unique().tolist()) == {0.0, 2.0}
        assert abs((mask == 0).float().mean().item() - 0.5) < 5 * 0.5 / np.sqrt(mask.numel())

    def test_of_channels_drops_whole_channels(self):
        network = Network(channel_dropout, IMAGE)
        mask = network.module[1].draw(100, torch.Generator().manual_seed(0))
        whole = mask.expand(100, 4, 4, 4)
        assert torch.equal(whole.amin((2, 3)), whole.amax((2, 3))) and set(mask.unique().tolist()) == {0.0, 2.0}

    def test_does_nothing_when_testing(self):
        network = Network(dropout, FLAT)
        for layer in network.dropouts.values():
            layer.mask = layer.draw(1, torch.Generator().manual_seed(0))
        x = torch.ones(3, 6)
        plain = network._build(0, 0).eval()
        network.load(network.spec.row_of(plain))
        assert torch.equal(network.logits(x), plain(x))


class TestNetwork:
    @pytest.mark.parametrize("factory, shape", [(mlp, FLAT), (wide_cnn, IMAGE), (batch_norm, FLAT)])
    def test_a_row_goes_in_and_comes_out(self, factory, shape):
        network = Network(factory, shape)
        rows = [network.new_model(5, index) for index in (0, 1)]
        assert not torch.equal(*rows)
        for row_P in rows:
            network.load(row_P)
            assert torch.equal(network.row(), row_P) and torch.equal(network.spec.row_of(network.module), row_P)

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
        stage = Stage(
            uneven([10, 6, 14, 9, 5], (36,)),
            lambda: nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)),
            LocalSGD(epochs=3, lr=0.2),
            engine,
        )
        found[engine] = port_results(stage)
    for engine in ("vectorised", "span", "manual"):
        for name, value in found["sequential"].items():
            assert torch.allclose(found[engine][name], value, rtol=0, atol=1e-5, equal_nan=True), (engine, name)


def port_results(stage: Stage) -> dict[str, torch.Tensor]:
    from cfl_ray.core.clients import ClientState, LocalTraining, Proximal

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
