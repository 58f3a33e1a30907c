"""CFL: when a leaf splits and into what, by the formulas; the tree under sampled cohorts; PACFL's variant against its own rule in numpy."""

from itertools import combinations

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, planted, uneven
from linear import ETA, assert_close, gradient, matrix, sgd
from playing import COHORTS, accuracy, assert_engines_agree, assert_equal, assert_survives_an_interruption, floats, groups, mlp
from torch import nn

from cfl_ray.core.cohort import Population
from cfl_ray.core.grouping import agreement
from cfl_ray.core.local import LocalSGD
from cfl_ray.methods.cfl import CFL
from cfl_ray.methods.fedavg import FedAvg

SIZES = [12, 4, 8, 6]
ALWAYS = {"eps1": 1e9, "eps2": 0.0}  # every leaf of 3 or more splits
P = 340


def four(sizes=SIZES, **local) -> Stage:
    return Stage(uneven(sizes, (5,)), lambda: nn.Linear(5, 3, bias=False), LocalSGD(**{"steps": 2, "lr": ETA} | local))


def updates(one: Stage, w: np.ndarray) -> list[np.ndarray]:
    """Delta_i = SGD_i(w) - w."""
    return [sgd(one, client, w) - w for client in range(one.federation.num_clients)]


def step(deltas, sizes, members) -> np.ndarray:
    """sum_i p_i Delta_i over some members, p_i their shares of the samples."""
    return sum(sizes[i] * deltas[i] for i in members) / sum(sizes[i] for i in members)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


def bipartition(deltas, linkage: str) -> set[frozenset]:
    """single: the paper's min over bipartitions of the largest cosine across. complete: the closest two by their smallest cosine, again and again."""
    everybody = range(len(deltas))
    cos = {(i, j): cosine(deltas[i], deltas[j]) for i in everybody for j in everybody}
    if linkage == "single":
        halves = [set(half) for size in range(1, len(deltas)) for half in combinations(everybody, size)]
        best = min(halves, key=lambda half: max(cos[i, j] for i in half for j in everybody if j not in half))
        return {frozenset(best), frozenset(set(everybody) - best)}
    parts = [frozenset([i]) for i in everybody]
    while len(parts) > 2:
        a, b = max(combinations(parts, 2), key=lambda pair: min(cos[i, j] for i in pair[0] for j in pair[1]))
        parts = [part for part in parts if part not in (a, b)] + [a | b]
    return set(parts)


class TestFormula:
    def test_two_clients_and_momentum_that_starts_afresh(self):
        """Per round v1 = g(W), W1 = W - eta v1, v2 = 0.9 v1 + g(W1), W2 = W1 - eta v2; two clients never split (|c| > 2)."""
        one = four([12, 4], momentum=0.9)
        w = matrix(one.model())
        state = one.play(CFL(min_rounds=0, **ALWAYS), None, None)
        for _ in range(2):
            results = []
            for client in (0, 1):
                v = gradient(one, client, w)
                w1 = w - ETA * v
                results.append(w1 - ETA * (0.9 * v + gradient(one, client, w1)))
            w = (12 * results[0] + 4 * results[1]) / 16
        assert state.num_clusters == 1
        assert_close(state.models_KP[0], w)

    @pytest.mark.parametrize("linkage", ["complete", "single"])
    @pytest.mark.parametrize("seed", range(3))
    def test_both_leaves_get_their_own_mean_in_the_round_of_the_split(self, linkage, seed):
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
    def test_linkages_differ_and_are_those_of_the_brute_force(self, linkage):
        """Seven clients; seeds in which the two linkages disagree are among them."""
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
        return np.linalg.norm(step(deltas, SIZES, range(4))), max(map(np.linalg.norm, deltas)), np.mean([*map(np.linalg.norm, deltas)])

    @pytest.mark.parametrize("above1, above2, splits", [(1.001, 0.999, True), (0.999, 0.999, False), (1.001, 1.001, False)])
    @pytest.mark.parametrize("relative", [False, True])
    def test_short_mean_and_long_updates(self, measured, above1, above2, splits, relative):
        u, v, mean = measured
        scale = mean if relative else 1.0
        state = four().play(CFL(eps1=above1 * u / scale, eps2=above2 * v / scale, min_rounds=0, relative=relative), None)
        assert state.num_clusters == 1 + splits

    @pytest.mark.parametrize("clients, splits", [(2, False), (3, True)])
    def test_more_than_two_members(self, clients, splits):
        assert four(SIZES[:clients]).play(CFL(min_rounds=0, **ALWAYS), None).num_clusters == 1 + splits

    @pytest.mark.parametrize("min_rounds, splits", [(1, True), (2, False)])
    def test_rounds_before_the_first_split(self, min_rounds, splits):
        assert four().play(CFL(min_rounds=min_rounds, **ALWAYS), None, None).num_clusters == 1 + splits

    def test_the_scale_of_relative_thresholds_is_the_mean_length_of_rounds_1_to_5(self):
        one, method, lengths = four(), CFL(relative=True, min_rounds=99), []
        state = method.init(one.start())
        for number in range(1, 8):
            lengths.append([np.linalg.norm(delta) for delta in updates(one, matrix(state.models_KP[0]))])
            state = one.play(method, None, state=state, first=number)
        assert state.early[0] / state.early[1] == pytest.approx(np.mean(lengths[:5]), rel=1e-5) != pytest.approx(np.mean(lengths), rel=1e-3)

    def test_half_of_a_sampled_leaf_must_have_a_recent_update(self):
        """Eight members. In round 3 the cohort of 3 gives a window of ceil(8 / 3) = 3 rounds."""
        for cohorts, splits in [([[0, 1, 2, 3, 4, 5, 6, 7], [0], [0, 1, 2]], True), ([[4, 5, 6, 7, 3], [0, 1, 2], [0], [0], [0, 1, 2]], False)]:
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

    def test_nobody_splits_without_a_sound_participant(self):
        """Everybody's update is recent, but the only ones of this round are NaN: a mean of length 0 that nobody sent."""
        one = Stage(Spoiled([]), mlp, LocalSGD(epochs=3, lr=0.3))
        method = CFL(eps1=1e-9, eps2=0.0, min_rounds=0)
        state = one.play(method, None)
        one.federation.spoiled = {0, 1, 2, 3}
        after = one.play(method, [0, 1, 2, 3], state=state, first=2)
        assert after.num_clusters == 1 and torch.equal(after.models_KP, state.models_KP)

    @pytest.mark.parametrize("options, expected", [({}, (0.4, 1.6)), ({"relative": True}, (0.1, 0.6)), ({"relative": True, "eps2": 1.6}, (0.1, 1.6)), ({"eps1": 0.0}, (0.0, 1.6))])
    def test_defaults_are_those_of_the_kind_of_threshold(self, options, expected):
        method = CFL(**options)
        assert (method.eps1, method.eps2) == expected

    def test_relative_thresholds_without_any_length_yet(self):
        one = Stage(Spoiled(range(8)), mlp, LocalSGD(lr=0.3))
        assert one.play(CFL(relative=True, min_rounds=0, **ALWAYS), None, None).num_clusters == 1


class TestSampledCohorts:
    """Eight clients in two groups (i mod 2). 6 and 7 took part in round 1 alone; round 4 splits by the others."""

    METHOD = CFL(min_rounds=3, **ALWAYS)
    BEGUN = [[6, 7], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]

    @pytest.fixture
    def split(self):
        one = groups()
        return one, one.play(self.METHOD, *self.BEGUN)

    def test_old_updates_follow_the_side_with_the_higher_mean_cosine(self, split):
        _, state = split
        assert state.num_clusters == 2 and state.split_E.tolist() == [0] * 6
        for client in (6, 7):
            mine = state.signature_SF[state.seen_S.tolist().index(client)].numpy()
            means = [np.mean([cosine(mine, other) for other in state.update_EF[state.side_E == side].numpy()]) for side in (0, 1)]
            assert state.assign_N[client] == np.argmax(means)
        assert agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1
        assert dict(zip(state.seen_S.tolist(), state.open_S.tolist())) == {client: 0 if client in (6, 7) else -1 for client in range(8)}

    def test_a_new_update_corrects_an_old_guess_and_counts_in_no_average_then(self, split):
        one, state = split
        right = state.assign_N.copy()
        wrong = state.advance(assign_N=state.place([6], 1 - right[6]))
        after = one.play(CFL(min_rounds=9), [6], state=wrong, first=5)
        assert np.array_equal(after.assign_N, right) and torch.equal(after.models_KP, state.models_KP)
        assert after.open_S[after.seen_S.tolist().index(6)] == -1
        again = one.play(CFL(min_rounds=9), [6], state=after, first=6)
        assert not torch.equal(again.models_KP[right[6]], after.models_KP[right[6]]), "from then on it does"

    def test_an_update_that_moves_its_client_splits_nothing(self, split):
        """It was trained from the other side's model, so it is long; with two others that agree it would make a third leaf."""
        one, state = split
        wrong = state.advance(assign_N=state.place([6], 1 - state.assign_N[6]), round_S=np.zeros(8, np.int64))
        after = one.play(CFL(min_rounds=0, **ALWAYS), [0, 2, 6], state=wrong, first=5)
        assert after.num_clusters == 2 and after.assign_N[6] == state.assign_N[6]
        assert dict(zip(after.seen_S.tolist(), after.round_S.tolist())) == {0: 5, 2: 5} | dict.fromkeys([1, 3, 4, 5, 6, 7], 0)

    def test_members_without_an_update_are_placed_when_they_next_take_part(self):
        """6 and 7 come after round 1, when there is one leaf, and do not take part until it is split."""
        one = groups()
        state = one.play(self.METHOD, [0, 1, 2, 3, 4, 5])
        state = self.METHOD.join(state, one.clients([6, 7], number=2))
        assert state.assign_N[[6, 7]].tolist() == [0, 0]
        state = one.play(self.METHOD, *self.BEGUN[1:], state=state, first=2)
        assert state.num_clusters == 2 and state.assign_N[[6, 7]].tolist() == [-1, -1]
        after = one.play(CFL(min_rounds=9), [6, 7], state=state, first=5)
        assert agreement(np.arange(8) % 2, after.assign_N)["ari"] == 1

    def test_a_decided_member_is_not_asked_again(self, split):
        one, state = split
        moved = state.advance(assign_N=state.place([0], 1 - state.assign_N[0]))
        assert one.play(CFL(min_rounds=9), [0], state=moved, first=5).assign_N[0] == moved.assign_N[0]

    def test_a_new_update_goes_down_all_splits_since_the_old_one(self, split):
        """A second split of the same leaf, in which 6 takes no part either."""
        one, state = split
        leaf = int(state.assign_N[6])
        mine = state.update_EF[torch.from_numpy(state.side_E == (leaf != 0))]
        deeper = state.with_split(leaf, np.array([0, 2] if leaf == 0 else [1, 3]), torch.stack([-mine.mean(0), mine.mean(0)]), np.array([0, 1]))
        after = one.play(CFL(min_rounds=9), [6], state=deeper.advance(assign_N=deeper.place([6], 1 - leaf)), first=5)
        assert after.assign_N[6] == 2

    def test_updates_by_which_a_leaf_was_split_split_it_no_more(self):
        """Everybody in round 1, which splits in two; then one client a round, whose window of 8 rounds holds all those updates."""
        one = groups()
        state = one.play(CFL(min_rounds=0, **ALWAYS), None, *[[0]] * 3)
        assert state.num_clusters == 2 and sorted(state.round_S.tolist()) == [0] * 7 + [4]

    def test_clients_without_an_update_have_no_leaf_and_are_served_the_mean(self, split):
        one, _ = split
        state = one.play(self.METHOD, *self.BEGUN[1:], [0, 1, 2, 3, 4, 5])
        assert state.assign_N[[6, 7]].tolist() == [-1, -1] and state.num_clusters == 2
        serving = self.METHOD.serve(state, one.clients([6, 0]))
        assert serving.row_M.tolist() == [2, state.assign_N[0]] and torch.equal(serving.models_KP[2], state.models_KP.mean(0))
        after = one.play(CFL(min_rounds=9), [6, 7], state=state, first=5)
        assert agreement(np.arange(8) % 2, after.assign_N)["ari"] == 1


class TestReapply:
    """PACFL's CFL: every round the cohort's updates replace theirs, then every cluster moves by the mean of all its members' updates."""

    SIZES = [9, 4, 8, 6, 5, 7]
    COHORTS = [[0, 1, 2], [1, 3], [4, 0, 2], [1], [2, 3, 4]]

    def test_is_pacfl_s_rule(self):
        """Clients 0 to 5, the last of which never takes part; splits from round 3 on, by the last updates of all, zeros for 5."""
        one = four(self.SIZES)
        deltas, models, clusters = np.zeros((6, 15)), [matrix(one.model()).reshape(-1)], [list(range(6))]
        for number, cohort in enumerate(self.COHORTS, 1):
            for leaf, members in enumerate(clusters):
                for client in set(members) & set(cohort):
                    deltas[client] = sgd(one, client, models[leaf].reshape(3, 5)).reshape(-1) - models[leaf]
            if number > 2:
                for leaf, members in enumerate(list(clusters)):
                    if len(members) > 2:
                        halves = self.halves(deltas, members)
                        clusters[leaf] = max(halves, key=lambda half: (len(half), min(members) in half))
                        clusters.append(min(halves, key=lambda half: (len(half), min(members) in half)))
                        models.append(models[leaf])
            models = [w + deltas[members].mean(0) for w, members in zip(models, clusters)]
        state = one.play(CFL(stale_updates="reapply", min_rounds=2, **ALWAYS), *self.COHORTS)
        assert [np.flatnonzero(state.assign_N == leaf).tolist() for leaf in range(state.num_clusters)] == [sorted(members) for members in clusters]
        assert len(clusters) > 2
        for row_P, w in zip(state.models_KP, models):
            assert_close(row_P, w.reshape(3, 5))

    def halves(self, deltas, members) -> list[list[int]]:
        """Complete linkage on cosines, 0 where an update is all zeros, as PACFL divides by the norms + 1e-12."""
        norm = np.linalg.norm(deltas, axis=1)
        parts = [[i] for i in members]
        while len(parts) > 2:
            a, b = max(combinations(parts, 2), key=lambda pair: min(deltas[i] @ deltas[j] / (norm[i] * norm[j] + 1e-12) for i in pair[0] for j in pair[1]))
            parts = [part for part in parts if part not in (a, b)] + [a + b]
        return parts

    def test_is_not_what_is_done_by_default(self):
        states = [four(self.SIZES).play(CFL(stale_updates=stale, eps1=0.0), *self.COHORTS) for stale in ("drop", "reapply")]
        assert (states[0].models_KP - states[1].models_KP).abs().max() > 1e-2

    def test_with_everybody_and_equal_sizes_it_is(self):
        states = [four([8, 8, 8, 8]).play(CFL(stale_updates=stale, min_rounds=1, **ALWAYS), *[None] * 3) for stale in ("drop", "reapply")]
        assert states[0].num_clusters > 1 and np.array_equal(states[0].assign_N, states[1].assign_N)
        assert torch.allclose(states[0].models_KP, states[1].models_KP, rtol=0, atol=1e-6)

    def test_keeps_whole_updates(self):
        """A sketch cannot be added to a model."""
        one = groups()
        assert one.play(CFL(stale_updates="reapply", sketch=16), None).signature_SF.shape == (8, P)
        assert one.play(CFL(sketch=16), None).signature_SF.shape == (8, 16)


@pytest.mark.parametrize("stale", ["drop", "reapply"])
def test_batch_statistics_survive(stale):
    """Running means and variances are averaged over the participants, split or not."""

    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def stage():
        return Stage(planted(4), model, LocalSGD(epochs=2, lr=0.1))

    one, other = stage(), stage()
    state = one.play(CFL(stale_updates=stale, min_rounds=0, **ALWAYS), None)
    assert state.num_clusters == 2
    clients = other.clients()
    rows = clients.train(clients.send(other.model()[None]), keep=other.network.spec.all).kept_MF
    trained = other.network.spec.trained
    for leaf in (0, 1):
        expected = rows[torch.from_numpy(state.assign_N == leaf)].mean(0)
        assert torch.allclose(state.models_KP[leaf, trained:], expected[trained:], rtol=0, atol=1e-6)
        assert (state.models_KP[leaf, trained:] - other.model()[trained:]).abs().max() > 1e-2


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("local", [{}, {"batch_size": 30, "momentum": 0.9}], ids=["full batch", "mini-batches"])
def test_is_fedavg_where_eps1_is_zero(weights, local):
    one, other = groups(**local), groups(**local)
    found = one.play(CFL(eps1=0.0, eps2=0.0, min_rounds=0, weights=weights), *COHORTS)
    assert torch.equal(found.models_KP, other.play(FedAvg(weights=weights), *COHORTS).models_KP)


@pytest.mark.parametrize("participation, rounds", [(1.0, 8), (0.3, 16)])
def test_planted_groups_are_found(participation, rounds):
    one = Stage(planted(12, 3), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
    population = Population(12, (), 0)
    drawn = [population.draw(number, participation).ids_M for number in range(1, rounds + 1)]
    method = CFL(relative=True, min_rounds=5, eps1=0.3 if participation == 1 else 0.6, eps2=0.5)
    state = one.play(method, *drawn)
    assert state.num_clusters == 3 and agreement(one.federation.group_N, state.assign_N)["ari"] == 1
    assert accuracy(one, method, state).mean() > 0.9


@pytest.mark.parametrize("options", [{}, {"stale_updates": "reapply"}, {"linkage": "single", "relative": True, "sketch": 16}], ids=str)
class TestEveryEngineAndInterruption:
    COHORTS = [*TestSampledCohorts.BEGUN, [0, 6, 7], [1, 6]]

    def test_engines_agree(self, options):
        assert_engines_agree(groups, CFL(min_rounds=1, **ALWAYS | options), [None, None, [0, 1, 2]])

    def test_an_interruption_changes_nothing(self, options, tmp_path):
        method = CFL(min_rounds=3, **ALWAYS | options)
        assert groups().play(method, *self.COHORTS).num_clusters > 1
        assert_survives_an_interruption(groups, method, self.COHORTS, tmp_path)


class TestComingAndGoing:
    METHOD = CFL(min_rounds=0, **ALWAYS)

    @pytest.fixture
    def two_levels(self):
        """Three groups: two rounds with clients 0 .. 8 of 12 split off one group, then another."""
        one = Stage(planted(12, 3), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        method = CFL(relative=True, min_rounds=5, eps1=0.3, eps2=0.5)
        state = one.play(method, *[np.arange(9)] * 8)
        assert state.num_clusters == 3 and agreement(one.federation.group_N[:9], state.assign_N[:9])["ari"] == 1
        return one, method, state

    def test_newcomers_go_down_two_levels_by_one_training_each(self, two_levels):
        one, method, state = two_levels
        clients = one.clients([9, 10, 11], number=9)
        joined = method.join(state, clients)
        assert agreement(one.federation.group_N, joined.assign_N)["ari"] == 1
        assert torch.equal(joined.models_KP, state.models_KP) and not set(joined.seen_S) & {9, 10, 11}
        second = np.isin(joined.assign_N[[9, 10, 11]], state.leaves_K2[1]).sum() if state.leaves_K2[1, 0] in joined.assign_N[[9, 10, 11]] else 0
        assert second == 2 and floats(one) == (P * (3 + second), P * (3 + second)) and not one.books.train_loss
        assert accuracy(one, method, joined, [9, 10, 11]).min() > 0.8

    def test_their_way_is_that_of_the_higher_max_cosine(self, two_levels):
        one, method, state = two_levels
        joined = method.join(state, one.clients([9, 10, 11], number=9))
        clients = one.clients([9, 10, 11], number=9)
        kept = clients.train(clients.send(state.split_KP[:1]), keep=method.keep(clients.spec)).kept_MF.numpy()
        for client, mine in zip((9, 10, 11), kept):
            first = state.split_E == 0
            highest = [max(cosine(mine, other) for other in state.update_EF[first & (state.side_E == side)].numpy()) for side in (0, 1)]
            stays = highest[0] >= highest[1]
            below = {int(state.leaves_K2[0, 0 if stays else 1])}
            below |= {int(state.leaves_K2[1, 1])} if state.leaves_K2[1, 0] in below else set()
            assert int(joined.assign_N[client]) in below

    def test_one_member_like_the_newcomer_outweighs_a_side_that_is_nearer_on_average(self):
        """Side 0 holds its own update u and -u, side 1 twice u + v with v orthogonal to u and as long: cosines 1, -1 and 0.7, 0.7."""
        one = groups()
        clients = one.clients([5])
        u = clients.train(clients.send(one.model()[None]), keep=self.METHOD.keep(clients.spec)).kept_MF[0]
        v = torch.roll(u, 1)
        v = v - (v @ u) / (u @ u) * u
        both = u + v / v.norm() * u.norm()
        tree = self.METHOD.init(one.start()).with_split(0, np.arange(4), torch.stack([u, -u, both, both]), np.array([0, 0, 1, 1]))
        assert self.METHOD.join(tree, one.clients([5])).assign_N[5] == 0

    def test_newcomers_before_any_split_join_the_one_leaf_for_nothing(self):
        one = groups()
        state = one.play(self.METHOD, [0, 1])
        joined = self.METHOD.join(state, one.clients([5], number=2))
        assert joined.assign_N[5] == 0 and floats(one) == (0, 0)

    def test_leavers_are_forgotten_and_come_again_as_newcomers(self, two_levels):
        one, method, state = two_levels
        leaf = int(state.assign_N[2])
        gone = np.flatnonzero(state.assign_N == leaf)
        left = method.leave(state, gone)
        assert set(left.assign_N[gone]) == {-1} and not set(left.seen_S) & set(gone) and len(left.signature_SF) == len(left.norm_S) == len(left.open_S) == 6
        assert left.num_clusters == 3 and torch.equal(left.models_KP, state.models_KP), "the last members are gone, the model stays"
        later = one.play(method, np.setdiff1d(np.arange(9), gone), state=left, first=9)
        assert torch.equal(later.models_KP[leaf], state.models_KP[leaf])
        assert method.join(later, one.clients(gone, number=10)).assign_N[gone].tolist() == [leaf] * 3

    def test_a_rejected_newcomer_stays_without_a_leaf(self, two_levels):
        one, method, state = two_levels
        read = one.federation.train
        one.federation.train = lambda client: (read(client)[0] * (torch.nan if client == 10 else 1), read(client)[1])
        joined = method.join(state, one.clients([9, 10], number=9))
        assert joined.assign_N[10] == -1 and joined.assign_N[9] >= 0 and one.books.rejected.keys() == {10}

    def test_one_client_is_fedavg(self):
        one, other = groups(), groups()
        found = one.play(self.METHOD, [3], [3])
        assert torch.equal(found.models_KP, other.play(FedAvg(), [3], [3]).models_KP)

    def test_an_empty_cohort_changes_nothing(self):
        one = groups()
        state = one.play(self.METHOD, [0, 1])
        assert_equal(one.play(self.METHOD, [], state=state, first=2), state)


def test_traffic_of_a_round_is_one_model_each_way():
    one = groups()
    one.play(CFL(min_rounds=0, **ALWAYS), None)
    assert floats(one) == (8 * P, 8 * P)
    one.play(CFL(min_rounds=0, **ALWAYS), None, [0, 1, 5])
    assert floats(one) == (3 * P, 3 * P)
