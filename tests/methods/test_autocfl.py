"""AutoCFL: epochs are adjusted until training progress is even, then the clients vote for representatives."""

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, planted
from linear import N_0, N_1, assert_close, loss, matrix, mean, sgd
from linear import stage as linear_stage
from oneshot import CLIENTS, HEAD, OneShot, P, stage
from rounds import floats, watched

from cfl_ray.core.rng import Draws
from cfl_ray.core.updates import Updates
from cfl_ray.methods import autocfl
from cfl_ray.methods.autocfl import AutoCFL, representatives, row_gap
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fl_hc import FLHC

E_0 = 2
linear = partial(linear_stage, steps=None, epochs=E_0)


class TestTwoClients:
    """Full batch, so an epoch is one step, and the loss of the last epoch is that before the last step."""

    def by_hand(self, one: Stage, alpha: float, rounds: int, weights: str = "samples"):
        """(w, the clients' last models, C, E) after `rounds` rounds of the first phase; s is client 0."""
        w, total, epochs = matrix(one.model()), np.zeros(2), np.full(2, float(E_0))
        for _ in range(rounds):
            steps = [math.floor(e + 0.5) for e in epochs]
            models = [sgd(one, client, w, steps=steps[client]) for client in (0, 1)]
            last = np.array([loss(one, client, sgd(one, client, w, steps=steps[client] - 1)) for client in (0, 1)])
            total += last
            if total[1] > total[0]:
                epochs[1] += (alpha * N_0 / N_1) ** min(1, last[1] / last[0])
            w = mean(*models, weights)
        return w, models, total, epochs

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    @pytest.mark.parametrize("seed, behind", [(0, False), (1, False), (2, True), (5, True)])
    @pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0])
    def test_epochs_follow_progress(self, seed, behind, alpha, weights):
        one, method = linear(seed=seed), AutoCFL(alpha=alpha, min_rounds=9, max_rounds=9, weights=weights)
        state = method.init(one.start())
        for rounds in (1, 2, 3):
            state = one.play(method, None, state=state, first=rounds)
            w, _, total, epochs = self.by_hand(one, alpha, rounds, weights)
            assert_close(state.models_KP[0], w)
            assert close(state.loss_N, total, 1e-5) and close(E_0 + state.more_N, epochs, 1e-4)
            assert state.variance == pytest.approx(((total[0] - total[1]) / 2) ** 2, rel=1e-4)
        assert (epochs[1] > E_0) == behind

    def test_alpha_0_leaves_the_epochs_as_they_are(self):
        one, method = linear(), AutoCFL(alpha=0, min_rounds=9, max_rounds=9)
        assert not one.play(method, *[None] * 3).more_N.any()

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    def test_a_cluster_starts_from_its_members_last_models(self, weights):
        one = linear(seed=1)
        _, models, _, _ = self.by_hand(one, 0.5, 3, weights)
        state = one.play(AutoCFL(max_rounds=3, weights=weights), None, None, None)
        assert state.assign_N.tolist() == [0, 0] and state.phase == "federate"
        assert_close(state.models_KP[0], mean(*models, weights))

    def test_two_clusters_train_apart_for_their_first_epochs(self, monkeypatch):
        """With the votes replaced, since one of two clients always follows the other."""
        calls = []
        monkeypatch.setattr(
            autocfl, "representatives", lambda *arguments: (calls.append(arguments), np.array([0, 1]))[1]
        )
        one = linear(seed=2)
        before, _, _, _ = self.by_hand(one, 0.5, 2)
        _, (w_0, w_1), _, epochs = self.by_hand(one, 0.5, 3)
        state = one.play(AutoCFL(max_rounds=3), None, None, None)
        ((distance_MM, num_samples_M, vote, min_gap),) = calls
        assert close(distance_MM, np.linalg.norm(w_0 - w_1) / 15 * (1 - np.eye(2)), 1e-5)
        assert (num_samples_M.tolist(), vote, min_gap) == ([N_0, N_1], "row", 0.0)
        assert_close(state.start_KP[0], before)
        for k, w in enumerate((w_0, w_1)):
            assert_close(state.models_KP[k], w)
            assert_close(state.centre_KF[k], w)
            for keep, steps in ((False, E_0), (True, math.floor(epochs[k] + 0.5))):
                after = one.play(AutoCFL(max_rounds=3, keep_epochs=keep), None, state=state, first=4)
                assert_close(after.models_KP[k], sgd(one, k, w, steps=steps))
        assert math.floor(epochs[1] + 0.5) > E_0

    def test_a_newcomer_joins_the_nearest_representative_after_its_first_epochs_from_the_stored_model(self):
        one = linear(sizes=(N_0, N_1, 6))
        method = AutoCFL(max_rounds=3)
        state = one.play(method, *[[0, 1]] * 4)
        h_2 = sgd(one, 2, state.start_KP[0].double().reshape(3, 5).numpy(), steps=E_0)
        for near, offsets in enumerate([(0.1, 0.2), (0.2, 0.1)]):
            centre_KF = torch.from_numpy(np.stack([h_2 + offset for offset in offsets])).float().reshape(2, 15)
            crafted = state.advance(
                centre_KF=centre_KF, models_KP=state.models_KP.repeat(2, 1), more_N=np.array([0, 0, 5.0])
            )
            assert method.join(crafted, one.clients([2], 5)).assign_N[2] == near


class TestSteps:
    """floor(E_m ceil(n / B) + 1/2)."""

    def test_are_rounded_from_fractional_epochs(self):
        """12 samples in 3 batches, 5 in 2. Where steps are configured, E_0 follows from them."""
        for more, local, expected in [
            ([0, 0], {"batch_size": 4}, [2 * 3, 2 * 2]),
            ([0.1, 0.2], {"batch_size": 4}, [6, 4]),
            ([0.2, 0.3], {"batch_size": 4}, [7, 5]),
            ([0.5, 0.24], {"batch_size": 4}, [8, 4]),
            ([0.4, 0.5], {}, [2, 3]),
            ([0, 0], {"batch_size": 4, "steps": 7}, [7, 7]),
            ([1, 0.5], {"batch_size": 4, "steps": 7}, [10, 8]),
            ([1, 0.5], {"batch_size": 4, "steps": 7, "drop_last": True}, [10, 8]),
        ]:
            one = linear(**{"sizes": (12, 5)} | local)
            state = AutoCFL().init(one.start()).advance(more_N=np.array(more))
            assert AutoCFL().steps(state, one.clients()).tolist() == expected
            works = watched(one)
            one.play(AutoCFL(), None, state=state)
            assert works[0].steps_M.tolist() == expected, (more, local)


class TestStop:
    """After the round in which Var(C_m) rises, or its factor falls; round 3 at the earliest and 6 at the latest."""

    CASES = [  # C_0 - C_1 after each round, so that Var = (C_0 - C_1)^2 / 4; options; the clustering round
        ([1, 2, 3], {}, 3),
        ([3, 2, 1, 2], {}, 4),
        ([6, 5, 4, 3, 2, 1], {}, 6),
        ([3, 1, 1, 1, 2], {}, 5),
        ([1, 2, 1, 2], {}, 4),
        ([5, 4, 3, -4], {}, 4),
        ([1, 2], {"min_rounds": 2}, 2),
        ([1, 2, 3, 4, 5], {"min_rounds": 5}, 5),
        ([5, 4, 3, 2], {"max_rounds": 4}, 4),
        ([1], {"max_rounds": 1}, 1),
        # of C_m / t: (1, 2 / 2, 2.5 / 3, 2.6 / 4, 6 / 5) / 2, and without a rise (1, 2 / 2, .. 6 / 6) / 2
        ([1, 2, 2.5, 2.6, 6], {"progress": "mean"}, 5),
        ([1, 2, 3, 4, 5, 6], {"progress": "mean"}, 6),
        # factors of Var: 4, 9 / 4; 4, 4.2, 4.8, 4; 4, 4.2, 4.8, 4.9, 6.3, without an elbow; 9, 4 / 9
        ([1, 2, 3], {"progress": "elbow"}, 3),
        ([1, 2, 4.1, 9, 18], {"progress": "elbow"}, 5),
        ([1, 2, 4.1, 9, 20, 50], {"progress": "elbow"}, 6),
        ([1, 3, 2], {"progress": "elbow"}, 3),
        ([0, 1, 2, 3], {"progress": "elbow"}, 4),  # no factor in round 2
    ]

    def test_is_where_the_variance_rises(self, monkeypatch):
        for differences, options, expected in self.CASES:
            losses = iter(
                np.array([max(change, 0), max(-change, 0)], float) + 1 for change in np.diff([0, *differences])
            )
            monkeypatch.setattr(Updates, "train_loss_M", property(lambda updates: next(losses)))
            one, method, number = linear(), AutoCFL(**options), 0
            state = method.init(one.start())
            while state.phase == "adjust":
                number += 1
                state = one.play(method, None, state=state, first=number)
            assert number == expected, (differences, options)


def voted(distance, size, vote: str) -> list[int]:
    """The representative of each client, step by step as in the paper and the header of the method's file."""
    clients = range(len(size))
    scores = [defaultdict(float) for _ in clients]
    for m in clients:
        others = sorted((n for n in clients if n != m), key=lambda n: (distance[m][n], n))
        party, widest = list(others), 0.0
        for at in range(1, len(others)):
            gap = distance[m][others[at]] - distance[m][others[at - 1]]
            if gap > widest:
                party, widest = others[:at], gap
        party = sorted([*party, m])
        rep = max(party, key=lambda n: (size[n], -n))
        for n in party:
            scores[n][rep] += {"row": size[m], "literal": size[n] / sum(size[q] for q in party), "unweighted": 1}[vote]
    leader = [max(scores[n], key=lambda rep: (scores[n][rep], -rep)) for n in clients]

    def root(n):
        return n if leader[n] == n else root(leader[n])

    return [root(n) for n in clients]


def symmetric(draw, clients: int, kind: str) -> np.ndarray:
    if kind == "grid":  # whole numbers: many ties
        upper = np.triu(draw.integers(1, 6, (clients, clients)), 1).astype(float)
    elif kind == "groups":
        group = draw.integers(0, 3, clients)
        upper = np.triu(np.where(group[:, None] == group, 1, 4) + 0.5 * draw.random((clients, clients)), 1)
    else:
        upper = np.triu(draw.random((clients, clients)), 1)
    return upper + upper.T


class TestVotes:
    @pytest.mark.parametrize("kind", ["random", "grid", "groups"])
    @pytest.mark.parametrize("vote", ["row", "literal", "unweighted"])
    def test_are_those_of_the_plain_version(self, vote, kind):
        """150 random matrices."""
        draw, seen = np.random.default_rng(0), set()
        for trial in range(150):
            clients = int(draw.integers(1, 13))
            distance = symmetric(draw, clients, kind)
            size = draw.integers(1, 4, clients) if trial % 2 else draw.integers(1, 1000, clients)
            found = representatives(distance, size, vote)
            assert found.tolist() == voted(distance, size.tolist(), vote), (distance, size)
            seen.add(len(set(found)))
        assert len(seen) > 2

    def test_of_a_matrix_by_hand(self):
        """Two pairs, (0, 1) at distance 1 and (2, 3) at 2, 9 and more apart: each follows its larger client."""
        distance = np.array([[0, 1, 9, 9.5], [1, 0, 9.2, 9.7], [9, 9.2, 0, 2], [9.5, 9.7, 2, 0]])
        for vote in ("row", "literal", "unweighted"):
            assert representatives(distance, np.array([5, 7, 3, 2]), vote).tolist() == [1, 1, 2, 2]
            assert representatives(distance, np.array([4, 4, 4, 4]), vote).tolist() == [0, 0, 2, 2], (
                "ties go to the lowest"
            )

    def test_the_distance_to_itself_takes_no_part(self):
        """All at nearly the same distance: with the zero in a row, its largest gap would cut off all other clients."""
        size = 12
        distance = 1 + 0.01 * symmetric(np.random.default_rng(0), size, "random")
        np.fill_diagonal(distance, 0)
        assert len(set(representatives(distance, np.full(size, 100), "row"))) < size / 2
        for diagonal in (1e-9, 7.0, np.inf):
            other = distance.copy()
            np.fill_diagonal(other, diagonal)
            found, expected = (representatives(matrix, np.full(size, 100), "row") for matrix in (other, distance))
            assert np.array_equal(found, expected)

    def test_without_any_gap_all_clients_are_near(self):
        distance = np.ones((5, 5)) - np.eye(5)
        assert representatives(distance, np.array([1, 2, 3, 9, 4]), "row").tolist() == [3] * 5

    def test_a_representative_follows_itself(self):
        """Client 4 has most votes to follow 3, which follows 1. Representatives are larger, or lower on ties."""
        distance = np.array(
            [[0, 1, 13, 4, 2], [1, 0, 15, 5, 11], [13, 15, 0, 6, 1], [4, 5, 6, 0, 1], [2, 11, 1, 1, 0]], float
        )
        assert representatives(distance, np.array([1, 4, 7, 3, 2]), "literal").tolist() == [1, 1, 2, 1, 1]
        draw = np.random.default_rng(1)
        for _ in range(200):
            size = draw.integers(1, 4, 9)
            found = representatives(symmetric(draw, 9, "random"), size, "literal")
            assert np.array_equal(found[found], found)
            assert all((size[r], -r) >= (size[n], -n) for n, r in enumerate(found))

    def test_rows_without_large_gaps_make_one_cluster_by_min_gap(self):
        """min_gap bounds the median over rows of the largest gap relative to the median distance."""
        distance = symmetric(np.random.default_rng(0), 9, "groups")
        size, ratio = np.full(9, 10), []
        for m in range(9):
            row = np.sort(np.delete(distance[m], m))
            ratio.append(np.diff(row).max() / np.median(row))
        guard = float(np.median(ratio))
        assert len(set(representatives(distance, size, "row", guard - 1e-6))) == 3
        assert representatives(distance, size, "row", guard + 1e-6).tolist() == [0] * 9

    def test_of_few_clients(self):
        for vote in ("row", "literal", "unweighted"):
            assert representatives(np.zeros((0, 0)), np.zeros(0, int), vote).tolist() == []
            assert representatives(np.zeros((1, 1)), np.array([3]), vote).tolist() == [0]
            assert representatives(np.array([[0, 5.0], [5.0, 0]]), np.array([3, 4]), vote).tolist() == [1, 1]


class TestOtherClusterings:
    """Table 4: K-means, hierarchical clustering and DBSCAN on the matrix that the votes use."""

    # Two pairs, (0, 1) at distance 1 and (2, 3) at 2, 9 and more apart
    PAIRS = np.array([[0, 1, 9, 9.5], [1, 0, 9.2, 9.7], [9, 9.2, 0, 2], [9.5, 9.7, 2, 0]])

    @pytest.mark.parametrize("clustering", ["kmeans", "hac", "dbscan"])
    def test_of_a_matrix_by_hand(self, clustering):
        for distance, expected in ((self.PAIRS, [0, 0, 1, 1]), (np.zeros((1, 1)), [0]), (np.ones((5, 5)), [0] * 5)):
            distance = distance * (1 - np.eye(len(distance)))
            assert AutoCFL(clustering=clustering).other_clusters(distance, Draws(0, 3)).tolist() == expected

    def test_parameters(self):
        def clusters(**options):
            return AutoCFL(**options).other_clusters(self.PAIRS, Draws(0, 3)).tolist()

        assert row_gap(self.PAIRS) == np.median([(1 + 9) / 2, (1 + 9.2) / 2, (2 + 9) / 2, (2 + 9.5) / 2])
        assert clusters(clustering="dbscan", eps=1.5) == [0, 0, 1, 2], "a client without neighbours is a cluster"
        assert clusters(clustering="dbscan", eps=9.0) == [0, 0, 0, 0]
        assert clusters(clustering="hac", num_clusters=3) == clusters(clustering="kmeans", num_clusters=3)
        assert clusters(clustering="hac", num_clusters=3) == [0, 0, 1, 2]
        for options in ({"num_clusters": 3}, {"clustering": "dbscan", "num_clusters": 3}, {"eps": 1.0}):
            with pytest.raises(ValueError, match=r"is for clustering (kmeans and hac|dbscan), clustering is"):
                AutoCFL(**options)

    @pytest.mark.parametrize("clustering", ["kmeans", "hac", "dbscan"])
    def test_finds_the_groups_and_places_newcomers_by_mean_heads(self, clustering):
        one, method = stage(), AutoCFL(clustering=clustering, max_rounds=3)
        one.online = range(11)
        state = one.play(method, *[range(11)] * 3)
        assert state.assign_N.tolist() == [0, 1, 2] * 3 + [0, 1, -1]
        assert method.join(state, one.clients([11], 4)).assign_N[11] == 2
        assert state.centre_KF.shape == (3, HEAD)


def resized(sizes: list[int], groups: int):
    """A planted federation of which each client has the first samples only."""
    federation = planted(len(sizes), groups)
    train, federation.num_samples_N = federation.train, np.array(sizes)
    federation.train = lambda client: tuple(part[: sizes[client]] for part in train(client))
    return federation


class TestAutoCFL(OneShot):
    method, clustered = AutoCFL(min_rounds=2, max_rounds=2), 2

    @pytest.mark.parametrize("vote", ["literal", "unweighted"])
    def test_finds_the_groups_by_other_votes(self, vote):
        state = stage().play(AutoCFL(vote=vote, max_rounds=3), *[None] * 3)
        assert state.assign_N.tolist() == [0, 1, 2] * 4

    def test_finds_the_groups_among_unequal_clients(self):
        """Client 3 of group 0 has a tenth of the others' samples."""
        one = stage(resized([200, 200, 200, 20, 200, 60, 200, 120, 200], 3))
        state = one.play(AutoCFL(max_rounds=3), None, None, None)
        assert state.assign_N.tolist() == [0, 1, 2] * 3
        assert (state.more_N[[3, 5, 7]] > 0).all() and not state.more_N[[0]].any()

    @pytest.mark.parametrize(
        "sizes", [[200] * 10, [200, 20, 200, 60, 120, 200, 20, 200, 60, 120]], ids=["equal", "unequal"]
    )
    def test_iid_data_are_one_cluster(self, sizes):
        one = stage(resized(sizes, 1), epochs=3, batch_size=20, lr=0.1)
        assert one.play(AutoCFL(), *[None] * 6).assign_N.tolist() == [0] * 10

    def test_a_client_that_missed_a_round_is_not_ahead_of_the_others(self):
        """Eight similar clients; client 0, the s of C_m > C_s, is absent at first. Its C_m is nearly as if present."""
        one = stage(planted(8, 1))
        one.online = range(1, 8)
        state = one.play(AutoCFL(), None)
        one.online = range(8)
        after = one.play(AutoCFL(), None, state=state, first=2)
        whole = stage(planted(8, 1)).play(AutoCFL(), None, None)
        assert state.loss_N[0] == pytest.approx(state.loss_N[1:].mean())
        assert np.allclose(after.loss_N, whole.loss_N, rtol=0.3)
        assert after.grown(9).loss_N[8] == pytest.approx(after.loss_N.mean())

    def test_the_progress_of_leavers_is_forgotten(self):
        one, method = stage(), AutoCFL()
        state = one.play(method, None).advance(more_N=np.arange(12.0))
        left = method.leave(state, np.array([2, 5]))
        stay = np.delete(np.arange(CLIENTS), [2, 5])
        assert np.allclose(left.loss_N[[2, 5]], state.loss_N[stay].mean()) and (left.more_N[[2, 5]] == 0).all()
        assert np.array_equal(left.loss_N[stay], state.loss_N[stay])
        assert np.array_equal(left.more_N[stay], state.more_N[stay])

    def test_traffic(self):
        """First phase: the model both ways, |D_m| and L_m, of all N. Then participants only. Newcomers: a head up."""
        one = stage()
        state = None
        for number in (1, 2):
            state = one.play(self.method, [0, 1], state=state, first=number)
            assert floats(one) == (CLIENTS * P, CLIENTS * (P + 2))
        one.play(self.method, [0, 1, 5], state=state, first=3)
        assert floats(one) == (3 * P, 3 * P)
        left = self.method.leave(state, np.array([5]))
        one.play(self.method, [0, 1, 5], state=left, first=3)
        assert floats(one) == (4 * P, 3 * P + HEAD)


@pytest.mark.parametrize("weights, local", [("samples", {}), ("uniform", {"epochs": 1, "steps": 7})], ids=str)
def test_without_adjustment_and_with_one_cluster_is_fedavg(weights, local):
    """All clients in the first phase, fewer later; the same mini-batches."""
    drawn = [None, None, None, [0, 1, 5], [2, 3, 7, 9]]
    one, other = stage(momentum=0.5, **local), stage(momentum=0.5, **local)
    found = one.play(AutoCFL(alpha=0, min_gap=1e9, max_rounds=3, weights=weights), *drawn)
    assert found.phase == "federate" and not found.more_N.any()
    assert torch.equal(found.models_KP, other.play(FedAvg(weights=weights), *drawn).models_KP)


def test_whole_updates_in_a_tree_without_adjustment_are_fl_hc():
    """The same clusters, models and placement of a client that left and comes back."""
    adjusting = AutoCFL(clustering="hac", signature="update", min_rounds=3, max_rounds=3)
    drawn = [None, None, None, [0, 1, 5]]
    one, other = stage(), stage()
    found = one.play(replace(adjusting, alpha=0), *drawn)
    expected = other.play(FLHC(cluster_round=3), *drawn)
    assert found.assign_N.max() == 2 and found.assign_N.tolist() == expected.assign_N.tolist()
    assert torch.equal(found.models_KP, expected.models_KP) and torch.equal(found.centre_KF, expected.centre_KF)
    left = [method.leave(state, np.array([5])) for method, state in ((adjusting, found), (FLHC(), expected))]
    again = [
        one.play(method, [5], state=state, first=5) for method, state in zip((adjusting, FLHC()), left, strict=True)
    ]
    assert again[0].assign_N.tolist() == again[1].assign_N.tolist() == found.assign_N.tolist()


def test_keeping_the_epochs_changes_later_rounds_only():
    one, drawn = stage(), [None, None]
    states = [one.play(replace(TestAutoCFL.method, keep_epochs=keep), *drawn) for keep in (False, True)]
    assert torch.equal(states[0].models_KP, states[1].models_KP)
