"""Exchanges through the port in this process: chains, gradients, losses, what is left out, and failures that name their client."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, planted, uneven
from torch import nn
from torch.nn.functional import cross_entropy

from cfl_ray.core.clients import Own
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.engine import sequential
from cfl_ray.engine.failure import ClientFailure
from cfl_ray.engine.local import piece_size, pieces_of
from cfl_ray.engine.oneclient import OneClient
from cfl_ray.engine.task import Task


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


class TestRelay:
    def test_every_client_starts_from_the_result_before_it(self):
        stage = Stage(planted(4), linear, LocalSGD(epochs=2, batch_size=80, lr=0.3))
        clients = stage.clients()
        chain = clients.train(clients.send(stage.model()[None]), keep=stage.network.spec.all, relay=True).kept_MF
        row_P = stage.model()
        for client in range(4):
            task = Task(client, row_P, *stage.federation.train(client), 6, stage.local, Address(0, 1, 1))
            row_P = next(sequential.train(stage.network, [task])).row_P.clone()
            assert torch.equal(chain[client], row_P)

    @pytest.mark.parametrize("engine", ["vectorised", "span"])
    def test_is_the_same_with_every_engine(self, engine):
        federation, local = uneven([5, 7, 6, 8], (36,)), LocalSGD(epochs=3, lr=0.3)
        rows = []
        for name in ("sequential", engine):
            stage = Stage(federation, lambda: nn.Sequential(nn.Linear(36, 3)), local, name)
            clients = stage.clients()
            rows.append(clients.train(clients.send(stage.model()[None]), keep=stage.network.spec.all, relay=True).kept_MF)
        assert torch.allclose(*rows, rtol=0, atol=1e-5)

    def test_testing_what_clients_hold_does_not_disturb_it(self):
        stage = Stage(planted(3), linear)
        rows = []
        for images in (0, 50):
            clients = replace(stage.clients(), measure=images)
            rows.append(clients.train(clients.send(stage.model()[None]), keep=stage.network.spec.all, relay=True).kept_MF)
        assert torch.equal(*rows)

    def test_a_client_whose_result_is_rejected_is_passed_over(self):
        """0 -> 1 (spoiled) -> 2 is 0 -> 2."""
        stage = Stage(Spoiled([1], clients=4), linear)
        clients = stage.clients([0, 1, 2])
        chain = clients.train(clients.send(stage.model()[None]), keep=stage.network.spec.all, relay=True)
        assert chain.ok_M.tolist() == [True, False, True]
        clients = stage.clients([0, 2])
        assert torch.equal(chain.kept_MF[2], clients.train(clients.send(stage.model()[None]), keep=stage.network.spec.all, relay=True).kept_MF[1])

    def test_is_one_piece_in_order(self):
        stage = Stage(planted(40), linear)
        clients, asked = stage.clients(), []
        stage.backend.run = lambda work, run=stage.backend.run: (asked.append(work), run(work))[1]
        clients.train(clients.send(stage.model()[None]), relay=True)
        clients.train(clients.send(stage.model()[None]))
        assert [piece.tolist() for piece in pieces_of(asked[0], 4)] == [list(range(40))]
        assert [len(piece) for piece in pieces_of(asked[1], 4)] == [4] * 10


class TestPieces:
    def test_hold_everybody_once_and_clients_of_one_model_side_by_side(self):
        stage, asked = Stage(planted(10), linear), []
        stage.backend.run = lambda work, run=stage.backend.run: (asked.append(work), run(work))[1]
        clients = stage.clients()
        mix = torch.zeros(2, 10)
        mix[np.arange(10) % 2, np.arange(10)] = 1
        clients.train(clients.send(stage.model()[None]), mix=mix)
        assert [piece.tolist() for piece in pieces_of(asked[0], 4)] == [[0, 2, 4, 6], [8, 1, 3, 5], [7, 9]]

    @pytest.mark.parametrize("clients, engine, expected", [(480, "sequential", 8), (40, "sequential", 1), (100, "span", 3), (480, "vectorised", 64), (10, "vectorised", 3), (1, "vectorised", 1)])
    def test_size_follows_the_cohort_within_bounds(self, clients, engine, expected):
        assert piece_size(clients, engine) == expected
        assert piece_size(clients, engine, one_by_one=True) == 1


class TestOneClient:
    def one(self, factory, federation, client=1) -> OneClient:
        stage = Stage(federation, factory, LocalSGD(epochs=2, batch_size=4, lr=0.2))
        return OneClient(client, *federation.train(client), stage.network, Address(0, 1, 1), stage.local)

    @pytest.mark.parametrize("batch", [2048, 4])
    def test_gradient_is_that_of_the_mean_loss_without_dropout(self, batch):
        """Autograd of the mean over all samples; cutting the data into batches changes nothing."""
        one = self.one(net, uneven([10, 7]))
        row_P = one.network.new_model(3, 0)
        module = net().eval()
        for parameter, value in zip(module.parameters(), one.spec.tensors(row_P).values()):
            parameter.data.copy_(value)
        cross_entropy(module(one.x), one.y).backward()
        expected = torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters()])
        assert torch.allclose(one.gradient(row_P, batch), expected, rtol=0, atol=1e-6) and expected.abs().max() > 0.01

    def test_gradient_of_a_linear_model_is_the_formula(self):
        """(softmax(X W' + b) - Y)' X / n, and its column sums for the bias."""
        one = self.one(linear, planted())
        row_P = one.network.new_model(3, 0)
        weight, bias = one.spec.tensors(row_P.double()).values()
        x = one.x.flatten(1).double()
        residual = torch.softmax(x @ weight.T + bias, 1) - nn.functional.one_hot(one.y, 4)
        expected = torch.cat([(residual.T @ x).reshape(-1), residual.sum(0)]) / len(x)
        assert torch.allclose(one.gradient(row_P).double(), expected, rtol=0, atol=1e-6)

    def test_training_is_local_training_with_changes(self):
        one = self.one(net, uneven([10, 7]))
        start_P = one.network.new_model(3, 0)
        task = Task(1, start_P, one.x, one.y, 3, replace(one.local, epochs=3, batch_size=None), one.address)
        expected = next(sequential.train(one.network, [task])).row_P.clone()
        assert torch.equal(one.train(start_P, epochs=3, batch_size=None), expected)
        assert not torch.equal(one.train(start_P), expected)


class TestLosses:
    def test_are_the_mean_of_each_model_on_each_clients_data(self):
        stage = Stage(uneven([10, 7, 3]), net)
        clients, models_KP = stage.clients(), torch.stack([stage.model(k) for k in range(3)])
        expected = np.empty((3, 3))
        for k, module in enumerate(stage.network._build(0, k).eval() for k in range(3)):
            for client in range(3):
                x, y = stage.federation.train(client)
                expected[client, k] = cross_entropy(module(x), y).item()
        assert np.allclose(clients.losses(clients.broadcast(models_KP)), expected, rtol=0, atol=1e-6)

    def test_on_the_first_samples(self):
        stage = Stage(uneven([10, 7, 3]), net)
        clients = stage.clients()
        x, y = stage.federation.train(0)
        found = clients.losses(clients.broadcast(stage.model()[None]), max_samples=5)
        assert found[0, 0] == pytest.approx(cross_entropy(stage.network._build(0, 0).eval()(x[:5]), y[:5]).item(), abs=1e-6)


class TestRejection:
    @pytest.mark.parametrize("engine", ["sequential", "vectorised"])
    def test_a_client_with_spoiled_data_is_left_out_of_every_sum(self, engine):
        """The mean is that of the others; the spoiled client keeps nothing of it."""
        own = Own("mine")
        stage = Stage(Spoiled([2, 5]), linear, engine=engine)
        clients = stage.clients()
        updates = clients.train(clients.send(stage.model()[None]), mix=torch.ones(1, 8), keep=stage.network.spec.all, own=own)
        good = [0, 1, 3, 4, 6, 7]
        assert updates.ok_M.tolist() == [i in good for i in range(8)]
        assert stage.books.rejected == dict.fromkeys([2, 5], "its data have values that are not finite") and sorted(stage.books.train_loss) == good
        assert updates.kept_MF.isnan().all(1).tolist() == [i not in good for i in range(8)]
        assert torch.allclose(updates.mixed(empty=torch.zeros(1, 68))[0], updates.kept_MF[good].mean(0), atol=1e-6)
        assert sorted(client for _, client in stage.memory) == good

    def test_an_update_beyond_2_to_the_20_is_left_out(self):
        """One step from 0 with learning rate eta moves the bias by eta (softmax - share): beyond 2^20 for eta = 1e8."""
        stage = Stage(planted(2), linear, LocalSGD(lr=1e8))
        clients = stage.clients()
        updates = clients.train(clients.send(torch.zeros(1, 68)), mix=torch.ones(1, 2))
        assert not updates.ok_M.any()
        assert torch.equal(updates.mixed(empty=torch.full((1, 68), 3.0)), torch.full((1, 68), 3.0)), "nobody's update: the model stays"

    def test_a_spoiled_signature_is_left_out(self):
        stage = Stage(Spoiled([1]), linear)
        clients = stage.clients([0, 1])
        _, ok_M = clients.describe(lambda client, anchor_P: client.gradient(anchor_P), clients.known(stage.model()[None]))
        assert ok_M.tolist() == [True, False] and stage.books.rejected == {1: "its data have values that are not finite"}


class TestFailure:
    def test_names_the_client_and_what_it_was_at(self):
        stage = Stage(planted(3), linear)
        read = stage.federation.train
        stage.federation.train = lambda client: read(client) if client != 1 else 1 / 0
        with pytest.raises(ClientFailure, match="client 1 failed while reading its data: division by zero"):
            clients = stage.clients()
            clients.train(clients.send(stage.model()[None]))

    def test_of_a_described_client(self):
        def broken(client, anchor_P):
            raise RuntimeError(f"no features of {client.client}")

        with pytest.raises(ClientFailure, match=r"client 0 failed while describing itself: no features of 0 \(broken, line \d+\)"):
            Stage(planted(3), linear).clients().describe(broken)


class TestMemory:
    def test_owned_columns_replace_those_of_the_start(self):
        """Second round: base from what is sent, head from the client's memory, whoever trained in between."""
        stage = Stage(uneven([10, 7, 3]), lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))
        spec = stage.network.spec
        own = Own("head", spec.head)
        clients = stage.clients()
        clients.train(clients.send(stage.model()[None]), own=own)
        mine = stage.memory["head", 1].clone()
        clients = stage.clients([1], number=2)
        result = clients.train(clients.send(stage.model(5)[None]), own=own, keep=spec.all, local=LocalSGD(lr=1e-9, steps=1)).kept_MF[0]
        assert torch.allclose(spec.head.of(result), mine, atol=1e-6) and torch.allclose(spec.base.of(result), spec.base.of(stage.model(5)), atol=1e-6)

    def test_what_changed_is_told_once_and_forgotten_with_its_client(self):
        stage = Stage(planted(4), linear)
        clients = stage.clients([0, 3])
        clients.train(clients.send(stage.model()[None]), own=Own("mine"))
        assert [key for key, _ in stage.backend.changed()] == [("mine", 0), ("mine", 3)]
        assert list(stage.backend.changed()) == []
        clients.train(clients.send(stage.model()[None]), own=Own("mine"))
        stage.backend.forget(np.array([3]))
        assert [key for key, _ in stage.backend.changed()] == [("mine", 0)] and set(stage.memory) == {("mine", 0)}

    def test_restored_memory_is_the_memory(self):
        stage, other = Stage(planted(4), linear), Stage(planted(4), linear)
        clients = stage.clients()
        clients.train(clients.send(stage.model()[None]), own=Own("mine"))
        other.backend.restore((key, value.clone()) for key, value in stage.backend.changed())
        rows = []
        for one in (stage, other):
            clients = one.clients(number=2)
            rows.append(clients.train(clients.send(one.model()[None]), own=Own("mine"), keep=one.network.spec.all).kept_MF)
        assert torch.equal(*rows) and list(other.memory) == list(stage.memory)


def test_a_cohort_without_clients_trains_nothing():
    stage = Stage(planted(3), linear)
    for engine in ("sequential", "vectorised"):
        stage.backend.worker.engine = engine
        clients = stage.clients([])
        updates = clients.train(clients.send(stage.model()[None]), mix=torch.ones(1, 0), keep=stage.network.spec.head)
        assert len(updates.ok_M) == 0 and updates.kept_MF.shape == (0, 68) and torch.equal(updates.mixed(stage.model()[None]), stage.model()[None])
