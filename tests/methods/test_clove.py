"""CLoVE: rounds by the formulas, K that is not known, fixed clusters and clients that come later."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
import torch
from federations import planted
from linear import ETA, assert_close, gradient, loss, matrix, sgd, stage
from rounds import COHORTS, EnginesAndCheckpoints, accuracy, floats, groups

from cfl_ray.clustering.agreement import agreement
from cfl_ray.methods.clove import CLoVE
from cfl_ray.methods.fedavg import FedAvg

SIZES = [12, 4, 8, 6, 10]
P = 340


def best_split(loss_MK: np.ndarray) -> np.ndarray:
    """The division into two non-empty clusters with the least sum of squared distances, of all divisions."""
    splits = [np.array(split) for split in product((0, 1), repeat=len(loss_MK)) if 0 < sum(split) < len(split)]
    squares = lambda rows: ((rows - rows.mean(0)) ** 2).sum()
    return min(splits, key=lambda split: squares(loss_MK[split == 0]) + squares(loss_MK[split == 1]))


def best_models(loss_MK: np.ndarray, cluster_M: np.ndarray) -> np.ndarray:
    """The model of each client, such that the sum of the clients' losses is least, of all assignments."""
    clients = range(len(loss_MK))
    cost = lambda model_A: sum(loss_MK[i, model_A[cluster_M[i]]] for i in clients)
    return np.array(min(permutations(range(loss_MK.shape[1]), 2), key=cost))[cluster_M]


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("average", ["models", "gradients"])
def test_rounds_follow_the_formulas(average, root):
    """Three rounds of five clients: k-means and matching by enumeration, averages of SGD or of one gradient."""
    method = CLoVE(num_clusters=2, first="losses", average=average, root=root)
    one, state = stage(sizes=SIZES), None
    w = [matrix(one.model(k)) for k in (0, 1)]
    for number in (1, 2, 3):
        loss_MK = np.array([[loss(one, i, w[k]) for k in (0, 1)] for i in range(5)])
        loss_MK = np.sqrt(loss_MK) if root else loss_MK
        chosen_M = best_models(loss_MK, best_split(loss_MK))
        for k in (0, 1):
            members = np.flatnonzero(chosen_M == k)
            if average == "models":
                w[k] = np.average([sgd(one, i, w[k]) for i in members], axis=0, weights=np.array(SIZES)[members])
            else:
                w[k] = w[k] - ETA / 5 * sum(gradient(one, i, w[k]) for i in members)
        state = one.play(method, None, state=state, first=number)
        assert state.assign_N.tolist() == chosen_M.tolist(), number
        for k in (0, 1):
            assert_close(state.models_KP[k], w[k])
            assert np.allclose(state.centre_KK[k], loss_MK[chosen_M == k].mean(0), rtol=1e-5)


def test_the_first_round_divides_the_clients_at_random():
    """Whatever their losses, and each client by itself: with others in the cohort its model is the same."""
    one, method = groups(), CLoVE(num_clusters=3)
    state = one.play(method, None)
    assert len(set(state.assign_N)) == 3 and floats(one) == (8 * P, 8 * P) and state.phase == "cluster"
    assert groups().play(method, [3, 5]).assign_N[[3, 5]].tolist() == state.assign_N[[3, 5]].tolist()


class TestOfGroups:
    METHOD = CLoVE(num_clusters=2)

    def stage(self):
        return groups(federation=planted(samples=100), epochs=5, lr=0.5, batch_size=40)

    @pytest.mark.parametrize("changes", [{}, {"num_clusters": None, "max_clusters": 5}, {"first": "losses"}], ids=str)
    def test_they_are_found(self, changes):
        """From random starts, also if K is not known; IFCA's collapse to one model does not happen."""
        one, method = self.stage(), replace(self.METHOD, **changes)
        state = one.play(method, *[None] * 6)
        assert agreement(one.federation.group_N, state.assign_N)["ari"] == 1
        assert accuracy(one, method, state).min() > 0.9

    def fixed(self, cohort):
        one = self.stage()
        state = one.play(self.METHOD, *[cohort] * 8)
        assert state.phase == "federate"
        return one, state

    def test_fixed_clusters_send_one_model_and_no_losses(self):
        one, state = self.fixed(None)
        assert (state.same_N >= 3).all()
        after = one.play(self.METHOD, None, state=state, first=9)
        assert floats(one) == (8 * P, 8 * P) and np.array_equal(after.assign_N, state.assign_N)
        never = replace(self.METHOD, stable_rounds=None)
        assert one.play(never, *[None] * 8).phase == "cluster"
        assert floats(one) == (8 * 2 * P, 8 * (P + 2))  # K models down, a model and K losses up

    def test_a_client_that_comes_late_gets_the_cluster_with_the_nearest_mean_loss_vector(self):
        """By joining, or by taking part for the first time; and its predictions before that are by the same rule."""
        one, state = self.fixed([0, 1, 2, 3])
        row_M = self.METHOD.serve(state, one.clients()).row_M
        assert agreement(one.federation.group_N, row_M)["ari"] == 1 and floats(one) == (0, 0)
        joined = self.METHOD.join(state, one.clients([4, 5], round=9))
        assert floats(one) == (2 * 2 * P, 2 * 2) and joined.assign_N[[4, 5]].tolist() == row_M[[4, 5]].tolist()
        after = one.play(self.METHOD, [0, 6, 7], state=state, first=9)
        assert floats(one) == ((2 * 2 + 3) * P, 2 * 2 + 3 * P)
        assert after.phase == "federate" and after.assign_N[[6, 7]].tolist() == row_M[[6, 7]].tolist()

    def test_clients_that_replace_all_others_get_clusters(self):
        """Fixed clusters outlive their clients: those that come later are placed, and train the models."""
        one, state = self.fixed([0, 1, 2, 3])
        row_M = self.METHOD.serve(state, one.clients()).row_M
        left = self.METHOD.leave(state, np.arange(4))
        for after in (
            self.METHOD.join(left, one.clients([4, 5], round=9)),
            one.play(self.METHOD, [4, 5], state=left, first=9),
        ):
            assert after.assign_N.tolist() == [-1] * 4 + row_M[4:6].tolist() + [-1] * 2
        assert not torch.equal(after.models_KP, state.models_KP)

    def test_the_nearest_vector_is_not_the_least_loss(self):
        """Model 0 fits all clients best; the vectors of cluster 1 are those with losses of about 1 and 2."""
        one, state = self.fixed(None)
        loss_MK = np.array([[1.1, 2.2], [0.1, 0.3]])
        state = state.advance(centre_KK=torch.tensor([[0.0, 0.2], [1.0, 2.0]]))
        clients = one.clients([0, 1])
        object.__setattr__(clients, "losses", lambda sent: loss_MK)
        assert self.METHOD.nearest(state, clients).tolist() == [1, 0]

    def test_clients_are_compared_again_after_a_drift(self):
        one, state = self.fixed(None)
        again = self.METHOD.drift(state, one.clients([2, 3], round=9))
        assert again.phase == "cluster" and (again.same_N[[0, 1]] > 0).all()
        assert again.same_N[[2, 3]].tolist() == [-1, -1]
        after = one.play(self.METHOD, None, state=again, first=9)
        assert floats(one) == (8 * 2 * P, 8 * (P + 2)) and after.same_N[[2, 3]].tolist() == [1, 1]

    def test_clusters_are_not_fixed_before_a_client_whose_data_changed_is_compared(self):
        one, state = self.fixed(None)
        state = self.METHOD.drift(state, one.clients([2], round=9))
        without = one.play(self.METHOD, [0, 1, 3], state=state, first=9)
        assert without.phase == "cluster"
        assert one.play(self.METHOD, *[None] * 3, state=without, first=10).phase == "federate"
        assert one.play(self.METHOD, [0], state=self.METHOD.leave(without, np.array([2])), first=10).phase == "federate"

    def test_before_the_first_comparison_the_least_loss_decides(self):
        """Under the models of the random division, which newcomers receive and predict with."""
        one = self.stage()
        state = one.play(self.METHOD, [0, 1, 2, 3])
        clients = one.clients([4, 5, 6, 7], round=2)
        best_M = clients.losses(clients.known_models(state.models_KP)).argmin(1).tolist()
        assert set(best_M) == {0, 1} and self.METHOD.serve(state, clients).row_M.tolist() == best_M
        assert self.METHOD.join(state, clients).assign_N[4:].tolist() == best_M


@pytest.mark.parametrize("margin, expected", [(0.0, 3), (5.0, 2)])
def test_a_larger_number_of_clusters_needs_a_clearly_better_silhouette(margin, expected):
    """Three groups of points: mean silhouettes of 2 and 3 clusters are 0.73 and 0.96."""
    loss_MK = np.array([[0.0, 3], [0.1, 3], [1, 1], [1.1, 1], [4, 0], [4.1, 0]])
    found = CLoVE(num_clusters=None, margin=margin).clusters(loss_MK, 0)
    assert found.max() + 1 == expected and (found[::2] == found[1::2]).all()


def test_one_cluster_is_fedavg():
    options = {"num_clusters": 1, "first": "losses"}
    assert torch.equal(
        groups().play(CLoVE(**options), *COHORTS).models_KP[0], groups().play(FedAvg(), *COHORTS).models_KP[0]
    )


@pytest.mark.parametrize("cohort, warned", [(7, True), (8, False)])
def test_small_cohorts_are_warned_of(cohort, warned):
    assert ("7 are less than two for each of 4" in CLoVE().warning(100, cohort)) == warned


class TestKnown(EnginesAndCheckpoints):
    METHOD = CLoVE(num_clusters=2, stable_rounds=2)


class TestNotKnown(EnginesAndCheckpoints):
    METHOD = CLoVE(num_clusters=None, max_clusters=4)
