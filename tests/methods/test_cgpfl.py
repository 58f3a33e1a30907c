"""CGPFL: personal models and context models by the formulas of pFedMe, and the clustering of the uploads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, planted
from linear import ETA, assert_close, gradient, matrix, mean, sgd, stage
from rounds import accuracy, assert_engines_agree, assert_survives_an_interruption, floats, groups, mlp, row_accuracy
from torch import nn

from cfl_ray.clustering.agreement import agreement
from cfl_ray.clustering.kmeans import kmeans
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.cgpfl import CGPFL
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.local import Local

LAM, MU, BETA = 0.7, 0.4, 0.6
DIFFERENT = [[0, 1, 2, 3], [4, 5], [6, 7, 1], [0, 2]]  # cohorts


def pfedme(
    one: Stage,
    client: int,
    theta: np.ndarray,
    y: np.ndarray,
    steps: int,
    inner: int,
    rho: float = 0.0,
    lam: float = LAM,
):
    """(theta_i, y_i): y moves after every `inner` steps of theta, and after the last."""
    velocity = 0.0
    for step in range(1, steps + 1):
        velocity = rho * velocity + gradient(one, client, theta) + lam * (theta - y)
        theta = theta - ETA * velocity
        if step % inner == 0 or step == steps:
            y = y - ETA * lam * (y - theta)
    return theta, y


class TestFull:
    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    @pytest.mark.parametrize("steps, inner, rho", [(6, 2, 0.0), (5, 2, 0.0), (6, 3, 0.5), (3, 5, 0.0)])
    def test_of_one_cluster_is_pfedme(self, steps, inner, rho, weights):
        """R_l = steps / S_l moves of y_i; theta_i continues from its last value, and Omega moves by beta."""
        one = stage(steps, momentum=rho)
        method = CGPFL(num_clusters=1, lam=LAM, inner_steps=inner, beta=BETA, weights=weights)
        omega = matrix(one.model())
        theta, state = [omega, omega], None
        for number in (1, 2):
            found = [pfedme(one, client, theta[client], omega, steps, inner, rho) for client in (0, 1)]
            theta, y = zip(*found)
            omega = (1 - BETA) * omega + BETA * mean(*y, weights)
            state = one.play(method, None, state=state, first=number)
            assert_close(state.models_KP[0], omega)
            for client in (0, 1):
                assert_close(one.client_states["personal", client], theta[client])

    def test_every_cluster_has_its_omega(self):
        one = stage(4)
        method, w = CGPFL(num_clusters=2, lam=LAM, inner_steps=2), matrix(one.model())
        state = one.play(method, None)
        first = [pfedme(one, client, w, w, 4, 2) for client in (0, 1)]
        assert state.assign_N.tolist() == [0, 1]
        for client in (0, 1):
            assert_close(state.models_KP[client], first[client][1])
        state = one.play(method, None, state=state, first=2)
        for client, (theta, y) in enumerate(first):
            assert_close(state.models_KP[client], pfedme(one, client, theta, y, 4, 2)[1])

    def test_lambda_is_at_most_one_over_eta(self):
        """At 1 / eta, y_i moves onto theta_i, and theta_i is y_i less one step."""
        found, expected = (stage(4).play(CGPFL(num_clusters=1, lam=lam), None).models_KP for lam in (15.0, 1 / ETA))
        assert torch.equal(found, expected)
        one = stage(4)
        w = matrix(one.model())
        y_0, y_1 = (pfedme(one, client, w, w, 4, 5, lam=1 / ETA)[1] for client in (0, 1))
        assert_close(found[0], mean(y_0, y_1))

    def test_a_learning_rate_of_zero_moves_nothing(self):
        """A schedule may begin, or end, with a rate of 0."""
        one = stage(4)
        one.local = replace(one.local, lr=0.0)
        assert torch.equal(one.play(CGPFL(num_clusters=1), None).models_KP[0], one.model())

    def test_without_the_proximal_term_y_stays(self):
        """lambda = 0: theta_i is that of Local, and Omega stays at its start."""
        one, other = stage(), stage()
        state = one.play(CGPFL(num_clusters=2, lam=0.0), None, None)
        other.play(Local(), None, None)
        assert torch.equal(state.models_KP[0], one.model()) and state.num_clusters == 1
        for client in (0, 1):
            assert torch.equal(one.client_states["personal", client], other.client_states["personal", client])


class TestSimple:
    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    def test_theta_has_a_proximal_term_to_omega_which_is_their_mean(self, weights):
        one = stage()
        method = CGPFL(num_clusters=1, mode="simple", mu=MU, beta=BETA, weights=weights)
        omega = matrix(one.model())
        theta, state = [omega, omega], None
        for number in (1, 2):
            theta = [sgd(one, client, theta[client], MU, omega) for client in (0, 1)]
            omega = (1 - BETA) * omega + BETA * mean(*theta, weights)
            state = one.play(method, None, state=state, first=number)
            assert_close(state.models_KP[0], omega)
            for client in (0, 1):
                assert_close(one.client_states["personal", client], theta[client])

    def test_without_its_term_the_personal_models_are_local_bit_for_bit(self):
        """With all clients in the first round: a later client would start from a centre."""
        local = {"batch_size": 30, "momentum": 0.9}
        one, other = groups(**local), groups(**local)
        one.play(CGPFL(mode="simple", mu=0.0), None, None, [0, 3])
        other.play(Local(), None, None, [0, 3])
        assert one.client_states.keys() == other.client_states.keys() and len(one.client_states) == 8
        assert all(torch.equal(value, other.client_states[key]) for key, value in one.client_states.items())

    def test_the_first_round_without_its_term_is_fedavg_bit_for_bit(self):
        found, expected = (
            groups(batch_size=30).play(method, None).models_KP
            for method in (CGPFL(num_clusters=1, mode="simple", mu=0.0), FedAvg())
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "mode, cohorts",
    [("simple", [None] * 4), ("full", [[0, 1, 2, 3], [4, 5], [6, 7, 8], [9, 10, 11]] * 4)],
    ids=["all", "30 %"],
)
def test_groups_are_found(mode, cohorts):
    one = groups(federation=planted(12, 3), epochs=5, batch_size=40, lr=0.5)
    method = CGPFL(num_clusters=3, mode=mode, lam=1.0)
    state = one.play(method, *cohorts)
    assert agreement(one.federation.group_N, state.assign_N)["ari"] == 1
    assert accuracy(one, method, state).min() > 0.7
    row_M = method.serve(method.leave(state, np.arange(12)), one.clients()).row_M
    assert (row_M == 3).all(), "clients without a cluster are served the mean of the centres"


def test_clusters_without_participants_keep_their_model():
    one, method = groups(), CGPFL(num_clusters=2)
    state = one.play(method, None)
    after = one.play(method, [0, 2], state=state, first=2)
    assert state.assign_N.tolist() == [0, 1] * 4 == after.assign_N.tolist()
    assert torch.equal(after.models_KP[1], state.models_KP[1])
    assert not torch.equal(after.models_KP[0], state.models_KP[0])


class TestFirstCohort:
    def test_with_fewer_clients_than_clusters(self):
        one, method = groups(), CGPFL(num_clusters=4)
        state = one.play(method, [2, 5])
        assert state.num_clusters == 2 and state.assign_N.tolist() == [-1, -1, 0, -1, -1, 1, -1, -1]
        assert one.play(method, None, state=state, first=2).num_clusters == 2

    @pytest.mark.parametrize("mode", ["full", "simple"])
    def test_without_a_valid_client_leaves_the_clustering_to_the_next(self, mode):
        one, method = Stage(Spoiled([4, 5]), mlp), CGPFL(num_clusters=2, mode=mode)
        state = one.play(method, [4, 5])
        assert state.phase == "cluster" and torch.equal(state.models_KP[0], one.model()) and one.client_states == {}
        assert not np.isnan(accuracy(one, method, state)).any()
        state = one.play(method, None, state=state, first=2)
        assert state.num_clusters == 2 and state.assign_N[[4, 5]].tolist() == [-1, -1]
        after = one.play(method, [4, 5], state=state, first=3)
        assert torch.equal(after.models_KP, state.models_KP) and np.array_equal(after.assign_N, state.assign_N)


class TestJoinAndLeave:
    def test_before_the_first_round(self):
        one, method = groups(), CGPFL()
        state = method.init(one.start())
        state = method.leave(method.join(state, one.clients([3])), np.array([2]))
        assert state.phase == "cluster" and floats(one) == (0, 0)
        assert accuracy(one, method, state, [3]) == pytest.approx([row_accuracy(one, one.model(), 3)])

    def test_a_client_that_never_took_part_is_served_the_mean_of_the_centres(self):
        one, method = groups(), CGPFL(num_clusters=2, lam=1.0)
        state = one.play(method, [0, 1, 2, 3])
        mean_P = state.models_KP.mean(0)
        joined = method.join(state, one.clients([6]))
        assert accuracy(one, method, joined, [6]) == pytest.approx([row_accuracy(one, mean_P, 6)])
        assert accuracy(one, method, state, [1]) == pytest.approx(
            [row_accuracy(one, one.client_states["personal", 1], 1)]
        )

    def test_a_leaver_that_returns_is_a_newcomer(self):
        """theta_i starts from the mean of the centres, and its upload decides the cluster."""
        one, method = stage(4), CGPFL(num_clusters=2, lam=LAM, inner_steps=2)
        state = one.play(method, None)
        one.backend.forget(np.array([1]))
        state = method.join(method.leave(state, np.array([1])), one.clients([1], 2))
        assert state.assign_N.tolist() == [0, -1] and state.num_clusters == 2 and floats(one) == (0, 0)
        middle = matrix(state.models_KP.mean(0))
        state = one.play(method, [1], state=state, first=2)
        theta, y = pfedme(one, 1, middle, middle, 4, 2)
        assert_close(one.client_states["personal", 1], theta)
        assert_close(state.models_KP[state.assign_N[1]], y)


@pytest.mark.parametrize("mode", ["full", "simple"])
def test_engines_agree(mode):
    assert_engines_agree(
        lambda engine: groups(engine, batch_size=30, momentum=0.5),
        CGPFL(num_clusters=2, mode=mode, lam=1.0, inner_steps=4, beta=0.7, sketch=16),
        DIFFERENT,
    )


def test_the_simple_mode_continues_from_a_checkpoint_after_any_round(tmp_path):
    method = CGPFL(num_clusters=2, mode="simple", beta=0.7)
    assert_survives_an_interruption(lambda: groups(batch_size=30), method, DIFFERENT, tmp_path)


@pytest.mark.parametrize("mode", ["full", "simple"])
def test_continues_from_a_checkpoint_before_the_clustering(mode, tmp_path):
    """The data of the only client of the first round are not valid."""
    assert_survives_an_interruption(
        lambda: Stage(Spoiled([4]), mlp), CGPFL(num_clusters=2, mode=mode), [[4], [0, 1, 4], [2, 3, 4]], tmp_path
    )


def test_clients_are_compared_by_trained_columns():
    """The running statistics of batch normalisation take no part in the clustering."""

    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    one, calls = Stage(planted(4), model, LocalSGD(epochs=2, lr=0.1)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "cfl_ray.methods.cgpfl.kmeans",
            lambda rows, *args, **more: (calls.append(rows), kmeans(rows, *args, **more))[1],
        )
        one.play(CGPFL(num_clusters=2), None)
    assert calls[0].shape == (4, one.network.spec.trained) and one.network.spec.trained < one.network.spec.size
