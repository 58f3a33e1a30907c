"""FedClust: one clustering of all clients by their final layers, of which only the clusters and their means remain."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from federations import Stage, uneven
from linear import ETA, N_0, N_1, assert_close, matrix, mean, sgd
from linear import stage as linear_stage
from oneshot import CLIENTS, HEAD, INPUTS, OneShot, P, stage
from rounds import assert_equal, floats
from scipy.spatial.distance import pdist, squareform
from torch import nn

from cfl_ray import Experiment
from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.data.from_config import build
from cfl_ray.errors import ConfigError
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedclust import FedClust, FedClustState
from cfl_ray.models import REGISTRY, recipe

RHO = 0.5
linear, sgd_rho = partial(linear_stage, momentum=RHO), partial(sgd, momentum=RHO)


def row(w: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(w).float().reshape(1, -1)


class TestTwoClients:
    """The model is its final layer, so s_i = SGD_i(w_0)."""

    @pytest.mark.parametrize("margin, clusters", [(-1e-4, [0, 1]), (1e-4, [0, 0])])
    def test_join_up_to_lambda_and_all_start_from_the_first_model(self, margin, clusters):
        one = linear()
        w = matrix(one.model())
        s_0, s_1 = (sgd_rho(one, client, w) for client in (0, 1))
        state = one.play(FedClust(threshold=float(np.linalg.norm(s_0 - s_1)) + margin), None)
        assert state.assign_N.tolist() == clusters
        assert torch.equal(state.models_KP, one.model()[None].repeat(len(set(clusters)), 1)), (
            "the results of the first round are discarded"
        )
        for k, centre in enumerate([(s_0 + s_1) / 2] if clusters == [0, 0] else [s_0, s_1]):
            assert_close(state.centre_KF[k], centre)

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    def test_then_average_within_clusters(self, weights):
        one = linear()
        w = matrix(one.model())
        apart, together = (one.play(FedClust(num_clusters=k, weights=weights), None, None) for k in (2, 1))
        for k in (0, 1):
            assert_close(apart.models_KP[k], sgd_rho(one, k, w))
        assert_close(together.models_KP[0], mean(sgd_rho(one, 0, w), sgd_rho(one, 1, w), weights))
        later = one.play(FedClust(num_clusters=1, weights=weights), [1], state=together, first=3)
        assert_close(later.models_KP[0], sgd_rho(one, 1, mean(sgd_rho(one, 0, w), sgd_rho(one, 1, w), weights)))

    def test_signatures_are_the_final_layer_alone(self):
        two = Stage(
            uneven([N_0, N_1], (5,)), lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), LocalSGD(steps=1, lr=ETA)
        )
        state = two.play(FedClust(num_clusters=2), None)
        assert state.centre_KF.shape == (2, 4 * 3 + 3)
        clients = two.clients()
        whole = clients.train(clients.send(two.model()[None]), features=clients.spec.all).features_MF
        assert torch.equal(state.centre_KF, whole[:, -15:])


class TestLayer:
    """`layer` chooses the weights by which clients are compared."""

    def played(self, **options) -> tuple[Stage, FedClustState, np.ndarray]:
        """(stage, state, distances on record) after the clustering."""
        one = stage()
        method = FedClust(**options)
        state = method.init(one.start())
        clients = one.clients()
        state = method.round(state, clients, Draws(one.seed, 1))
        return one, state, clients.stats.diagnostics.array("distance").value

    def test_the_last_layer_is_the_default_bit_for_bit(self):
        one, default, distance = self.played()
        _, last, of_last = self.played(layer=2)
        assert_equal(default, last)
        assert np.array_equal(distance, of_last)
        methods = (FedClust(), FedClust(layer=2))
        joined = [method.join(method.leave(default, np.array([5])), one.clients([5], 2)).assign_N for method in methods]
        assert np.array_equal(*joined)

    def test_the_first_layer_has_other_distances_those_of_its_weights(self):
        one, state, distance = self.played(layer=1)
        clients = one.clients()
        trained_MP = clients.train(clients.send(one.model()[None]), features=clients.spec.all).features_MF
        first = INPUTS * 16 + 16  # weights and biases
        assert np.allclose(distance, squareform(pdist(trained_MP[:, :first].double())), rtol=1e-6)
        assert not np.allclose(distance, self.played()[2])
        assert state.centre_KF.shape[1] == first

    def test_newcomers_are_compared_by_the_same_layer(self):
        """The centre of one cluster is what the newcomer's first layer becomes."""
        one, state, _ = self.played(layer=1, num_clusters=2)
        newcomer = one.clients([5], 2)
        updates = newcomer.train(newcomer.send(state.start_KP), features=newcomer.spec.layer(1))
        for k in (0, 1):
            centre_KF = state.centre_KF.clone()
            centre_KF[k], centre_KF[1 - k] = updates.features_MF[0], updates.features_MF[0] + 1
            method = FedClust(layer=1, num_clusters=2)
            left = method.leave(state, np.array([5])).advance(centre_KF=centre_KF)
            assert method.join(left, one.clients([5], 2)).assign_N[5] == k
            assert floats(one)[1] == INPUTS * 16 + 16

    def test_the_statistics_of_a_normalisation_are_not_compared(self):
        spec = ParamSpec.of(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        assert FedClust(layer=2).compared(spec) == Columns(((16, 24),))

    def test_a_layer_that_the_model_does_not_have(self):
        with torch.device("meta"):  # shapes alone
            spec = ParamSpec.of(REGISTRY["vgg16"]((3, 32, 32), 10))
        for number in (1, 7, 14, 16):  # those of Fig. 1
            FedClust(layer=number).check_model(spec)
        with pytest.raises(
            ConfigError,
            match=r"fedclust.layer must be in 1 .. 16, the layers of this model with trained parameters, got 17",
        ):
            FedClust(layer=17).check_model(spec)
        for number in (0, -1, 1.5, True):
            with pytest.raises(ValueError, match=r"fedclust.layer: .*(a valid integer|equal to 1), got"):
                FedClust(layer=number)


class TestNewcomers:
    """Client 2 joins when the models of two clusters have moved on."""

    def arrive(self, method, centres, **changes):
        """(stage, s_2, state before, state after), with models and centres (functions of s_2) set by hand."""
        one = linear(sizes=(N_0, N_1, 6))
        s_2 = sgd_rho(one, 2, matrix(one.model()))
        state = one.play(method, [0, 1]).advance(
            centre_KF=torch.cat([row(centre(s_2)) for centre in centres]), **changes
        )
        state = state.advance(models_KP=state.models_KP + torch.tensor([[1.0], [2.0]]))
        return one, s_2, state, method.join(state, one.clients([2], 5))

    @pytest.mark.parametrize("offsets", [(0.3, 0.2), (0.2, 0.3)])
    def test_join_the_nearest_first_round_centre(self, offsets):
        one, _, state, joined = self.arrive(FedClust(num_clusters=2), [lambda s, d=d: s + d for d in offsets])
        assert joined.assign_N.tolist() == [0, 1, int(np.argmin(offsets))]
        assert torch.equal(joined.models_KP, state.models_KP) and torch.equal(joined.centre_KF, state.centre_KF)

    @pytest.mark.parametrize(
        "height, founds", [(0.2 * 15**0.5 - 1e-4, True), (0.2 * 15**0.5 + 1e-4, False), (None, False)]
    )
    def test_found_a_cluster_beyond_lambda_with_newcomers_found(self, height, founds):
        """Each of 15 coordinates differs by 0.2 from the nearest centre."""
        method, centres = FedClust(num_clusters=2, newcomers="found"), [lambda s: s + 0.3, lambda s: s - 0.2]
        one, s_2, state, joined = self.arrive(method, centres, height=height)
        assert joined.assign_N.tolist() == [0, 1, 2 if founds else 1]
        assert joined.num_clusters == len(joined.centre_KF) == 2 + founds
        if founds:
            assert_close(joined.models_KP[2], matrix(one.model()))
            assert_close(joined.centre_KF[2], s_2)
            again = FedClust(newcomers="found").join(joined.advance(assign_N=state.assign_N), one.clients([2], 5))
            assert again.assign_N.tolist() == [0, 1, 2], "a second newcomer joins the cluster of the first"

    def test_similar_newcomers_found_one_cluster(self):
        one = stage()
        one.online = [0, 1, 3, 4, 6, 7, 9, 10]
        method = FedClust(newcomers="found", cut="median")
        state = one.play(method, [0])
        joined = method.join(state, one.clients([2, 5, 8, 11], 2))
        assert (state.num_clusters, joined.num_clusters) == (2, 3)
        assert joined.assign_N[[2, 5, 8, 11]].tolist() == [2] * 4
        assert method.join(joined, one.clients([], 3)).num_clusters == 3

    def test_lambda_is_part_of_the_state(self):
        one = linear()
        distance = np.linalg.norm(sgd_rho(one, 0, matrix(one.model())) - sgd_rho(one, 1, matrix(one.model())))
        heights = [
            one.play(FedClust(**options), None).height
            for options in ({}, {"cut": "median"}, {"threshold": 0.3}, {"num_clusters": 2}, {"cut": "gap"})
        ]
        assert heights == [pytest.approx(distance), pytest.approx(distance / 2), 0.3, None, None]


class TestDefaultCut:
    """The largest mean silhouette finds groups of label skew and of feature shift, and none in IID data."""

    CASES = [  # data of the handwritten digits, clients; clusters: those of the true groups, of the label sets, or one
        ({"shift": {"kind": "rotated", "angles": [0, 180, 270]}, "partition": {"clients": 12}}, "groups"),
        ({"shift": {"kind": "rotated"}, "partition": {"clients": 16}}, "groups"),
        ({"shift": {"kind": "pathological"}, "partition": {"clients": 16}}, "groups"),
        ({"partition": {"kind": "classes", "clients": 30, "classes_per_client": 2}}, "labels"),
        ({"partition": {"clients": 16}}, "one"),
    ]

    @pytest.mark.parametrize("data, expected", CASES, ids=str)
    def test_on_digits(self, data, expected, tmp_path):
        federation = build(Experiment(data={"source": "digits", **data}).data, 0, tmp_path)
        model = recipe("mlp", {"hidden": 32}, federation.shape.input, 10)
        one = Stage(federation, model, LocalSGD(epochs=2, batch_size=20, lr=0.1), "manual")
        found_N = one.play(FedClust(), None).assign_N
        label_set = [sum(2 ** federation.train(client)[1].unique()).item() for client in range(len(found_N))]
        true_N = {"groups": federation.group_N, "labels": np.array(label_set), "one": np.zeros(len(found_N))}[expected]
        assert agreement(true_N, found_N)["ari"] == 1

    def test_half_the_median_cuts_rotations_to_chunks_and_makes_iid_clients_train_alone(self, tmp_path):
        for angles, clusters in (([0, 90, 180, 270], 6), ([0], 15)):
            data = {"source": "digits", "shift": {"kind": "rotated", "angles": angles}, "partition": {"clients": 16}}
            federation = build(Experiment(data=data).data, 0, tmp_path)
            model = recipe("mlp", {"hidden": 32}, federation.shape.input, 10)
            one = Stage(federation, model, LocalSGD(epochs=2, batch_size=20, lr=0.1), "manual")
            assert one.play(FedClust(cut="median"), None).num_clusters >= clusters - 1
            assert one.play(FedClust(), None).num_clusters == len(angles)


class TestFedClust(OneShot):
    method = FedClust(num_clusters=3)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"cut": "median"},
            {"cut": "gap"},
            {"threshold": 1.6},
            {"linkage": "complete"},
            {"linkage": "ward", "cut": "gap"},
        ],
        ids=str,
    )
    def test_finds_the_groups_by_any_cut(self, options):
        one = stage()
        assert one.play(FedClust(**options), [0]).assign_N.tolist() == [0, 1, 2] * 4

    def test_the_state_has_no_signature_of_a_client(self):
        """Only means over clusters are stored."""
        state = self.clustering_state(stage())
        per_client = {name for name, value in vars(state).items() if getattr(value, "shape", [0])[0] == CLIENTS}
        assert per_client == {"assign_N"}

    def test_traffic(self):
        """First round and newcomers: the model down, a classifier up. Later rounds: the model both ways."""
        one = stage()
        state = one.play(self.method, [0, 1])
        assert floats(one) == (CLIENTS * P, CLIENTS * HEAD)
        one.play(self.method, [0, 1, 5], state=state, first=2)
        assert floats(one) == (3 * P, 3 * P)
        left = self.method.leave(state, np.array([5]))
        self.method.join(left, one.clients([5], 2))
        assert floats(one) == (P, HEAD)
        one.play(self.method, [0, 1, 5], state=left, first=2)
        assert floats(one) == (4 * P, 3 * P + HEAD)


def test_one_cluster_is_fedavg_without_its_first_round():
    """The same rounds, cohorts and mini-batches from the second round on."""
    drawn = [[0, 1, 5], [2, 3, 7, 9], [4]]
    one, other = stage(momentum=0.5), stage(momentum=0.5)
    found = one.play(FedClust(threshold=math.inf), [0], *drawn)
    expected = other.play(FedAvg(), *drawn, first=2)
    assert torch.equal(found.models_KP, expected.models_KP)


def test_lambda_without_momentum_is_that_of_the_formula():
    one = linear_stage()
    s_0, s_1 = (sgd(one, client, matrix(one.model())) for client in (0, 1))
    height = one.play(FedClust(cut="median"), None).height
    assert height == pytest.approx(np.linalg.norm(s_0 - s_1) / 2, rel=1e-5)
