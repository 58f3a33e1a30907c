"""The port against a backend that only notes what it was asked, and answers with numbers that can be recognised."""

import numpy as np
import pytest
import torch
from torch import nn

from cfl_ray.core.clients import Clients, Own, Pull, Round
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.work import Address, Describe, LeftOut, Losses, Outcome

SPEC = ParamSpec.of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))  # P = 12 + 3 + 6 + 2 = 23
P, BITS = 23, 32


class Notebook:
    """A backend that keeps the work. Every client is sound, except those in `bad`."""

    def __init__(self, bad=()):
        self.asked, self.bad = [], bad

    def run(self, work):
        self.asked.append(work)
        size, ok = len(work.ids_M), ~np.isin(work.ids_M, self.bad)
        left_out = {i: LeftOut("its update is odd") for i in np.flatnonzero(~ok).tolist()}
        if isinstance(work, Losses):
            return Outcome({"losses": np.arange(size * work.num_models, dtype=float).reshape(size, -1)})
        if isinstance(work, Describe):
            return Outcome({"features": np.ones((size, P), np.float32), "ok": ok, "floats": np.full(size, P)}, left_out=left_out)
        arrays = {"ok": ok, "train_loss": np.where(ok, work.ids_M / 10, np.nan), "held": np.tile([0.5, 0.25], (size, 1))}
        if work.keep is not None:
            arrays["kept"] = np.ones((size, work.keep.count), np.float32)
        return Outcome(arrays, {}, None if work.mix is None else np.zeros(work.mix.num_rows), left_out)


def clients(ids=(3, 5, 8), backend=None, number=1, measure=0) -> Clients:
    ids = np.array(ids)
    return Clients(ids, 10 * (ids + 1), SPEC, LocalSGD(epochs=2, batch_size=20), backend or Notebook(), 7, number, Round(), measure)


MODELS = torch.arange(3 * P).reshape(3, P).float()


class TestTraffic:
    @pytest.mark.parametrize("send, floats", [
        (lambda c: c.send(MODELS, np.array([0, 1, 2])), P),
        (lambda c: c.send(MODELS, columns=SPEC.head), 8),
        (lambda c: c.broadcast(MODELS), 3 * P),
        (lambda c: c.broadcast(MODELS, shared=SPEC.base), 3 * (P - 15) + 15),
        (lambda c: c.known(MODELS), 0),
        (lambda c: c.broadcast(MODELS).choose(np.zeros(3)), 3 * P),
    ])  # fmt: skip
    def test_down(self, send, floats):
        cohort = clients()
        send(cohort)
        assert (cohort.books.ledger.down_bits, cohort.books.ledger.up_bits) == (3 * BITS * floats, 0)

    @pytest.mark.parametrize("options, floats", [
        ({"mix": torch.ones(1, 3)}, P),
        ({"mix": torch.ones(2, 3)}, P),  # a result is uploaded once, into however many sums it goes
        ({"mix": torch.ones(1, 3), "own": Own("head", SPEC.head)}, P - 8),
        ({"mix": torch.ones(1, 3), "own": Own("head", SPEC.head, private=False)}, P),
        ({"mix_later": True}, P),
        ({"keep": SPEC.head}, 8),
        ({"mix": torch.ones(1, 3), "keep": SPEC.head}, P),
        ({"own": Own("all")}, 0),
    ])  # fmt: skip
    def test_up(self, options, floats):
        cohort = clients()
        cohort.train(cohort.known(MODELS[:1]), **options)
        assert (cohort.books.ledger.down_bits, cohort.books.ledger.up_bits) == (0, 3 * BITS * floats)

    @pytest.mark.parametrize("options, floats", [({}, P), ({"floats": 4}, 4), ({"sketch": 16}, P)])
    def test_of_signatures(self, options, floats):
        cohort = clients()
        cohort.describe(lambda client, anchor_P: anchor_P, cohort.known(MODELS[:1]), **options)
        assert cohort.books.ledger.up_bits == 3 * BITS * floats

    def test_selected_clients_book_to_the_same_round(self):
        cohort = clients()
        cohort.select(np.array([True, False, True])).send(MODELS)
        cohort.select(np.array([1])).upload(5)
        assert (cohort.books.ledger.down_bits, cohort.books.ledger.up_bits) == (2 * BITS * P, BITS * 5)


class TestSending:
    def test_rows_that_do_not_exist_are_refused(self):
        for rows in (np.array([0, 1, 3]), np.array([0, -1, 2]), np.array([0, 1])):
            with pytest.raises(ValueError, match="send: 3 clients and 3 models, got rows"):
                clients().send(MODELS, rows)

    def test_a_broadcast_is_not_a_choice(self):
        cohort = clients()
        with pytest.raises(ValueError, match="say which one each client works with"):
            cohort.train(cohort.broadcast(MODELS), mix=torch.ones(1, 3))

    def test_a_table_used_twice_crosses_once(self):
        backend = Notebook()
        cohort = clients(backend=backend)
        sent = cohort.send(MODELS, np.array([2, 1, 0]))
        cohort.train(sent, pulls=[Pull(0.1, cohort.send(MODELS)), Pull(0.2, cohort.send(MODELS[:1] + 1))])
        (work,) = backend.asked
        assert len(work.tables) == 2 and work.tables[0] is MODELS
        assert [(rows.table, rows.row_M.tolist()) for rows in work.rows()] == [(0, [2, 1, 0]), (0, [0, 0, 0]), (1, [0, 0, 0])]

    def test_a_pull_without_weight_is_no_pull(self):
        backend = Notebook()
        cohort = clients(backend=backend)
        cohort.train(cohort.send(MODELS), pulls=[Pull(0.0, cohort.send(MODELS))])
        assert backend.asked[0].pulls == ()


class TestTraining:
    def test_weights_are_normalised_row_by_row(self):
        backend = Notebook()
        cohort = clients(backend=backend)
        cohort.train(cohort.send(MODELS), mix=torch.tensor([[1.0, 3, 0], [0, 0, 0], [0, 0, 5]]))
        mix = backend.asked[0].mix
        assert list(zip(mix.out_E.tolist(), mix.client_E.tolist(), mix.weight_E.tolist())) == [(0, 0, 0.25), (0, 1, 0.75), (2, 2, 1.0)]
        assert mix.num_rows == 3 and mix.total_R.tolist() == [4, 0, 5]

    @pytest.mark.parametrize("mix", [torch.ones(3), torch.ones(1, 2), -torch.ones(1, 3), torch.tensor([[1.0, np.nan, 1]])])
    def test_other_weights_are_refused(self, mix):
        cohort = clients()
        with pytest.raises(ValueError, match=r"mix must be weights >= 0 of shape \(R, 3\)"):
            cohort.train(cohort.send(MODELS), mix=mix)

    def test_mean_of_what_arrived_and_the_rest_as_it_was(self):
        """sum / mass: 0.6 of the weight arrived for row 0, none for row 1."""
        cohort = clients()
        updates = cohort.train(cohort.send(MODELS), mix=torch.ones(2, 3))
        outcome = Outcome(updates.outcome.arrays, {0: torch.full((P,), 1.2, dtype=torch.float64), 1: torch.zeros(P, dtype=torch.float64)}, np.array([0.6, 0.0]))
        mixed = type(updates)(outcome, updates.mix).mixed(empty=MODELS[:2])
        assert torch.allclose(mixed[0], torch.full((P,), 2.0)) and torch.equal(mixed[1], MODELS[1]) and mixed.dtype == torch.float32

    def test_steps_follow_samples_or_are_given(self):
        backend = Notebook()
        cohort = clients(backend=backend)  # 40, 60, 90 samples; two epochs of batches of 20
        cohort.train(cohort.send(MODELS))
        cohort.train(cohort.send(MODELS), steps_M=np.array([1, 2, 3]))
        cohort.train(cohort.send(MODELS), local=LocalSGD(steps=9))
        assert [work.steps_M.tolist() for work in backend.asked] == [[4, 6, 10], [1, 2, 3], [9, 9, 9]]

    def test_every_exchange_has_an_address_of_its_own(self):
        backend = Notebook()
        cohort = clients(backend=backend, number=4)
        cohort.train(cohort.send(MODELS))
        cohort.select(np.array([0])).losses(cohort.broadcast(MODELS))
        cohort.describe(lambda client, anchor_P: anchor_P)
        assert [work.address for work in backend.asked] == [Address(7, 4, exchange) for exchange in (1, 2, 3)]


class TestWhatIsNoticed:
    def test_of_clients_that_were_left_out(self):
        cohort = clients(backend=Notebook(bad=[5]), measure=9)
        updates = cohort.train(cohort.send(MODELS), mix=torch.ones(1, 3))
        assert updates.ok_M.tolist() == [True, False, True] and np.array_equal(updates.train_loss_M, [0.3, np.nan, 0.8], equal_nan=True)
        assert cohort.books.rejected == {5: "its update is odd"} and cohort.books.train_loss == {3: 0.3, 8: 0.8}
        assert cohort.books.held == {3: (0.5, 0.25), 8: (0.5, 0.25)}

    def test_of_signatures_that_were_left_out(self):
        cohort = clients(backend=Notebook(bad=[3]))
        assert cohort.describe(lambda client, anchor_P: anchor_P)[1].tolist() == [False, True, True]
        assert cohort.books.rejected == {3: "its update is odd"}

    def test_a_training_whose_result_is_not_held_leaves_no_trace_but_its_rejections(self):
        backend = Notebook(bad=[5])
        cohort = clients(backend=backend, measure=9)
        cohort.train(cohort.send(MODELS), held=False)
        assert backend.asked[0].measure == 0
        assert cohort.books.train_loss == {} and cohort.books.held == {} and cohort.books.rejected == {5: "its update is odd"}

    def test_a_loss_that_is_no_number_is_never_the_least(self):
        class Diverged(Notebook):
            def run(self, work):
                return Outcome({"losses": np.array([[np.nan, 2.0], [np.inf, 3.0], [1.0, np.nan]])})

        cohort = clients(backend=Diverged())
        losses_MK = cohort.losses(cohort.broadcast(MODELS[:2]))
        assert losses_MK.argmin(1).tolist() == [1, 1, 0] and losses_MK[1, 0] == np.inf


def test_weights_of_clients():
    assert clients().weights().tolist() == [40, 60, 90] and clients().weights("uniform").tolist() == [1, 1, 1]
