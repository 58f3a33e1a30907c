"""IFCA-CAM: sums of logits in choice, training and prediction, by the formulas; warm-up and one silent cluster are FedAvg."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, planted
from linear import ETA, N_0, N_1, assert_close, data, matrix, mean, stage
from playing import COHORTS, accuracy, assert_engines_agree, assert_equal, assert_survives_an_interruption, floats, groups, mlp

from cfl_ray.core.clients import Clients
from cfl_ray.core.cohort import Population
from cfl_ray.core.grouping import agreement
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.rng import Draws
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.ifca_cam import IFCACAM

P = 340


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(z) / np.exp(z).sum(1, keepdims=True)


def beside(one: Stage, client: int, w: np.ndarray, other: np.ndarray, steps: int = 2, momentum: float = 0.0) -> np.ndarray:
    """Steps of g(W) = (softmax(X W' + X V') - Y)' X / n with V = `other` frozen."""
    x, y = data(one, client)
    v = 0.0
    for _ in range(steps):
        v = momentum * v + (softmax(x @ w.T + x @ other.T) - y).T @ x / len(x)
        w = w - ETA * v
    return w


def loss(one: Stage, client: int, w: np.ndarray, other: np.ndarray) -> float:
    x, y = data(one, client)
    return -np.log((softmax(x @ w.T + x @ other.T) * y).sum(1)).mean()


class TestFormula:
    """Two clients, two cluster models; rounds without warm-up."""

    def models(self, one: Stage) -> tuple[np.ndarray, list[np.ndarray]]:
        return matrix(one.model(0)), [matrix(one.model(1)), matrix(one.model(2))]

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    @pytest.mark.parametrize("damped", [False, True])
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_a_round(self, weights, damped, seed, momentum):
        """c(i) = argmin_k loss(h + f_k); theta_i beside Theta_g, theta0_i beside Theta_c(i), both as received; damped: Theta_k moves by q_k."""
        one = stage(momentum=momentum)
        one.seed = seed
        whole, clusters = self.models(one)
        chosen = [int(np.argmin([loss(one, client, w, whole) for w in clusters])) for client in (0, 1)]
        theta = [beside(one, client, clusters[chosen[client]], whole, momentum=momentum) for client in (0, 1)]
        theta0 = [beside(one, client, whole, clusters[chosen[client]], momentum=momentum) for client in (0, 1)]
        state = one.play(IFCACAM(num_clusters=2, warmup_rounds=0, damped=damped, weights=weights), None)
        assert state.assign_N.tolist() == chosen
        assert_close(state.global_KP[0], mean(*theta0, weights))
        n = np.array([N_0, N_1]) if weights == "samples" else np.ones(2)
        for k, before in enumerate(clusters):
            members = [client for client in (0, 1) if chosen[client] == k]
            q = n[members].sum() / n.sum()
            after = sum(n[i] * theta[i] for i in members) / n[members].sum() if members else before
            assert_close(state.models_KP[k], (1 - q) * before + q * after if damped else after)

    def test_seeds_of_both_kinds_are_among_them(self):
        """Clients of one cluster, and clients of two."""
        found = []
        for seed in range(3):
            one = stage()
            one.seed = seed
            found.append(one.play(IFCACAM(num_clusters=2, warmup_rounds=0), None).assign_N.tolist())
        assert {len(set(assign)) for assign in found} == {1, 2}

    def test_the_choice_is_by_the_sum_of_logits_not_by_f_alone(self):
        """Theta_1 = -Theta_g is perfectly bad alone, and cancels a bad Theta_g."""
        one = stage()
        bad = 5 * matrix(one.model(1))
        good = -bad
        alone = [loss(one, 0, w, np.zeros((3, 5))) for w in (np.zeros((3, 5)), good)]
        both = [loss(one, 0, w, bad) for w in (np.zeros((3, 5)), good)]
        assert np.argmin(alone) == 0 and np.argmin(both) == 1
        method = IFCACAM(num_clusters=2, warmup_rounds=0)
        rows = torch.tensor(np.stack([np.zeros((3, 5)), good])).float().reshape(2, 15)
        state = method.init(one.start()).advance(models_KP=rows, global_KP=torch.tensor(bad).float().reshape(1, 15))
        assert one.play(method, [0], state=state).assign_N[0] == 1 == method.serve(state, one.clients([0])).row_M[0]

    def test_compares_on_the_first_samples_only(self):
        one, asked = stage(), []
        one.backend.run = lambda work, run=one.backend.run: (asked.append(work), run(work))[1]
        one.play(IFCACAM(num_clusters=2, warmup_rounds=0, select_samples=3), None)
        assert asked[0].max_samples == 3 and asked[0].num_models == 2


@pytest.mark.parametrize("weights", ["samples", "uniform"])
class TestIsFedAvg:
    @pytest.mark.parametrize("local", [{}, {"batch_size": 30, "momentum": 0.9}], ids=["full batch", "mini-batches"])
    def test_in_the_warm_up(self, weights, local):
        one = groups(**local)
        method = IFCACAM(num_clusters=3, warmup_rounds=4, weights=weights)
        state = one.play(method, *COHORTS)
        assert torch.equal(state.global_KP, groups(**local).play(FedAvg(weights=weights), *COHORTS).models_KP)
        assert torch.equal(state.models_KP, method.init(one.start()).models_KP) and state.phase == "federate" and set(state.assign_N) == {-1}

    def test_beside_one_cluster_that_predicts_nothing(self, weights):
        """Full batch: the exchange has another number, so other batches. One round, for the cluster learns too."""
        one, method = groups(), IFCACAM(num_clusters=1, warmup_rounds=0, weights=weights)
        state = method.init(one.start())
        state = one.play(method, COHORTS[0], state=state.advance(models_KP=torch.zeros(1, P)))
        assert torch.equal(state.global_KP, groups().play(FedAvg(weights=weights), COHORTS[0]).models_KP)


@pytest.mark.parametrize("warmup, phases", [(0, ["federate"] * 4), (2, ["warmup", "federate", "federate", "federate"])])
def test_warm_up_lasts_as_many_rounds_as_it_is_told(warmup, phases):
    one, method, found = groups(), IFCACAM(num_clusters=2, warmup_rounds=warmup), []
    state = method.init(one.start())
    for number, cohort in enumerate(COHORTS, 1):
        before = state.models_KP
        state = one.play(method, cohort, state=state, first=number)
        found.append(state.phase)
        assert torch.equal(before, state.models_KP) == (number <= warmup)
    assert found == phases


def test_the_warm_up_ends_also_where_nobody_was_there_for_its_last_round():
    one, method = groups(), IFCACAM(num_clusters=2, warmup_rounds=2)
    state = one.play(method, None)
    state = one.play(method, None, state=state, first=3)
    assert state.phase == "federate" and method.serve(state, one.clients()).beside_P is not None


@pytest.mark.parametrize("participation, rounds", [(1.0, 5), (0.3, 16)])
def test_planted_groups_are_found(participation, rounds):
    """From cluster models that each trained on one client of a group, beside a global model that knows nothing yet."""
    one = Stage(planted(12, 3), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
    method = IFCACAM(num_clusters=3, warmup_rounds=0)
    state = method.init(one.start())
    warm = []
    for group in range(3):
        clients = one.clients([group])
        sent = clients.send(state.models_KP[group : group + 1])
        warm.append(clients.train(sent, beside=clients.send(state.global_KP), mix=torch.ones(1, 1)).mixed(state.models_KP[:1]))
    population = Population(12, (), 0)
    drawn = [population.draw(number, participation).ids_M for number in range(1, rounds + 1)]
    state = one.play(method, *drawn, state=state.advance(models_KP=torch.cat(warm)))
    served = method.serve(state, one.clients()).row_M
    assert agreement(one.federation.group_N, served)["ari"] == 1
    known = state.assign_N >= 0
    assert known.sum() >= 11 and np.array_equal(state.assign_N[known], served[known])
    assert accuracy(one, method, state).mean() > 0.9


@pytest.mark.parametrize("options", [{}, {"damped": True, "select_samples": 20, "weights": "uniform"}], ids=str)
class TestEveryEngineAndInterruption:
    METHOD = {"num_clusters": 2, "warmup_rounds": 2}

    def test_engines_agree(self, options):
        assert_engines_agree(groups, IFCACAM(**self.METHOD | options), COHORTS)

    def test_an_interruption_changes_nothing(self, options, tmp_path):
        assert_survives_an_interruption(groups, IFCACAM(**self.METHOD | options), COHORTS, tmp_path)


class TestComingAndGoing:
    METHOD = IFCACAM(num_clusters=2, warmup_rounds=1)

    def test_newcomers_choose_when_they_are_served_and_when_they_take_part(self):
        one = groups()
        state = one.play(self.METHOD, [0, 1, 2, 3], [0, 1, 2, 3])
        joined = self.METHOD.join(state, one.clients([6], number=3))
        assert joined.assign_N[6] == -1 and floats(one) == (0, 0)
        chosen = self.METHOD.serve(joined, one.clients([6])).row_M[0]
        assert floats(one) == (0, 0) and one.play(self.METHOD, [6], state=joined, first=3).assign_N[6] == chosen

    def test_in_the_warm_up_everybody_is_served_the_global_model_alone(self):
        one = groups()
        method = IFCACAM(num_clusters=2, warmup_rounds=3)
        state = one.play(method, [0, 1])
        serving = method.serve(state, one.clients())
        assert torch.equal(serving.models_KP, state.global_KP) and serving.row_M.tolist() == [0] * 8 and serving.beside_P is None
        later = one.play(method, [0], [0], [0], state=state, first=2)
        assert torch.equal(method.serve(later, one.clients()).beside_P, later.global_KP[0])

    def test_a_leaver_is_forgotten_and_its_cluster_stays(self):
        one = groups()
        state = one.play(self.METHOD, None, None)
        left = self.METHOD.leave(state, np.arange(8))
        assert set(left.assign_N) == {-1} and torch.equal(left.models_KP, state.models_KP)

    @pytest.mark.parametrize("damped", [False, True])
    def test_rejected_clients_count_nowhere(self, damped):
        """5's update is NaN: the round is that of the others, also in the shares of a damped step."""
        method, local = IFCACAM(num_clusters=2, warmup_rounds=0, damped=damped), LocalSGD(epochs=3, lr=0.3)
        one, other = Stage(Spoiled([5]), mlp, local), Stage(Spoiled([]), mlp, local)
        found, expected = one.play(method, [0, 1, 2, 5]), other.play(method, [0, 1, 2])
        assert torch.allclose(found.models_KP, expected.models_KP, rtol=0, atol=1e-6) and torch.allclose(found.global_KP, expected.global_KP, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("cohort", [[], [4, 5]])
    @pytest.mark.parametrize("damped", [False, True])
    def test_a_round_without_a_sound_update_moves_nothing(self, cohort, damped):
        method = IFCACAM(num_clusters=2, warmup_rounds=1, damped=damped)
        one = Stage(Spoiled([4, 5]), mlp, LocalSGD(epochs=3, lr=0.3))
        state = one.play(method, cohort)
        assert torch.equal(state.global_KP[0], one.model()) and state.phase == "federate"
        after = one.play(method, cohort, state=state, first=2)
        assert torch.equal(after.models_KP, state.models_KP) and torch.equal(after.global_KP, state.global_KP)


def test_traffic_is_that_of_fedavg_and_then_k_plus_one_down_and_two_up():
    one, method = groups(), IFCACAM(num_clusters=3, warmup_rounds=1)
    state = one.play(method, None)
    assert floats(one) == (8 * P, 8 * P)
    one.play(method, [0, 1, 5], state=state, first=2)
    assert floats(one) == (3 * 4 * P, 3 * 2 * P)


def test_states_of_a_pure_round_are_equal():
    one, method = groups(), IFCACAM(num_clusters=2, warmup_rounds=0)
    state = method.init(one.start())
    assert_equal(one.play(method, [0, 1], state=state), one.play(method, [0, 1], state=state))


def test_what_clients_hold_is_the_cluster_model_beside_the_global_one(monkeypatch):
    """P-local and the train loss are those of theta_i, the first of the two threads."""
    one, method, losses = groups(), IFCACAM(num_clusters=2, warmup_rounds=0), []
    state = method.init(one.start())
    train = Clients.train
    monkeypatch.setattr(Clients, "train", lambda *args, **more: (updates := train(*args, **more), losses.append(updates.train_loss_M))[0])
    method.round(state, replace(one.clients(number=1), measure=50), Draws(0, 1))
    assert len(losses) == 2 and not np.allclose(*losses)
    assert list(one.books.train_loss.values()) == losses[0].tolist() and len(one.books.held) == 8
