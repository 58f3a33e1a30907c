"""Checks of a method on a small federation: checkpoints, agreement of the engines, accuracy and traffic."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import close
from federations import Spoiled, Stage, planted
from torch import nn

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.clustering.agreement import agreement
from cfl_ray.config import EvaluationConfig
from cfl_ray.core.clients import Clients
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State
from cfl_ray.core.work import Exclusion, Losses, Outcome, Work
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.population.population import Population
from cfl_ray.runtime.evaluation import Evaluator

COHORTS = [[0, 1, 2, 5], [3, 4, 5, 6, 7], [1], [0, 2, 4, 7]]


def mlp() -> nn.Module:
    """340 parameters: 272 of the base, 68 of the head."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def groups(engine: str = "manual", federation=None, **local) -> Stage:
    """Eight clients in two groups that disagree about every label."""
    return Stage(federation or planted(), mlp, LocalSGD(**{"epochs": 3, "lr": 0.3} | local), engine)


def accuracy(one: Stage, method: Method, state: State, ids: Sequence[int] | None = None) -> np.ndarray:
    """P-server accuracy (M,), by the evaluator of a run."""
    clients = one.clients(ids)
    evaluator = Evaluator(EvaluationConfig(local_samples=10**6), one.federation, one.backend, one.seed)
    return evaluator.scores(method.serve(state, clients), clients)[:, 0]


def row_accuracy(one: Stage, row_P: torch.Tensor, client: int) -> float:
    """Accuracy of one model on the client's test images, by PyTorch alone."""
    one.network.load(row_P)
    x, y = one.federation.test(client)
    return (one.network.logits(x).cpu().argmax(1) == y).float().mean().item()


def assert_survives_an_interruption(make: Callable[[], Stage], method: Method, cohorts: Sequence, folder: Path):
    """Continuing from a checkpoint after any round gives the same state and client states, bit for bit."""
    whole, store, resumed = make(), CheckpointStore(folder, "hash"), []
    expected = method.init(whole.start())
    for after, ids in enumerate(cohorts, 1):
        expected = whole.play(method, ids, state=expected, first=after)
        resumed.append(saved_and_loaded(store, after, expected, whole, make()))
    for after, (again, state) in enumerate(resumed[:-1], 1):
        assert_equal(again.play(method, *cohorts[after:], state=state, first=after + 1), expected)
        found_states, expected_states = again.client_states, whole.client_states
        assert found_states.keys() == expected_states.keys()
        assert all(torch.equal(value, expected_states[key]) for key, value in found_states.items())


def saved_and_loaded(store: CheckpointStore, round: int, state: State, one: Stage, other: Stage) -> tuple[Stage, State]:
    """`other` with the client states of `one`, and the state, as they come back from a checkpoint."""
    store.save(round, *state.to_checkpoint(), one.backend.client_states)
    saved = CheckpointStore(store.directory, "hash").load()
    other.backend.restore(saved.client_states())
    return other, type(state).from_checkpoint(saved.tensors, saved.values)


def assert_equal(found: State, expected: State):
    (tensors, scalars), (others, other_scalars) = found.to_checkpoint(), expected.to_checkpoint()
    assert repr(scalars) == repr(other_scalars)  # NaN is not equal to itself
    assert tensors.keys() == others.keys()
    for name, value in tensors.items():
        assert value.dtype == others[name].dtype and torch.equal(value, others[name]), name


def assert_engines_agree(make: Callable[[str], Stage], method: Method, cohorts: Sequence = COHORTS[:3]):
    """Vectorised and sequential rounds end in the same models, clusters and client states, up to rounding."""
    one, other = make("sequential"), make("vectorised")
    expected, found = one.play(method, *cohorts), other.play(method, *cohorts)
    change = (expected.models_KP - method.init(one.start()).models_KP[:1]).abs().max()
    assert change > 1e-3 or one.client_states, "nothing was trained"
    assert close(found.models_KP, expected.models_KP, 2e-5)
    assert np.array_equal(found.assign_N, expected.assign_N)
    found_states, expected_states = other.client_states, one.client_states
    assert found_states.keys() == expected_states.keys()
    assert all(close(value, expected_states[key], 2e-5) for key, value in found_states.items())


def make_late_in_choices(one: Stage, client: int) -> None:
    """From now on this client takes too long whenever clients compare models by their losses, and only then."""
    in_time = one.backend.run

    def run(work: Work) -> Outcome:
        outcome = in_time(work)
        if not isinstance(work, Losses) or client not in work.ids_M:
            return outcome
        at = work.ids_M.tolist().index(client)
        outcome.arrays["losses"][at] = np.inf
        return replace(outcome, excluded={at: Exclusion("its part took too long", late=True)})

    one.backend.run = run


def watched(one: Stage) -> list[Work]:
    """The work orders that the backend receives from now on."""
    works, run = [], one.backend.run
    one.backend.run = lambda work: works.append(work) or run(work)
    return works


def sampled(clients: int, participation: float, rounds: int) -> list[np.ndarray]:
    """The cohorts of the first rounds."""
    population = Population(clients, (), 0)
    return [population.draw(number, participation).ids_M for number in range(1, rounds + 1)]


def floats(one: Stage) -> tuple[float, float]:
    """Traffic of the latest round in floats: (down, up)."""
    return one.stats.traffic.down_bits / 32, one.stats.traffic.up_bits / 32


def assert_local_model_is_of_the_cluster_training(method: Method, one: Stage, state: State, round: int, monkeypatch):
    """P-local and the train loss are those of theta_i, the first of the two trainings of a round."""
    losses, train = [], Clients.train

    def recorded(*args, **more):
        updates = train(*args, **more)
        losses.append(updates.train_loss_M)
        return updates

    monkeypatch.setattr(Clients, "train", recorded)
    method.round(state, replace(one.clients(round=round), local_test_samples=50), Draws(0, round))
    assert len(losses) == 2 and not np.allclose(*losses)
    assert list(one.stats.train_loss.values()) == losses[0].tolist() and len(one.stats.local_scores) == 8


OPPOSED_COHORTS = {"all clients": [None] * 5, "30 %": [[0, 1], [2, 3], [4, 5, 6], [6, 7, 0], [1, 2, 3], [4, 5, 7]] * 3}


def assert_serves_groups_that_disagree(method: Method, cohorts: str, least: float):
    """Every client has at least this accuracy; one model for both groups is right for half of the labels."""
    found = []
    for each in (method, FedAvg()):
        one = groups(federation=planted(samples=100), epochs=5, lr=0.5, batch_size=40)
        found.append(accuracy(one, each, one.play(each, *OPPOSED_COHORTS[cohorts])))
    assert found[0].min() > least and found[1].mean() < 0.55


class EnginesAndCheckpoints:
    """For a subclass with a METHOD whose options bring every step into few rounds."""

    METHOD: Method
    COHORTS: Sequence = COHORTS[:3]

    def test_engines_agree(self):
        assert_engines_agree(groups, self.METHOD, self.COHORTS)

    def test_continues_from_a_checkpoint_after_any_round(self, tmp_path):
        assert_survives_an_interruption(groups, self.METHOD, COHORTS, tmp_path)


class Centres:
    """Clients that come and go, for a subclass with a METHOD that has two centres from its first round on."""

    METHOD: Method
    FIRST: str  # the phase of the first round
    START = 0  # the model of the first round

    @pytest.fixture
    def found(self):
        """The stage and the state after two rounds; clients 5, 6 and 7 never took part."""
        one = groups()
        return one, one.play(self.METHOD, [0, 1, 2, 3, 4], [0, 1, 2, 3])

    def test_newcomers_before_the_first_round_wait(self):
        one = groups()
        state = self.METHOD.init(one.start())
        assert_equal(self.METHOD.join(state, one.clients([5])), state)
        assert self.METHOD.serve(state, one.clients()).frozen_P is None and floats(one) == (0, 0)

    def test_clients_are_served_their_centre_and_unseen_ones_the_mean(self, found):
        one, state = found
        serving = self.METHOD.serve(state, one.clients([0, 1, 7]))
        assert serving.row_M.tolist() == [*state.assign_N[:2], 2]
        assert torch.equal(serving.models_KP[2], state.models_KP.mean(0))

    def test_a_leaver_is_forgotten_and_a_cluster_without_members_stays(self, found):
        one, state = found
        gone = np.flatnonzero(state.assign_N == 1)
        left = self.METHOD.leave(state, gone)
        later = one.play(self.METHOD, np.flatnonzero(state.assign_N == 0), state=left, first=3)
        assert set(later.assign_N[gone]) == {-1} and torch.equal(later.models_KP[1], state.models_KP[1])
        assert set(self.METHOD.join(later, one.clients(gone, round=4)).assign_N[gone]) == {1}

    def test_fewer_clients_than_centres_make_as_many_as_there_are(self):
        state = groups().play(replace(self.METHOD, num_clusters=5), [0, 3], [0, 3])
        assert state.num_clusters == 2 and sorted(state.assign_N[[0, 3]]) == [0, 1]

    @pytest.mark.parametrize("cohort", [[], [4, 5]])
    def test_a_first_round_without_a_valid_update_is_repeated(self, cohort):
        one = Stage(Spoiled([4, 5]), mlp, LocalSGD(epochs=3, lr=0.3))
        state = one.play(self.METHOD, cohort)
        assert state.phase == self.FIRST and torch.equal(state.models_KP[0], one.model(self.START))
        later = one.play(self.METHOD, [0, 1, 2, 3], state=state, first=2)
        assert later.num_clusters == 2 and agreement(np.arange(4) % 2, later.assign_N[:4])["ari"] == 1
        assert_equal(one.play(self.METHOD, cohort, state=later, first=3), later)
