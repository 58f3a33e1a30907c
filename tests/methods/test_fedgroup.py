"""FedGroup: groups by the update directions of a sample of clients, and the placement of all others."""

from itertools import combinations

import numpy as np
import pytest
import torch
from closeness import close
from federations import planted
from linear import N_0, N_1, assert_close, matrix, mean, sgd
from linear import stage as linear
from oneshot import CLIENTS, OneShot, P, stage
from rounds import accuracy, floats, watched
from sklearn.metrics import adjusted_rand_score

from cfl_ray.clustering.agglomerative import mean_difference_of_cosines
from cfl_ray.clustering.spectral import decomposed_cosines
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedgroup import FedGroup
from cfl_ray.setup.dry_rounds import DryBackend, DryRounds

PRETRAIN = 3


def cos(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


class TestTwoClients:
    def groups(self, count, weights="samples", **options):
        one = linear()
        state = one.play(FedGroup(num_clusters=count, pretrain_steps=PRETRAIN, weights=weights, **options), None)
        return one, matrix(one.model()), state

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    def test_models_are_uniform_means_of_pretrained_ones_and_then_trained_on(self, weights):
        one, w, state = self.groups(1, weights)
        w_0, w_1 = (sgd(one, client, w, steps=PRETRAIN) for client in (0, 1))
        assert_close(state.centre_KF[0], (w_0 + w_1) / 2 - w)
        first = (w_0 + w_1) / 2
        assert_close(state.models_KP[0], mean(sgd(one, 0, first), sgd(one, 1, first), weights))

    def test_two_groups(self):
        one, w, state = self.groups(2)
        assert state.assign_N.tolist() == [0, 1]
        for client in (0, 1):
            first = sgd(one, client, w, steps=PRETRAIN)
            assert_close(state.models_KP[client], sgd(one, client, first))
            assert_close(state.centre_KF[client], first - w)

    @pytest.mark.parametrize("eta_g", [0.1, 1.0])
    def test_groups_are_mixed_after_the_round(self, eta_g):
        """w_0 <- (w_0 + eta w_1 / |w_1|) / (1 + eta / |w_1|), and w_1 in the same way from the old w_0."""
        one, w, state = self.groups(2, eta_g=eta_g)
        a, b = (sgd(one, client, sgd(one, client, w, steps=PRETRAIN)) for client in (0, 1))
        norm_a, norm_b = np.linalg.norm(a), np.linalg.norm(b)
        assert_close(state.models_KP[0], (a + eta_g * b / norm_b) / (1 + eta_g / norm_b))
        assert_close(state.models_KP[1], (b + eta_g * a / norm_a) / (1 + eta_g / norm_a))

    def test_a_newcomer_joins_the_most_similar_direction(self):
        """After the cold start's steps from w_0. The wrong centre is nearer by distance, the right one by angle."""
        one = linear(sizes=(N_0, N_1, 6))
        method = FedGroup(num_clusters=2, pretrain_steps=PRETRAIN)
        state = one.play(method, *[[0, 1]] * 3)
        w = matrix(one.model())
        delta = sgd(one, 2, w, steps=PRETRAIN) - w
        for near in (0, 1):
            centres = np.stack([5 * delta, delta + 0.5 * np.linalg.norm(delta) * np.eye(3, 5)])
            assert cos(delta, centres[0]) > cos(delta, centres[1])
            centre_KF = torch.from_numpy(np.roll(centres, near, 0)).float().reshape(2, 15)
            joined = method.join(state.advance(centre_KF=centre_KF), one.clients([2], 4))
            assert joined.assign_N.tolist() == [0, 1, near] and torch.equal(joined.models_KP, state.models_KP)


class TestMixing:
    def test_of_three_by_the_formula(self):
        models_KP = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 7))).float()
        eta, w = 0.3, models_KP.double().numpy()
        norm = np.linalg.norm(w, axis=1)
        for k, found in enumerate(FedGroup(eta_g=eta).mix_groups(models_KP)):
            others = [l for l in range(3) if l != k]
            expected = (w[k] + eta * sum(w[l] / norm[l] for l in others)) / (1 + eta * sum(1 / norm[l] for l in others))
            assert close(found, expected, 1e-5)

    def test_of_one_group_changes_nothing(self):
        models_KP = torch.arange(5.0)[None]
        assert close(FedGroup(eta_g=0.5).mix_groups(models_KP), models_KP, 1e-6)


def updates(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns))


class TestSimilarity:
    def test_decomposed_cosines_are_those_with_the_leading_singular_directions(self):
        """e_i = [cos(Delta_i, v_j)]_j up to signs, with v_j the left singular vectors of the updates as columns."""
        distance = lambda e: np.linalg.norm(e[:, None] - e[None], axis=2)  # EDC_ij = |e_i - e_j|
        for rows, columns, components in [(9, 40, 3), (40, 9, 5), (5, 30, 8), (1, 10, 3)]:
            delta = updates(rows, columns)
            v = np.linalg.svd(delta.T, full_matrices=False)[0][:, :components]
            expected = delta @ v / np.linalg.norm(delta, axis=1, keepdims=True)
            found = decomposed_cosines(torch.from_numpy(delta).float(), components).double().numpy()
            assert found.shape == expected.shape
            assert close(np.abs(found), np.abs(expected), 1e-5)
            assert close(distance(found), distance(expected), 1e-5)

    def test_an_update_of_zeros_has_no_direction(self):
        delta = updates(4, 10)
        delta[2] = 0
        assert decomposed_cosines(torch.from_numpy(delta).float(), 2)[2].tolist() == [0, 0]

    def test_madc_is_the_mean_absolute_difference_of_cosines_with_others(self):
        for rows in (3, 4, 9):
            delta = updates(rows, 6)
            cosines = np.array([[cos(one, other) for other in delta] for one in delta])
            expected = [
                np.mean([abs(cosines[i, z] - cosines[j, z]) for z in range(rows) if z not in (i, j)])
                for i, j in combinations(range(rows), 2)
            ]
            assert close(mean_difference_of_cosines(torch.from_numpy(delta).float()), expected, 1e-5)

    def test_madc_of_two_clients_without_others_is_zero(self):
        for rows in (0, 1, 2):
            found = mean_difference_of_cosines(torch.from_numpy(updates(rows, 6)).float())
            assert found.tolist() == [0.0] * (rows == 2)


class TestColdStart:
    def played(self, one, method, ids) -> tuple[object, list]:
        """The state after a round, and its work orders."""
        works = watched(one)
        return one.play(method, ids), works

    def test_samples_alpha_times_k_reachable_clients(self):
        for alpha, clusters, expected in [(2, 3, 6), (1, 2, 2), (3, 4, 12), (20, 5, 12)]:
            method = FedGroup(num_clusters=clusters, alpha=alpha, pretrain_steps=2)
            state, works = self.played(stage(epochs=1), method, [0])
            assert len(works[0].ids_M) == len(set(works[0].ids_M)) == expected
            assert works[0].steps_M.tolist() == [2] * expected
            assert set(np.flatnonzero(state.assign_N >= 0)) == {0, *works[0].ids_M}

    def test_the_sample_depends_on_the_seed_and_has_reachable_clients_only(self):
        drawn = []
        for seed in range(12):
            one = stage(epochs=1)
            one.seed, one.online = seed, [1, 2, 3, 5, 7, 8]
            drawn.append(tuple(self.played(one, FedGroup(num_clusters=2, alpha=1, pretrain_steps=1), [1])[1][0].ids_M))
        assert len(set(drawn)) > 5 and {client for ids in drawn for client in ids} == {1, 2, 3, 5, 7, 8}

    def test_newcomers_train_from_the_first_model_for_as_many_steps(self):
        one, method = stage(), FedGroup(num_clusters=3, pretrain_steps=7)
        left = method.leave(one.play(method, [0]), np.array([5]))
        works = watched(one)
        method.join(left, one.clients([5], 2))
        assert [work.steps_M.tolist() for work in works] == [[7]] and torch.equal(works[0].tables[0], one.model()[None])

    def test_clients_outside_the_sample_are_placed_when_they_first_take_part(self):
        one = stage()
        method = FedGroup(num_clusters=3, alpha=3)
        state = one.play(method, [0])
        outside = np.flatnonzero(state.assign_N == -1)
        assert 2 <= len(outside) <= 3
        after = one.play(method, outside[:2], state=state, first=2)
        assert (after.assign_N[outside[:2]] >= 0).all() and (after.assign_N[outside[2:]] == -1).all()
        known = after.assign_N >= 0
        assert adjusted_rand_score(one.federation.group_N[known], after.assign_N[known]) == 1


def test_migration_compares_with_the_labels_of_the_cold_start():
    """Clients 1 and 2 take part for the first time in round 2, after labels changed; 2 left and joined again before."""
    one, method = stage(epochs=1), FedGroup(num_clusters=3, pretrain_steps=1, migrate=0.2)
    state = one.play(method, [0])  # all clients are cold-started
    state = method.join(method.leave(state, np.array([2])), one.clients([2], 2))
    share_NC = np.stack([np.bincount(one.federation.train(client)[1], minlength=4) / 200 for client in range(CLIENTS)])
    assert np.allclose(state.label_NC, share_NC)
    changed = state.advance(label_NC=state.label_NC + np.array([0.2, -0.2, 0, 0], np.float32))
    after = one.play(method, [1, 2], state=changed, first=2)
    assert one.stats.diagnostics.numbers["migrated"] == 2 and (after.assign_N >= 0).all()
    assert np.allclose(after.label_NC[[1, 2]], share_NC[[1, 2]])


def test_rounds_without_training_have_as_many_label_shares_as_classes():
    one = stage()
    spec, shape = one.network.spec, one.federation.shape
    dry = DryRounds(FedGroup(migrate=0.2), 30, 4, LocalSGD(), spec, shape, rounds=1)
    ((state, _),) = dry.play(DryBackend(spec, shape))
    assert state.label_NC.shape == (30, 4)


class TestFedGroup(OneShot):
    method = FedGroup(num_clusters=3, pretrain_steps=15)

    @pytest.mark.parametrize(
        "options",
        [{"similarity": "madc"}, {"similarity": "edc", "sketch": 64}, {"similarity": "madc", "sketch": 64}],
        ids=str,
    )
    def test_finds_the_groups_by_any_similarity(self, options):
        one = stage()
        assert one.play(FedGroup(num_clusters=3, **options), [0]).assign_N.tolist() == [0, 1, 2] * 4

    def test_fewer_clients_than_groups(self):
        one = stage(planted(3, 3))
        for similarity in ("edc", "madc"):
            assert one.play(FedGroup(similarity=similarity), None).assign_N.tolist() == [0, 1, 2]

    def test_traffic(self):
        """A cold start is a model down and an update up, for the sample and clients without a group; else as FedAvg."""
        one = stage()
        method = FedGroup(num_clusters=3, alpha=2, pretrain_steps=5)
        state = one.play(method, [])
        assert floats(one) == (6 * P, 6 * P)
        inside, outside = np.flatnonzero(state.assign_N >= 0), np.flatnonzero(state.assign_N == -1)
        one.play(method, [*inside[:2], *outside[:3]], state=state, first=2)
        assert floats(one) == ((5 + 3) * P, (5 + 3) * P)
        one.play(self.method, [0, 1])
        assert floats(one) == ((CLIENTS + 2) * P, (CLIENTS + 2) * P)
        method.join(state, one.clients(outside[:1], 2))
        assert floats(one) == (P, P)


@pytest.mark.parametrize("server", ["none", {"fedavgm": {"lr": 0.5}}], ids=str)
def test_one_group_is_fedavg_from_the_mean_of_pretrained_models(server):
    """Full batch, since mini-batches depend on the exchange, and the first round has another one before."""
    drawn = [[0, 1, 5], [2, 3, 7, 9], None]
    one, other = (stage(batch_size=None, momentum=0.5, epochs=2) for _ in range(2))
    found = one.play(FedGroup(num_clusters=1, alpha=100, server_optimizer=server), *drawn)
    pretrain = stage(batch_size=None, momentum=0.5, epochs=None, steps=50)
    pretrained = pretrain.play(FedAvg(weights="uniform"), None)
    assert torch.equal(found.models_KP, other.play(FedAvg(server_optimizer=server), *drawn, state=pretrained).models_KP)


def test_p_server_is_over_the_clients_that_have_a_group():
    one = stage()
    method = FedGroup(num_clusters=3, alpha=2, pretrain_steps=5)
    before = accuracy(one, method, method.init(one.start()))
    assert not np.isnan(before).any(), "before the cold start all clients are served w_0"
    state = one.play(method, [])
    outside_N = state.assign_N == -1
    assert outside_N.sum() == CLIENTS - 6 and np.array_equal(np.isnan(accuracy(one, method, state)), outside_N)
    assert np.isnan(accuracy(one, method, state, np.flatnonzero(outside_N))).all()
