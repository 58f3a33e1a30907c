"""PACFL: clients are compared by the subspaces that their images span, before anything is trained."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Spoiled, Stage, uneven
from linear import ETA, N_0, N_1, STEPS, assert_close, data, matrix, mean, sgd
from linear import stage as linear
from oneshot import CLIENTS, GROUPS, INPUTS, OneShot, P, stage
from rounds import assert_equal, floats, make_late_in_choices
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.linalg import subspace_angles
from scipy.spatial.distance import squareform
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.data import federation_from_arrays
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.pacfl import PACFL, PrincipalVectors


def apart(clients: int = CLIENTS, groups: int = GROUPS, samples: int = 80, classes: int = 4, noise: float = 0.05):
    """Groups have images of their own, near `classes` directions each, and the labels are the same for all."""
    draw = np.random.default_rng(0)
    rotation = np.linalg.qr(draw.standard_normal((INPUTS, INPUTS)))[0]
    direction = rotation[: groups * classes].reshape(groups, classes, INPUTS)
    make = lambda count: (draw.integers(0, classes, count * clients), np.repeat(np.arange(clients), count))
    arrays = {}
    for name, count in (("", samples), ("_test", 40)):
        y, owner = make(count)
        x = 2 * direction[owner % groups, y] + noise * draw.standard_normal((len(y), INPUTS))
        arrays |= {
            "x" + name: x.astype(np.float32).reshape(-1, 1, 4, 4),
            "y" + name: y,
            ("test_clients" if name else "clients"): owner,
        }
    groups_of = {client: client % groups for client in range(clients)}
    return federation_from_arrays(**arrays, num_classes=classes, groups=groups_of)


def vectors(one: Stage, client: int, p: int = 3) -> np.ndarray:
    """U_i by numpy: left singular vectors of each class's images as columns, side by side."""
    x, y = one.federation.train(client)
    x, y = x.flatten(1).double().numpy(), y.numpy()
    u = np.concatenate([np.linalg.svd(x[y == label].T, full_matrices=False)[0][:, :p] for label in np.unique(y)], 1)
    return u * np.sign(u[np.abs(u).argmax(0), np.arange(u.shape[1])])  # the largest entry is positive


def matrix_by_hand(one: Stage, ids, kind: str, p: int = 3) -> np.ndarray:
    """Angles in degrees between the clients `ids`."""
    bases = [vectors(one, client, p) for client in ids]
    between = {
        "smallest": lambda u, v: np.rad2deg(subspace_angles(u, v).min()),
        "sum": lambda u, v: np.rad2deg(subspace_angles(u, v)).sum(),
        "trace": lambda u, v: np.rad2deg(np.arccos(np.minimum(np.abs(np.diag(u.T @ v)), 1))).sum(),
        "code": lambda u, v: np.rad2deg(np.arccos((u.T @ v).max())),
    }[kind]
    return np.array([[0 if i == j else between(u, v) for j, v in enumerate(bases)] for i, u in enumerate(bases)])


def wide(sizes=(N_0, N_1), inputs: int = 40) -> Stage:
    """Few samples of many values, so that subspaces of different clients are apart."""
    return Stage(uneven(sizes, (inputs,)), lambda: nn.Linear(inputs, 3, bias=False), LocalSGD(steps=STEPS, lr=ETA))


class TestTwoClients:
    @pytest.mark.parametrize("margin, clusters", [(-1e-3, [0, 1]), (1e-3, [0, 0])])
    @pytest.mark.parametrize("kind", ["smallest", "sum", "trace", "code"])
    def test_are_together_up_to_an_angle_of_beta(self, kind, margin, clusters):
        one = wide()
        beta = matrix_by_hand(one, (0, 1), kind, p=1)[0, 1]
        assert beta > 5
        state = one.play(PACFL(vectors=1, angle=kind, threshold=beta + margin), None)
        assert state.assign_N.tolist() == clusters
        assert close(state.angle_SS, [[0, beta], [beta, 0]], 1e-5)

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    def test_train_in_the_round_in_which_they_are_clustered(self, weights):
        """The first round is a round of FedAvg per cluster from w_0; so is every other."""
        one = linear()
        w = matrix(one.model())
        state = one.play(PACFL(num_clusters=2, weights=weights), None, [1])
        assert state.assign_N.tolist() == [0, 1]
        assert_close(state.models_KP[0], sgd(one, 0, w))
        assert_close(state.models_KP[1], sgd(one, 1, sgd(one, 1, w)))
        together = one.play(PACFL(num_clusters=1, weights=weights), None)
        assert_close(together.models_KP[0], mean(sgd(one, 0, w), sgd(one, 1, w), weights))


class TestVectors:
    @pytest.mark.parametrize("p", [1, 3])
    def test_are_left_singular_vectors_of_each_class(self, p):
        one = wide((12, 20))
        state = one.play(PACFL(vectors=p, num_clusters=1), None)
        for client in (0, 1):
            expected = vectors(one, client, p)
            found = state.signature_SF[client].reshape(-1, 40).T.double().numpy()[:, : expected.shape[1]]
            assert close(np.abs((found * expected).sum(0)), 1, 1e-5)

    def test_are_of_stored_pixels_with_undo_normalize(self):
        x, y = torch.rand(40, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
        means, deviations = [0.5, 0.4, 0.3], [0.2, 0.1, 0.3]
        scaled = (x - torch.tensor(means).view(3, 1, 1)) / torch.tensor(deviations).view(3, 1, 1)
        stored, normalised = (SimpleNamespace(x=one, y=y) for one in (x, scaled))
        expected = PrincipalVectors(3, None)(stored, None)
        undone = PrincipalVectors(3, None, [means, deviations])(normalised, None)
        assert close(undone, expected, 1e-4)
        assert not close(PrincipalVectors(3, None)(normalised, None), expected, 1e-2)

    def test_of_a_budget_are_spread_by_the_shares_of_the_classes(self):
        """Of 10: 12, 5 and 3 of 20 samples give 6, 2 (2.5 rounds to even) and 2 (1.5 to even); at least one a class."""
        y = np.repeat([0, 1, 2], [12, 5, 3])
        x = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32)
        federation = federation_from_arrays(x, y, np.zeros(20, int), num_classes=3, holdout=1e-9)
        one = Stage(federation, lambda: nn.Linear(30, 3), LocalSGD())
        x, y = (part.numpy() for part in one.federation.train(0))
        for budget in (10, 1, 2):
            share = [max(1, round(budget * np.mean(y == label))) for label in range(3)]
            state = one.play(PACFL(budget=budget), None)
            found = state.signature_SF[0].reshape(-1, 30)
            assert len(found) == sum(share)
            at = np.cumsum([0, *share])
            for label in range(3):
                span = np.linalg.svd(x[y == label].T, full_matrices=False)[0][:, : share[label]]
                inside = span @ (span.T @ found[at[label] : at[label + 1]].double().numpy().T)
                assert close(inside.T, found[at[label] : at[label + 1]], 1e-5)

    def test_their_largest_size_is_forecast(self):
        assert PrincipalVectors(3, None).floats(784, 10) == 784 * 30
        assert PrincipalVectors(3, 20).floats(784, 10) == 784 * 20

    def test_of_black_images_are_not_valid(self):
        x = np.zeros((8, 6), np.float32)
        x[:4] = np.random.default_rng(0).standard_normal((4, 6))
        y, owner = np.arange(8) % 2, np.repeat([0, 1], 4)
        federation = federation_from_arrays(x, y, owner, num_classes=2, holdout=1e-9)
        one = Stage(federation, lambda: nn.Linear(6, 2), LocalSGD())
        state = one.play(PACFL(), None)
        assert state.assign_N.tolist() == [0, -1]
        assert one.stats.rejected == {1: "its signature has values that are not finite"}


class TestMatrix:
    @pytest.mark.parametrize("kind", ["smallest", "sum", "trace", "code"])
    def test_extended_client_by_client_is_that_of_all_at_once(self, kind):
        """Their numbers of vectors differ, so signatures are of different lengths."""
        one = wide((12, 2, 7, 20, 4, 9))
        method = PACFL(vectors=2, angle=kind)
        whole = one.play(method, None)
        first = method.init(one.start())
        empty = {name: getattr(first, name) for name in ("signature_SF", "seen_S", "angle_SS")}
        one_by_one = replace(whole, **empty)
        for ids in ([1], [0, 2], [3], [4, 5]):
            one_by_one = method.place(one_by_one, one.clients(ids))
        assert one_by_one.seen_S.tolist() == [1, 0, 2, 3, 4, 5]
        order = np.argsort(one_by_one.seen_S)
        assert close(one_by_one.angle_SS[order][:, order], whole.angle_SS, 1e-5)
        assert close(whole.angle_SS, matrix_by_hand(one, range(6), kind, p=2), 1e-5)
        assert torch.equal(one_by_one.signature_SF[order], whole.signature_SF)

    def test_newcomers_are_placed_as_clustering_all_again_says(self):
        """With the tree of all seven recomputed from scratch: the old cluster that most of its companions are in."""
        for beta in (20, 40, 60, 80):
            method = PACFL(vectors=1, threshold=beta)
            one = wide((12, 2, 7, 20, 4, 9, 6))
            state = method.place(method.init(one.start()), one.clients(range(5)))
            joined = method.join(state, one.clients([5, 6], 2))
            angle = matrix_by_hand(one, range(7), "smallest", p=1)
            label = fcluster(linkage(squareform(angle, checks=False), "average"), beta, "distance")
            for client in (5, 6):
                companions = np.flatnonzero(label[:5] == label[client])
                if not len(companions):
                    companions = [angle[client, :5].argmin()]
                assert joined.assign_N[client] == np.bincount(state.assign_N[companions]).argmax(), beta
            assert joined.assign_N[:5].tolist() == state.assign_N[:5].tolist()
            assert torch.equal(joined.models_KP, state.models_KP)

    def test_of_the_clients_that_stay_is_left(self):
        one, method = stage(apart()), PACFL(vectors=1, num_clusters=3)
        state = one.play(method, None)
        left = method.leave(state, np.array([3, 0, 8]))
        stay = [1, 2, 4, 5, 6, 7, 9, 10, 11]
        assert left.seen_S.tolist() == stay and torch.equal(left.angle_SS, state.angle_SS[stay][:, stay])
        assert torch.equal(left.signature_SF, state.signature_SF[stay])
        back = method.join(left, one.clients([8, 3], 2))
        assert back.seen_S.tolist() == [*stay, 8, 3]
        assert back.assign_N[[8, 3]].tolist() == state.assign_N[[8, 3]].tolist()
        assert close(back.angle_SS, state.angle_SS[back.seen_S][:, back.seen_S], 1e-5)


class TestPACFL(OneShot):
    method = PACFL(vectors=1, num_clusters=3)

    def federation(self):
        return apart()

    def check_return(self, one, state, after):
        """No client of their group is left with which they could fall together: they follow the nearest client."""
        back = self.method.join(after, one.clients([4, 7], 3))
        nearest = back.angle_SS[8:, :8].argmin(1)
        assert back.assign_N[[4, 7]].tolist() == after.assign_N[after.seen_S[nearest]].tolist()

    @pytest.mark.parametrize("clusters", [3, 1])
    def test_models_outlive_all_members_and_newcomers_join_the_best(self, clusters):
        """Newcomers after all members have left are placed by their losses, the next by the angles to them."""
        one, method = stage(apart()), replace(self.method, num_clusters=clusters)
        one.online = range(9)
        state = one.play(method, *[range(9)] * 3)
        left = method.leave(state, np.arange(9))
        first = method.join(left, one.clients([9, 10], 4))
        assert torch.equal(first.models_KP, state.models_KP)
        assert first.assign_N[[9, 10]].tolist() == state.assign_N[[0, 1]].tolist()
        assert floats(one) == (2 * clusters * P * (clusters > 1), 2 * (4 * INPUTS + (clusters > 1)))
        second = method.join(first, one.clients([3, 4], 5))
        assert second.assign_N[[3, 4]].tolist() == state.assign_N[[0, 1]].tolist()
        assert second.seen_S.tolist() == [9, 10, 3, 4]
        if clusters > 1:
            make_late_in_choices(one, 9)
            late = method.join(left, one.clients([9, 10], 4))
            assert late.assign_N[9] == -1 and late.seen_S.tolist() == [10]

    def test_finds_the_groups_by_any_cut_linkage_and_angle(self):
        """Groups span orthogonal directions: angles of 60 and more between them, and of a few degrees within them."""
        cuts = ({}, {"cut": "gap"}, {"threshold": 30.0}, {"linkage": "weighted"})
        for options in (*cuts, {"angle": "code"}, {"angle": "sum"}, {"angle": "trace"}, {"budget": 4}):
            state = stage(apart()).play(PACFL(**{"vectors": 1} | options), [0])
            assert state.assign_N.tolist() == [0, 1, 2] * 4, options

    def test_a_client_without_a_valid_signature_does_not_stop_the_others(self):
        one = stage(Spoiled([2], 4, 2))
        state = one.play(PACFL(), None, None)
        assert state.seen_S.tolist() == [0, 1, 3] and one.stats.rejected.keys() == {2}
        assert_equal(state, one.play(PACFL(), [2], state=state, first=3))

    def test_traffic(self):
        """Once a vector of each of 4 classes up, from all N or a newcomer; the model both ways for participants."""
        one = stage(apart())
        state = one.play(self.method, [0, 1])
        assert all(len(one.federation.train(client)[1].unique()) == 4 for client in range(CLIENTS))
        assert floats(one) == (2 * P, 2 * P + CLIENTS * 4 * INPUTS)
        one.play(self.method, [0, 1, 5], state=state, first=2)
        assert floats(one) == (3 * P, 3 * P)
        left = self.method.leave(state, np.array([5]))
        self.method.join(left, one.clients([5], 2))
        assert floats(one) == (0, 4 * INPUTS)
        one.play(self.method, [0, 1, 5], state=left, first=2)
        assert floats(one) == (3 * P, 3 * P + 4 * INPUTS)


@pytest.mark.parametrize(
    "options", [{"threshold": 180.0}, {"angle": "sum", "threshold": math.inf}, {"num_clusters": 1}], ids=str
)
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_one_cluster_is_fedavg(options, weights):
    """Full batch: the exchange of vectors gives the first training another address."""
    drawn = [[0, 1, 5], [2, 3, 7, 9], [4], None]
    one, other = (stage(apart(), batch_size=None, momentum=0.5, epochs=2) for _ in range(2))
    found = one.play(PACFL(weights=weights, **options), *drawn)
    assert torch.equal(found.models_KP, other.play(FedAvg(weights=weights), *drawn).models_KP)


def test_numpy_and_project_agree_on_the_data():
    """`data` and `vectors` read the same samples."""
    one = wide()
    assert np.allclose(data(one, 0)[0], one.federation.train(0)[0].flatten(1))
