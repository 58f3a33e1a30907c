"""Clients against a backend that records its work and returns recognisable numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from torch import nn

from cfl_ray.core.client_program import ClientProgram
from cfl_ray.core.clients import Clients, ClientState, LocalTraining, Proximal, RoundStats
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.work import Address, Describe, Exclusion, Losses, Outcome

SPEC = ParamSpec.of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))  # P = 12 + 3 + 6 + 2 = 23
P, BITS = 23, 32


class Recorder:
    """A backend that records its work. All clients are valid, except those in `invalid`."""

    def __init__(self, invalid=()):
        self.works, self.invalid = [], invalid

    def run(self, work):
        self.works.append(work)
        size, valid = len(work.ids_M), ~np.isin(work.ids_M, self.invalid)
        excluded = {i: Exclusion("its update is odd") for i in np.flatnonzero(~valid).tolist()}
        if isinstance(work, Losses):
            return Outcome({"losses": np.arange(size * work.num_models, dtype=float).reshape(size, -1)})
        if isinstance(work, Describe):
            arrays = {"features": np.ones((size, P), np.float32), "valid": valid, "floats": np.full(size, P)}
            return Outcome(arrays, excluded=excluded)
        arrays = {
            "valid": valid,
            "train_loss": np.where(valid, work.ids_M / 10, np.nan),
            "local_scores": np.tile([0.5, 0.25], (size, 1)),
        }
        if work.features is not None:
            arrays["features"] = np.ones((size, work.features.count), np.float32)
        return Outcome(arrays, {}, None if work.averaging is None else np.zeros(work.averaging.num_rows), excluded)


def clients(ids=(3, 5, 8), backend=None, **options) -> Clients:
    """Client i has 10 (i + 1) samples."""
    ids, local = np.array(ids), LocalSGD(epochs=2, batch_size=20)
    options = {"seed": 7, "round": 1, "stats": RoundStats()} | options
    return Clients(ids, 10 * (ids + 1), SPEC, local, backend or Recorder(), **options)


MODELS = torch.arange(3 * P).reshape(3, P).float()


class TestTraffic:
    @pytest.mark.parametrize(
        "send, floats",
        [
            (lambda c: c.send(MODELS, np.array([0, 1, 2])), P),
            (lambda c: c.send(MODELS, columns=SPEC.head), 8),
            (lambda c: c.broadcast(MODELS), 3 * P),
            (lambda c: c.broadcast(MODELS, shared=SPEC.base), 3 * (P - 15) + 15),
            (lambda c: c.known_models(MODELS), 0),
            (lambda c: c.broadcast(MODELS).choose(np.zeros(3)), 3 * P),
        ],
    )
    def test_down(self, send, floats):
        cohort = clients()
        send(cohort)
        assert (cohort.stats.traffic.down_bits, cohort.stats.traffic.up_bits) == (3 * BITS * floats, 0)

    @pytest.mark.parametrize(
        "options, floats",
        [
            ({"average": torch.ones(1, 3)}, P),
            ({"average": torch.ones(2, 3)}, P),  # a result is uploaded once, for any number of averages
            ({"average": torch.ones(1, 3), "client_state": ClientState("head", SPEC.head)}, P - 8),
            ({"average": torch.ones(1, 3), "client_state": ClientState("head", SPEC.head, private=False)}, P),
            ({"defer_aggregation": True}, P),
            ({"features": SPEC.head}, 8),
            ({"average": torch.ones(1, 3), "features": SPEC.head}, P),
            ({"client_state": ClientState("all")}, 0),
        ],
    )
    def test_up(self, options, floats):
        cohort = clients()
        cohort.train(cohort.known_models(MODELS[:1]), **options)
        assert (cohort.stats.traffic.down_bits, cohort.stats.traffic.up_bits) == (0, 3 * BITS * floats)

    @pytest.mark.parametrize("options, floats", [({}, P), ({"floats": 4}, 4), ({"sketch": 16}, P)])
    def test_of_signatures(self, options, floats):
        cohort = clients()
        cohort.describe(lambda client, anchor_P: anchor_P, cohort.known_models(MODELS[:1]), **options)
        assert cohort.stats.traffic.up_bits == 3 * BITS * floats

    def test_of_selected_clients_counts_for_the_same_round(self):
        cohort = clients()
        cohort.select(np.array([True, False, True])).send(MODELS)
        cohort.select(np.array([1])).count_upload(5)
        assert (cohort.stats.traffic.down_bits, cohort.stats.traffic.up_bits) == (2 * BITS * P, BITS * 5)


class TestSending:
    def test_rows_that_do_not_exist_are_rejected(self):
        for rows in (np.array([0, 1, 3]), np.array([0, -1, 2]), np.array([0, 1])):
            with pytest.raises(ValueError, match=r"send: 3 clients and 3 models, got rows .*; each .* row in 0 .. 2"):
                clients().send(MODELS, rows)
        with pytest.raises(ValueError, match="-1 is a client without a cluster"):
            clients().send(MODELS, np.array([0, -1, 2]))

    def test_after_a_broadcast_clients_have_to_choose(self):
        cohort = clients()
        with pytest.raises(ValueError, match="select the model of each client"):
            cohort.train(cohort.broadcast(MODELS), average=torch.ones(1, 3))

    def test_a_table_that_is_used_twice_is_sent_once(self):
        backend = Recorder()
        cohort = clients(backend=backend)
        sent = cohort.send(MODELS, np.array([2, 1, 0]))
        proximal = [Proximal(0.1, cohort.send(MODELS)), Proximal(0.2, cohort.send(MODELS[:1] + 1))]
        cohort.train(sent, how=LocalTraining(proximal=proximal))
        (work,) = backend.works
        assert len(work.tables) == 2 and work.tables[0] is MODELS
        used = [(rows.table, rows.row_M.tolist()) for rows in work.rows()]
        assert used == [(0, [2, 1, 0]), (0, [0, 0, 0]), (1, [0, 0, 0])]

    def test_a_proximal_term_without_weight_is_dropped(self):
        backend = Recorder()
        cohort = clients(backend=backend)
        cohort.train(cohort.send(MODELS), how=LocalTraining(proximal=[Proximal(0.0, cohort.send(MODELS))]))
        assert backend.works[0].given.proximal == ()


class TestTraining:
    def test_weights_are_normalised_row_by_row(self):
        backend = Recorder()
        cohort = clients(backend=backend)
        cohort.train(cohort.send(MODELS), average=torch.tensor([[1.0, 3, 0], [0, 0, 0], [0, 0, 5]]))
        averaging = backend.works[0].averaging
        entries = zip(averaging.out_E.tolist(), averaging.client_E.tolist(), averaging.weight_E.tolist())
        assert list(entries) == [(0, 0, 0.25), (0, 1, 0.75), (2, 2, 1.0)]
        assert averaging.num_rows == 3 and averaging.total_R.tolist() == [4, 0, 5]

    def test_a_proximal_term_is_of_whole_tensors(self):
        """The sequential engine took such a term for one of the whole tensor, the others for one of the columns."""
        cohort = clients()
        sent = cohort.send(MODELS)
        how = LocalTraining(proximal=[Proximal(1.0, sent, Columns(((0, 1),)))])
        with pytest.raises(ValueError, match="columns must be of whole tensors, which end at .*; got an edge at 1"):
            cohort.train(sent, how=how)

    def test_a_vector_of_weights_is_a_single_average(self):
        backend = Recorder()
        cohort = clients(backend=backend)
        cohort.train(cohort.send(MODELS), average=np.array([1, 3, 0]))
        averaging = backend.works[0].averaging
        assert averaging.num_rows == 1 and averaging.weight_E.tolist() == [0.25, 0.75]

    def test_other_weights_are_rejected(self):
        cohort = clients()
        for weights in (torch.ones(2), torch.ones(1, 2), -torch.ones(1, 3), torch.tensor([[1.0, np.nan, 1]])):
            with pytest.raises(ValueError, match=r"average must be weights >= 0, \(M,\) or \(R, M\) with M = 3, got"):
                cohort.train(cohort.send(MODELS), average=weights)

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            (None, "train: how must be a LocalTraining, got NoneType"),
            (ClientProgram(), r"got ClientProgram; .* write LocalTraining\(program=ClientProgram\(...\)\)"),
        ],
    )
    def test_a_description_of_another_type_is_rejected(self, how, message):
        cohort = clients()
        with pytest.raises(TypeError, match=message):
            cohort.train(cohort.send(MODELS), how=how)

    def test_averages_are_of_the_weight_that_arrived(self):
        """0.6 of the weight of row 0 arrived, and none of row 1, which is the default."""
        cohort = clients()
        updates = cohort.train(cohort.send(MODELS), average=torch.ones(2, 3))
        means = {0: torch.full((P,), 2.0)}
        updates = replace(updates, outcome=Outcome(updates.outcome.arrays, means, np.array([0.6, 0.0])))
        averaged = updates.averaged(default=MODELS[:2])
        assert close(averaged[0], torch.full((P,), 2.0), 1e-6) and torch.equal(averaged[1], MODELS[1])
        assert averaged.dtype == torch.float32 and updates.weight_R.tolist() == pytest.approx([1.8, 0])
        damped = updates.damped(MODELS[:2], total=3.6)
        assert close(damped[0], (MODELS[0] + 2) / 2, 1e-6) and torch.equal(damped[1], MODELS[1])

    def test_what_was_not_asked_for_and_models_that_were_not_sent(self):
        cohort = clients()
        with pytest.raises(ValueError, match="these updates have no features: pass `features` to `train`"):
            cohort.train(cohort.send(MODELS)).features_MF  # noqa: B018
        with pytest.raises(TypeError, match="models that clients received, as clients.send returns, got Tensor of flo"):
            cohort.train(MODELS)

    def test_results_that_were_not_averaged_have_no_average_and_no_weights(self):
        cohort = clients()
        updates = cohort.train(cohort.send(MODELS), features=SPEC.head)
        for read in (lambda: updates.arrived_R, lambda: updates.weight_R, lambda: updates.averaged(default=MODELS)):
            with pytest.raises(ValueError, match="these updates were not averaged: pass `average` to `train`"):
                read()

    def test_steps_follow_from_samples_or_are_given(self):
        backend = Recorder()
        cohort = clients(backend=backend)  # 40, 60, 90 samples; two epochs of batches of 20
        cohort.train(cohort.send(MODELS))
        cohort.train(cohort.send(MODELS), how=LocalTraining(steps_M=np.array([1, 2, 3])))
        cohort.train(cohort.send(MODELS), how=LocalTraining(sgd=LocalSGD(steps=9)))
        assert [work.steps_M.tolist() for work in backend.works] == [[4, 6, 10], [1, 2, 3], [9, 9, 9]]

    def test_every_exchange_has_an_address_of_its_own(self):
        backend = Recorder()
        cohort = clients(backend=backend, round=4)
        cohort.train(cohort.send(MODELS))
        cohort.select(np.array([0])).losses(cohort.broadcast(MODELS))
        cohort.describe(lambda client, anchor_P: anchor_P)
        assert [work.address for work in backend.works] == [Address(7, 4, exchange) for exchange in (1, 2, 3)]


class TestStatistics:
    def test_of_training_are_of_valid_clients(self):
        cohort = clients(backend=Recorder(invalid=[5]), local_test_samples=9)
        updates = cohort.train(cohort.send(MODELS), average=torch.ones(1, 3))
        assert updates.valid_M.tolist() == [True, False, True]
        assert np.array_equal(updates.train_loss_M, [0.3, np.nan, 0.8], equal_nan=True)
        assert cohort.stats.rejected == {5: "its update is odd"} and cohort.stats.train_loss == {3: 0.3, 8: 0.8}
        assert cohort.stats.local_scores == {3: (0.5, 0.25), 8: (0.5, 0.25)}

    def test_of_signatures_name_excluded_clients(self):
        cohort = clients(backend=Recorder(invalid=[3]))
        assert cohort.describe(lambda client, anchor_P: anchor_P)[1].tolist() == [False, True, True]
        assert cohort.stats.rejected == {3: "its update is odd"}

    def test_of_training_for_another_model_than_the_local_one_are_only_its_exclusions(self):
        backend = Recorder(invalid=[5])
        cohort = clients(backend=backend, local_test_samples=9)
        cohort.train(cohort.send(MODELS), keep_as_local_model=False)
        assert backend.works[0].local_test_samples == 0
        assert cohort.stats.train_loss == {} and cohort.stats.local_scores == {}
        assert cohort.stats.rejected == {5: "its update is odd"}

    def test_a_loss_of_nan_is_never_the_least(self):
        class Diverged(Recorder):
            def run(self, work):
                return Outcome({"losses": np.array([[np.nan, 2.0], [np.inf, 3.0], [1.0, np.nan]])})

        cohort = clients(backend=Diverged())
        losses_MK = cohort.losses(cohort.broadcast(MODELS[:2]))
        assert losses_MK.argmin(1).tolist() == [1, 1, 0] and losses_MK[1, 0] == np.inf


def test_a_mixture_needs_a_step():
    models_KP = torch.zeros(2, P)
    with pytest.raises(ValueError, match="fit_mixture: steps must be at least 1, got 0"):
        clients(backend=Recorder()).fit_mixture(clients().broadcast(models_KP), LocalTraining(), steps=0)


def test_weights_of_clients():
    assert clients().weights().tolist() == [40, 60, 90] and clients().weights("uniform").tolist() == [1, 1, 1]
