"""FedAC: personal models with two proximal terms by the formulas, the low-rank space, and CNT."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from closeness import close, negligible
from federations import Spoiled, Stage, linear, planted
from linear import ETA, assert_layers, data, deep_stage, layers
from rounds import (
    EnginesAndCheckpoints,
    assert_equal,
    assert_survives_an_interruption,
    floats,
    groups,
    mlp,
    sampled,
)
from torch import nn

from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State
from cfl_ray.methods.fedac import FedAC, compactness, merge_cluster
from cfl_ray.methods.local import Local

P, BASE = 340, 272
MU, LAM = 0.3, 0.2


def trained(one: Stage, client: int, start, centre, phi, steps: int = 2, momentum: float = 0.0):
    """(A, B) after steps of grad f + mu (omega - Omega) on both, + lambda (A - Phi) on A, the base."""
    x, y = data(one, client)
    (a, b), (centre_a, centre_b) = start, centre
    va = vb = 0.0
    for _ in range(steps):
        logits = x @ a.T @ b.T
        error = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True) - y) / len(x)
        va = momentum * va + b.T @ error.T @ x + MU * (a - centre_a) + LAM * (a - phi)
        vb = momentum * vb + error.T @ (x @ a.T) + MU * (b - centre_b)
        a, b = a - ETA * va, b - ETA * vb
    return a, b


def average(*models, weight=(1, 1)):
    """The weighted mean of each layer."""
    return tuple(sum(n * layer for n, layer in zip(weight, same)) / sum(weight) for same in zip(*models))


HALF = {"fedavgm": {"lr": 0.5, "momentum": 0.0}}


def moved(before: State, models: list[torch.Tensor], server) -> torch.Tensor:
    """The mean of the models; with HALF, half of the way to it from the only model of `before`."""
    return torch.lerp(before.models_KP[0], torch.stack(models).mean(0), 0.5 if server == HALF else 1.0)


def fixed(**options) -> FedAC:
    """With a fixed number of clusters."""
    return FedAC(**{"mu": MU, "lam": LAM, "start": "own", "adapt_clusters": False} | options)


class TestFormula:
    """Two clients, two layers: A is the base phi, B the head."""

    @pytest.mark.parametrize("clusters", [1, 2])
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    @pytest.mark.parametrize("weights, weight", [("uniform", (1, 1)), ("samples", (12, 4))])
    def test_two_rounds(self, clusters, weights, weight, momentum):
        """Round 1 from w_0 near w_0; round 2 from the own omega_i near Omega_r(i) and Phi, the means of the uploads."""
        one = deep_stage()
        one.local = LocalSGD(steps=2, lr=ETA, momentum=momentum)
        w0 = layers(one.model())
        omega = [trained(one, client, w0, w0, w0[0], momentum=momentum) for client in (0, 1)]
        method = fixed(num_clusters=clusters, weights=weights)
        state = one.play(method, None)
        for _ in range(2):
            both = average(*omega, weight=weight)
            centres = omega if clusters == 2 else [both]
            assert state.assign_N.tolist() == ([0, 1] if clusters == 2 else [0, 0])
            for client in (0, 1):
                assert_layers(one.client_states["personal", client], *omega[client])
            for k, centre in enumerate(centres):
                assert_layers(state.models_KP[k], *centre)
            assert close(layers(state.global_KP[0])[0], both[0], 1e-5)
            omega = [
                trained(one, client, omega[client], centres[state.assign_N[client]], both[0], momentum=momentum)
                for client in (0, 1)
            ]
            state = one.play(method, None, state=state, first=2)

    def test_a_client_that_never_took_part_starts_from_phi_and_the_mean_head(self):
        one = deep_stage()
        method = fixed(num_clusters=2)
        state = one.play(method, None)
        omega = [layers(row) for row in state.models_KP]
        start = layers(state.global_KP[0])[0], (omega[0][1] + omega[1][1]) / 2
        one.backend.forget(np.array([1]))
        state = one.play(method, [1], state=method.leave(state, np.array([1])), first=2)
        assert_layers(one.client_states["personal", 1], *trained(one, 1, start, start, start[0]))
        assert state.assign_N.tolist() == [0, 1], "an upload counts in no mean before its client has a cluster"
        assert_layers(state.models_KP[1], *omega[1])

    def test_a_newcomer_trains_once_from_there_and_keeps_no_state(self):
        one = deep_stage()
        method = fixed(num_clusters=2)
        state = method.leave(one.play(method, None), np.array([1]))
        one.backend.forget(np.array([1]))
        outcomes = []
        one.backend.run = lambda work, run=one.backend.run: (outcomes.append(run(work)), outcomes[-1])[1]
        joined = method.join(state, one.clients([1], round=2))
        start = layers(state.global_KP[0])[0], average(*map(layers, state.models_KP))[1]
        assert_layers(torch.from_numpy(outcomes[0].arrays["features"][0]), *trained(one, 1, start, start, start[0]))
        assert joined.assign_N.tolist() == [0, 1] and joined.seen_S.tolist() == [0]
        assert list(one.client_states) == [("personal", 0)]


def test_personal_models_without_the_proximal_terms_are_those_of_local():
    local = {"batch_size": 30, "momentum": 0.9}
    one, other = groups(**local), groups(**local)
    state = one.play(fixed(mu=0.0, lam=0.0, num_clusters=2), *[None] * 3)
    other.play(Local(), *[None] * 3)
    found, expected = one.client_states, other.client_states
    assert state.num_clusters == 2 and found.keys() == expected.keys() and len(found) == 8
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


class TestLowRank:
    def test_is_pca_of_the_centred_uploads(self):
        """The right singular vectors of numpy's SVD, up to signs."""
        state = groups().play(fixed(rank=3), None)
        uploads = state.signature_SF.double().numpy()
        centred = uploads - uploads.mean(0)
        _, _, right = np.linalg.svd(centred, full_matrices=False)
        assert state.basis_FQ.shape == (P, 3)
        assert close(np.abs(right[:3] @ state.basis_FQ.double().numpy()), np.eye(3), 1e-4)
        z = state.z(state.signature_SF)
        assert negligible(z.mean(0), z, 1e-5)
        assert close(z.abs(), np.abs(centred @ right[:3].T), 1e-4)

    def test_centring_separates_the_uploads(self):
        """Without it all cosines of the uploads are positive, since the models are close to each other."""
        state = groups().play(fixed(num_clusters=2), None)
        plain = torch.nn.functional.normalize(state.signature_SF, dim=1)
        z = torch.nn.functional.normalize(state.z(state.signature_SF), dim=1)
        assert (plain @ plain.T).min() > 0.3 and (z @ z.T).min() < -0.5

    def test_has_no_more_components_than_uploads_less_one(self):
        for rank, clients, columns in [(20, 8, 7), (3, 8, 3), (20, 2, 1), (20, 1, 1)]:
            state = groups().play(fixed(rank=rank), range(clients))
            assert state.basis_FQ.shape == (P, columns) and not state.basis_FQ.isnan().any()

    def test_has_no_more_components_than_features(self):
        assert groups().play(fixed(rank=100, sketch=16), None).basis_FQ.shape == (16, 7)
        one = Stage(planted(40, 2, 20), mlp, LocalSGD(lr=0.3))
        assert one.play(fixed(rank=100, sketch=16), None).basis_FQ.shape == (16, 16)

    def test_is_computed_again_every_pca_every_rounds(self):
        one, method = groups(), fixed(pca_every=3)
        state = one.play(method, None)
        changed = []
        for number in range(2, 8):
            before, state = state, one.play(method, None, state=state, first=number)
            changed.append(not torch.equal(before.mean_F, state.mean_F))
        assert changed == [False, True, False, False, True, False]

    def test_remembers_the_latest_uploads(self):
        """At most 4, the last of each client; the oldest are dropped."""
        one, method = groups(), fixed(memory=4)
        first = one.play(method, [0, 1, 2])
        assert set(first.seen_S) == {0, 1, 2}
        state = one.play(method, [1, 5, 6], state=first, first=2)
        assert set(state.seen_S[1:]) == {1, 5, 6} and state.seen_S[0] == first.seen_S[first.seen_S != 1][-1]
        assert torch.equal(state.signature_SF[list(state.seen_S).index(1)], one.client_states["personal", 1])

    def test_remembers_a_random_part_of_a_large_cohort(self):
        """Not the highest ids: the clients of a group often have consecutive ids."""
        seen = [frozenset(replace(groups(), seed=seed).play(fixed(memory=4), None).seen_S) for seed in range(6)]
        assert all(len(ids) == 4 for ids in seen)
        assert frozenset.union(*seen) == set(range(8)) and len(set(seen)) > 3


def at(*degrees: float) -> torch.Tensor:
    """Directions in the plane, of different lengths."""
    angle = torch.tensor(degrees) / 180 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], 1) * torch.linspace(0.5, 3, len(degrees))[:, None]


def far(degrees: float) -> float:
    """1 - cos."""
    return 1 - np.cos(np.deg2rad(degrees))


class TestCompactness:
    def test_is_the_mean_distance_inside_over_that_to_the_nearest_other_centre(self):
        """Centres at 0 and 90 degrees; members 10 and 30 degrees off the first, 20 off the second; one of neither."""
        rho_K, nearest_K, members_K = compactness(at(10, -30, 110, 77), np.array([0, 0, 1, -1]), at(0, 90))
        assert rho_K == pytest.approx([(far(10) + far(30)) / 2 / far(90), far(20) / far(90)], rel=1e-5)
        assert nearest_K.tolist() == [1, 0] and members_K.tolist() == [2, 1]

    def test_centres_are_compared_with_the_nearest_other(self):
        rho_K, nearest_K, _ = compactness(at(5, 95, 130), np.array([0, 1, 2]), at(0, 90, 120))
        assert nearest_K.tolist() == [1, 2, 1]
        assert rho_K == pytest.approx([far(5) / far(90), far(5) / far(30), far(10) / far(30)], rel=1e-5)

    def test_centres_without_members_are_not_compared_with(self):
        """The third is nearest to both others."""
        rho_K, nearest_K, members_K = compactness(at(5, 95), np.array([0, 1]), at(0, 90, 45))
        assert members_K.tolist() == [1, 1, 0] and nearest_K[:2].tolist() == [1, 0]
        assert rho_K == pytest.approx([far(5) / far(90), far(5) / far(90), 0], rel=1e-5)

    def test_the_only_cluster_is_compared_with_an_orthogonal_centre(self):
        for centres in [(0,), (0, 20)]:
            rho_K, nearest_K, _ = compactness(at(40, -40), np.array([0, 0]), at(*centres))
            assert rho_K[0] == pytest.approx(far(40), rel=1e-5) and nearest_K[0] == 0

    def test_of_no_members(self):
        rho_K, _, members_K = compactness(torch.zeros(0, 2), np.zeros(0, np.int64), at(0, 90))
        assert rho_K.tolist() == [0, 0] and members_K.tolist() == [0, 0]


class TestChoice:
    """The split or merge of one step of CNT."""

    def choice(self, rho, remembered, members=None, **options):
        members = remembered if members is None else members
        method = FedAC(num_clusters=3, **options)
        return method.choose_adaptation(np.array(rho), np.array(remembered), np.array(members))

    def test_is_one_split_or_one_merge_at_most(self):
        for rho, members, expected in [
            ([0.5, 1.1, 1.5], [9, 9, 9], (2, None)),  # the highest rho
            ([0.5, 1.1, 1.5], [9, 9, 3], (1, None)),  # of those with 4 members
            ([0.5, 0.9, 1.0], [9, 9, 9], (None, None)),
            ([0.1, 0.05, 0.5], [3, 2, 9], (None, 1)),  # the lowest rho
            ([0.1, 0.05, 0.5], [3, 4, 9], (None, 0)),  # of those with fewer than 4 members
            ([0.0, 0.5, 0.5], [0, 9, 9], (None, None)),  # a cluster without members does not merge
            ([0.1, 0.0, 0.0], [3, 0, 0], (None, None)),  # nor does another merge with it
            ([0.1, 1.5, 0.5], [1, 9, 9], (1, None)),  # a split comes before a merge
            ([0.2, 0.5, 0.5], [1, 9, 9], (None, None)),
        ]:
            assert self.choice(rho, members) == expected, (rho, members)

    def test_never_makes_more_than_max_clusters(self):
        assert self.choice([0.5, 1.5, 0.5], [9, 9, 9], max_clusters=3) == (None, None)
        assert self.choice([0.1, 1.5, 0.5], [1, 9, 9], max_clusters=3) == (None, 0), "a merge is still possible"

    def test_splits_need_remembered_members_and_merges_few_members(self):
        assert self.choice([1.5, 0.1, 0.5], [3, 2, 9], [30, 20, 9]) == (None, None)
        assert self.choice([1.5, 0.1, 0.5], [4, 2, 9], [30, 3, 9]) == (0, None)
        assert self.choice([0.5, 0.1, 0.5], [4, 2, 9], [30, 3, 9]) == (None, 1)

    def test_the_only_cluster_does_not_merge(self):
        assert self.choice([0.1], [3]) == (None, None)

    def test_is_made_every_10_rounds_after_round_20(self):
        for number, adapts in [(10, False), (20, False), (21, False), (30, True), (35, False), (40, True)]:
            assert FedAC().adapts_in(number) == adapts and not FedAC(adapt_clusters=False).adapts_in(number)


class TestOptions:
    def test_rho_high_is_at_least_three_times_rho_low(self):
        with pytest.raises(ValueError, match=r"fedac.rho_high must be at least 3 rho_low = 1.2, got 1.0"):
            FedAC(rho_low=0.4)
        assert FedAC(rho_low=0.2, rho_high=0.6).rho_high == 0.6

    def test_the_first_number_of_clusters_is_at_most_max_clusters(self):
        with pytest.raises(ValueError, match="fedac.num_clusters must be at most max_clusters = 20, got 21"):
            FedAC(num_clusters=21)
        assert FedAC(num_clusters=21, adapt_clusters=False).num_clusters == 21

    def test_those_of_cnt_come_first(self):
        """Labels and tables list options in this order."""
        names = [option["name"] for option in FedAC.options()]
        cnt = ["adapt_clusters", "adapt_every", "adapt_after", "adaptation", "level", "merge_cosine"]
        cnt += ["rho_low", "rho_high", "max_clusters"]
        training = ["num_clusters", "mu", "lam", "start", "rank", "pca_every", "similarity", "memory", "sketch"]
        assert names == [*cnt, *training, "weights", "aggregation", "server_optimizer", "norm", "local", "label"]


def test_a_merge_moves_the_members_and_keeps_the_model_of_the_other_cluster():
    state = State(torch.arange(4.0)[:, None], np.array([0, 1, 2, 3, -1], np.int32))
    for k, other, expected in [(1, 2, [0, 1, 1, 2, -1]), (3, 0, [0, 1, 2, 0, -1]), (0, 3, [2, 0, 1, 2, -1])]:
        merged = merge_cluster(state, k, np.int64(other))
        assert merged.assign_N.tolist() == expected and merged.assign_N.dtype == np.int32
        assert merged.models_KP[:, 0].tolist() == [row for row in range(4) if row != k]


class TestAdaptation:
    """CNT by rho in every round after the first."""

    OFTEN = {"adaptation": "rho", "adapt_after": 1, "adapt_every": 1, "mu": MU, "lam": LAM, "start": "own"}

    @pytest.mark.parametrize("memory, server", [(100, "none"), (5, "none"), (100, HALF)])
    def test_a_loose_cluster_splits_into_the_planted_groups(self, memory, server):
        """The models of the halves are means of all participants of a group, remembered or not.

        With a server optimiser they are one step towards these means, from the model before the round.
        """
        one = groups()
        options = {"memory": memory, "server_optimizer": server, **self.OFTEN}
        method = FedAC(num_clusters=1, rho_low=0.0, rho_high=0.1, max_clusters=2, **options)
        before = one.play(method, None)
        assert before.num_clusters == 1
        state = one.play(method, None, state=before, first=2)
        assert state.num_clusters == 2 and agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1
        for k in (0, 1):
            mine = [one.client_states["personal", client] for client in np.flatnonzero(state.assign_N == k)]
            assert close(state.models_KP[k], moved(before, mine, server), 1e-5)

    def test_halves_are_means_of_participants_and_have_the_absent_members_too(self):
        one = groups()
        method = FedAC(num_clusters=1, rho_low=0.0, rho_high=0.1, max_clusters=2, **self.OFTEN)
        state = one.play(method, None, [0, 1, 2])
        assert state.num_clusters == 2 and agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1
        assert close(state.models_KP[state.assign_N[1]], one.client_states["personal", 1], 1e-5)

    def test_a_cluster_does_not_split_if_a_half_has_no_participant(self):
        method = FedAC(num_clusters=1, rho_low=0.0, rho_high=0.1, **self.OFTEN)
        state = groups().play(method, None, [0, 2, 4])
        assert state.num_clusters == 1 and set(state.assign_N) == {0}

    def test_a_cluster_does_not_split_if_the_participants_of_a_half_are_rejected(self):
        one = groups(federation=Spoiled([]))
        method = FedAC(num_clusters=1, rho_low=0.0, rho_high=0.1, max_clusters=2, **self.OFTEN)
        state = one.play(method, None)
        one.federation.spoiled |= {1}
        after = one.play(method, [0, 1, 2], state=state, first=2)
        assert after.num_clusters == 1 and set(after.assign_N) == {0}

    def test_a_large_cluster_does_not_merge_if_few_of_its_members_are_remembered(self):
        one = groups()
        state = one.play(FedAC(num_clusters=2, memory=6, **self.OFTEN), *[None] * 6)
        assert state.num_clusters == 2 and agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1

    def test_hand_made_clusters_merge_into_the_nearest(self):
        """z in the plane: 5 members at 0 degrees, 2 at 20 and 1 at 180."""
        one = groups()
        method = FedAC(num_clusters=3, **self.OFTEN)
        angle = torch.deg2rad(torch.tensor([0.0] * 5 + [20, 20.1, 180]))
        plane = torch.zeros(8, P)
        plane[:, 0], plane[:, 1] = angle.cos(), angle.sin()
        basis = torch.eye(P)[:, :2]
        state = one.play(method, None).advance(
            signature_SF=plane,
            seen_S=np.arange(8),
            assign_N=np.array([2] * 5 + [0, 0, 1], np.int32),
            models_KP=plane[[5, 7, 0]],
            mean_F=torch.zeros(P),
            basis_FQ=basis,
        )
        merged = method.adapt(state, state.models_KP, one.clients(round=2), None, Draws(0, 2))
        assert merged.assign_N.tolist() == [1, 1, 1, 1, 1, 0, 0, 0], (
            "the most compact is the one of one member, and its nearest is that at 20 degrees"
        )
        assert torch.equal(merged.models_KP, state.models_KP[[0, 2]])
        again = method.adapt(merged, merged.models_KP, one.clients(round=3), None, Draws(0, 3))
        assert again.num_clusters == 2, "3 members between 20 and 180 degrees are not compact"

    def test_clusters_that_are_far_apart_stay(self):
        """Two groups of 4, found in the first round: rho is far below rho_lo."""
        one = groups()
        state = one.play(FedAC(num_clusters=2, **self.OFTEN), *[None] * 5)
        assert state.num_clusters == 2 and agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1

    def test_too_many_clusters_become_the_planted_groups(self):
        one = Stage(planted(12, 3), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        state = one.play(FedAC(num_clusters=5, **self.OFTEN | {"mu": 0.1, "lam": 0.1}), *[None] * 8)
        assert state.num_clusters == 3 and agreement(one.federation.group_N, state.assign_N)["ari"] == 1

    @pytest.mark.parametrize("most, reached", [(2, 2), (3, 3), (20, 4)])
    def test_there_are_never_more_than_max_clusters(self, most, reached):
        """rho_hi = 0 splits every cluster of 4 or more: 8 clients could make 4 clusters."""
        one, found = groups(), []
        method = FedAC(num_clusters=1, rho_low=0.0, rho_high=0.0, max_clusters=most, **self.OFTEN)
        state = method.init(one.start())
        for number in range(1, 9):
            state = one.play(method, None, state=state, first=number)
            found.append(state.num_clusters)
        assert max(found) == reached

    def test_a_cluster_without_members_is_neither_merged_nor_merged_into(self):
        """All clients of one group leave; the centre of their cluster stays, and the other cluster does not merge."""
        one = groups()
        method = FedAC(num_clusters=2, **self.OFTEN)
        state = one.play(method, None, None)
        gone = np.arange(1, 8, 2)
        one.backend.forget(gone)
        left = method.leave(method.leave(state, gone), np.array([6]))
        one.backend.forget(np.array([6]))
        after = one.play(method, [0, 2, 4], [0, 2, 4], state=left, first=3)
        empty = 1 - after.assign_N[0]
        assert after.num_clusters == 2 and len(set(after.assign_N[[0, 2, 4]])) == 1
        assert torch.equal(after.models_KP[empty], state.models_KP[empty])
        assert torch.equal(method.serve(after, one.clients()).models_KP[empty], state.models_KP[empty])

    def test_can_be_turned_off(self):
        state = groups().play(FedAC(num_clusters=5, adapt_clusters=False, adapt_after=0, adapt_every=1), *[None] * 4)
        assert state.num_clusters == 5


class TestSignificance:
    """CNT by significance: K moves to the number of planted groups from both sides."""

    @pytest.mark.parametrize("first, participation", [(1, 1.0), (2, 0.5), (8, 0.5), (12, 1.0)])
    def test_the_number_of_planted_groups_is_reached(self, first, participation):
        one = Stage(planted(20, 4), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        method = FedAC(num_clusters=first, adapt_after=3, adapt_every=2)
        state = one.play(method, *sampled(20, participation, 8))
        assert state.num_clusters == 4 and agreement(one.federation.group_N, state.assign_N)["ari"] == 1

    def test_one_group_stays_one_cluster(self):
        one = Stage(planted(24, 1), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        assert one.play(FedAC(num_clusters=1, adapt_after=1, adapt_every=1), *[None] * 4).num_clusters == 1

    @pytest.mark.parametrize("most", [2, 3])
    def test_there_are_never_more_than_max_clusters(self, most):
        one = Stage(planted(32, 4), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        method = FedAC(num_clusters=1, max_clusters=most, adapt_after=1, adapt_every=1)
        assert one.play(method, *[None] * 3).num_clusters <= most

    @pytest.mark.parametrize("server", ["none", HALF])
    def test_parts_get_the_means_of_their_participants_and_keep_the_absent_members(self, server):
        one = Stage(planted(32, 4), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        method = FedAC(num_clusters=1, adapt_after=1, adapt_every=1, start="own", server_optimizer=server)
        cohort = list(range(16))
        before = one.play(method, None)
        state = one.play(method, cohort, state=before, first=2)
        assert state.num_clusters == 4 and agreement(one.federation.group_N, state.assign_N)["ari"] == 1
        for k in range(4):
            mine = [one.client_states["personal", client] for client in cohort if state.assign_N[client] == k]
            assert close(state.models_KP[k], moved(before, mine, server), 1e-5)

    def test_nothing_splits_without_a_participant_in_every_part(self):
        one = Stage(planted(32, 4), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        group_N = one.federation.group_N
        method = FedAC(num_clusters=1, adapt_after=1, adapt_every=1, start="own")
        assert one.play(method, None, np.flatnonzero(group_N < 3)).num_clusters == 1

    def test_the_larger_cluster_s_model_stays_when_two_merge(self):
        """Clusters of 5, 2 and 3 members; the first two lie 20 degrees apart, seen from the mean of all."""
        one = groups()
        angle = torch.deg2rad(torch.tensor([0.0] * 2 + [20.0] * 3 + [180.0] * 3))
        plane = torch.zeros(8, P)
        plane[:, 0], plane[:, 1] = angle.cos(), angle.sin()
        method = FedAC(num_clusters=3)
        state = one.play(method, None).advance(
            signature_SF=plane,
            seen_S=np.arange(8),
            assign_N=np.array([0] * 2 + [1] * 3 + [2] * 3, np.int32),
            models_KP=plane[[0, 2, 5]],
            mean_F=torch.zeros(P),
            basis_FQ=torch.eye(P)[:, :2],
        )
        updates = SimpleNamespace(valid_features_MF=plane)
        merged = method.adapt(state, state.models_KP, one.clients(round=2), updates, Draws(0, 2))
        assert merged.assign_N.tolist() == [0] * 5 + [1] * 3
        assert torch.equal(merged.models_KP, state.models_KP[[1, 2]])


class TestEuclideanDistance:
    """The ablation `similarity: l2`."""

    def test_there_is_no_projection(self):
        one = Stage(planted(12, 3), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        state = one.play(FedAC(num_clusters=3, similarity="l2"), None)
        assert state.basis_FQ is None and torch.equal(state.z(state.signature_SF), state.signature_SF - state.mean_F)

    def test_clients_join_the_nearest_model(self):
        one = Stage(planted(12, 3), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        method = FedAC(num_clusters=3, similarity="l2")
        state = one.play(method, *[None] * 3)
        upload_SF = state.signature_SF
        models_KF = method.update_features(one.network.spec).of_rows(state.models_KP, 0)
        nearest_S = torch.cdist(upload_SF, models_KF).argmin(1).numpy()
        assert np.array_equal(state.assign_N[state.seen_S], nearest_S)
        assert agreement(one.federation.group_N, state.assign_N)["ari"] == 1

    def test_continues_from_a_checkpoint(self, tmp_path):
        assert_survives_an_interruption(groups, FedAC(num_clusters=2, similarity="l2"), [None] * 3, tmp_path)


class TestEngines(EnginesAndCheckpoints):
    METHOD = FedAC(
        num_clusters=2, adapt_after=1, adapt_every=1, pca_every=2, memory=5, sketch=64, rank=2, weights="samples"
    )


class TestJoinAndLeave:
    METHOD = fixed(num_clusters=2)

    @pytest.fixture
    def found(self):
        one = groups()
        return one, one.play(self.METHOD, [0, 1, 2, 3, 4], [0, 1, 2, 3])

    def test_newcomers_join_the_cluster_with_the_highest_cosine(self, found):
        one, state = found
        joined = self.METHOD.join(state, one.clients([5, 6], round=3))
        assert agreement(np.arange(7) % 2, joined.assign_N[:7])["ari"] == 1
        assert floats(one) == (2 * P, 2 * P) and not one.stats.train_loss
        assert torch.equal(joined.models_KP, state.models_KP)

    def test_newcomers_before_the_first_round_change_nothing(self):
        one = groups()
        state = self.METHOD.init(one.start())
        assert_equal(self.METHOD.join(state, one.clients([5])), state)

    def test_clients_are_served_their_own_model_that_of_their_cluster_or_phi_with_the_mean_head(self, found):
        """The first of these that exists."""
        one, state = found
        joined = self.METHOD.join(state, one.clients([5], round=3))
        serving = self.METHOD.serve(joined, one.clients())
        assert serving.row_M.tolist() == [*joined.assign_N[:6], 2, 2] and serving.client_state.name == "personal"
        assert torch.equal(serving.models_KP[:2], state.models_KP)
        assert torch.equal(serving.models_KP[2, :BASE], state.global_KP[0, :BASE])
        assert close(serving.models_KP[2, BASE:], state.models_KP[:, BASE:].mean(0), 1e-6)
        assert sorted(client for _, client in one.client_states) == [0, 1, 2, 3, 4]

    def test_a_leaver_s_upload_is_forgotten(self, found):
        one, state = found
        left = self.METHOD.leave(state, np.array([1, 3]))
        assert left.assign_N[[1, 3]].tolist() == [-1, -1]
        assert sorted(left.seen_S) == [0, 2, 4] and len(left.signature_SF) == 3

    @pytest.mark.parametrize("cohort", [[], [4, 5]])
    def test_a_round_without_a_valid_update_changes_nothing(self, cohort):
        one = Stage(Spoiled([4, 5]), mlp, LocalSGD(epochs=3, lr=0.3))
        state = one.play(self.METHOD, cohort)
        assert_equal(state, self.METHOD.init(one.start()))
        later = one.play(self.METHOD, [0, 1, 2, 3], state=state, first=2)
        assert later.num_clusters == 2
        assert_equal(one.play(self.METHOD, cohort, state=later, first=3), later)

    @pytest.mark.filterwarnings("error::RuntimeWarning")
    def test_one_client(self):
        one = groups()
        state = one.play(FedAC(num_clusters=5), [3], [3])
        assert state.num_clusters == 1 and state.assign_N[3] == 0 and not state.models_KP.isnan().any()


class TestStart:
    """`start`: the embedding from which a participant starts; the last layer is its own."""

    @pytest.mark.parametrize("start", ["cluster", "global"])
    def test_with_a_learning_rate_near_zero_an_upload_is_the_start(self, start):
        """In round 2 the means of the uploads are the start for the embedding; the clients keep their last layers."""
        network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
        one = Stage(planted(4), network, LocalSGD(lr=0.3, epochs=2))
        method = FedAC(num_clusters=2, mu=0.0, lam=0.0, start=start, adapt_clusters=False)
        state = one.play(method, None)
        spec, head_MF = one.network.spec, self.heads(one)
        assert head_MF.shape == (4, spec.head.count)
        one.local = LocalSGD(lr=1e-12, epochs=1)
        after = one.play(method, None, state=state, first=2)
        start_KF = spec.base.of(state.models_KP if start == "cluster" else state.global_KP.expand(2, -1))
        assert state.num_clusters == 2 and torch.equal(start_KF[0], start_KF[1]) == (start == "global")
        assert close(spec.base.of(after.models_KP), start_KF, 1e-5)
        assert close(self.heads(one), head_MF, 1e-5)
        served = method.serve(after, one.clients())
        assert served.client_state.columns == spec.head
        served_KF = spec.base.of(served.models_KP)
        assert close(served_KF[:2], start_KF, 1e-5)
        assert torch.equal(served_KF[2:], spec.base.of(after.global_KP)), "a client without a cluster starts from Phi"

    def heads(self, one: Stage) -> torch.Tensor:
        """The personal last layers of the clients."""
        return torch.stack([one.client_states["personal", client] for client in range(4)])

    def test_traffic_does_not_depend_on_the_start(self):
        traffic = []
        for start in ("own", "cluster", "global"):
            one = Stage(planted(4), linear)
            one.play(FedAC(num_clusters=2, start=start, adapt_clusters=False), None, None)
            traffic.append((one.stats.traffic.down_bits, one.stats.traffic.up_bits))
        assert traffic[0] == traffic[1] == traffic[2]
