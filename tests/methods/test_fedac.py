"""FedAC: personal models between two anchors by the formulas, the low-rank space, and the number of clusters as it is adapted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, planted
from linear import ETA, assert_layers, data, deep_stage, layers
from playing import COHORTS, accuracy, assert_engines_agree, assert_equal, assert_survives_an_interruption, floats, groups, mlp

from cfl_ray.core.cohort import Population
from cfl_ray.core.grouping import agreement
from cfl_ray.core.local import LocalSGD
from cfl_ray.methods.fedac import FedAC
from cfl_ray.methods.local import Local

P, BASE = 340, 272
MU, LAM = 0.3, 0.2


def pulled(one: Stage, client: int, start, centre, phi, steps: int = 2, momentum: float = 0.0):
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
    """Layer by layer."""
    return tuple(sum(n * layer for n, layer in zip(weight, same)) / sum(weight) for same in zip(*models))


def untuned(**options) -> FedAC:
    return FedAC(**{"mu": MU, "lam": LAM, "tune_clusters": False} | options)


class TestFormula:
    """Two clients, two layers: A is the base phi, B the head."""

    @pytest.mark.parametrize("clusters", [1, 2])
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    @pytest.mark.parametrize("weights, weight", [("uniform", (1, 1)), ("samples", (12, 4))])
    def test_two_rounds(self, clusters, weights, weight, momentum):
        """Round 1 from w_0 near w_0; round 2 from the own omega_i near Omega_r(i) and Phi, which are means of what was uploaded."""
        one = deep_stage()
        one.local = LocalSGD(steps=2, lr=ETA, momentum=momentum)
        w0 = layers(one.model())
        omega = [pulled(one, client, w0, w0, w0[0], momentum=momentum) for client in (0, 1)]
        method = untuned(num_clusters=clusters, weights=weights)
        state = one.play(method, None)
        for _ in range(2):
            both = average(*omega, weight=weight)
            centres = omega if clusters == 2 else [both]
            assert state.assign_N.tolist() == ([0, 1] if clusters == 2 else [0, 0])
            for client in (0, 1):
                assert_layers(one.memory["personal", client], *omega[client])
            for k, centre in enumerate(centres):
                assert_layers(state.models_KP[k], *centre)
            assert np.allclose(layers(state.global_KP[0])[0], both[0], atol=1e-6)
            omega = [pulled(one, client, omega[client], centres[state.assign_N[client]], both[0], momentum=momentum) for client in (0, 1)]
            state = one.play(method, None, state=state, first=2)

    def test_a_client_never_seen_starts_from_phi_and_the_mean_head(self):
        one = deep_stage()
        method = untuned(num_clusters=2)
        state = one.play(method, None)
        omega = [layers(row) for row in state.models_KP]
        begun = layers(state.global_KP[0])[0], (omega[0][1] + omega[1][1]) / 2
        one.backend.forget(np.array([1]))
        state = one.play(method, [1], state=method.leave(state, np.array([1])), first=2)
        assert_layers(one.memory["personal", 1], *pulled(one, 1, begun, begun, begun[0]))
        assert state.assign_N.tolist() == [0, 1], "its upload is in no mean before it has a cluster"
        assert_layers(state.models_KP[1], *omega[1])

    def test_a_newcomer_trains_once_like_that_and_keeps_nothing(self):
        one = deep_stage()
        method = untuned(num_clusters=2)
        state = method.leave(one.play(method, None), np.array([1]))
        one.backend.forget(np.array([1]))
        uploads = []
        one.backend.run = lambda work, run=one.backend.run: (uploads.append(run(work)), uploads[-1])[1]
        joined = method.join(state, one.clients([1], number=2))
        begun = layers(state.global_KP[0])[0], average(*map(layers, state.models_KP))[1]
        assert_layers(torch.from_numpy(uploads[0].arrays["kept"][0]), *pulled(one, 1, begun, begun, begun[0]))
        assert joined.assign_N.tolist() == [0, 1] and list(one.memory) == [("personal", 0)] and joined.seen_S.tolist() == [0]


@pytest.mark.parametrize("local", [{}, {"batch_size": 30, "momentum": 0.9}], ids=["full batch", "mini-batches"])
def test_personal_models_without_the_pulls_are_local(local):
    one, other = groups(**local), groups(**local)
    state = one.play(untuned(mu=0.0, lam=0.0, num_clusters=2), *[None] * 3)
    other.play(Local(), *[None] * 3)
    assert state.num_clusters == 2 and one.memory.keys() == other.memory.keys() and len(one.memory) == 8
    assert all(torch.equal(value, other.memory[key]) for key, value in one.memory.items())


class TestLowRank:
    def test_is_pca_of_the_centred_uploads(self):
        """numpy's SVD, up to the signs; the mean is taken off on both sides."""
        state = groups().play(untuned(rank=3), None)
        uploads = state.signature_SF.double().numpy()
        _, _, right = np.linalg.svd(uploads - uploads.mean(0), full_matrices=False)
        assert state.basis_FQ.shape == (P, 3)
        assert np.allclose(np.abs(right[:3] @ state.basis_FQ.double().numpy()), np.eye(3), atol=1e-4)
        z = state.z(state.signature_SF)
        assert z.mean(0).abs().max() < 1e-5 and torch.allclose(z.abs(), torch.tensor(np.abs((uploads - uploads.mean(0)) @ right[:3].T)).float(), atol=1e-4)

    def test_uploads_hardly_differ_without_centring(self):
        """What centring is for: cosines of nearby models are all nearly 1."""
        state = groups().play(untuned(num_clusters=2), None)
        plain = torch.nn.functional.normalize(state.signature_SF, dim=1)
        z = torch.nn.functional.normalize(state.z(state.signature_SF), dim=1)
        assert (plain @ plain.T).min() > 0.3 and (z @ z.T).min() < -0.5

    @pytest.mark.parametrize("rank, clients, columns", [(20, 8, 7), (3, 8, 3), (20, 2, 1), (20, 1, 1)])
    def test_has_no_more_components_than_there_are(self, rank, clients, columns):
        state = groups().play(untuned(rank=rank), range(clients))
        assert state.basis_FQ.shape == (P, columns) and not state.basis_FQ.isnan().any()

    def test_has_no_more_components_than_features(self):
        assert groups().play(untuned(rank=100, sketch=16), None).basis_FQ.shape == (16, 7)
        one = Stage(planted(40, 2, 20), mlp, LocalSGD(lr=0.3))
        assert one.play(untuned(rank=100, sketch=16), None).basis_FQ.shape == (16, 16)

    def test_is_made_anew_every_so_many_rounds(self):
        one, method = groups(), untuned(pca_every=3)
        state = one.play(method, None)
        changed = []
        for number in range(2, 8):
            before, state = state, one.play(method, None, state=state, first=number)
            changed.append(not torch.equal(before.mean_F, state.mean_F))
        assert changed == [False, True, False, False, True, False]

    def test_remembers_the_latest_uploads(self):
        """At most 4, each client's last; the latest stay."""
        one, method = groups(), untuned(memory=4)
        first = one.play(method, [0, 1, 2])
        assert set(first.seen_S) == {0, 1, 2}
        state = one.play(method, [1, 5, 6], state=first, first=2)
        assert set(state.seen_S[1:]) == {1, 5, 6} and state.seen_S[0] == first.seen_S[first.seen_S != 1][-1]
        assert torch.equal(state.signature_SF[list(state.seen_S).index(1)], one.memory["personal", 1])

    def test_chance_decides_whom_it_remembers_of_a_large_cohort(self):
        """Not the highest numbers: groups of clients are often numbered one after another."""
        seen = [set(replace(groups(), seed=seed).play(untuned(memory=4), None).seen_S.tolist()) for seed in range(6)]
        assert all(len(ids) == 4 for ids in seen) and set.union(*seen) == set(range(8)) and len(set(map(frozenset, seen))) > 3


class TestNumberOfClusters:
    """CNT in every round after the first."""

    OFTEN = {"tune_after": 1, "tune_every": 1, "mu": MU, "lam": LAM}

    @pytest.mark.parametrize("memory", [100, 5])
    def test_a_loose_cluster_splits_into_the_planted_groups(self, memory):
        """The models of the halves are means of all participants of a group, also of the three that are not remembered."""
        one = groups()
        method = FedAC(num_clusters=1, rho_low=0.0, rho_high=0.1, max_clusters=2, memory=memory, **self.OFTEN)
        state = one.play(method, None)
        assert state.num_clusters == 1
        state = one.play(method, None, state=state, first=2)
        assert state.num_clusters == 2 and agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1
        for k in (0, 1):
            mine = [one.memory["personal", client] for client in np.flatnonzero(state.assign_N == k)]
            assert torch.allclose(state.models_KP[k], torch.stack(mine).mean(0), rtol=0, atol=1e-6)

    def test_halves_are_means_of_participants_and_absent_members_go_along(self):
        one = groups()
        method = FedAC(num_clusters=1, rho_low=0.0, rho_high=0.1, max_clusters=2, **self.OFTEN)
        state = one.play(method, None, [0, 1, 2])
        assert state.num_clusters == 2 and agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1
        assert torch.allclose(state.models_KP[state.assign_N[1]], one.memory["personal", 1], rtol=0, atol=1e-6)

    def test_a_half_without_participant_is_no_cluster(self):
        method = FedAC(num_clusters=1, rho_low=0.0, rho_high=0.1, **self.OFTEN)
        state = groups().play(method, None, [0, 2, 4])
        assert state.num_clusters == 1 and set(state.assign_N) == {0}

    def test_a_half_whose_participants_are_rejected_is_no_cluster(self):
        one = groups(federation=Spoiled([]))
        method = FedAC(num_clusters=1, rho_low=0.0, rho_high=0.1, max_clusters=2, **self.OFTEN)
        state = one.play(method, None)
        one.federation.spoiled |= {1}
        after = one.play(method, [0, 1, 2], state=state, first=2)
        assert after.num_clusters == 1 and set(after.assign_N) == {0}

    def test_a_large_cluster_does_not_merge_because_few_of_it_are_remembered(self):
        one = groups()
        state = one.play(FedAC(num_clusters=2, memory=6, **self.OFTEN), *[None] * 6)
        assert state.num_clusters == 2 and agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1

    def test_hand_made_clusters_merge_into_the_nearest(self):
        """z are the directions of the plane: 2 members at 20 degrees, near 5 at 0 and far from 3 at 180."""
        one = groups()
        method = FedAC(num_clusters=3, **self.OFTEN)
        angle = torch.deg2rad(torch.tensor([0.0] * 5 + [20, 20.1, 180]))
        plane = torch.zeros(8, P)
        plane[:, 0], plane[:, 1] = angle.cos(), angle.sin()
        basis = torch.eye(P)[:, :2]
        state = one.play(method, None).advance(
            signature_SF=plane, seen_S=np.arange(8), assign_N=np.array([2] * 5 + [0, 0, 1], np.int32), models_KP=plane[[5, 7, 0]], mean_F=torch.zeros(P), basis_FQ=basis,
        )  # fmt: skip
        merged = method.tuned(state, one.clients(number=2), None)
        assert merged.assign_N.tolist() == [1, 1, 1, 1, 1, 0, 0, 0], "the tightest is the single one, and its nearest is the cluster at 20 degrees"
        assert torch.equal(merged.models_KP, state.models_KP[[0, 2]])
        again = method.tuned(merged, one.clients(number=3), None)
        assert again.num_clusters == 2, "3 members between 20 and 180 degrees are not tight"

    def test_clusters_that_are_far_apart_stay(self):
        """Two groups of 4, found at once: rho is far below rho_lo."""
        one = groups()
        state = one.play(FedAC(num_clusters=2, **self.OFTEN), *[None] * 5)
        assert state.num_clusters == 2 and agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1

    def test_too_many_clusters_become_the_planted_groups(self):
        one = Stage(planted(12, 3), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
        state = one.play(FedAC(num_clusters=5, **self.OFTEN | {"mu": 0.1, "lam": 0.1}), *[None] * 8)
        assert state.num_clusters == 3 and agreement(one.federation.group_N, state.assign_N)["ari"] == 1

    @pytest.mark.parametrize("most, reached", [(2, 2), (3, 3), (20, 4)])
    def test_there_are_never_more_than_max_clusters(self, most, reached):
        """Everything is too loose here, and clusters of 4 or more split: 8 clients could make 4 clusters."""
        one, method, found = groups(), FedAC(num_clusters=1, rho_low=0.0, rho_high=0.0, max_clusters=most, **self.OFTEN), []
        state = method.init(one.start())
        for number in range(1, 9):
            state = one.play(method, None, state=state, first=number)
            found.append(state.num_clusters)
        assert max(found) == reached

    def test_a_cluster_that_lost_its_members_is_neither_merged_nor_merged_into(self):
        """Group 1 leaves; its centre stays, and the other cluster does not fall into it."""
        one = groups()
        method = FedAC(num_clusters=2, **self.OFTEN)
        state = one.play(method, None, None)
        gone = np.arange(1, 8, 2)
        one.backend.forget(gone)
        left = method.leave(method.leave(state, gone), np.array([6]))
        one.backend.forget(np.array([6]))
        after = one.play(method, [0, 2, 4], [0, 2, 4], state=left, first=3)
        empty = 1 - after.assign_N[0]
        assert after.num_clusters == 2 and torch.equal(after.models_KP[empty], state.models_KP[empty]) and len(set(after.assign_N[[0, 2, 4]])) == 1
        assert torch.equal(method.serve(after, one.clients()).models_KP[empty], state.models_KP[empty])

    def test_is_off_where_it_is_told_to_be(self):
        state = groups().play(FedAC(num_clusters=5, tune_clusters=False, tune_after=0, tune_every=1), *[None] * 4)
        assert state.num_clusters == 5


@pytest.mark.parametrize("clients, participation, rounds", [(12, 1.0, 3), (30, 0.3, 10)])
def test_planted_groups_are_found(clients, participation, rounds):
    one = Stage(planted(clients, 3), mlp, LocalSGD(epochs=5, batch_size=40, lr=0.5))
    population = Population(clients, (), 0)
    drawn = [population.draw(number, participation).ids_M for number in range(1, rounds + 1)]
    method = FedAC(num_clusters=3)
    state = one.play(method, *drawn)
    seen = np.unique(np.concatenate(drawn))
    assert len(seen) >= 0.9 * clients and agreement(one.federation.group_N[seen], state.assign_N[seen])["ari"] == 1 and state.num_clusters == 3
    assert accuracy(one, method, state, seen).mean() > 0.9


@pytest.mark.parametrize("options", [{}, {"tune_after": 1, "tune_every": 1, "pca_every": 2, "memory": 5, "sketch": 64, "rank": 2, "weights": "samples"}], ids=str)
class TestEveryEngineAndInterruption:
    def test_engines_agree(self, options):
        assert_engines_agree(groups, FedAC(num_clusters=2, **options))

    def test_an_interruption_changes_nothing(self, options, tmp_path):
        assert_survives_an_interruption(groups, FedAC(num_clusters=3, **options), COHORTS, tmp_path)


class TestComingAndGoing:
    METHOD = untuned(num_clusters=2)

    @pytest.fixture
    def found(self):
        one = groups()
        return one, one.play(self.METHOD, [0, 1, 2, 3, 4], [0, 1, 2, 3])

    def test_newcomers_go_where_their_cosine_is_highest(self, found):
        one, state = found
        joined = self.METHOD.join(state, one.clients([5, 6], number=3))
        assert agreement(np.arange(7) % 2, joined.assign_N[:7])["ari"] == 1
        assert floats(one) == (2 * P, 2 * P) and torch.equal(joined.models_KP, state.models_KP) and not one.books.train_loss

    def test_newcomers_before_the_first_round_wait(self):
        one = groups()
        state = self.METHOD.init(one.start())
        assert_equal(self.METHOD.join(state, one.clients([5])), state)

    def test_are_served_their_own_their_cluster_s_or_phi_with_the_mean_head(self, found):
        """In this order, by what they have."""
        one, state = found
        joined = self.METHOD.join(state, one.clients([5], number=3))
        serving = self.METHOD.serve(joined, one.clients())
        assert serving.row_M.tolist() == [*joined.assign_N[:6], 2, 2] and serving.own.name == "personal"
        assert torch.equal(serving.models_KP[:2], state.models_KP)
        assert torch.equal(serving.models_KP[2, :BASE], state.global_KP[0, :BASE])
        assert torch.allclose(serving.models_KP[2, BASE:], state.models_KP[:, BASE:].mean(0))
        assert sorted(client for _, client in one.memory) == [0, 1, 2, 3, 4]

    def test_a_leaver_s_upload_is_forgotten(self, found):
        one, state = found
        left = self.METHOD.leave(state, np.array([1, 3]))
        assert left.assign_N[[1, 3]].tolist() == [-1, -1] and sorted(left.seen_S) == [0, 2, 4] and len(left.signature_SF) == 3

    @pytest.mark.parametrize("cohort", [[], [4, 5]])
    def test_a_round_without_a_sound_update_is_none(self, cohort):
        one = Stage(Spoiled([4, 5]), mlp, LocalSGD(epochs=3, lr=0.3))
        state = one.play(self.METHOD, cohort)
        assert_equal(state, self.METHOD.init(one.start()))
        later = one.play(self.METHOD, [0, 1, 2, 3], state=state, first=2)
        assert later.num_clusters == 2
        assert_equal(one.play(self.METHOD, cohort, state=later, first=3), later)

    def test_one_client_alone(self):
        one = groups()
        state = one.play(FedAC(num_clusters=5), [3], [3])
        assert state.num_clusters == 1 and state.assign_N[3] == 0 and not state.models_KP.isnan().any()


def test_traffic_is_a_model_and_a_base_down_and_a_model_up():
    one = groups()
    for cohorts in ([None], [None, [0, 1, 5]]):
        one.play(FedAC(num_clusters=2), *cohorts)
        count = len(cohorts[-1] or range(8))
        assert floats(one) == (count * (P + BASE), count * P)


class TestStart:
    """`start: global`: every participant begins at the global embedding, with the last layer that it has."""

    def test_with_no_steps_to_speak_of_an_upload_is_where_it_started(self):
        """lr 1e-12: the second round's mean of uploads is Phi of the first for the embedding, and the mean of the clients' own last layers."""
        one = Stage(planted(4), lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)), LocalSGD(lr=0.3, epochs=2))
        method = FedAC(num_clusters=2, mu=0.0, lam=0.0, start="global", tune_clusters=False)
        state = one.play(method, None)
        spec, heads = one.network.spec, torch.stack([one.memory["personal", client] for client in range(4)])
        assert heads.shape == (4, spec.head.count)
        one.local = LocalSGD(lr=1e-12, epochs=1)
        after = one.play(method, None, state=state, first=2)
        assert torch.allclose(spec.base.of(after.models_KP), spec.base.of(state.global_KP).expand(after.num_clusters, -1), atol=1e-6)
        assert torch.allclose(torch.stack([one.memory["personal", client] for client in range(4)]), heads, atol=1e-6)
        served = method.serve(after, one.clients())
        assert torch.equal(spec.base.of(served.models_KP), spec.base.of(after.global_KP).expand(len(served.models_KP), -1)) and served.own.columns == spec.head

    def test_costs_what_the_other_start_costs(self):
        down = []
        for start in ("own", "global"):
            one = Stage(planted(4), lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4)))
            one.play(FedAC(num_clusters=2, start=start, tune_clusters=False), None, None)
            down.append((one.books.ledger.down_bits, one.books.ledger.up_bits))
        assert down[0] == down[1]
