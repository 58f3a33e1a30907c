"""FeSEM: one E-step and one M-step per round by the formulas, and the first round that makes the centres."""

import numpy as np
import pytest
import torch
from federations import Stage, planted
from linear import assert_close, matrix, mean, sgd, stage
from rounds import Centres, EnginesAndCheckpoints, floats, groups
from torch import nn

from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.state import State
from cfl_ray.methods.fesem import FeSEM

P = 340


def centred(one: Stage, *models: np.ndarray, assign=(0, 1)) -> State:
    """A state with these centres."""
    rows = torch.tensor(np.stack(models)).float().reshape(len(models), -1)
    return FeSEM().init(one.start()).advance(models_KP=rows, assign_N=np.array(assign, np.int32), phase="federate")


class TestFormula:
    def test_the_first_round_makes_a_centre_of_every_cluster_of_w(self):
        one = stage()
        w = matrix(one.model())
        state = one.play(FeSEM(num_clusters=2), None)
        assert state.assign_N.tolist() == [0, 1] and state.phase == "federate"
        for client in (0, 1):
            assert_close(state.models_KP[client], sgd(one, client, w))

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    @pytest.mark.parametrize("seed", range(6))
    def test_a_round_is_argmin_and_mean(self, weights, seed):
        """c(i) = argmin_k ||W_i - theta_k||^2 with W_i = SGD(theta_c(i)), then theta_k = Avg of the W_i of k.

        The centres are near each other, so that clients move.
        """
        one = stage()
        draw = np.random.default_rng(seed)
        theta = [matrix(one.model()) + 0.1 * draw.standard_normal((3, 5)) for _ in range(2)]
        w = [sgd(one, client, theta[client]) for client in (0, 1)]
        expected = [int(np.argmin([((w[client] - centre) ** 2).sum() for centre in theta])) for client in (0, 1)]
        state = one.play(FeSEM(num_clusters=2, weights=weights), None, state=centred(one, *theta), first=2)
        assert state.assign_N.tolist() == expected
        for k, centre in enumerate(theta):
            members = [client for client in (0, 1) if expected[client] == k]
            after = {0: centre, 1: w[members[0]] if members else None, 2: mean(*w, weights)}[len(members)]
            assert_close(state.models_KP[k], after)

    def test_those_starts_do_move_clients(self):
        """The test above needs a seed with which a client leaves its centre."""
        found = []
        for seed in range(6):
            one, draw = stage(), np.random.default_rng(seed)
            theta = [matrix(one.model()) + 0.1 * draw.standard_normal((3, 5)) for _ in range(2)]
            found.append(one.play(FeSEM(num_clusters=2), None, state=centred(one, *theta), first=2).assign_N.tolist())
        assert [0, 1] in found and any(assign != [0, 1] for assign in found)

    def test_momentum_starts_afresh_in_every_round(self):
        one = stage(momentum=0.9)
        w = matrix(one.model())
        state = one.play(FeSEM(num_clusters=2), None, None)
        for client in (0, 1):
            first = sgd(one, client, w, momentum=0.9)
            assert_close(state.models_KP[client], sgd(one, client, first, momentum=0.9))

    def test_a_client_never_seen_starts_from_the_mean_of_the_centres(self):
        one = stage()
        theta = [matrix(one.model(1)), matrix(one.model(2))]
        w = sgd(one, 1, (theta[0] + theta[1]) / 2)
        nearest = int(np.argmin([((w - centre) ** 2).sum() for centre in theta]))
        state = one.play(FeSEM(num_clusters=2), [1], state=centred(one, *theta, assign=(-1, -1)), first=2)
        assert state.assign_N.tolist() == [-1, nearest]
        assert_close(state.models_KP[nearest], w)
        assert_close(state.models_KP[1 - nearest], theta[1 - nearest])


class TestFeatures:
    def conv(self):
        return Stage(
            planted(4),
            lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4)),
            LocalSGD(epochs=2, lr=0.3),
        )

    @pytest.mark.parametrize("features, columns", [("linear", slice(20, 56)), ("all", slice(0, 56))])
    def test_are_the_fully_connected_layers_or_everything(self, features, columns):
        """20 parameters of the convolution, 36 of the linear layer. Centre 0 is nearer by one measure, 1 by the other.

        The centres are the common model plus and minus a direction: that of the update in the linear layer, and its
        opposite, more strongly, in the convolution. A client never seen trains from their mean, the common model.
        """
        one = self.conv()
        method = FeSEM(num_clusters=2, features=features)
        clients = one.clients([0])
        w = clients.train(clients.send(one.model()[None]), features=one.network.spec.all).features_MF[0]
        away = w - one.model()
        away[:20] *= -2 * away[20:].norm() ** 2 / away[:20].norm() ** 2
        start = torch.stack([one.model() + away, one.model() - away])
        state = centred(one, *start.numpy(), assign=(-1,) * 4)
        expected = int((start[:, columns] - w[columns]).norm(dim=1).argmin())
        assert one.play(method, [0], state=state, first=2).assign_N[0] == expected
        nearest = [int((start[:, part] - w[part]).norm(dim=1).argmin()) for part in (slice(20, 56), slice(0, 56))]
        assert nearest == [0, 1]

    def test_a_sketch_leaves_planted_groups_apart(self):
        state = groups().play(FeSEM(num_clusters=2, sketch=32), None, None)
        assert agreement(np.arange(8) % 2, state.assign_N)["ari"] == 1


class TestReseed:
    @pytest.fixture
    def empty(self):
        """Centre 2 is far from both clients."""
        one = stage()
        theta = [matrix(one.model(0)), matrix(one.model(1)), np.full((3, 5), 50.0)]
        return one, theta, centred(one, *theta)

    def test_gives_an_empty_centre_the_participant_furthest_from_its_own(self, empty):
        one, theta, state = empty
        w = [sgd(one, client, theta[client]) for client in (0, 1)]
        furthest = int(np.argmax([min(np.linalg.norm(w[client] - centre) for centre in theta) for client in (0, 1)]))
        after = one.play(FeSEM(num_clusters=3, reseed=True), None, state=state, first=2)
        assert after.assign_N[furthest] == 2
        assert_close(after.models_KP[2], w[furthest])

    def test_takes_no_client_from_a_centre_that_would_be_empty_then(self):
        method, found = FeSEM(num_clusters=3, reseed=True), np.array([1, 2, 2])
        start = method.init(stage().start())
        state = start.advance(models_KP=torch.zeros(3, 15), assign_N=np.full(3, -1, np.int32))
        method.reseed_empty_centre(state, np.arange(3), found, np.array([9.0, 1.0, 2.0]))
        assert found.tolist() == [1, 2, 0]

    def test_is_off_by_default_and_leaves_the_centre(self, empty):
        one, _, state = empty
        after = one.play(FeSEM(num_clusters=3), None, state=state, first=2)
        assert 2 not in after.assign_N and torch.equal(after.models_KP[2], state.models_KP[2])

    def test_a_centre_whose_members_are_absent_is_not_empty(self, empty):
        one, _, state = empty
        state = state.advance(models_KP=state.models_KP[:2])
        after = one.play(FeSEM(num_clusters=3, reseed=True), [0], state=state, first=2)
        assert after.assign_N[0] == 0

    def test_newcomers_do_not_move_a_centre_so_they_are_not_given_an_empty_one(self, empty):
        one, _, state = empty
        method = FeSEM(num_clusters=3, reseed=True)
        joined = method.join(method.leave(state, np.array([1])), one.clients([1], round=2))
        assert joined.assign_N[1] in (0, 1) and torch.equal(joined.models_KP, state.models_KP)


class TestOtherOptions(EnginesAndCheckpoints):
    METHOD = FeSEM(num_clusters=2, features="all", reseed=True, sketch=64, weights="uniform")


def test_newcomers_upload_only_the_layers_that_are_compared():
    """Their models are not averaged. A model down, 30 weights of a convolution among them; 52 numbers up."""
    net = lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 4))
    one, method = Stage(planted(), net, LocalSGD(lr=0.1)), FeSEM(num_clusters=2)
    state = one.play(method, [0, 1, 2, 3])
    method.join(state, one.clients([5, 6], round=2))
    assert floats(one) == (2 * (30 + 52), 2 * 52)


class TestComingAndGoing(Centres):
    METHOD, FIRST = FeSEM(num_clusters=2), "cluster"

    def test_newcomers_train_once_from_the_mean_and_go_to_the_nearest_centre(self, found):
        one, state = found
        joined = self.METHOD.join(state, one.clients([5, 6], round=3))
        assert agreement(np.arange(7) % 2, joined.assign_N[:7])["ari"] == 1 and joined.assign_N[7] == -1
        assert torch.equal(joined.models_KP, state.models_KP) and floats(one) == (2 * P, 2 * P)
        assert not one.stats.train_loss, "the result is not their local model"
        other = groups()
        clients = other.clients([5, 6])
        w = clients.train(clients.send(state.models_KP.mean(0, keepdim=True)), features=clients.spec.all).features_MF
        assert joined.assign_N[[5, 6]].tolist() == torch.cdist(w, state.models_KP).argmin(1).tolist()
