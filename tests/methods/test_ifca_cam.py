"""IFCA-CAM: sums of logits in choice, training and prediction, by the formulas; its reductions to FedAvg."""

import numpy as np
import pytest
import torch
from closeness import close
from federations import Spoiled, Stage, planted
from linear import N_0, N_1, assert_close, loss, matrix, mean, sgd, stage
from rounds import (
    COHORTS,
    EnginesAndCheckpoints,
    accuracy,
    assert_local_model_is_of_the_cluster_training,
    floats,
    groups,
    make_late_in_choices,
    mlp,
    sampled,
    watched,
)

from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.clients import LocalTraining
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.ifca_cam import IFCACAM

P = 340


class TestFormula:
    """Two clients, two cluster models; rounds without warm-up."""

    def models(self, one: Stage) -> tuple[np.ndarray, list[np.ndarray]]:
        return matrix(one.model(0)), [matrix(one.model(1)), matrix(one.model(2))]

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    @pytest.mark.parametrize("damped", [False, True])
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_a_round(self, weights, damped, seed, momentum):
        """c(i) = argmin_k loss(h + f_k); theta_i with Theta_g frozen, theta0_i with Theta_c(i) frozen, as received.

        damped: Theta_k moves by q_k.
        """
        one = stage(momentum=momentum)
        one.seed = seed
        whole, clusters = self.models(one)
        chosen = [int(np.argmin([loss(one, client, w + whole) for w in clusters])) for client in (0, 1)]
        theta = [sgd(one, client, clusters[chosen[client]], frozen=whole, momentum=momentum) for client in (0, 1)]
        theta0 = [sgd(one, client, whole, frozen=clusters[chosen[client]], momentum=momentum) for client in (0, 1)]
        state = one.play(IFCACAM(num_clusters=2, warmup_rounds=0, damped=damped, weights=weights), None)
        assert state.assign_N.tolist() == chosen
        assert_close(state.global_KP[0], mean(*theta0, weights))
        n = np.array([N_0, N_1]) if weights == "samples" else np.ones(2)
        for k, before in enumerate(clusters):
            members = [client for client in (0, 1) if chosen[client] == k]
            q = n[members].sum() / n.sum()
            after = sum(n[i] * theta[i] for i in members) / n[members].sum() if members else before
            assert_close(state.models_KP[k], (1 - q) * before + q * after if damped else after)

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    @pytest.mark.parametrize("seed", range(3))
    def test_an_alternating_round(self, weights, seed):
        """(i) c(i), (ii) Theta_g with f frozen, (i) c(i) with the new Theta_g, (iii) f with the new Theta_g frozen."""
        one = stage()
        one.seed = seed
        whole, clusters = self.models(one)

        def choose(frozen):
            return [int(np.argmin([loss(one, client, w + frozen) for w in clusters])) for client in (0, 1)]

        first = choose(whole)
        new = mean(*(sgd(one, client, whole, frozen=clusters[first[client]]) for client in (0, 1)), weights)
        second = choose(new)
        theta = [sgd(one, client, clusters[second[client]], frozen=new) for client in (0, 1)]
        method = IFCACAM(num_clusters=2, warmup_rounds=0, schedule="alternating", weights=weights)
        state = one.play(method, None)
        assert state.assign_N.tolist() == second
        assert_close(state.global_KP[0], new)
        n = np.array([N_0, N_1]) if weights == "samples" else np.ones(2)
        for k, before in enumerate(clusters):
            members = [client for client in (0, 1) if second[client] == k]
            after = sum(n[i] * theta[i] for i in members) / n[members].sum() if members else before
            assert_close(state.models_KP[k], after)

    @pytest.mark.parametrize("empty", ["keep", "zero"])
    def test_a_cluster_without_clients_is_kept_or_zeroed_and_predicts_with_the_global_model_alone(self, empty):
        """Both clients prefer cluster 0; client 0 was in cluster 1."""
        one, method = stage(), IFCACAM(num_clusters=2, warmup_rounds=0, empty=empty)
        whole, (good, _) = self.models(one)
        for _ in range(20):
            good = mean(*(sgd(one, client, good, frozen=whole) for client in (0, 1)))
        rows = torch.tensor(np.stack([good, -5 * good])).float().reshape(2, 15)
        state = method.init(one.start()).advance(models_KP=rows, assign_N=np.array([1, 0], np.int32))
        after = one.play(method, None, state=state)
        assert after.assign_N.tolist() == [0, 0]
        assert torch.equal(after.models_KP[1], torch.zeros(15) if empty == "zero" else rows[1])
        if empty == "zero":
            again = one.play(method, None, state=after.advance(models_KP=torch.stack([-rows[0] * 5, torch.zeros(15)])))
            assert again.assign_N.tolist() == [1, 1] and again.models_KP[1].any() and not again.models_KP[0].any()

    def test_only_clusters_without_any_assigned_client_are_zeroed(self):
        """Client 1 is not in this cohort and keeps its cluster 1."""
        one, method = stage(), IFCACAM(num_clusters=3, warmup_rounds=0, empty="zero")
        state = method.init(one.start()).advance(assign_N=np.array([-1, 1], np.int32))
        after = one.play(method, [0], state=state)
        for k in range(3):
            assert after.models_KP[k].any() == (k in (after.assign_N[0], 1))

    def test_those_seeds_put_the_clients_into_one_cluster_and_into_two(self):
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
        alone = [loss(one, 0, w) for w in (np.zeros((3, 5)), good)]
        both = [loss(one, 0, w + bad) for w in (np.zeros((3, 5)), good)]
        assert np.argmin(alone) == 0 and np.argmin(both) == 1
        method = IFCACAM(num_clusters=2, warmup_rounds=0)
        rows = torch.tensor(np.stack([np.zeros((3, 5)), good])).float().reshape(2, 15)
        state = method.init(one.start()).advance(models_KP=rows, global_KP=torch.tensor(bad).float().reshape(1, 15))
        assert one.play(method, [0], state=state).assign_N[0] == 1 == method.serve(state, one.clients([0])).row_M[0]

    def test_compares_on_the_first_samples_only(self):
        one = stage()
        works = watched(one)
        one.play(IFCACAM(num_clusters=2, warmup_rounds=0, select_samples=3), None)
        assert works[0].max_samples == 3 and works[0].num_models == 2


@pytest.mark.parametrize("weights", ["samples", "uniform"])
class TestIsFedAvg:
    @pytest.mark.parametrize("local", [{}, {"batch_size": 30, "momentum": 0.9}], ids=["full batch", "mini-batches"])
    def test_in_the_warm_up(self, weights, local):
        one = groups(**local)
        method = IFCACAM(num_clusters=3, warmup_rounds=4, weights=weights)
        state = one.play(method, *COHORTS)
        assert torch.equal(state.global_KP, groups(**local).play(FedAvg(weights=weights), *COHORTS).models_KP)
        assert torch.equal(state.models_KP, method.init(one.start()).models_KP)
        assert state.phase == "federate" and set(state.assign_N) == {-1}

    def test_with_one_cluster_model_of_zeros(self, weights):
        """Full batch: the exchange has another number, so other batches. One round: the cluster model trains too."""
        one, method = groups(), IFCACAM(num_clusters=1, warmup_rounds=0, weights=weights)
        state = method.init(one.start())
        state = one.play(method, COHORTS[0], state=state.advance(models_KP=torch.zeros(1, P)))
        assert torch.equal(state.global_KP, groups().play(FedAvg(weights=weights), COHORTS[0]).models_KP)


@pytest.mark.parametrize("warmup, phases", [(0, ["federate"] * 4), (2, ["warmup", "federate", "federate", "federate"])])
def test_warm_up_lasts_as_many_rounds_as_the_option_says(warmup, phases):
    one, method, found = groups(), IFCACAM(num_clusters=2, warmup_rounds=warmup), []
    state = method.init(one.start())
    for number, cohort in enumerate(COHORTS, 1):
        before = state.models_KP
        state = one.play(method, cohort, state=state, first=number)
        found.append(state.phase)
        assert torch.equal(before, state.models_KP) == (number <= warmup)
    assert found == phases


def test_the_warm_up_ends_also_where_its_last_round_had_no_clients():
    one, method = groups(), IFCACAM(num_clusters=2, warmup_rounds=2)
    state = one.play(method, None)
    state = one.play(method, None, state=state, first=3)
    assert state.phase == "federate" and method.serve(state, one.clients()).frozen_P is not None


@pytest.mark.parametrize("participation, rounds", [(1.0, 4), (0.3, 14)])
def test_planted_groups_are_found(participation, rounds):
    """From cluster models that each trained on one client of a group, with an untrained global model frozen."""
    one = Stage(planted(12, 3, samples=120), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
    method = IFCACAM(num_clusters=3, warmup_rounds=0)
    state = method.init(one.start())
    warm = []
    for group in range(3):
        clients = one.clients([group])
        how = LocalTraining(frozen_model=clients.send(state.global_KP))
        sent = clients.send(state.models_KP[group : group + 1])
        updates = clients.train(sent, how=how, average=torch.ones(1, 1))
        warm.append(updates.averaged(default=state.models_KP[:1]))
    state = one.play(method, *sampled(12, participation, rounds), state=state.advance(models_KP=torch.cat(warm)))
    served = method.serve(state, one.clients()).row_M
    assert agreement(one.federation.group_N, served)["ari"] == 1
    known = state.assign_N >= 0
    assert known.sum() >= 11 and np.array_equal(state.assign_N[known], served[known])
    assert accuracy(one, method, state).mean() > 0.9


class TestOtherOptions(EnginesAndCheckpoints):
    METHOD = IFCACAM(
        num_clusters=2,
        warmup_rounds=2,
        damped=True,
        select_samples=20,
        weights="uniform",
        schedule="alternating",
        empty="zero",
    )
    COHORTS = COHORTS


class TestComingAndGoing:
    METHOD = IFCACAM(num_clusters=2, warmup_rounds=1)

    def test_newcomers_choose_when_they_are_served_and_when_they_take_part(self):
        one = groups()
        state = one.play(self.METHOD, [0, 1, 2, 3], [0, 1, 2, 3])
        joined = self.METHOD.join(state, one.clients([6], round=3))
        assert joined.assign_N[6] == -1 and floats(one) == (0, 0)
        chosen = self.METHOD.serve(joined, one.clients([6])).row_M[0]
        assert floats(one) == (0, 0) and one.play(self.METHOD, [6], state=joined, first=3).assign_N[6] == chosen

    def test_in_the_warm_up_all_clients_are_served_the_global_model_alone(self):
        one = groups()
        method = IFCACAM(num_clusters=2, warmup_rounds=3)
        state = one.play(method, [0, 1])
        serving = method.serve(state, one.clients())
        assert torch.equal(serving.models_KP, state.global_KP)
        assert serving.row_M.tolist() == [0] * 8 and serving.frozen_P is None
        later = one.play(method, [0], [0], [0], state=state, first=2)
        assert torch.equal(method.serve(later, one.clients()).frozen_P, later.global_KP[0])

    def test_a_leaver_is_forgotten_and_its_cluster_stays(self):
        one = groups()
        state = one.play(self.METHOD, None, None)
        left = self.METHOD.leave(state, np.arange(8))
        assert set(left.assign_N) == {-1} and torch.equal(left.models_KP, state.models_KP)

    @pytest.mark.parametrize("damped", [False, True])
    def test_rejected_clients_are_in_no_average(self, damped):
        """5's update is NaN: the round is that of the others, also in the shares of a damped step."""
        method, local = IFCACAM(num_clusters=2, warmup_rounds=0, damped=damped), LocalSGD(epochs=3, lr=0.3)
        one, other = Stage(Spoiled([5]), mlp, local), Stage(Spoiled([]), mlp, local)
        found, expected = one.play(method, [0, 1, 2, 5]), other.play(method, [0, 1, 2])
        assert close(found.models_KP, expected.models_KP, 1e-5)
        assert close(found.global_KP, expected.global_KP, 1e-5)

    @pytest.mark.parametrize("schedule", ["parallel", "alternating"])
    @pytest.mark.parametrize("damped", [False, True])
    def test_a_client_whose_choice_comes_late_counts_in_no_average(self, schedule, damped):
        method = IFCACAM(num_clusters=2, warmup_rounds=0, damped=damped, schedule=schedule)
        one, other = groups(), groups()
        make_late_in_choices(one, 3)
        found, expected = one.play(method, [0, 1, 2, 3]), other.play(method, [0, 1, 2])
        assert one.stats.late.keys() == {3} and found.assign_N.tolist() == expected.assign_N.tolist()
        assert close(found.models_KP, expected.models_KP, 1e-5)
        assert close(found.global_KP, expected.global_KP, 1e-5)

    @pytest.mark.parametrize("cohort", [[], [4, 5]])
    @pytest.mark.parametrize("damped", [False, True])
    def test_a_round_without_a_valid_update_changes_nothing(self, cohort, damped):
        method = IFCACAM(num_clusters=2, warmup_rounds=1, damped=damped)
        one = Stage(Spoiled([4, 5]), mlp, LocalSGD(epochs=3, lr=0.3))
        state = one.play(method, cohort)
        assert torch.equal(state.global_KP[0], one.model()) and state.phase == "federate"
        after = one.play(method, cohort, state=state, first=2)
        assert torch.equal(after.models_KP, state.models_KP) and torch.equal(after.global_KP, state.global_KP)


def test_the_local_model_is_that_of_the_cluster_training(monkeypatch):
    one, method = groups(), IFCACAM(num_clusters=2, warmup_rounds=0)
    assert_local_model_is_of_the_cluster_training(method, one, method.init(one.start()), 1, monkeypatch)
