"""FeSEM-CAM: both trainings by the formulas with the proximal term, weighted k-means from the centres, the warm-up."""

import numpy as np
import pytest
import torch
from closeness import close
from federations import Spoiled, Stage
from linear import ETA, N_0, N_1, alike, assert_close, matrix, mean, sgd, stage
from rounds import (
    Centres,
    EnginesAndCheckpoints,
    assert_equal,
    assert_local_model_is_of_the_cluster_training,
    floats,
    groups,
    mlp,
)
from torch import nn

from cfl_ray.clustering.agreement import agreement
from cfl_ray.clustering.kmeans import kmeans
from cfl_ray.core.clients import LocalTraining
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.fesem import FeSEM
from cfl_ray.methods.fesem_cam import FeSEMCAM

P = 340


def lloyd(features: np.ndarray, n: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """k-means from these centres, every mean weighted by n; empty ones stay."""
    centres = centres.copy()
    for _ in range(50):
        found = ((features[:, None] - centres) ** 2).sum(2).argmin(1)
        for k in set(found):
            centres[k] = np.average(features[found == k], axis=0, weights=n[found == k])
    return found


class TestFormula:
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    @pytest.mark.parametrize("seed", range(4))
    def test_a_round(self, weights, seed, momentum):
        one, lam = stage(momentum=momentum), 0.3
        draw = np.random.default_rng(seed)
        whole = matrix(one.model(9))
        theta = [matrix(one.model()) + 0.1 * draw.standard_normal((3, 5)) for _ in range(2)]
        w = [sgd(one, client, theta[client], lam, theta[client], momentum=momentum, frozen=whole) for client in (0, 1)]
        w0 = [sgd(one, client, whole, momentum=momentum, frozen=theta[client]) for client in (0, 1)]
        n = np.array([N_0, N_1]) if weights == "samples" else np.ones(2)
        expected = lloyd(np.stack(w).reshape(2, 15), n, np.stack(theta).reshape(2, 15))
        method = FeSEMCAM(num_clusters=2, lam=lam, weights=weights)
        start = method.init(one.start()).advance(
            models_KP=torch.tensor(np.stack(theta)).float().reshape(2, 15),
            global_KP=torch.tensor(whole).float().reshape(1, 15),
            assign_N=np.array([0, 1], np.int32),
            phase="federate",
        )
        state = one.play(method, None, state=start, first=2)
        assert state.assign_N.tolist() == expected.tolist()
        assert_close(state.global_KP[0], mean(*w0, weights))
        for k, centre in enumerate(theta):
            members = [client for client in (0, 1) if expected[client] == k]
            after = {0: centre, 1: w[members[0]] if members else None, 2: mean(*w, weights)}[len(members)]
            assert_close(state.models_KP[k], after)

    def test_the_warm_up_trains_theta_alone_for_beta_epochs(self):
        """From one start, with h taken as 0 and without the proximal term; a cluster is the mean of its members."""
        one = stage()
        w = matrix(one.model(1))
        state = one.play(FeSEMCAM(num_clusters=2, warmup_epochs=3), None)
        assert state.assign_N.tolist() == [0, 1] and state.phase == "federate"
        for client in (0, 1):
            assert_close(state.models_KP[client], sgd(one, client, w, steps=3))

    @pytest.mark.parametrize("options, expected", [({"warmup_epochs": 2}, [6, 2]), ({"warmup_steps": 5}, [5, 5])])
    def test_the_warm_up_in_steps_is_the_same_for_clients_of_all_sizes(self, options, expected):
        """12 samples and 4, in batches of 4, all samples of a client the same: three steps an epoch and one."""
        one = Stage(alike([12, 4]), lambda: nn.Linear(5, 3, bias=False), LocalSGD(batch_size=4, lr=ETA))
        w = matrix(one.model(1))
        state = one.play(FeSEMCAM(num_clusters=2, **options), None)
        for client, steps in enumerate(expected):
            assert_close(state.models_KP[client], sgd(one, client, w, steps=steps))

    def test_the_global_model_starts_neutral(self):
        """Its last layer is zero, the others are those of the common start; the warm-up leaves it alone."""
        one = groups()
        method = FeSEMCAM(num_clusters=2)
        first = method.init(one.start()).global_KP[0]
        assert (first[272:] == 0).all() and torch.equal(first[:272], one.model()[:272])
        assert torch.equal(one.play(method, None).global_KP[0], first)

    def test_without_proximal_term_and_with_a_global_model_of_zeros_a_round_is_fesem(self):
        """Full batch, all clients: on groups so far apart one E-step decides as k-means does."""
        one, other = groups(), groups()
        state = one.play(FeSEM(num_clusters=2), None)
        method = FeSEMCAM(num_clusters=2, lam=0.0)
        begun = method.init(one.start()).advance(
            models_KP=state.models_KP, assign_N=state.assign_N, global_KP=torch.zeros(1, P), phase="federate"
        )
        expected = other.play(FeSEM(num_clusters=2), None, state=state, first=2)
        found = one.play(method, None, state=begun, first=2)
        assert torch.equal(found.models_KP, expected.models_KP) and np.array_equal(found.assign_N, expected.assign_N)


class TestClustering:
    def test_sees_the_last_uploads_of_all_with_their_samples(self, monkeypatch):
        one, calls = groups(), []

        def recorded(*args, **more):
            calls.append((*args, more))
            return kmeans(*args, **more)

        monkeypatch.setattr("cfl_ray.methods.fesem_cam.kmeans", recorded)
        state = one.play(FeSEMCAM(num_clusters=2), [0, 1, 2, 3], [2, 4])
        features, _, _, more = calls[-1]
        assert state.seen_S.tolist() == [0, 1, 2, 3, 4] and more["weight_S"].tolist() == [200] * 5
        assert torch.equal(features, state.signature_SF) and more["centres_KF"].shape == (2, P)
        before = calls[0][0]
        assert torch.equal(features[[0, 1, 3]], before[[0, 1, 3]]) and not torch.equal(features[2], before[2])

    def test_moves_absent_clients_too_but_averages_participants_alone(self):
        """The centres change places: absent clients follow theirs."""
        one, method = groups(), FeSEMCAM(num_clusters=2)
        state = one.play(method, [0, 1, 2, 3])
        swapped = state.advance(models_KP=state.models_KP.flip(0))
        after = one.play(method, [0, 2], state=swapped, first=2)
        assert after.assign_N[1] == after.assign_N[3] == 1 - state.assign_N[1]
        uploads, centres = after.signature_SF.double().numpy(), swapped.models_KP.double().numpy()
        assert after.assign_N[after.seen_S].tolist() == lloyd(uploads, after.weight_S, centres).tolist()
        for k in (0, 1):
            mine = [client for client in (0, 2) if after.assign_N[client] == k]
            expected = after.signature_SF[mine].mean(0) if mine else swapped.models_KP[k]
            assert close(after.models_KP[k], expected, 1e-5)


class TestOtherOptions(EnginesAndCheckpoints):
    METHOD = FeSEMCAM(num_clusters=2, sketch=64, lam=0.0, weights="uniform")


class TestComingAndGoing(Centres):
    METHOD, FIRST, START = FeSEMCAM(num_clusters=2), "warmup", 1

    def test_newcomers_train_once_from_the_mean_with_the_global_model_frozen(self, found):
        one, state = found
        joined = self.METHOD.join(state, one.clients([5, 6], round=3))
        assert agreement(np.arange(7) % 2, joined.assign_N[:7])["ari"] == 1 and not set(joined.seen_S) & {5, 6}
        assert floats(one) == (2 * 2 * P, 2 * P) and not one.stats.train_loss
        clients = groups().clients([5, 6])
        sent = clients.send(state.models_KP.mean(0, keepdim=True))
        how = LocalTraining(frozen_model=clients.send(state.global_KP))
        w = clients.train(sent, how=how, features=clients.spec.all).features_MF
        assert joined.assign_N[[5, 6]].tolist() == torch.cdist(w, state.models_KP).argmin(1).tolist()

    def test_clients_are_served_the_global_model_too(self, found):
        one, state = found
        assert torch.equal(self.METHOD.serve(state, one.clients([0, 7])).frozen_P, state.global_KP[0])

    def test_leavers_are_in_no_later_clustering(self, found):
        one, state = found
        gone = np.flatnonzero(state.assign_N == 1)
        left = self.METHOD.leave(state, gone)
        assert not set(left.seen_S) & set(gone) and len(left.weight_S) == len(left.signature_SF) == len(left.seen_S)

    def test_all_clients_leave_and_others_come(self, found):
        one, state = found
        left = self.METHOD.leave(state, np.arange(8))
        later = one.play(self.METHOD, [5, 6], state=left, first=3)
        assert later.seen_S.tolist() == [5, 6] and later.assign_N[5] >= 0 and not later.models_KP.isnan().any()

    def test_all_clients_leave_and_the_updates_of_those_who_come_are_not_valid(self):
        one = Stage(Spoiled([4, 5]), mlp, LocalSGD(epochs=3, lr=0.3))
        state = self.METHOD.leave(one.play(self.METHOD, [0, 1, 2]), np.array([0, 1, 2]))
        later = one.play(self.METHOD, [4, 5], state=state, first=2)
        assert_equal(later, state)
        assert not one.stats.diagnostics.names, "of no client"


def test_the_local_model_is_that_of_the_cluster_training(monkeypatch):
    one, method = groups(), FeSEMCAM(num_clusters=2)
    assert_local_model_is_of_the_cluster_training(method, one, one.play(method, None), 2, monkeypatch)
