"""Exchanges in this process: chains, gradients, losses, excluded clients, client states and named failures."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from closeness import close
from federations import Spoiled, Stage, attack_of, linear, planted, uneven
from torch import nn
from torch.nn.functional import cross_entropy
from training_tasks import logits_of, mlp

from benchmarks.models import LSTM, LeNet5, ResNet8, Transformer
from cfl_ray.core.clients import ClientState, LocalTraining
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns
from cfl_ray.core.rng import stream
from cfl_ray.core.updates import Updates
from cfl_ray.core.work import Address
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.engine import sequential
from cfl_ray.engine.chunks import chunks_of
from cfl_ray.engine.describing import ClientView
from cfl_ray.engine.failure import ClientFailure
from cfl_ray.engine.task import TrainingTask


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def train(stage: Stage, ids=None, round: int = 1, **options) -> Updates:
    """The updates of a training exchange from the first model of the stage."""
    clients = stage.clients(ids, round)
    return clients.train(clients.send(stage.model()[None]), **options)


def chain(stage: Stage, ids=None) -> Updates:
    return train(stage, ids, how=LocalTraining(chained=True), features=stage.network.spec.all)


class TestChain:
    def test_every_client_starts_from_the_result_before_it(self):
        stage = Stage(planted(4), linear, LocalSGD(epochs=2, batch_size=80, lr=0.3), "sequential")
        features_MF, row_P = chain(stage).features_MF, stage.model()
        for client in range(4):
            task = TrainingTask(client, row_P, *stage.federation.train(client), 6, stage.local, Address(0, 1, 1))
            row_P = next(sequential.train(stage.network, [task])).row_P.cpu().clone()
            assert torch.equal(features_MF[client], row_P)

    @pytest.mark.parametrize("engine", ["manual", "vectorised", "span"])
    def test_is_the_same_with_every_engine(self, engine):
        federation, local = uneven([5, 7, 6, 8], (36,)), LocalSGD(epochs=3, lr=0.3)
        rows = []
        for name in ("sequential", engine):
            stage = Stage(federation, lambda: nn.Sequential(nn.Linear(36, 3)), local, name)
            rows.append(chain(stage).features_MF)
        assert close(*rows, 1e-5)

    def test_measuring_local_scores_does_not_disturb_it(self):
        stage = Stage(planted(3), linear)
        rows = []
        for images in (0, 50):
            clients = replace(stage.clients(), local_test_samples=images)
            rows.append(
                clients.train(
                    clients.send(stage.model()[None]), how=LocalTraining(chained=True), features=stage.network.spec.all
                ).features_MF
            )
        assert torch.equal(*rows)

    def test_a_client_whose_result_is_rejected_is_passed_over(self):
        """0 -> 1 (spoiled) -> 2 is 0 -> 2."""
        stage = Stage(Spoiled([1], clients=4), linear)
        whole, rest = chain(stage, [0, 1, 2]), chain(stage, [0, 2])
        assert whole.valid_M.tolist() == [True, False, True]
        assert torch.equal(whole.features_MF[2], rest.features_MF[1])

    def test_an_attacker_whose_training_failed_is_passed_over_whatever_it_uploads(self):
        """Client 1 is left out of every mean, so its forgery, which is valid, is no start for client 2 either."""

        class Large(SyntheticFederation):
            def train(self, client):
                x, y = super().train(client)
                return (x * 2.0**15 if client == 1 else x), y

        stage = Stage(Large(4, input=(1, 4, 4), classes=4, groups=2, samples=50), linear, LocalSGD(lr=100.0))
        stage.backend.worker.attack = attack_of("gaussian", [1])
        whole, rest = chain(stage, [0, 1, 2]), chain(stage, [0, 2])
        assert whole.valid_M.tolist() == [True, False, True]
        assert torch.equal(whole.features_MF[[0, 2]], rest.features_MF)

    def test_is_one_chunk_in_order(self):
        stage = Stage(planted(40), linear)
        works = []
        stage.backend.run = lambda work, run=stage.backend.run: (works.append(work), run(work))[1]
        chain(stage)
        train(stage)
        assert [chunk.index_m.tolist() for chunk in chunks_of(works[0], 4)] == [list(range(40))]
        assert [len(chunk.index_m) for chunk in chunks_of(works[1], 4)] == [4] * 10


class TestClientView:
    def one(self, factory, federation, client=1) -> ClientView:
        stage = Stage(federation, factory, LocalSGD(epochs=2, batch_size=4, lr=0.2), "sequential")
        train_one = stage.backend.worker.train_one
        return ClientView(client, *federation.train(client), stage.network, Address(0, 1, 1), stage.local, train_one)

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
        assert close(one.gradient(row_P, batch), expected, 1e-5) and expected.abs().max() > 0.01

    @pytest.mark.parametrize("ranges", [lambda P: ((P - 14, P),), lambda P: ((1, 3), (P - 1, P)), lambda P: ((0, P),)])
    def test_gradient_of_some_columns_has_the_same_bits(self, ranges):
        one = self.one(net, uneven([10, 7]))
        row_P, columns = one.network.new_model(3, 0), Columns(ranges(one.spec.trained))
        assert torch.equal(one.gradient(row_P, 4, columns=columns), columns.of(one.gradient(row_P, 4)))

    @pytest.mark.parametrize(
        "factory",
        [partial(LeNet5, 4), partial(Transformer, 4, 0.1), partial(LSTM, 4), partial(ResNet8, 4)],
        ids=["pooling", "attention", "recurrent", "normalisation"],
    )
    def test_gradient_of_the_last_layer_has_the_same_bits_where_kernels_differ_without_gradients(self, factory):
        one = self.one(factory, SyntheticFederation(2, input=(1, 28, 28), classes=4, samples=10))
        row_P, head = one.network.new_model(3, 0), one.spec.top(1)
        assert torch.equal(one.gradient(row_P, columns=head), head.of(one.gradient(row_P)))
        assert all(p.requires_grad for p in one.network.params) and torch.backends.mha.get_fastpath_enabled()

    def test_layers_below_the_columns_have_no_backward_pass(self):
        """The gradient of the last bias is the mean of softmax - Y, for which the layers below are constants."""
        one, calls = self.one(net, uneven([10, 7])), []
        one.network.params[0].register_hook(lambda grad: calls.append(1))
        row_P, last = one.network.new_model(3, 0), Columns(((one.spec.trained - 1, one.spec.trained),))
        one.gradient(row_P, columns=last)
        assert not calls
        one.gradient(row_P)
        assert calls == [1]

    @pytest.mark.parametrize(
        "engine, factory, by_torch", [("sequential", mlp, 3), ("manual", mlp, 0), ("manual", net, 3)]
    )
    def test_gradients_of_batches_are_of_the_engine_that_has_them(self, engine, factory, by_torch, monkeypatch):
        """Batches of 4 of 10 samples. With dropout (`net`) the passes of `manual` are not those in evaluation mode."""
        one, calls = replace(self.one(factory, uneven([10, 7]), client=0), engine=engine), []
        row_P, gradient = one.network.new_model(3, 0), ClientView.gradient
        expected = torch.stack([one.gradient(row_P, samples=slice(i, i + 4)) for i in (0, 4, 8)])
        monkeypatch.setattr(ClientView, "gradient", lambda *args, **named: calls.append(1) or gradient(*args, **named))
        found = torch.stack(list(one.batch_gradients(row_P, 4)))
        assert len(calls) == by_torch and close(found, expected, 1e-5) and expected.abs().max() > 0.01
        assert close(next(iter(one.batch_gradients(row_P, None))), gradient(one, row_P), 1e-5)

    def test_gradient_of_a_linear_model_is_the_formula(self):
        """(softmax(X W' + b) - Y)' X / n, and its column sums for the bias."""
        one = self.one(linear, planted())
        row_P = one.network.new_model(3, 0)
        weight, bias = one.spec.tensors(row_P.double()).values()
        x = one.x.flatten(1).double()
        residual = torch.softmax(x @ weight.T + bias, 1) - nn.functional.one_hot(one.y, 4)
        expected = torch.cat([(residual.T @ x).reshape(-1), residual.sum(0)]) / len(x)
        assert close(one.gradient(row_P).double(), expected, 1e-5)

    def test_outputs_are_those_of_the_module_without_dropout(self):
        one = self.one(net, uneven([10, 7]))
        row_P = one.network.new_model(3, 0)
        module = net().eval()
        module.load_state_dict(one.spec.tensors(row_P))
        assert close(one.outputs(row_P), module(one.x), 1e-5)

    def test_training_is_local_training_with_changes(self):
        one = self.one(net, uneven([10, 7]))
        start_P = one.network.new_model(3, 0)
        task = TrainingTask(1, start_P, one.x, one.y, 3, replace(one.local, epochs=3, batch_size=None), one.address)
        expected = next(sequential.train(one.network, [task])).row_P.cpu().clone()
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
        assert close(clients.losses(clients.broadcast(models_KP)), expected, 1e-5)

    def test_count_the_columns_that_a_client_keeps(self):
        """After a training that keeps the last layer, the losses are those of the sent layers with this last layer."""
        stage = Stage(uneven([10, 7, 3]), net, LocalSGD(lr=0.5, epochs=2))
        state = ClientState("head", stage.network.spec.head)
        clients = stage.clients([0, 1])  # client 2 has no head of its own yet
        clients.train(clients.send(stage.model()[None]), client_state=state)
        clients, models_KP = stage.clients(), torch.stack([stage.model(k) for k in range(2)])
        found = clients.losses(clients.broadcast(models_KP), client_state=state)
        plain = clients.losses(clients.broadcast(models_KP))
        for client in range(3):
            kept = stage.backend.client_state("head", client)
            x, y = stage.federation.train(client)
            for k in range(2):
                row_P = models_KP[k].clone()
                if kept is not None:
                    state.columns.put(row_P, kept)
                expected = cross_entropy(logits_of(stage.network, row_P, x), y).item()
                assert found[client, k] == pytest.approx(expected, rel=1e-5)
                assert (found[client, k] == plain[client, k]) == (client == 2)

    def test_on_samples_that_are_drawn_once_for_each_client(self):
        stage = Stage(uneven([10, 7, 3]), net)
        module, found = stage.network._build(0, 0).eval(), []
        for round in (1, 2):
            clients = stage.clients(round=round)
            found.append(clients.losses(clients.broadcast(stage.model()[None]), max_samples=5)[:, 0])
        assert np.array_equal(*found), "the same samples in all rounds"
        for client, size in enumerate((10, 7, 3)):
            chosen = np.sort(stream(clients.seed, 0, 0, client, "choice").permutation(size)[:5])
            x, y = (part[chosen] for part in stage.federation.train(client))
            assert len(y) == min(size, 5) and (size == 3 or chosen.tolist() != list(range(5)))
            assert found[0][client] == pytest.approx(cross_entropy(module(x), y).item(), rel=1e-5)


class TestRejection:
    @pytest.mark.parametrize("engine", ["sequential", "vectorised"])
    def test_a_client_with_invalid_data_is_excluded_from_every_sum(self, engine):
        """The mean is that of the others; the excluded client has no state."""
        state = ClientState("mine")
        stage = Stage(Spoiled([2, 5]), linear, engine=engine)
        updates = train(stage, average=torch.ones(1, 8), features=stage.network.spec.all, client_state=state)
        good = [0, 1, 3, 4, 6, 7]
        assert updates.valid_M.tolist() == [i in good for i in range(8)]
        assert (
            stage.stats.rejected == dict.fromkeys([2, 5], "its data have values that are not finite")
            and sorted(stage.stats.train_loss) == good
        )
        assert updates.features_MF.isnan().all(1).tolist() == [i not in good for i in range(8)]
        assert close(updates.averaged(default=torch.zeros(1, 68))[0], updates.features_MF[good].mean(0), 1e-5)
        assert sorted(client for _, client in stage.client_states) == good

    def test_an_update_beyond_2_to_the_20_is_excluded(self):
        """One step from 0 with learning rate eta moves the bias by eta (softmax - share): beyond 2^20 for eta = 1e8."""
        stage = Stage(planted(2), linear, LocalSGD(lr=1e8))
        clients = stage.clients()
        updates = clients.train(clients.send(torch.zeros(1, 68)), average=torch.ones(1, 2))
        assert not updates.valid_M.any()
        assert torch.equal(updates.averaged(default=torch.full((1, 68), 3.0)), torch.full((1, 68), 3.0)), (
            "without a valid update the model stays"
        )

    def test_the_signature_of_invalid_data_is_excluded(self):
        stage = Stage(Spoiled([1]), linear)
        clients = stage.clients([0, 1])
        _, valid_M = clients.describe(
            lambda client, anchor_P: client.gradient(anchor_P), clients.known_models(stage.model()[None])
        )
        assert valid_M.tolist() == [True, False] and stage.stats.rejected == {
            1: "its data have values that are not finite"
        }


class TestFailure:
    def test_names_the_client_and_the_stage(self):
        stage = Stage(planted(3), linear)
        read = stage.federation.train
        stage.federation.train = lambda client: read(client) if client != 1 else 1 / 0
        with pytest.raises(ClientFailure, match="client 1 failed while reading its data: .*division by zero"):
            clients = stage.clients()
            clients.train(clients.send(stage.model()[None]))

    def test_of_a_described_client(self):
        def broken(client, anchor_P):
            raise RuntimeError(f"no features of {client.client}")

        with pytest.raises(
            ClientFailure,
            match=r"client 0 failed while describing itself: function broken .*: no features of 0 \(line \d+\)",
        ):
            Stage(planted(3), linear).clients().describe(broken)


class TestClientState:
    def test_its_columns_replace_those_of_the_start(self):
        """Second round: the base is the one that is sent, the head that of the client state."""
        stage = Stage(
            uneven([10, 7, 3]), lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), engine="sequential"
        )
        spec = stage.network.spec
        state = ClientState("head", spec.head)
        train(stage, client_state=state)
        mine = stage.client_states["head", 1].clone()
        clients = stage.clients([1], round=2)
        result = clients.train(
            clients.send(stage.model(5)[None]),
            how=LocalTraining(sgd=LocalSGD(lr=1e-9, steps=1)),
            client_state=state,
            features=spec.all,
        ).features_MF[0]
        assert close(spec.head.of(result), mine, 1e-5) and close(
            spec.base.of(result), spec.base.of(stage.model(5)), 1e-5
        )

    def test_changes_are_listed_once_and_dropped_with_their_client(self):
        stage = Stage(planted(4), linear)
        train(stage, [0, 3], client_state=ClientState("mine"))
        size, states = stage.model().nbytes, stage.backend.client_states
        assert states.unsaved == 2 * size
        assert states.changed() == {("mine", 0): size, ("mine", 3): size}
        assert not states.changed() and not states.unsaved
        train(stage, [0, 3], client_state=ClientState("mine"))
        stage.backend.forget(np.array([3]))
        assert list(states.changed()) == [("mine", 0)] and set(stage.client_states) == {("mine", 0)}

    def test_restored_states_are_the_states(self):
        stage, other = Stage(planted(4), linear), Stage(planted(4), linear)
        train(stage, client_state=ClientState("mine"))
        other.backend.restore((key, value.clone()) for key, value in stage.client_states.items())
        options = {"client_state": ClientState("mine"), "features": stage.network.spec.all}
        rows = [train(one, round=2, **options).features_MF for one in (stage, other)]
        assert torch.equal(*rows) and list(other.client_states) == list(stage.client_states)


def test_a_cohort_without_clients_trains_nothing():
    stage = Stage(planted(3), linear)
    for engine in ("sequential", "vectorised"):
        stage.backend.worker.engine = engine
        updates = train(stage, [], average=torch.ones(1, 0), features=stage.network.spec.head)
        assert len(updates.valid_M) == 0 and updates.features_MF.shape == (0, 68)
        assert torch.equal(updates.averaged(stage.model()[None]), stage.model()[None])
