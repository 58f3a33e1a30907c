"""What counts as sound, with the limit on both sides, and what an exchange brings back of who is left out."""

import numpy as np
import pytest
import torch
from federations import Stage, planted
from torch import nn

from cfl_ray.core.clients import Own
from cfl_ray.core.errors import DataError
from cfl_ray.core.grouping import everyone
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.work import Address, Rows
from cfl_ray.core.work import TestClients as OwnTest
from cfl_ray.core.work import TestShared as SharedTest
from cfl_ray.data.federation import Shape
from cfl_ray.engine import choose
from cfl_ray.engine.sound import blank, data_flaw, update_flaw, value_flaw

SHAPE = Shape((1, 4, 4), 4)


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


def samples(size=3, shape=(1, 4, 4), value=1.0, labels=(0, 3, 1), dtype=torch.float32):
    return torch.full((size, *shape), value, dtype=dtype), torch.tensor(labels)


class TestData:
    @pytest.mark.parametrize("made", [samples(), samples(value=2.0**16 - 1), samples(value=-(2.0**16) + 1)])
    def test_within_the_limits_are_sound(self, made):
        assert data_flaw(*made, SHAPE) is None

    @pytest.mark.parametrize("made, flaw", [
        (samples(shape=(1, 2, 8)), "shape (1, 2, 8), expected (1, 4, 4)"),
        (samples(shape=(16,)), "shape (16,), expected (1, 4, 4)"),
        (samples(labels=(0, 1)), "3 samples and labels of shape (2,), expected one label for each"),
        (samples(0, labels=[]), "inputs of torch.float32 and labels of torch.float32, expected torch.float32 and torch.int64"),
        ((torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.long)), "0 samples, expected at least 1"),
        (samples(labels=(0, 4, 1)), "labels 0 .. 4, expected 0 .. 3"),
        (samples(labels=(0, -1, 1)), "labels -1 .. 1, expected 0 .. 3"),
        (samples(dtype=torch.float64), "inputs of torch.float64 and labels of torch.int64, expected torch.float32 and torch.int64"),
        (samples(value=1e6), "values up to 1e+06, beyond 2^16"),
        (samples(value=-(2.0**16)), "values up to 6.55e+04, beyond 2^16"),
        (samples(value=np.nan), "values that are not finite"),
        (samples(value=-np.inf), "values that are not finite"),
    ])  # fmt: skip
    def test_flaws_are_named_with_both_values(self, made, flaw):
        assert data_flaw(*made, SHAPE) == flaw

    def test_one_value_among_many_is_found(self):
        x, y = samples()
        x[2, 0, 3, 1] = np.nan
        assert data_flaw(x, y, SHAPE) == "values that are not finite"

    def test_nobody_needs_test_samples(self):
        assert data_flaw(torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.long), SHAPE, least=0) is None


class TestUpdates:
    def test_weights_stay_below_2_to_the_14_and_buffers_below_2_to_the_20(self):
        row_P = torch.tensor([2.0**14 - 1, 0.0, -(2.0**20) + 1])
        assert update_flaw(row_P, trained=2) is None and update_flaw(row_P, trained=3) == "values up to 1.05e+06, beyond 2^14"
        assert update_flaw(torch.tensor([0.0, -(2.0**14), 0.0]), 2) == "values up to 1.64e+04, beyond 2^14"
        assert update_flaw(torch.tensor([0.0, 0.0, 2.0**20]), 2) == "values up to 1.05e+06, beyond 2^20"
        assert update_flaw(torch.tensor([0.0, 0.0, np.nan]), 2) == update_flaw(torch.tensor([np.inf, 0.0]), 2) == "values that are not finite"

    def test_nothing_is_sound(self):
        assert value_flaw(torch.zeros(0), 20) is None


def flawed(client, change, what="train", clients=6):
    """A planted federation in which one client's samples, for training or for testing, are changed."""
    federation = planted(clients)
    read = getattr(federation, what)
    setattr(federation, what, lambda asked, *rest: change(*read(asked, *rest)) if asked == client else read(asked, *rest))
    return federation


WRONG_SHAPE = (lambda x, y: (x[:, :, :2], y), "shape (1, 2, 4), expected (1, 4, 4)")
WRONG_LABEL = (lambda x, y: (x, y + 3), "labels 3 .. 6, expected 0 .. 3")
TOO_LARGE = (lambda x, y: (x * 1e6, y), "beyond 2^16")
GOOD = [0, 1, 3, 4, 5]


@pytest.mark.parametrize("change, flaw", [WRONG_SHAPE, WRONG_LABEL, TOO_LARGE], ids=["shape", "label", "size"])
class TestExchanges:
    @pytest.mark.parametrize("engine", ["sequential", "vectorised", "span"])
    def test_train_without_a_client_whose_data_are_not_sound(self, change, flaw, engine):
        """The others get what they would get without it."""
        stage, clean = (Stage(federation, linear, LocalSGD(epochs=2), engine) for federation in (flawed(2, change), planted(6)))
        rows = []
        for one, ids in ((stage, range(6)), (clean, GOOD)):
            clients = one.clients(ids)
            rows.append(clients.train(clients.send(one.model()[None]), mix=everyone(clients.weights()), keep=one.network.spec.all, own=Own("mine")))
        assert rows[0].ok_M.tolist() == [i in GOOD for i in range(6)] and torch.allclose(rows[0].kept_MF[GOOD], rows[1].kept_MF, atol=1e-6)
        assert torch.allclose(rows[0].mixed(torch.zeros(1, 68)), rows[1].mixed(torch.zeros(1, 68)), atol=1e-6)
        assert stage.books.rejected.keys() == {2} and flaw in stage.books.rejected[2] and stage.books.rejected[2].startswith("its data have ")
        assert ("mine", 2) not in stage.memory and not stage.books.late

    def test_losses_and_signatures(self, change, flaw):
        stage, clean = Stage(flawed(2, change), linear), Stage(planted(6), linear)
        models_KP = torch.stack([stage.model(k) for k in range(2)])
        beside = models_KP[[0, 1, 0, 1, 0, 1]]
        found, expected = (
            clients.losses(clients.broadcast(models_KP), beside=clients.send(beside, np.arange(6))) for clients in (stage.clients(), clean.clients())
        )
        assert np.isinf(found[2]).all() and np.allclose(found[GOOD], expected[GOOD], rtol=0, atol=1e-6)
        assert flaw in stage.books.rejected[2]
        clients = stage.clients()
        features_MF, ok_M = clients.describe(lambda client, anchor_P: client.x.sum((0, 1)))
        assert ok_M.tolist() == [i in GOOD for i in range(6)] and features_MF.shape == (6, 16) and flaw in stage.books.rejected[2]

    def test_scores(self, change, flaw):
        """Bad training data matter where one trains first, bad test data always."""
        for what, tune in (("train", LocalSGD(steps=1)), ("test", None)):
            stage = Stage(flawed(2, change, what), linear)
            work = OwnTest(Address(0, 1, -1), np.arange(6), (stage.model()[None],), start=Rows(0, np.zeros(6, int)), tune=tune, steps_M=np.ones(6, int))
            outcome = stage.backend.run(work)
            assert np.isnan(outcome.arrays["scores"]).all(1).tolist() == [i not in GOOD for i in range(6)]
            assert outcome.left_out.keys() == {2} and flaw in outcome.left_out[2].why

    def test_a_shared_test_set(self, change, flaw):
        stage = Stage(flawed(1, change, "test_set"), linear)
        work = SharedTest(Address(0, 1, -1), np.arange(2), (stage.model()[None],), start=Rows(0, np.zeros(2, int)))
        outcome = stage.backend.run(work)
        assert outcome.arrays["confusion"][0].sum() > 0 and outcome.arrays["confusion"][1].sum() == 0
        assert outcome.left_out.keys() == {1} and outcome.left_out[1].why.startswith("its test set 1 has ") and flaw in outcome.left_out[1].why

    def test_the_engine_is_measured_on_others(self, change, flaw):
        network = Stage(planted(6), linear).network
        assert "for 5 clients" in choose.measure(network, flawed(2, change), LocalSGD(), 0).reason
        with pytest.raises(DataError, match="no client has sound data; those of client 0 have "):
            choose.measure(network, flawed(0, change, clients=1), LocalSGD(), 0)


def test_what_is_known_of_nobody_has_the_form_of_what_is_found():
    """Of every kind of work: the same names, types and shapes, so that both fit into one array."""
    stage, asked = Stage(planted(4), linear), []
    run = stage.backend.run
    stage.backend.run = lambda work: (asked.append((work, run(work))), asked[-1][1])[1]
    clients = stage.clients()
    object.__setattr__(clients, "measure", 10)
    updates = clients.train(clients.send(stage.model()[None]), mix_later=True, keep=stage.network.spec.head)
    clients.mix(updates, everyone(clients.weights()))
    clients.losses(clients.broadcast(stage.model()[None]))
    clients.describe(lambda client, anchor_P: client.y[:1])
    for kind in (OwnTest, SharedTest):
        ids = np.arange(2)
        stage.backend.run(kind(Address(0, 1, -1), ids, (stage.model()[None],), start=Rows(0, 0 * ids)))
    assert len({type(work) for work, _ in asked}) == 6
    for work, outcome in asked:
        nothing = blank(work, 4)
        assert nothing.keys() == outcome.arrays.keys()
        for name, values in outcome.arrays.items():
            assert nothing[name].dtype == values.dtype and (nothing[name].shape == values.shape or name == "features"), name
            assert len(nothing[name]) == len(work.ids_M)
