"""FL+HC: some rounds of FedAvg, all clients' updates clustered once, FedAvg per cluster."""

import math

import numpy as np
import pytest
import torch
from federations import Stage, planted
from linear import N_0, N_1, assert_close, matrix, mean, sgd
from linear import stage as linear
from oneshot import CLIENTS, OneShot, P, stage
from rounds import floats

from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fl_hc import FLHC

METRICS = {
    "l1": lambda a, b: np.abs(a - b).sum(),
    "l2": lambda a, b: np.linalg.norm(a - b),
    "cosine": lambda a, b: 1 - (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b),
}


def second(one: Stage) -> tuple[np.ndarray, list[np.ndarray]]:
    """w after one round of FedAvg by clients 0 and 1, and the local model of each in the next."""
    w = matrix(one.model())
    w = mean(sgd(one, 0, w), sgd(one, 1, w))
    return w, [sgd(one, client, w) for client in (0, 1)]


class TestTwoClients:
    @pytest.mark.parametrize("margin, clusters", [(-1e-4, [0, 1]), (1e-4, [0, 0])])
    @pytest.mark.parametrize("metric", METRICS)
    def test_updates_of_the_second_round_are_compared(self, metric, margin, clusters):
        one = linear()
        w, (w_0, w_1) = second(one)
        threshold = METRICS[metric](w_0 - w, w_1 - w) + margin
        state = one.play(FLHC(cluster_round=2, metric=metric, threshold=threshold), None, None)
        assert state.assign_N.tolist() == clusters
        assert_close(state.start_KP[0], w)
        for k, centre in enumerate([(w_0 + w_1) / 2 - w] if clusters == [0, 0] else [w_0 - w, w_1 - w]):
            assert_close(state.centre_KF[k], centre)

    @pytest.mark.parametrize("model", ["mean", "common"])
    def test_a_cluster_starts_from_its_members_or_from_the_common_model(self, model):
        one = linear()
        w, (w_0, w_1) = second(one)
        apart, together = (one.play(FLHC(cluster_round=2, num_clusters=k, model=model), None, None) for k in (2, 1))
        assert_close(apart.models_KP[0], w_0 if model == "mean" else w)
        assert_close(apart.models_KP[1], w_1 if model == "mean" else w)
        assert_close(together.models_KP[0], mean(w_0, w_1) if model == "mean" else w)

    def test_then_goes_on_within_clusters(self):
        one = linear()
        _, models = second(one)
        state = one.play(FLHC(cluster_round=2, num_clusters=2), None, None, None, [1])
        assert_close(state.models_KP[0], sgd(one, 0, models[0]))
        assert_close(state.models_KP[1], sgd(one, 1, sgd(one, 1, models[1])))

    def test_members_are_weighted_by_samples_or_equally(self):
        one = linear()
        w, (w_0, w_1) = second(one)
        w = mean(sgd(one, 0, matrix(one.model())), sgd(one, 1, matrix(one.model())), "uniform")
        state = one.play(FLHC(cluster_round=2, num_clusters=1, weights="uniform"), None, None)
        assert_close(state.models_KP[0], mean(sgd(one, 0, w), sgd(one, 1, w), "uniform"))

    @pytest.mark.parametrize("metric, near", [("l1", 0), ("l2", 1), ("cosine", 2)])
    def test_newcomers_join_the_nearest_mean_update_from_the_stored_model(self, metric, near):
        """Centres: the newcomer's update, 5 off in one of 15 coordinates, 1 off in each, and multiplied by 50."""
        one = linear(sizes=(N_0, N_1, 6))
        method = FLHC(cluster_round=2, num_clusters=2, metric=metric)
        state = one.play(method, *[[0, 1]] * 4)
        w, _ = second(one)
        delta = sgd(one, 2, w) - w
        off = 0.1 * np.abs(delta).max()
        centres = [delta + 5 * off * np.eye(1, 15).reshape(3, 5), delta + off, 50 * delta]
        assert np.argmin([METRICS[metric](delta, centre) for centre in centres]) == near
        state = state.advance(
            centre_KF=torch.from_numpy(np.stack(centres)).float().reshape(3, 15), models_KP=state.models_KP[[0, 1, 1]]
        )
        joined = method.join(state, one.clients([2], 5))
        assert joined.assign_N.tolist() == [0, 1, near] and torch.equal(joined.models_KP, state.models_KP)


class TestFLHC(OneShot):
    method, clustered = FLHC(cluster_round=2, num_clusters=3), 2

    def test_clients_with_iid_data_are_one_cluster(self):
        """The largest gap of merge heights never finds one cluster, the largest mean silhouette does."""
        one = stage(planted(CLIENTS, 1))
        assert one.play(FLHC(cluster_round=1), None).num_clusters == 1
        assert one.play(FLHC(cluster_round=1, cut="gap"), None).num_clusters > 1

    def test_finds_the_groups_by_any_metric_cut_and_linkage(self):
        metrics = ("l1", "cosine")
        others = ({"cut": "median"}, {"cut": "gap"}, {"linkage": "complete"}, {"linkage": "single"})
        for options in ({}, *({"metric": metric} for metric in metrics), *others):
            state = stage().play(FLHC(cluster_round=2, **options), [0, 1, 2], [0])
            assert state.assign_N.tolist() == [0, 1, 2] * 4, options

    def test_clusters_in_round_five_by_default(self):
        one, method = stage(epochs=1), FLHC()
        states = [method.init(one.start())]
        for number in range(1, 7):
            states.append(one.play(method, None, state=states[-1], first=number))
        assert [state.phase for state in states] == ["warmup"] * 5 + ["federate"] * 2
        assert [len(np.unique(state.assign_N)) for state in states[:5]] == [1] * 5

    def test_can_cluster_in_the_first_round(self):
        one = stage()
        state = one.play(FLHC(cluster_round=1), [0])
        assert state.assign_N.tolist() == [0, 1, 2] * 4 and torch.equal(state.start_KP[0], one.model())

    def test_long_updates_are_projected_but_for_l1(self):
        one = stage()
        for metric, features in (("l2", 64), ("cosine", 64), ("l1", P)):
            state = one.play(FLHC(cluster_round=1, metric=metric, sketch=64), [0])
            assert state.centre_KF.shape == (3, features) and state.assign_N.tolist() == [0, 1, 2] * 4

    def test_traffic(self):
        """FedAvg's, but with all N in the clustering round; a newcomer exchanges one model for its update."""
        one = stage()
        for method in (self.method, FLHC(cluster_round=2, model="common"), FLHC(cluster_round=2, metric="l1")):
            state = one.play(method, [0, 1])
            assert floats(one) == (2 * P, 2 * P)
            state = one.play(method, [0, 1], state=state, first=2)
            assert floats(one) == (CLIENTS * P, CLIENTS * P)
            one.play(method, [0, 1, 5], state=state, first=3)
            assert floats(one) == (3 * P, 3 * P)
        left = self.method.leave(state, np.array([5]))
        one.play(self.method, [0, 1, 5], state=left, first=3)
        assert floats(one) == (4 * P, 4 * P)

    def test_ward_is_for_l2(self):
        assert stage().play(FLHC(cluster_round=1, linkage="ward"), None).assign_N.tolist() == [0, 1, 2] * 4
        with pytest.raises(ValueError, match="fl_hc.linkage ward is defined for metric l2 only, got 'cosine'"):
            FLHC(linkage="ward", metric="cosine")


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_one_cluster_is_fedavg(weights):
    """All clients in the clustering round, fewer in others; the same mini-batches."""
    drawn = [[0, 1, 5], [2, 3, 7, 9], None, [4], [4, 8]]
    one, other = stage(momentum=0.5), stage(momentum=0.5)
    found = one.play(FLHC(cluster_round=3, threshold=math.inf, weights=weights), *drawn)
    assert torch.equal(found.models_KP, other.play(FedAvg(weights=weights), *drawn).models_KP)
