"""CFL-GP: profiles and their coordinates by the formulas, numbers of clusters that stay, planted and rotated groups."""

from itertools import permutations

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, planted
from linear import assert_close, matrix, sgd, stage
from rounds import COHORTS, EnginesAndCheckpoints, accuracy, floats, groups, mlp

import cfl_ray
from cfl_ray.clustering.agreement import agreement
from cfl_ray.clustering.kmeans import renumbered
from cfl_ray.clustering.spectral import leading_coordinates
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.cflgp import CFLGP
from cfl_ray.methods.fedavg import FedAvg


def test_profiles_are_means_of_the_updates_from_each_model():
    """Two clients in two clusters: rounds 1 and 3 compare updates from models 0 and 1, round 5 from model 0 again."""
    one, method = stage(), CFLGP(num_clusters=2, period=2, cluster_rounds=9)
    w = matrix(one.model())
    state = one.play(method, None)
    theta = [sgd(one, i, w) for i in (0, 1)]
    first = [theta[i] - w for i in (0, 1)]
    assert state.assign_N.tolist() == [0, 1]
    for i in (0, 1):
        assert_close(state.signature_SF[i, :15], first[i])
        assert_close(state.models_KP[i], theta[i])
    assert state.signature_SF.shape == (2, 30) and not state.signature_SF[:, 15:].any()
    state = one.play(method, None, state=state, first=2)
    models = [sgd(one, i, theta[i]) for i in (0, 1)]
    state = one.play(method, None, state=state, first=3)
    assert floats(one) == (3 * 15, 3 * 15)  # client 0 trains model 1 too
    second = [sgd(one, i, models[1]) - models[1] for i in (0, 1)]
    models = [sgd(one, i, models[i]) for i in (0, 1)]
    assert state.assign_N.tolist() == [0, 1] and state.updates_SK.tolist() == [[1, 1], [1, 1]]
    for i in (0, 1):
        assert_close(state.signature_SF[i, 15:], second[i])
        assert_close(state.models_KP[i], models[i])
    state = one.play(method, None, None, state=state, first=4)
    models = [sgd(one, i, models[i]) for i in (0, 1)]
    again = [sgd(one, i, models[0]) - models[0] for i in (0, 1)]
    for i in (0, 1):
        assert_close(state.signature_SF[i, :15], (first[i] + again[i]) / 2)
    assert state.updates_SK.tolist() == [[2, 1], [2, 1]]


def test_the_first_model_is_the_criterion_of_the_official_code():
    one, method = stage(), CFLGP(num_clusters=2, criterion="first")
    state = one.play(method, None, None, None)
    assert state.updates_SK.tolist() == [[2, 0], [2, 0]] and not state.signature_SF[:, 15:].any()


def test_coordinates_are_those_on_the_leading_singular_vectors():
    profile = torch.from_numpy(np.random.default_rng(0).standard_normal((7, 20))).float()
    u, _, _ = np.linalg.svd(profile.numpy().T.astype(np.float64), full_matrices=False)
    expected = (u[:, :3].T @ profile.numpy().T).T
    found = leading_coordinates(profile, 3).numpy()
    assert close(np.abs(found), np.abs(expected), 2e-5)  # a vector has either sign


def test_numbers_agree_with_those_before_as_the_best_permutation():
    draw = np.random.default_rng(1)
    for _ in range(50):
        cluster, before = draw.integers(0, 4, 12), draw.integers(-1, 4, 12)
        found = renumbered(cluster, before, 4)
        best = max((np.array(order)[cluster] == before).sum() for order in permutations(range(4)))
        assert (found == before).sum() == best and agreement(cluster, found)["ari"] == 1


def test_with_one_cluster_it_is_fedavg():
    """Up to the rounding of sums, which are made after the comparison."""
    one, other = groups(batch_size=30), groups(batch_size=30)
    found, expected = one.play(CFLGP(num_clusters=1), *COHORTS), other.play(FedAvg(), *COHORTS)
    assert close(found.models_KP, expected.models_KP, 1e-5) and floats(one) == floats(other)


@pytest.mark.parametrize("cohorts", [[None] * 3, [None, [0, 1, 5, 7], None, [2, 3, 4, 9], [6, 8]]])
def test_finds_planted_groups_and_goes_on_with_fedavg(cohorts):
    one = Stage(planted(12, 3, samples=120), mlp, LocalSGD(epochs=5, batch_size=20, lr=0.5))
    method = CFLGP(num_clusters=3, cluster_rounds=len(cohorts) - 1)
    state = one.play(method, *cohorts)
    assert state.phase == "federate" and state.num_clusters == 3
    assert agreement(one.federation.group_N, state.assign_N)["ari"] == 1
    assert accuracy(one, method, state).mean() > 0.8


def test_newcomers_join_the_cluster_with_the_least_loss():
    one, method = groups(epochs=5, lr=0.5, batch_size=40), CFLGP(num_clusters=2)
    state = one.play(method, [0, 1, 2, 3], [0, 1, 2, 3])
    joined = method.join(state, one.clients([6, 7], round=3))
    assert joined.assign_N[6] == joined.assign_N[0] and joined.assign_N[7] == joined.assign_N[1]
    left = method.leave(joined, np.array([0, 6]))
    assert left.seen_S.tolist() == [1, 2, 3] and left.updates_SK.shape == (3, 2)


def test_the_first_clustering_finds_the_rotations_of_digits():
    """The paper's claim in small: K = 4 angles, and a gradient of each client."""
    experiment = cfl_ray.Experiment(
        rounds=1,
        methods=["cflgp"],
        model={"name": "mlp", "options": {"hidden": 32}},
        data={"source": "digits", "shift": {"kind": "rotated"}, "partition": {"clients": 16}},
        local={"steps": 1, "batch_size": None, "lr": 0.1},
        cohort={"fraction": 1.0},
        tracking={"enabled": False},
        runtime={"engine": "sequential"},
    )
    (record,) = cfl_ray.simulate(experiment)["cflgp"].records
    assert record.metrics["ari"] == 1.0


class TestEngines(EnginesAndCheckpoints):
    METHOD = CFLGP(num_clusters=2, cluster_rounds=4)
