"""CFL: the conditions of a split, the bipartition and the tree; sampled cohorts; PACFL's rule."""

from itertools import combinations

import numpy as np
import pytest
import torch
from closeness import close
from federations import Spoiled, Stage, planted, uneven
from linear import assert_close, matrix, mean, sgd, stage
from rounds import (
    accuracy,
    assert_engines_agree,
    assert_equal,
    assert_survives_an_interruption,
    floats,
    groups,
    mlp,
)
from torch import nn

from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.cfl import CFL, SplitState, noise

SIZES = [12, 4, 8, 6]
ALWAYS = {"eps1": 1e9, "eps2": 0.0}  # every leaf of 3 or more splits
P = 340


def four(sizes=SIZES, **local) -> Stage:
    return stage(sizes=sizes, **local)


def updates(one: Stage, w: np.ndarray) -> list[np.ndarray]:
    """Delta_i = SGD_i(w) - w."""
    return [sgd(one, client, w) - w for client in range(one.federation.num_clients)]


def step(deltas, sizes, members) -> np.ndarray:
    """sum_i p_i Delta_i over some members, with p_i their shares of the samples."""
    return sum(sizes[i] * deltas[i] for i in members) / sum(sizes[i] for i in members)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


def bipartition(deltas, linkage: str) -> set[frozenset]:
    """Brute force. Single: the paper's bipartition with the least largest cosine across.

    Complete: the two parts with the highest smallest cosine merge, until two are left.
    """
    clients = range(len(deltas))
    cos = {(i, j): cosine(deltas[i], deltas[j]) for i in clients for j in clients}
    if linkage == "single":
        halves = [set(half) for size in range(1, len(deltas)) for half in combinations(clients, size)]
        best = min(halves, key=lambda half: max(cos[i, j] for i in half for j in clients if j not in half))
        return {frozenset(best), frozenset(set(clients) - best)}
    parts = [frozenset([i]) for i in clients]
    while len(parts) > 2:
        a, b = max(combinations(parts, 2), key=lambda pair: min(cos[i, j] for i in pair[0] for j in pair[1]))
        parts = [part for part in parts if part not in (a, b)] + [a | b]
    return set(parts)


class TestFormula:
    def test_two_clients_with_momentum_that_starts_from_zero_in_every_round(self):
        """Per round v1 = g(W), W1 = W - eta v1, v2 = 0.9 v1 + g(W1), W2 = W1 - eta v2. Two clients never split."""
        one = four([12, 4], momentum=0.9)
        w = matrix(one.model())
        state = one.play(CFL(min_rounds=0, **ALWAYS), None, None)
        for _ in range(2):
            w = mean(*(sgd(one, client, w, momentum=0.9) for client in (0, 1)))
        assert state.num_clusters == 1
        assert_close(state.models_KP[0], w)

    @pytest.mark.parametrize("linkage", ["complete", "single"])
    @pytest.mark.parametrize("seed", range(3))
    def test_both_leaves_move_by_their_own_mean_in_the_round_of_the_split(self, linkage, seed):
        one = four()
        one.seed = seed
        w = matrix(one.model())
        deltas = updates(one, w)
        state = one.play(CFL(min_rounds=0, linkage=linkage, **ALWAYS), None)
        leaves = [np.flatnonzero(state.assign_N == leaf).tolist() for leaf in (0, 1)]
        assert {frozenset(leaf) for leaf in leaves} == bipartition(deltas, linkage) and len(leaves[0]) >= len(leaves[1])
        for leaf, members in enumerate(leaves):
            assert_close(state.models_KP[leaf], w + step(deltas, SIZES, members))
        assert_close(state.split_KP[0], w)

    @pytest.mark.parametrize("linkage", ["complete", "single"])
    def test_linkages_are_those_of_the_brute_force(self, linkage):
        """Seven clients; in some of the seeds the two linkages disagree."""
        other, found = {"complete": "single", "single": "complete"}[linkage], []
        for seed in range(6):
            one = four([9, 4, 8, 6, 5, 7, 3])
            one.seed = seed
            deltas = updates(one, matrix(one.model()))
            state = one.play(CFL(min_rounds=0, linkage=linkage, **ALWAYS), None)
            parts = {frozenset(np.flatnonzero(state.assign_N == leaf).tolist()) for leaf in (0, 1)}
            assert parts == bipartition(deltas, linkage)
            found.append(parts != bipartition(deltas, other))
        assert any(found)


class TestConditions:
    """u = ||sum_i p_i Delta_i||, v = max_i ||Delta_i|| of the first round."""

    @pytest.fixture
    def measured(self):
        one = four()
        deltas = updates(one, matrix(one.model()))
        lengths = [np.linalg.norm(delta) for delta in deltas]
        return np.linalg.norm(step(deltas, SIZES, range(4))), max(lengths), np.mean(lengths)

    @pytest.mark.parametrize("relative", [False, True])
    def test_short_mean_and_long_updates(self, measured, relative):
        u, v, mean = measured
        scale = mean if relative else 1.0
        for above1, above2, splits in [(1.001, 0.999, True), (0.999, 0.999, False), (1.001, 1.001, False)]:
            method = CFL(eps1=above1 * u / scale, eps2=above2 * v / scale, min_rounds=0, relative=relative)
            assert four().play(method, None).num_clusters == 1 + splits, (above1, above2)

    def test_more_than_two_members(self):
        for clients, splits in [(2, False), (3, True)]:
            assert four(SIZES[:clients]).play(CFL(min_rounds=0, **ALWAYS), None).num_clusters == 1 + splits

    def test_rounds_before_the_first_split(self):
        for min_rounds, splits in [(1, True), (2, False)]:
            assert four().play(CFL(min_rounds=min_rounds, **ALWAYS), None, None).num_clusters == 1 + splits

    def test_the_scale_of_relative_thresholds_is_the_mean_length_of_rounds_1_to_5(self):
        one, method, lengths = four(), CFL(relative=True, min_rounds=99), []
        state = method.init(one.start())
        for number in range(1, 8):
            lengths.append([np.linalg.norm(delta) for delta in updates(one, matrix(state.models_KP[0]))])
            state = one.play(method, None, state=state, first=number)
        scale = state.early[0] / state.early[1]
        assert scale == pytest.approx(np.mean(lengths[:5]), rel=1e-5) != pytest.approx(np.mean(lengths), rel=1e-3)

    def test_half_of_a_sampled_leaf_must_have_a_recent_update(self):
        """Eight members. In round 3 the cohort of 3 gives a window of ceil(8 / 3) = 3 rounds."""
        for cohorts, splits in [
            ([[0, 1, 2, 3, 4, 5, 6, 7], [0], [0, 1, 2]], True),
            ([[4, 5, 6, 7, 3], [0, 1, 2], [0], [0], [0, 1, 2]], False),
        ]:
            one = groups()
            state = one.play(CFL(min_rounds=len(cohorts) - 1, **ALWAYS), *cohorts)
            assert state.num_clusters == 1 + splits, cohorts

    def test_buffers_do_not_count_in_the_length_of_the_mean(self):
        """The running variance of inputs of size 100 moves by thousands, the weights by little."""

        def model():
            return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

        federation = uneven([8, 8, 8, 8])
        one = Stage(federation, model, LocalSGD(lr=0.01))
        read = federation.train
        federation.train = lambda client: (100 * read(client)[0], read(client)[1])
        state = one.play(CFL(eps1=1.0, eps2=0.0, min_rounds=0), None)
        assert (state.models_KP[0] - one.model()).norm() > 100 and state.num_clusters == 2

    def test_a_leaf_without_a_valid_participant_does_not_split(self):
        """All updates are recent, but those of this round are NaN: the mean update has length 0 for lack of any."""
        one = Stage(Spoiled([]), mlp, LocalSGD(epochs=3, lr=0.3))
        method = CFL(eps1=1e-9, eps2=0.0, min_rounds=0)
        state = one.play(method, None)
        one.federation.spoiled = {0, 1, 2, 3}
        after = one.play(method, [0, 1, 2, 3], state=state, first=2)
        assert after.num_clusters == 1 and torch.equal(after.models_KP, state.models_KP)

    def test_defaults_are_those_of_the_kind_of_threshold(self):
        for options, expected in [
            ({}, (0.4, 1.6)),
            ({"relative": True}, (0.1, 0.6)),
            ({"relative": True, "eps2": 1.6}, (0.1, 1.6)),
            ({"eps1": 0.0}, (0.0, 1.6)),
        ]:
            method = CFL(**options)
            assert (method.eps1, method.eps2) == expected, options

    def test_relative_thresholds_without_any_length_yet(self):
        one = Stage(Spoiled(range(8)), mlp, LocalSGD(lr=0.3))
        assert one.play(CFL(relative=True, min_rounds=0, **ALWAYS), None, None).num_clusters == 1


E1, E2, E3 = torch.eye(3)


class TestSeparation:
    """gamma_max < sqrt((1 - alpha_cross) / 2), Algorithm 1's condition on a bipartition."""

    def quantities(self, one: Stage) -> tuple[float, float]:
        """sqrt((1 - alpha_cross) / 2), and max_i ||Delta_i - mean|| / ||mean|| over the sides of the bipartition."""
        deltas = updates(one, matrix(one.model()))
        sides = [sorted(side) for side in bipartition(deltas, "complete")]
        cross = max(cosine(deltas[i], deltas[j]) for i in sides[0] for j in sides[1])
        gammas = []
        for side in sides:
            mean = sum(deltas[i] for i in side) / len(side)
            gammas += [np.linalg.norm(deltas[i] - mean) / np.linalg.norm(mean) for i in side]
        return float(np.sqrt((1 - cross) / 2)), max(gammas)

    def test_a_given_gamma_max_is_compared_with_the_largest_cosine_across(self):
        one = four()
        bound, _ = self.quantities(one)
        assert 0.01 < bound < 0.99
        for gamma, leaves in ((bound - 1e-4, 2), (bound + 1e-4, 1)):
            assert one.play(CFL(min_rounds=0, gamma_max=gamma, **ALWAYS), None).num_clusters == leaves

    def test_an_estimated_one_is_the_largest_relative_distance_to_the_mean_of_its_side(self):
        found = set()
        for seed in (0, 2, 5, 7):
            one = four([2, 2, 2])
            one.seed = seed
            bound, gamma = self.quantities(one)
            leaves = one.play(CFL(min_rounds=0, estimate_gamma=True, **ALWAYS), None).num_clusters
            assert leaves == (2 if gamma < bound else 1), (gamma, bound)
            found.add(leaves)
        assert found == {1, 2}
        update_EF = torch.tensor([[1.0, 0], [3, 0], [0, 5]])  # means (2, 0) and (0, 5): gamma 1 / 2, 1 / 2, 0
        assert noise(update_EF, np.array([0, 0, 1])) == 0.5

    def test_is_not_checked_by_default_and_given_or_estimated(self):
        assert CFL().gamma_max is None and not CFL().estimate_gamma
        with pytest.raises(ValueError, match="give cfl.gamma_max or estimate_gamma, not both; got 0.3 and true"):
            CFL(gamma_max=0.3, estimate_gamma=True)


def unsplit(clients: int) -> SplitState:
    """One leaf with all clients, models of 4 columns and updates of 3."""
    none = {"split_KP": torch.zeros(0, 4), "update_EF": torch.zeros(0, 3), "signature_SF": torch.zeros(0, 3)}
    return SplitState(models_KP=torch.zeros(1, 4), assign_N=np.zeros(clients, np.int32), **none)


class TestTree:
    """Two splits made by hand."""

    @pytest.fixture
    def tree(self):
        """Leaf 0 is split by (+-e1) into 0 and 1, then leaf 1 by (+-e2) into 1 and 2."""
        updates = torch.stack([E1, E1 + 0.1 * E3, -E1, -E1 + 0.1 * E2])
        state = unsplit(8).with_split(0, np.array([0, 1, 2, 3]), updates, np.array([0, 0, 1, 1]))
        state = state.advance(models_KP=torch.tensor([[1.0] * 4, [2.0] * 4]))
        return state.with_split(1, np.array([2, 3]), torch.stack([E2, -E2]), np.array([0, 1]))

    def test_a_new_leaf_has_the_members_of_side_1_and_starts_from_the_model_that_was_split(self, tree):
        assert tree.assign_N.tolist() == [0, 0, 1, 2, 0, 0, 0, 0] and tree.assign_N.dtype == np.int32
        assert tree.models_KP[:, 0].tolist() == [1, 2, 2] and tree.split_KP[:, 0].tolist() == [0, 2]
        assert tree.leaves_K2.tolist() == [[0, 1], [1, 2]]
        assert tree.split_E.tolist() == [0, 0, 0, 0, 1, 1] and tree.side_E.tolist() == [0, 0, 1, 1, 0, 1]

    def test_updates_follow_the_more_similar_side(self, tree):
        assert tree.leaf_at(0, torch.stack([3 * E1, -E1, E1 + 9 * E3]), "mean").tolist() == [0, 1, 0]
        assert tree.leaf_at(1, torch.stack([E2, -5 * E2]), "max").tolist() == [1, 2]

    def test_max_and_mean_differ(self):
        """Cosines 0.995 and -0.995 with side 0, twice 0.774 with side 1: by `max` one similar update decides."""
        updates = torch.stack([E1, -E1, E1 + E2, E1 + E2])
        state = unsplit(4).with_split(0, np.arange(4), updates, np.array([0, 0, 1, 1]))
        near_e1 = (E1 + 0.1 * E2)[None]
        assert (state.leaf_at(0, near_e1, "max").item(), state.leaf_at(0, near_e1, "mean").item()) == (0, 1)

    def test_ties_stay_in_the_old_leaf(self, tree):
        assert tree.leaf_at(1, torch.stack([E1, torch.zeros(3)]), "mean").tolist() == [1, 1]

    def test_updates_descend_through_later_splits(self, tree):
        rows = torch.stack([E1 + 5 * E2, -E1 + E2, -E1 - E2])
        assert tree.leaf_below(0, rows).tolist() == [0, 1, 2]
        assert tree.leaf_below(1, rows).tolist() == [1, 1, 2]

    def test_comes_back_from_a_checkpoint(self, tree):
        tensors, scalars = tree.to_checkpoint()
        again = SplitState.from_checkpoint(tensors, scalars)
        for name, value in tensors.items():
            assert torch.equal(torch.as_tensor(getattr(again, name)), value), name
            assert type(getattr(again, name)) is type(getattr(tree, name)), name

    def test_updates_of_leavers_are_forgotten_and_a_side_keeps_the_mean_of_its_last(self, tree):
        left = tree.forget(np.array([0]))
        assert left.client_E.tolist() == [1, 2, 3, 2, 3] and torch.equal(left.update_EF, tree.update_EF[1:])
        left = left.forget(np.array([2, 3]))  # both of side 1 of split 0, and the only one of either side of split 1
        sides = {
            (split, side): (client, update.tolist())
            for split, side, client, update in zip(left.split_E, left.side_E, left.client_E, left.update_EF)
        }
        assert sides[0, 0] == (1, tree.update_EF[1].tolist())
        assert sides[0, 1] == (-1, tree.update_EF[2:4].mean(0).tolist())
        assert (sides[1, 0], sides[1, 1]) == ((-1, E2.tolist()), (-1, (-E2).tolist()))
        assert left.leaf_at(1, torch.stack([E2, -E2]), "max").tolist() == [1, 2]
        assert torch.equal(left.forget(np.array([0, 2])).update_EF, left.update_EF), "they have no update left"


class TestSampledCohorts:
    """Eight clients in two groups (i mod 2). 6 and 7 take part in round 1 only; round 4 splits by the others."""

    METHOD = CFL(min_rounds=3, **ALWAYS)
    FIRST = [[6, 7], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]

    @pytest.fixture
    def split(self):
        one = groups()
        return one, one.play(self.METHOD, *self.FIRST)

    def test_old_updates_follow_the_side_with_the_higher_mean_cosine(self, split):
        _, state = split
        assert state.num_clusters == 2 and state.split_E.tolist() == [0] * 6
        for client in (6, 7):
            mine = state.signature_SF[state.seen_S.tolist().index(client)].numpy()
            sides = [state.update_EF[state.side_E == side].numpy() for side in (0, 1)]
            assert state.assign_N[client] == np.argmax([np.mean([cosine(mine, one) for one in side]) for side in sides])
        assert agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1
        open_splits = dict(zip(state.seen_S.tolist(), state.open_S.tolist()))
        assert open_splits == {client: 0 if client in (6, 7) else -1 for client in range(8)}

    def test_a_new_update_that_moves_its_client_counts_in_no_average(self, split):
        one, state = split
        right = state.assign_N.copy()
        wrong = state.advance(assign_N=state.place([6], 1 - right[6]))
        after = one.play(CFL(min_rounds=9), [6], state=wrong, first=5)
        assert np.array_equal(after.assign_N, right) and torch.equal(after.models_KP, state.models_KP)
        assert after.open_S[after.seen_S.tolist().index(6)] == -1
        again = one.play(CFL(min_rounds=9), [6], state=after, first=6)
        assert not torch.equal(again.models_KP[right[6]], after.models_KP[right[6]]), "the next one does"

    def test_an_update_that_moves_its_client_splits_nothing(self, split):
        """It is long, being trained from the other side's model: with two similar updates it could split a leaf."""
        one, state = split
        wrong = state.advance(assign_N=state.place([6], 1 - state.assign_N[6]), round_S=np.zeros(8, np.int64))
        after = one.play(CFL(min_rounds=0, **ALWAYS), [0, 2, 6], state=wrong, first=5)
        assert after.num_clusters == 2 and after.assign_N[6] == state.assign_N[6]
        rounds = dict(zip(after.seen_S.tolist(), after.round_S.tolist()))
        assert rounds == {0: 5, 2: 5} | dict.fromkeys([1, 3, 4, 5, 6, 7], 0)

    def test_members_without_an_update_are_placed_when_they_next_take_part(self):
        """6 and 7 join the one leaf after round 1, and do not take part until it is split."""
        one = groups()
        state = one.play(self.METHOD, [0, 1, 2, 3, 4, 5])
        state = self.METHOD.join(state, one.clients([6, 7], round=2))
        assert state.assign_N[[6, 7]].tolist() == [0, 0]
        state = one.play(self.METHOD, *self.FIRST[1:], state=state, first=2)
        assert state.num_clusters == 2 and state.assign_N[[6, 7]].tolist() == [-1, -1]
        after = one.play(CFL(min_rounds=9), [6, 7], state=state, first=5)
        assert agreement(np.arange(8) % 2, after.assign_N)["ari"] == 1

    def test_a_member_whose_side_is_decided_stays(self, split):
        one, state = split
        moved = state.advance(assign_N=state.place([0], 1 - state.assign_N[0]))
        assert one.play(CFL(min_rounds=9), [0], state=moved, first=5).assign_N[0] == moved.assign_N[0]

    def test_a_new_update_descends_through_all_splits_since_the_old_one(self, split):
        """A second split of the same leaf, in which 6 takes no part either."""
        one, state = split
        leaf = int(state.assign_N[6])
        mean = state.update_EF[torch.from_numpy(state.side_E == (leaf != 0))].mean(0)
        members = np.array([0, 2] if leaf == 0 else [1, 3])
        deeper = state.with_split(leaf, members, torch.stack([-mean, mean]), np.array([0, 1]))
        after = one.play(CFL(min_rounds=9), [6], state=deeper.advance(assign_N=deeper.place([6], 1 - leaf)), first=5)
        assert after.assign_N[6] == 2

    def test_the_updates_of_a_split_cause_no_further_split(self):
        """All clients in round 1, which splits in two; then one client a round, so that the window is 8 rounds."""
        one = groups()
        state = one.play(CFL(min_rounds=0, **ALWAYS), None, *[[0]] * 3)
        assert state.num_clusters == 2 and sorted(state.round_S.tolist()) == [0] * 7 + [4]

    def test_updates_are_recent_by_the_clients_before_any_split_of_the_round(self):
        """Nine clients in two leaves, four in round 4: three rounds, also after client 8 lost its leaf in a split."""
        one = groups(federation=planted(10))
        state = one.play(CFL(min_rounds=0, **ALWAYS), range(8))
        state = one.play(self.METHOD, [4, 5, 6, 7], [4, 6], state=state, first=2)
        state = self.METHOD.join(state, one.clients([8], round=4))
        assert state.assign_N.tolist() == [*[0, 1] * 4, 0, -1]
        after = one.play(self.METHOD, [0, 1, 2, 3], state=state, first=4)
        assert after.assign_N[8] == -1 and after.num_clusters == 4

    def test_clients_without_an_update_have_no_leaf_and_are_served_the_mean(self, split):
        one, _ = split
        state = one.play(self.METHOD, *self.FIRST[1:], [0, 1, 2, 3, 4, 5])
        assert state.assign_N[[6, 7]].tolist() == [-1, -1] and state.num_clusters == 2
        serving = self.METHOD.serve(state, one.clients([6, 0]))
        assert serving.row_M.tolist() == [2, state.assign_N[0]]
        assert torch.equal(serving.models_KP[2], state.models_KP.mean(0))
        after = one.play(CFL(min_rounds=9), [6, 7], state=state, first=5)
        assert agreement(np.arange(8) % 2, after.assign_N)["ari"] == 1


class TestReapply:
    """PACFL's CFL: every round every cluster moves by the mean of the last updates of all its members."""

    SIZES = [9, 4, 8, 6, 5, 7]
    COHORTS = [[0, 1, 2], [1, 3], [4, 0, 2], [1], [2, 3, 4]]

    def test_is_pacfl_s_rule(self):
        """Clients 0 to 5; 5 never takes part and counts with zeros. Splits from round 3 on."""
        one = four(self.SIZES)
        deltas, models, clusters = np.zeros((6, 15)), [matrix(one.model()).reshape(-1)], [list(range(6))]
        for number, cohort in enumerate(self.COHORTS, 1):
            for leaf, members in enumerate(clusters):
                for client in set(members) & set(cohort):
                    deltas[client] = sgd(one, client, models[leaf].reshape(3, 5)).reshape(-1) - models[leaf]
            if number > 2:
                for leaf, members in enumerate(list(clusters)):
                    if len(members) > 2:
                        small, large = sorted(
                            self.halves(deltas, members), key=lambda half: (len(half), min(members) in half)
                        )
                        clusters[leaf] = large
                        clusters.append(small)
                        models.append(models[leaf])
            models = [w + deltas[members].mean(0) for w, members in zip(models, clusters)]
        state = one.play(CFL(stale_updates="reapply", min_rounds=2, **ALWAYS), *self.COHORTS)
        found = [np.flatnonzero(state.assign_N == leaf).tolist() for leaf in range(state.num_clusters)]
        assert found == [sorted(members) for members in clusters] and len(clusters) > 2
        for row_P, w in zip(state.models_KP, models):
            assert_close(row_P, w.reshape(3, 5))

    def halves(self, deltas, members) -> list[list[int]]:
        """Complete linkage on cosines, 0 where an update is all zeros, as PACFL divides by the norms + 1e-12."""
        norm = np.linalg.norm(deltas, axis=1)
        cos = deltas @ deltas.T / (np.outer(norm, norm) + 1e-12)
        parts = [[i] for i in members]
        while len(parts) > 2:
            a, b = max(combinations(parts, 2), key=lambda pair: min(cos[i, j] for i in pair[0] for j in pair[1]))
            parts = [part for part in parts if part not in (a, b)] + [a + b]
        return parts

    def test_differs_from_the_default(self):
        states = [
            four(self.SIZES).play(CFL(stale_updates=stale, eps1=0.0), *self.COHORTS) for stale in ("drop", "reapply")
        ]
        assert (states[0].models_KP - states[1].models_KP).abs().max() > 1e-2

    def test_equals_the_default_with_all_clients_and_equal_sizes(self):
        states = [
            four([8, 8, 8, 8]).play(CFL(stale_updates=stale, min_rounds=1, **ALWAYS), *[None] * 3)
            for stale in ("drop", "reapply")
        ]
        assert states[0].num_clusters > 1 and np.array_equal(states[0].assign_N, states[1].assign_N)
        assert close(states[0].models_KP, states[1].models_KP, 1e-5)

    def test_remembers_whole_updates(self):
        """A sketch cannot be added to a model."""
        one = groups()
        assert one.play(CFL(stale_updates="reapply", sketch=16), None).signature_SF.shape == (8, P)
        assert one.play(CFL(sketch=16), None).signature_SF.shape == (8, 16)


@pytest.mark.parametrize("stale", ["drop", "reapply"])
def test_batch_statistics_are_averaged(stale):
    """Running means and variances of a leaf are the means of its participants', in the round of a split too."""

    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def stage():
        return Stage(planted(4), model, LocalSGD(epochs=2, lr=0.1))

    one, other = stage(), stage()
    state = one.play(CFL(stale_updates=stale, min_rounds=0, **ALWAYS), None)
    assert state.num_clusters == 2
    clients = other.clients()
    rows = clients.train(clients.send(other.model()[None]), features=other.network.spec.all).features_MF
    trained = other.network.spec.trained
    for leaf in (0, 1):
        expected = rows[torch.from_numpy(state.assign_N == leaf)].mean(0)
        assert close(state.models_KP[leaf, trained:], expected[trained:], 1e-5)
        assert (state.models_KP[leaf, trained:] - other.model()[trained:]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "options", [{"stale_updates": "reapply"}, {"linkage": "single", "relative": True, "sketch": 16}], ids=str
)
class TestEnginesAndCheckpoints:
    COHORTS = [*TestSampledCohorts.FIRST, [0, 6, 7]]

    def test_engines_agree(self, options):
        assert_engines_agree(groups, CFL(min_rounds=1, **ALWAYS | options), [None, None, [0, 1, 2]])

    def test_continues_from_a_checkpoint_after_any_round(self, options, tmp_path):
        method = CFL(min_rounds=3, **ALWAYS | options)
        assert groups().play(method, *self.COHORTS).num_clusters > 1
        assert_survives_an_interruption(groups, method, self.COHORTS, tmp_path)


class TestJoinAndLeave:
    METHOD = CFL(min_rounds=0, **ALWAYS)

    @pytest.fixture(scope="class")
    def grown(self):
        """Three groups, clients 0 .. 8 of 12: one round splits off one group, a later one another."""
        one = Stage(planted(12, 3), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        method = CFL(relative=True, min_rounds=5, eps1=0.3, eps2=0.5)
        state = one.play(method, *[np.arange(9)] * 8)
        assert state.num_clusters == 3 and agreement(one.federation.group_N[:9], state.assign_N[:9])["ari"] == 1
        return method, state

    @pytest.fixture
    def two_levels(self, grown):
        """A new stage for that tree; joining and leaving need nothing of the rounds before."""
        method, state = grown
        return Stage(planted(12, 3), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5)), method, state

    def test_the_groups_are_found_with_full_participation(self, two_levels):
        one, method, state = two_levels
        assert accuracy(one, method, state, np.arange(9)).mean() > 0.9

    def test_newcomers_descend_two_levels_by_one_training_each(self, two_levels):
        one, method, state = two_levels
        clients = one.clients([9, 10, 11], round=9)
        joined = method.join(state, clients)
        assert agreement(one.federation.group_N, joined.assign_N)["ari"] == 1
        assert torch.equal(joined.models_KP, state.models_KP) and not set(joined.seen_S) & {9, 10, 11}
        assert np.isin(joined.assign_N[[9, 10, 11]], state.leaves_K2[1]).sum() == 2, "two reach the second split"
        assert floats(one) == (P * (3 + 2), P * (3 + 2)) and not one.stats.train_loss
        assert accuracy(one, method, joined, [9, 10, 11]).min() > 0.8

    def test_newcomers_follow_the_side_with_the_higher_max_cosine(self, two_levels):
        one, method, state = two_levels
        joined = method.join(state, one.clients([9, 10, 11], round=9))
        clients = one.clients([9, 10, 11], round=9)
        features = method.update_features(clients.spec)
        update_MF = clients.train(clients.send(state.split_KP[:1]), features=features).features_MF.numpy()
        sides = [state.update_EF[(state.split_E == 0) & (state.side_E == side)].numpy() for side in (0, 1)]
        for client, mine in zip((9, 10, 11), update_MF):
            old, new = (max(cosine(mine, other) for other in side) for side in sides)
            below = {int(state.leaves_K2[0, 0 if old >= new else 1])}
            below |= {int(state.leaves_K2[1, 1])} if state.leaves_K2[1, 0] in below else set()
            assert int(joined.assign_N[client]) in below

    def test_one_similar_member_outweighs_a_side_that_is_more_similar_on_average(self):
        """Side 0 has the newcomer's update u and -u, side 1 twice u + v, v orthogonal to u: cosines 1, -1, 0.7, 0.7."""
        one = groups()
        clients = one.clients([5])
        u = clients.train(
            clients.send(one.model()[None]), features=self.METHOD.update_features(clients.spec)
        ).features_MF[0]
        v = torch.roll(u, 1)
        v = v - (v @ u) / (u @ u) * u
        both = u + v / v.norm() * u.norm()
        updates = torch.stack([u, -u, both, both])
        tree = self.METHOD.init(one.start()).with_split(0, np.arange(4), updates, np.array([0, 0, 1, 1]))
        assert self.METHOD.join(tree, one.clients([5])).assign_N[5] == 0

    def test_newcomers_before_any_split_join_the_one_leaf_without_traffic(self):
        one = groups()
        state = one.play(self.METHOD, [0, 1])
        joined = self.METHOD.join(state, one.clients([5], round=2))
        assert joined.assign_N[5] == 0 and floats(one) == (0, 0)

    def test_leavers_are_forgotten_and_return_as_newcomers(self, two_levels):
        one, method, state = two_levels
        leaf = int(state.assign_N[2])
        gone = np.flatnonzero(state.assign_N == leaf)
        left = method.leave(state, gone)
        assert set(left.assign_N[gone]) == {-1} and not set(left.seen_S) & set(gone)
        assert len(left.signature_SF) == len(left.norm_S) == len(left.open_S) == 6
        assert left.num_clusters == 3 and torch.equal(left.models_KP, state.models_KP), "a leaf without members stays"
        later = one.play(method, np.setdiff1d(np.arange(9), gone), state=left, first=9)
        assert torch.equal(later.models_KP[leaf], state.models_KP[leaf])
        assert method.join(later, one.clients(gone, round=10)).assign_N[gone].tolist() == [leaf] * 3

    def test_a_rejected_newcomer_stays_without_a_leaf(self, two_levels):
        one, method, state = two_levels
        read = one.federation.train
        one.federation.train = lambda client: (read(client)[0] * (torch.nan if client == 10 else 1), read(client)[1])
        joined = method.join(state, one.clients([9, 10], round=9))
        assert joined.assign_N[10] == -1 and joined.assign_N[9] >= 0 and one.stats.rejected.keys() == {10}

    def test_an_empty_cohort_changes_nothing(self):
        one = groups()
        state = one.play(self.METHOD, [0, 1])
        assert_equal(one.play(self.METHOD, [], state=state, first=2), state)
