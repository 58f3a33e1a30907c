"""Traffic of a round per participant, in floats of 32 bits, as the papers count it. One-time costs are in round 1."""

import numpy as np
import pytest
import torch
from federations import Stage, uneven
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods import REGISTRY

P, BASE, HEAD = 23, 15, 8  # MLP 4-3-2
VECTORS = 3 * 2 * 4  # p vectors of 4 pixels for each of 2 classes
TABLE = [  # method, options, (down, up) in the first round, and in the second
    ("fedavg", {}, (P, P), (P, P)),
    ("fedbn", {}, (P, P), (P, P)),  # of a model without norm layers
    ("fedprox", {}, (P, P), (P, P)),
    ("fednova", {}, (P, P + 1), (P, P + 1)),
    # prototypes of 2 labels with 3 features, and up with the numbers of samples
    ("fedproto", {}, (0, 2 * 4), (2 * 3, 2 * 4)),
    # mu_iy, the counts of 2 labels and v_i, and prototypes with 3 features; prototypes down
    ("fedpac", {}, (P, P + 2 * 3 + 2 + 1 + 2 * 3), (P + 2 * 3, P + 2 * 3 + 2 + 1 + 2 * 3)),
    ("moon", {}, (P, P), (P, P)),
    ("fedrod", {}, (P, P), (P, P)),
    ("fedala", {}, (P, P), (P, P)),
    ("scaffold", {}, (2 * P, 2 * P), (2 * P, 2 * P)),  # and the control variates
    ("per_fedavg", {}, (P, P), (P, P)),
    ("per_fedavg", {"order": "second"}, (P, P), (P, P)),
    ("ditto", {}, (P, P), (P, P)),
    ("local", {}, (0, 0), (0, 0)),
    ("fedper", {}, (BASE, BASE), (BASE, BASE)),
    ("fedper", {"private_layers": 2}, (0, 0), (0, 0)),
    ("fedrep", {}, (BASE, BASE), (BASE, BASE)),
    ("fedrep", {"private_layers": 2}, (0, 0), (0, 0)),
    ("fedbabu", {}, (BASE, BASE), (BASE, BASE)),
    ("apfl", {}, (P, P), (P, P)),
    ("pfedme", {}, (P, P), (P, P)),
    ("fedas", {}, (BASE, P + 1), (BASE, P + 1)),  # F_i
    # v_i and the counts of 2 labels; prototypes with 3 features, also down for the loss on features
    ("fedccfa", {"align_after": 1}, (P, P + HEAD + 2 + 2 * 3), (P + 2 * 3, P + HEAD + 2 + 2 * 3)),
    ("lg_fedavg", {}, (HEAD, HEAD), (HEAD, HEAD)),
    ("fedavg_plus", {"num_models": 3}, (3 * P, 3 * P), (3 * P, 3 * P)),
    ("fedprox_plus", {"num_models": 3}, (3 * P, 3 * P), (3 * P, 3 * P)),
    ("fedem", {}, (3 * P, 3 * P), (3 * P, 3 * P)),
    ("fedrc", {}, (3 * P + 6, 3 * P + 6), (3 * P + 6, 3 * P + 6)),  # a table of 2 classes and 3 models, both ways
    ("fedsoft", {"tau": 5}, (4 * P, P + 2), (2 * P, P)),  # the importances once in five rounds
    ("ifca", {}, (4 * P, P + 1), (4 * P, P + 1)),
    ("ifca", {"share_base": True}, (BASE + 4 * HEAD, P + 1), (BASE + 4 * HEAD, P + 1)),
    ("ifca", {"average": "gradients"}, (4 * P, P), (4 * P, P)),
    ("ifca", {"share_base": True, "average": "gradients"}, (BASE + 4 * HEAD, P), (BASE + 4 * HEAD, P)),
    ("ifca", {"select": "test_accuracy"}, (4 * P, P + 1), (4 * P, P + 1)),
    ("ifca", {"warmup_rounds": 1}, (P, P), (4 * P, P + 1)),
    ("ifca", {"warmup_rounds": 1, "share_base": True}, (P, P), (BASE + 4 * HEAD, P + 1)),
    ("clove", {"stable_rounds": None}, (P, P), (4 * P, P + 4)),  # a random division, then K losses
    (
        "clove",
        {"num_clusters": None, "max_clusters": 3, "first": "losses", "stable_rounds": None},
        (3 * P, P + 3),
        (3 * P, P + 3),
    ),
    ("cfl", {}, (P, P), (P, P)),
    ("cfl", {"min_rounds": 0, "eps1": 1e9, "eps2": 0.0}, (P, P), (P, P)),  # with splits
    ("feddrift", {}, (P, P), (P, P)),
    ("feddrift", {"step_rounds": 1, "delta": 9.0}, (P, P), (2 * P, P + 1)),  # the pool of one, and its error
    ("fedgwc", {}, (P, P + 7), (P, P + 7)),
    ("fl_hc", {"cluster_round": 2}, (P, P), (P, P)),
    ("flux", {"cluster_round": 1}, (P, P + 12), (P, P)),  # a descriptor of 2 (2 + 1) means and stds
    ("feroma", {"warmup_rounds": 1}, (P, P), (P, P + 12)),  # the same descriptor in every round
    ("fesem", {}, (P, P), (P, P)),
    ("cgpfl", {}, (P, P), (P, P)),
    ("cgpfl", {"mode": "simple"}, (P, P), (P, P)),
    ("cflgp", {"cluster_rounds": 1}, (P, P), (P, P)),
    ("fedamp", {}, (P, P), (P, P)),
    ("pfedgraph", {}, (P, P), (P, P)),
    ("fedcac", {}, (P, P + 1), (2 * P, P + 1)),  # 23 bits
    ("fedgroup", {}, (2 * P, 2 * P), (P, P)),  # w_0 down and an update up for every client of the cold start, here all
    ("autocfl", {"min_rounds": 1, "max_rounds": 1}, (P, P + 2), (P, P)),  # |D_m| and L_m until they are clustered
    ("pacfl", {}, (P, P + VECTORS), (P, P)),
    ("fedclust", {}, (P, HEAD), (P, P)),
    ("stocfl", {}, (2 * P, 3 * P), (2 * P, 2 * P)),
    ("fedac", {}, (P + BASE, P), (P + BASE, P)),
    ("ifca_cam", {"num_clusters": 3, "warmup_rounds": 1}, (P, P), (4 * P, 2 * P + 1)),  # K + 1 down, c(i) up
    # Theta_g and c(i) once more
    ("ifca_cam", {"num_clusters": 3, "warmup_rounds": 1, "schedule": "alternating"}, (P, P), (5 * P, 2 * P + 2)),
    ("fesem_cam", {}, (P, P), (2 * P, 2 * P)),
]


def stage() -> Stage:
    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return Stage(uneven([20, 30, 20, 40, 30, 20], (4,), classes=2), network, LocalSGD(epochs=1, batch_size=20, lr=0.1))


@pytest.mark.parametrize("name, options, first, later", TABLE, ids=[f"{name} {options}" for name, options, *_ in TABLE])
def test_of_a_round_follows_the_table(name, options, first, later):
    """Three rounds of all six clients, and one of two clients: traffic is proportional to the cohort."""
    one, method, state = stage(), REGISTRY[name](**options), None
    for number, (cohort, (down, up)) in enumerate(((None, first), (None, later), (None, later), ([1, 4], later)), 1):
        state = one.play(method, cohort, state=state, first=number)
        size = 6 if cohort is None else len(cohort)
        assert (one.stats.traffic.down_bits, one.stats.traffic.up_bits) == (32 * size * down, 32 * size * up), number


@pytest.mark.parametrize(
    "name, down, up",
    [("fedavg", 35, 35), ("fedbn", 23, 23), ("scaffold", 35 + 29, 35 + 29), ("ifca", 4 * 35, 35 + 1)],
)
def test_statistics_of_normalisation_count_like_weights_and_have_no_control_variates(name, down, up):
    """MLP 4-3-2 of 23 weights, with a BatchNorm of 6 weights and 6 statistics."""
    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    local = LocalSGD(epochs=1, batch_size=20, lr=0.1)
    one = Stage(uneven([20, 30, 20], (4,), classes=2), network, local, "sequential")
    one.play(REGISTRY[name](), None)
    assert (one.stats.traffic.down_bits, one.stats.traffic.up_bits) == (32 * 3 * down, 32 * 3 * up)


def test_a_client_that_stocfl_first_sees_after_round_1_receives_the_anchor():
    """2 models down and up, and Psi up; psi down, which is what the participants of round 1 receive as omega."""
    one, method = stage(), REGISTRY["stocfl"]()
    state = one.play(method, [0, 1])
    assert one.stats.traffic.down_bits == 32 * 2 * 2 * P
    state = one.play(method, [0, 2, 3], state=state, first=2)
    assert one.stats.traffic.down_bits == 32 * (3 * 2 * P + 2 * P)
    assert one.stats.traffic.up_bits == 32 * (3 * 2 * P + 2 * P)
    method.join(state, one.clients([4], round=3))
    assert (one.stats.traffic.down_bits, one.stats.traffic.up_bits) == (32 * P, 32 * P)


def test_every_method_is_in_the_table():
    assert {name for name, *_ in TABLE} == REGISTRY.keys()


def test_the_sizes_are_those_of_the_network():
    spec = stage().network.spec
    assert (spec.size, spec.base.count, spec.head.count) == (P, BASE, HEAD)
    assert np.array_equal(np.unique(torch.cat([stage().federation.train(client)[1] for client in range(6)])), [0, 1])
