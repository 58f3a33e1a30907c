"""Limits of valid data and updates, on both sides, and the results of exchanges with excluded clients."""

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, linear, planted

from cfl_ray.core.clients import ClientState
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, Rows
from cfl_ray.core.work import EvaluateClients as OwnTest
from cfl_ray.core.work import EvaluateShared as SharedTest
from cfl_ray.data.federation import DataShape
from cfl_ray.engine.validation import invalid_data_reason, invalid_update_reason, invalid_value_reason

SHAPE = DataShape((1, 4, 4), 4)


def samples(size=3, shape=(1, 4, 4), value=1.0, labels=(0, 3, 1), dtype=torch.float32):
    return torch.full((size, *shape), value, dtype=dtype), torch.tensor(labels)


class TestData:
    @pytest.mark.parametrize("made", [samples(), samples(value=2.0**16 - 1), samples(value=-(2.0**16) + 1)])
    def test_within_the_limits_are_valid(self, made):
        assert invalid_data_reason(*made, SHAPE) is None

    @pytest.mark.parametrize(
        "made, reason",
        [
            (samples(shape=(1, 2, 8)), "shape (1, 2, 8), expected (1, 4, 4)"),
            (samples(shape=(16,)), "shape (16,), expected (1, 4, 4)"),
            (samples(labels=(0, 1)), "3 samples and labels of shape (2,), expected one label for each"),
            (
                samples(0, labels=[]),
                "inputs of torch.float32 and labels of torch.float32, expected torch.float32 and torch.int64",
            ),
            ((torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.long)), "0 samples, expected at least 1"),
            (samples(labels=(0, 4, 1)), "labels 0 .. 4, expected 0 .. 3"),
            (samples(labels=(0, -1, 1)), "labels -1 .. 1, expected 0 .. 3"),
            (
                samples(dtype=torch.float64),
                "inputs of torch.float64 and labels of torch.int64, expected torch.float32 and torch.int64",
            ),
            (samples(value=1e6), "values up to 1e+06, beyond 2^16"),
            (samples(value=-(2.0**16)), "values up to 6.55e+04, beyond 2^16"),
            (samples(value=np.nan), "values that are not finite"),
            (samples(value=-np.inf), "values that are not finite"),
        ],
    )
    def test_reasons_name_both_values(self, made, reason):
        assert invalid_data_reason(*made, SHAPE) == reason

    def test_one_value_among_many_is_found(self):
        x, y = samples()
        x[2, 0, 3, 1] = np.nan
        assert invalid_data_reason(x, y, SHAPE) == "values that are not finite"

    def test_no_test_samples_are_needed(self):
        assert invalid_data_reason(torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.long), SHAPE, least=0) is None


class TestUpdates:
    def test_weights_stay_below_2_to_the_14_and_buffers_below_2_to_the_20(self):
        row_P = torch.tensor([2.0**14 - 1, 0.0, -(2.0**20) + 1])
        assert (
            invalid_update_reason(row_P, trained=2) is None
            and invalid_update_reason(row_P, trained=3) == "values up to 1.05e+06, beyond 2^14"
        )
        assert invalid_update_reason(torch.tensor([0.0, -(2.0**14), 0.0]), 2) == "values up to 1.64e+04, beyond 2^14"
        assert invalid_update_reason(torch.tensor([0.0, 0.0, 2.0**20]), 2) == "values up to 1.05e+06, beyond 2^20"
        assert (
            invalid_update_reason(torch.tensor([0.0, 0.0, np.nan]), 2)
            == invalid_update_reason(torch.tensor([np.inf, 0.0]), 2)
            == "values that are not finite"
        )

    def test_no_values_are_valid(self):
        assert invalid_value_reason(torch.zeros(0), 20) is None


def with_invalid(client, change, what="train", clients=6):
    """A planted federation in which one client's samples, for training or for testing, are changed."""
    federation = planted(clients)
    read = getattr(federation, what)
    setattr(
        federation, what, lambda index, *rest: change(*read(index, *rest)) if index == client else read(index, *rest)
    )
    return federation


WRONG_SHAPE = (lambda x, y: (x[:, :, :2], y), "shape (1, 2, 4), expected (1, 4, 4)")
WRONG_LABEL = (lambda x, y: (x, y + 3), "labels 3 .. 6, expected 0 .. 3")
TOO_LARGE = (lambda x, y: (x * 1e6, y), "beyond 2^16")
GOOD = [0, 1, 3, 4, 5]


@pytest.mark.parametrize("change, reason", [WRONG_SHAPE, WRONG_LABEL, TOO_LARGE], ids=["shape", "label", "size"])
class TestExchanges:
    @pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised", "span"])
    def test_train_without_a_client_with_invalid_data(self, change, reason, engine):
        """The others have the results that they have without it."""
        stage, clean = (
            Stage(federation, linear, LocalSGD(epochs=2), engine)
            for federation in (with_invalid(2, change), planted(6))
        )
        rows = []
        for one, ids in ((stage, range(6)), (clean, GOOD)):
            clients = one.clients(ids)
            rows.append(
                clients.train(
                    clients.send(one.model()[None]),
                    average=clients.weights(),
                    features=one.network.spec.all,
                    client_state=ClientState("mine"),
                )
            )
        assert rows[0].valid_M.tolist() == [i in GOOD for i in range(6)] and close(
            rows[0].features_MF[GOOD], rows[1].features_MF, 1e-5
        )
        assert close(rows[0].averaged(torch.zeros(1, 68)), rows[1].averaged(torch.zeros(1, 68)), 1e-5)
        assert (
            stage.stats.rejected.keys() == {2}
            and reason in stage.stats.rejected[2]
            and stage.stats.rejected[2].startswith("its data have ")
        )
        assert ("mine", 2) not in stage.client_states and not stage.stats.late

    def test_losses_and_signatures(self, change, reason):
        stage, clean = Stage(with_invalid(2, change), linear), Stage(planted(6), linear)
        models_KP = torch.stack([stage.model(k) for k in range(2)])
        frozen_MP = models_KP[[0, 1, 0, 1, 0, 1]]
        found, expected = (
            clients.losses(clients.broadcast(models_KP), frozen_model=clients.send(frozen_MP, np.arange(6)))
            for clients in (stage.clients(), clean.clients())
        )
        assert np.isinf(found[2]).all() and close(found[GOOD], expected[GOOD], 1e-5)
        assert reason in stage.stats.rejected[2]
        clients = stage.clients()
        features_MF, valid_M = clients.describe(lambda client, anchor_P: client.x.sum((0, 1)))
        assert (
            valid_M.tolist() == [i in GOOD for i in range(6)]
            and features_MF.shape == (6, 16)
            and reason in stage.stats.rejected[2]
        )

    def test_scores(self, change, reason):
        """Invalid training data exclude a client where it is tuned first, invalid test data always."""
        for what, tune in (("train", LocalSGD(steps=1)), ("test", None)):
            stage = Stage(with_invalid(2, change, what), linear)
            work = OwnTest(
                Address(0, 1, -1),
                np.arange(6),
                (stage.model()[None],),
                start=Rows(0, np.zeros(6, int)),
                tune=tune,
                steps_M=np.ones(6, int),
            )
            outcome = stage.backend.run(work)
            assert np.isnan(outcome.arrays["scores"]).all(1).tolist() == [i not in GOOD for i in range(6)]
            assert outcome.excluded.keys() == {2} and reason in outcome.excluded[2].reason

    def test_a_shared_test_set(self, change, reason):
        stage = Stage(with_invalid(1, change, "test_set"), linear)
        work = SharedTest(Address(0, 1, -1), np.arange(2), (stage.model()[None],), start=Rows(0, np.zeros(2, int)))
        outcome = stage.backend.run(work)
        assert outcome.arrays["confusion"][0].sum() > 0 and outcome.arrays["confusion"][1].sum() == 0
        assert (
            outcome.excluded.keys() == {1}
            and outcome.excluded[1].reason.startswith("its test set 1 has ")
            and reason in outcome.excluded[1].reason
        )


def test_empty_results_have_the_form_of_results():
    """For every kind of work: the same names, types and shapes, so that both fit into one array."""
    stage, works = Stage(planted(4), linear), []
    run = stage.backend.run
    stage.backend.run = lambda work: (works.append((work, run(work))), works[-1][1])[1]
    clients = stage.clients()
    object.__setattr__(clients, "local_test_samples", 10)
    updates = clients.train(clients.send(stage.model()[None]), defer_aggregation=True, features=stage.network.spec.head)
    clients.average(updates, clients.weights())
    clients.losses(clients.broadcast(stage.model()[None]))
    clients.describe(lambda client, anchor_P: client.y[:1])
    for kind in (OwnTest, SharedTest):
        ids = np.arange(2)
        stage.backend.run(kind(Address(0, 1, -1), ids, (stage.model()[None],), start=Rows(0, 0 * ids)))
    assert len({type(work) for work, _ in works}) == 6
    for work, outcome in works:
        nothing = work.empty_result(4)
        assert nothing.keys() == outcome.arrays.keys()
        for name, values in outcome.arrays.items():
            assert nothing[name].dtype == values.dtype and (
                nothing[name].shape == values.shape or name == "features"
            ), name
            assert len(nothing[name]) == len(work.ids_M)
