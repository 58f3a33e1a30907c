"""FLUX: descriptors, scaling, the knee and rounds by plain formulas; unlabelled newcomers; the phase before."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, uneven
from linear import ETA, assert_layers, deep_sgd, layers
from rounds import EnginesAndCheckpoints, accuracy, floats, groups
from sklearn.cluster import DBSCAN
from torch import nn

from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import Draws
from cfl_ray.data import federation_from_arrays
from cfl_ray.methods.flux import Descriptor, Flux, knee, kneedle, projection

SIZES, FEATURES, CLASSES, P = [12, 4, 8, 6, 9], 4, 3, 5 * 4 + 4 * 3


def deep(sizes=SIZES, federation=None) -> Stage:
    module = lambda: nn.Sequential(nn.Linear(5, FEATURES, bias=False), nn.Linear(FEATURES, CLASSES, bias=False))
    return Stage(federation or uneven(sizes, (5,)), module, LocalSGD(steps=2, lr=ETA))


def shifted(clients: int = 8) -> Stage:
    """The first input of client i is around -3 or 3 by i mod 2, and its labels are 0 and 1, or 1 and 2."""
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(clients), 30)
    x = draw.standard_normal((len(owner), 5)).astype(np.float32)
    x[:, 0] += np.where(owner % 2, 3, -3)
    y = ((x[:, 1] > 0) + owner % 2).astype(np.int64)
    test = {"x_test": x, "y_test": y, "test_clients": owner}
    return deep(federation=federation_from_arrays(x, y, owner, **test, num_classes=CLASSES))


def described(one: Stage, client: int, a: np.ndarray) -> np.ndarray:
    """d_i with features x A', of all samples and label by label."""
    x, y = (value.double().numpy() for value in one.federation.train(client))
    z = x @ a.T @ projection(FEATURES, CLASSES, one.seed).numpy()
    means, stds = [], []
    for label in range(CLASSES):
        here = z[y == label]
        means += list(here.mean(0)) if len(here) > 1 else [-1] * 3
        stds += list(here.std(0)) if len(here) > 1 else [-1] * 3
    return np.concatenate([z.mean(0), z.std(0), means, stds])


EDGES = {"kinds": [3, 6, 15], "labels": list(range(3, 24, 3))}  # of the blocks


def scaled(d: np.ndarray, kind: str = "kinds") -> np.ndarray:
    blocks = np.split(d, EDGES[kind], axis=1)
    return np.concatenate([(block - block.min()) / (block.max() - block.min()) for block in blocks], 1)


@pytest.mark.parametrize("blocks, eps", [("kinds", 0.9), ("labels", 1.4)])
def test_rounds_follow_the_formulas(blocks, eps):
    """FedAvg in round 1; descriptors, DBSCAN of scikit-learn, and FedAvg in clusters in rounds 2 and 3."""
    one, method = deep(), Flux(cluster_round=2, eps=eps, blocks=blocks)
    a, b = layers(one.model())
    trained = [deep_sgd(one, i, a, b) for i in range(5)]
    a, b = (np.average([model[part] for model in trained], axis=0, weights=SIZES) for part in (0, 1))
    state = one.play(method, None)
    assert state.phase == "warmup" and floats(one) == (5 * P, 5 * P)
    assert_layers(state.models_KP[0], a, b)
    points = scaled(np.stack([described(one, i, a) for i in range(5)]), blocks)
    labels = DBSCAN(eps=eps, min_samples=2).fit_predict(points)
    labels = np.where(labels < 0, 10 + np.arange(5), labels)
    assert 1 < len(set(labels)) < 5, "a case with noise and clusters"
    models = dict.fromkeys(set(labels), (a, b))
    for number in (2, 3):
        for k in models:
            members = np.flatnonzero(labels == k)
            new = [deep_sgd(one, i, *models[k]) for i in members]
            sizes = np.array(SIZES)[members]
            models[k] = tuple(np.average([model[part] for model in new], axis=0, weights=sizes) for part in (0, 1))
        state = one.play(method, None, state=state, first=number)
        assert floats(one) == (5 * P, 5 * (P + (2 * 3 * 4 if number == 2 else 0)))
    assert agreement(labels, state.assign_N)["ari"] == 1 and state.phase == "federate"
    for i in range(5):
        assert_layers(state.models_KP[state.assign_N[i]], *models[labels[i]])
        centre = points[labels == labels[i], :6].mean(0)
        assert close(state.centre_KF[state.assign_N[i]], centre, 1e-5)


@pytest.mark.parametrize(
    "nearest, expected", [([1, 1.1, 1.2, 1.3, 9], 1.3), ([2, 2, 2], 2), ([0, 0, 5, 6], 0), ([1, 2], 1)]
)
def test_the_knee_is_the_distance_furthest_below_the_line(nearest, expected):
    """Also without a knee, when all are equal. Each client has its distance to a client of its own alone."""
    distance_MM = np.full((2 * len(nearest),) * 2, 100.0)
    for i, value in enumerate(nearest):
        distance_MM[2 * i, 2 * i + 1] = distance_MM[2 * i + 1, 2 * i] = value
    assert knee(distance_MM) == expected
    assert knee(np.zeros((1, 1))) == 0


@pytest.mark.parametrize(
    "nearest, place",
    [
        ([0, 1, 2, 3, 9, 10], 3),
        ([0, 0.5, 1, 5, 5.5, 12], 2),  # 4 is further below the line, but 3 is not a step lower
        ([0, 1, 1, 2, 6, 7, 7.5, 20], 6),
        ([0, 5, 10], None),
    ],
)
def test_kneedle_stops_at_the_first_knee_from_the_largest_distance(nearest, place):
    """The places that kneed 0.9.0 finds; where it has none, eps is the furthest distance."""
    assert kneedle(np.array(nearest, float)) == place
    distance_MM = np.where(np.eye(2, dtype=bool), 0, nearest[-1])  # two clients, whose distances are equal
    assert knee(distance_MM, "kneedle") == nearest[-1]


def test_the_projection_is_of_the_runs_seed():
    first, second = projection(20, 3, 0), projection(20, 3, 1)
    assert close(first.T @ first, np.eye(3), 1e-12) and not close(first, second, 0.1)
    assert torch.equal(first, projection(20, 3, 0)) and projection(2, 3, 0).shape == (2, 2)


def test_newcomers_without_labels_join_the_nearest_cluster():
    """By their inputs alone: labels that are all wrong change nothing."""
    one, method = shifted(), Flux(cluster_round=1, eps=0.6)
    state = one.play(method, [0, 1, 2, 3], [0, 1, 2, 3])
    assert state.num_clusters == 2 and agreement(np.arange(4) % 2, state.assign_N[:4])["ari"] == 1
    clients = one.clients([4, 5], round=3)
    train = one.federation.train
    one.federation.train = lambda client: (train(client)[0], (train(client)[1] + 1) % CLASSES)
    joined = method.join(state, clients)
    one.federation.train = train
    assert joined.assign_N[[4, 5]].tolist() == state.assign_N[[0, 1]].tolist()
    assert floats(one) == (2 * P, 2 * 2 * 3)  # the model of the descriptors, and mean z, std z
    serving = method.serve(state, one.clients([6, 7]))
    assert serving.row_M.tolist() == state.assign_N[[0, 1]].tolist() and floats(one)[0] == 0
    later = one.play(method, [6, 7], state=state, first=3)
    assert later.assign_N[[6, 7]].tolist() == state.assign_N[[0, 1]].tolist()


def test_clients_that_are_described_and_do_not_train_download_the_model():
    one, method = shifted(), Flux(cluster_round=1, eps=0.6)
    clients = one.clients([0, 1, 5])
    clients = replace(clients, reachable=lambda waits: (np.arange(8), one.federation.at(1).num_samples_N))
    state = method.round(method.init(one.start()), clients, Draws(0, 1))
    assert (state.assign_N >= 0).all()
    assert floats(one) == (8 * P, 3 * P + 8 * 2 * 3 * (CLASSES + 1))


@pytest.mark.parametrize("features", [2, 3, 5])
def test_descriptors_have_the_length_that_a_round_without_training_expects(features):
    """2 L (C + 1) numbers, L = min(C, F), of which the first 2 L need no labels."""
    module = lambda: nn.Sequential(nn.Linear(5, features), nn.Linear(features, CLASSES))
    one = Stage(uneven([4, 6], (5,)), module)
    for by_label, expected in ((True, 2 * min(CLASSES, features) * (CLASSES + 1)), (False, 2 * min(CLASSES, features))):
        clients = one.clients()
        descriptor = Descriptor.of(clients, by_label=by_label)
        d_MF, _ = clients.describe(descriptor, clients.known_models(one.model()[None]))
        assert d_MF.shape[1] == expected == descriptor.floats(5, CLASSES)


def test_clients_with_other_data_are_placed_anew():
    one, method = shifted(), Flux(cluster_round=1, eps=0.6)
    state = one.play(method, None, None)
    swapped = state.advance(assign_N=state.place([0, 1], state.assign_N[[1, 0]]))
    assert method.drift(swapped, one.clients([0, 1], round=3)).assign_N.tolist() == state.assign_N.tolist()


def test_groups_are_found_by_descriptors():
    one, method = shifted(), Flux(cluster_round=3, eps=0.6)
    state = one.play(method, *[None] * 8)
    assert agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1 and accuracy(one, method, state).mean() > 0.7


def test_the_first_phase_ends_when_accuracy_stops_to_rise():
    """Not before round 3, and in round `latest_round` at the latest; a number is uploaded in each of its rounds."""
    one = groups()
    for options, expected in (({"least_gain": 1.0}, 3), ({"least_gain": 0.0, "latest_round": 2}, 2)):
        method, phases = Flux(**options), []
        state = method.init(one.start())
        for number in range(1, 5):
            state = one.play(method, None, state=state, first=number)
            phases.append(state.phase)
        assert phases.index("federate") + 1 == expected
    state = one.play(Flux(least_gain=0.06), None)
    assert floats(one) == (8 * 340, 8 * 341) and state.accuracy > 0 and not state.slow


class TestAll(EnginesAndCheckpoints):
    METHOD = Flux(cluster_round=2)


class TestByAccuracy(EnginesAndCheckpoints):
    METHOD = Flux(earliest_round=2, least_gain=1.0)
