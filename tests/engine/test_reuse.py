"""Reuse of results: every figure is that of a backend that computes all of them, and known ones are not computed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, linear, planted, uneven
from torch import nn

from cfl_ray import Experiment, simulate
from cfl_ray.core.clients import ClientState
from cfl_ray.core.params import Columns
from cfl_ray.core.work import Address, EvaluateClients, EvaluateShared, Losses, Rows
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.engine import reuse
from cfl_ray.engine.reuse import ReusingBackend

NONE = np.zeros(0, np.int64)


class Counted(Stage):
    """A stage whose backend keeps what it is asked for, behind one that reuses results."""

    def __post_init__(self):
        super().__post_init__()
        self.plain, self.works = self.backend, []
        run = self.plain.run
        self.plain.run = lambda work: (self.works.append(work), run(work))[1]
        self.backend = ReusingBackend(self.plain, self.federation, NONE)

    def asked(self) -> list:
        """The works since the last call."""
        works, self.works[:] = list(self.works), []
        return works

    def evaluated(self, round: int, ids=None):
        return replace(self.clients(ids, round), evaluated=True)

    def models(self, *numbers: int) -> torch.Tensor:
        return torch.stack([self.model(number) for number in numbers])

    def test(self, models_KP, row_M, round: int, **changes) -> np.ndarray:
        ids = np.arange(len(row_M))
        work = EvaluateClients(Address(0, round, -1), ids, (models_KP,), start=Rows(0, np.array(row_M)), **changes)
        found = self.backend.run(work).arrays["scores"]
        assert np.array_equal(found, self.plain.__class__.run(self.plain, work).arrays["scores"])
        return found


@pytest.fixture
def stage():
    return Counted(uneven([10, 7, 5]), lambda: nn.Linear(6, 3))


class TestTests:
    def test_only_models_that_changed_are_tested(self, stage):
        stage.test(stage.models(0, 1), [0, 1, 1], 1)
        stage.asked()
        stage.test(stage.models(0, 2), [0, 1, 1], 2)
        (work,) = stage.asked()
        assert work.ids_M.tolist() == [1, 2]
        stage.test(stage.models(2, 0), [1, 0, 1], 3)
        (work,) = stage.asked()
        assert work.ids_M.tolist() == [2], "a model is known by its values, whatever its row"

    def test_results_of_two_evaluations_are_kept(self, stage):
        for round in (1, 2, 3):
            stage.test(stage.models(round), [0, 0, 0], round)
        assert len(stage.backend.latest) + len(stage.backend.before) == 2
        stage.asked()
        stage.test(stage.models(1), [0, 0, 0], 4)
        assert len(stage.asked()) == 1

    def test_limits_and_votes_are_apart(self, stage):
        stage.test(stage.models(0, 1), [0, 0, 0], 1)
        stage.test(stage.models(0, 1), [0, 0, 0], 1, max_test_samples=2)
        stage.test(stage.models(0, 1), [0, 0, 0], 1, weight_MK=np.full((3, 2), 0.5))
        stage.test(stage.models(0, 1), [0, 0, 0], 1, frozen_model=Rows(0, np.array([1, 1, 1])))
        assert len(stage.asked()) == 4
        stage.test(stage.models(0, 1), [1, 0, 1], 1, weight_MK=np.full((3, 2), 0.5))
        assert not stage.asked()

    def test_a_client_state_that_changed_is_tested(self, stage):
        state, models_KP = ClientState("mine"), stage.models(0)
        clients = stage.clients([0, 1])
        clients.train(clients.send(models_KP), client_state=state)
        stage.test(models_KP, [0, 0, 0], 1, client_state=state)
        clients = stage.clients([1], round=2)
        clients.train(clients.send(models_KP), client_state=state)
        stage.asked()
        stage.test(models_KP, [0, 0, 0], 2, client_state=state)
        assert stage.asked()[0].ids_M.tolist() == [1]
        stage.test(stage.models(3), [0, 0, 0], 3, client_state=state)
        assert stage.asked()[0].ids_M.tolist() == [2], "the state is the whole model, and client 2 has none"
        stage.backend.forget(np.array([0]))
        stage.test(stage.models(3), [0, 0, 0], 4, client_state=state)
        assert stage.asked()[0].ids_M.tolist() == [0]

    def test_part_of_a_model_in_the_client_state(self, stage):
        state, models_KP = ClientState("part", Columns(((0, 4),))), stage.models(0)
        clients = stage.clients()
        clients.train(clients.send(models_KP), client_state=state)
        stage.test(models_KP, [0, 0, 0], 1, client_state=state)
        stage.asked()
        stage.test(models_KP, [0, 0, 0], 2, client_state=state)
        assert not stage.asked()
        stage.test(stage.models(1), [0, 0, 0], 3, client_state=state)
        assert len(stage.asked()) == 1

    def test_excluded_clients_are_tried_again(self):
        stage = Counted(Spoiled([1], clients=3), linear)
        for round in (1, 2):
            clients = stage.evaluated(round)
            found = clients.losses(clients.broadcast(stage.models(0)))
            assert np.isinf(found[:, 0]).tolist() == [False, True, False] and sorted(clients.stats.excluded) == [1]
        assert [work.ids_M.tolist() for work in stage.asked()] == [[0, 1, 2], [1]]

    def test_pairs_of_a_model_and_a_test_set(self):
        stage = Counted(planted(4), linear)

        def test(round, sets, rows, *numbers):
            work = EvaluateShared(
                Address(0, round, -1), np.array(sets), (stage.models(*numbers),), start=Rows(0, np.array(rows))
            )
            found, plain = stage.backend.run(work).arrays, stage.plain.__class__.run(stage.plain, work).arrays
            assert all(np.array_equal(found[name], plain[name]) for name in ("confusion", "loss"))

        test(1, [0, 1, 0], [0, 0, 1], 0, 1)
        test(2, [0, 1, 0, 1], [0, 0, 1, 1], 0, 1)
        assert [work.ids_M.tolist() for work in stage.asked()] == [[0, 1, 0], [1]]

    def test_tuned_models_are_always_tested(self, stage):
        for round in (1, 2):
            stage.test(stage.models(0), [0, 0, 0], round, tune=stage.local, steps_M=np.array([1, 1, 1]))
        assert len(stage.asked()) == 2


class TestLosses:
    def test_of_models_that_changed(self, stage):
        clients = stage.evaluated(1)
        first = clients.losses(clients.broadcast(stage.models(0, 1, 2)))
        clients = stage.evaluated(2)
        second = clients.losses(clients.broadcast(stage.models(0, 5, 2)))
        works = stage.asked()
        assert [work.num_models for work in works] == [3, 1] and torch.equal(works[1].tables[0], stage.models(5))
        assert np.array_equal(second[:, [0, 2]], first[:, [0, 2]])
        clients = stage.clients(round=3)
        assert np.array_equal(clients.losses(clients.broadcast(stage.models(0, 5, 2))), second)
        assert not stage.asked(), "a training round uses those of the evaluation before"

    def test_do_not_depend_on_the_clients_beside(self, stage):
        clients = stage.clients()
        whole = clients.losses(clients.broadcast(stage.models(0, 1)))
        for client in range(3):
            one = stage.clients([client])
            assert np.array_equal(one.losses(one.broadcast(stage.models(0, 1)))[0], whole[client])

    def test_a_training_round_adds_nothing(self, stage):
        clients = stage.clients()
        clients.losses(clients.broadcast(stage.models(0)))
        assert not stage.backend.latest and not stage.backend.before

    def test_on_the_first_samples(self, stage):
        clients = replace(stage.evaluated(1), choice_samples=7)
        limited = clients.losses(clients.broadcast(stage.models(0)))
        assert stage.asked()[0].max_samples == 7
        clients = stage.clients(round=2)
        assert np.array_equal(clients.losses(clients.broadcast(stage.models(0)))[1:], limited[1:])
        assert stage.asked()[0].ids_M.tolist() == [0], "the other clients have no more samples than that"

    def test_of_attackers_are_always_computed(self, stage):
        stage.backend.attackers = np.array([1])
        for round in (1, 2):
            clients = stage.evaluated(round)
            clients.losses(clients.broadcast(stage.models(0)))
        assert [work.ids_M.tolist() for work in stage.asked()] == [[0, 1, 2], [1]]

    def test_with_a_frozen_model(self, stage):
        expected = []
        for round, frozen in ((1, 4), (2, 4), (3, 5)):
            clients = stage.evaluated(round)
            frozen_KP = clients.known_models(stage.models(frozen))
            expected.append(clients.losses(clients.broadcast(stage.models(0, 1)), frozen_model=frozen_KP))
        assert [type(work) for work in stage.asked()] == [Losses, Losses]
        assert np.array_equal(expected[0], expected[1]) and not np.array_equal(expected[0], expected[2])


def test_changed_data_are_tested_again():
    federation = ChangingFederation(planted(3), [DataChange(2, (1,), 1, 0, None)])
    stage = Counted(federation, linear)
    found = []
    for round in (1, 2, 3):
        clients = stage.evaluated(round)
        found.append(clients.losses(clients.broadcast(stage.models(0))))
    assert [len(work.ids_M) for work in stage.asked()] == [3, 3]
    assert not np.array_equal(found[0][1], found[1][1]) and np.array_equal(found[1], found[2])


# a method of each way to predict: models, choices by losses, personal, mixed and adapted models
WAYS = ["ditto", "fedavg", "fedem", "ifca", "per_fedavg"]
ASKING = [
    "autocfl",
    "cgpfl",
    "fedac",
    "feddrift",
    "fedrc",
    "fedsoft",
    "ifca_cam",
    "stocfl",
]  # the clients, for clusters


@pytest.mark.parametrize("view, names", [("cluster", WAYS + ASKING), ("holdout", WAYS)])
def test_figures_of_methods_are_those_without_reuse(view, names, monkeypatch, tmp_path, figures):
    """Also while clients join and leave, and while data change."""
    values = {
        "rounds": 4,
        "methods": [{name: {"warmup_rounds": 1} if name == "ifca_cam" else {}} for name in names],
        "data": {
            "source": "digits",
            "shift": {"kind": "rotated"},
            "partition": {"clients": 12, "samples": 40},
            "test": {"view": view},
        },
        "model": {"options": {"hidden": 8}},
        "local": {"epochs": 1, "batch_size": 20},
        "cohort": {"fraction": 0.4},
        "schedule": [
            {"round": 2, "join": [10, 11]},
            {"round": 3, "leave": [0], "change": [{"clients": [4, 5], "rotate": 90}]},
            {"round": 4, "join": [0]},
        ],
        "evaluation": {"choice_samples": None},
        "runtime": {"engine": "manual"},
        "output": str(tmp_path),
    }

    reused = figures(simulate(Experiment(**values)))
    monkeypatch.setattr(reuse, "_is_reusable", lambda work: False)
    assert repr(reused) == repr(figures(simulate(Experiment(**values))))  # NaN equals itself
