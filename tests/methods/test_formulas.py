"""Rounds of two clients with a linear model, full batch: the expected parameters are the paper's formula."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, uneven
from linear import ETA, N_0, N_1, STEPS, assert_close, data, gradient, loss, matrix, mean, sgd, stage
from rounds import floats, groups, watched
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import Draws
from cfl_ray.core.versions import Received, Versions
from cfl_ray.methods.ditto import Ditto
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedprox import FedProx
from cfl_ray.methods.ifca import IFCA
from cfl_ray.methods.local import Local
from cfl_ray.methods.stocfl import StoCFL, StoCFLState


@pytest.mark.parametrize("weights", ["samples", "uniform"])
class TestFedAvg:
    def test_goes_on_from_the_mean(self, weights):
        one = stage()
        first = mean(sgd(one, 0, matrix(one.model())), sgd(one, 1, matrix(one.model())), weights)
        state = one.play(FedAvg(weights=weights), None, [1])
        assert_close(state.models_KP[0], sgd(one, 1, first))


class TestFedProx:
    @pytest.mark.parametrize("mu", [0.01, 1.0])
    def test_the_anchor_is_the_received_model_which_stays_fixed(self, mu):
        """W2 = W1 - eta (g(W1) + mu (W1 - w)): the term is zero in the first step and acts in the second one."""
        one = stage()
        w = matrix(one.model())

        def client(number):
            w1 = w - ETA * gradient(one, number, w)
            return w1 - ETA * (gradient(one, number, w1) + mu * (w1 - w))

        state = one.play(FedProx(mu=mu), None)
        assert_close(state.models_KP[0], mean(client(0), client(1)))

    def test_the_anchor_is_no_reference_to_the_trained_model(self):
        """PACFL's trap: a penalty that is identically zero would give FedAvg."""
        plain, proximal = (stage().play(method, None).models_KP for method in (FedAvg(), FedProx(mu=1.0)))
        assert (plain - proximal).abs().max() > 1e-3


class TestLocal:
    def test_every_client_goes_on_from_its_own_model(self):
        one = stage()
        w = matrix(one.model())
        one.play(Local(), None, [0])
        assert_close(one.client_states["personal", 0], sgd(one, 0, w, steps=2 * STEPS))
        assert_close(one.client_states["personal", 1], sgd(one, 1, w))


class TestDitto:
    LAM = 0.7

    def test_the_personal_model_stays_near_the_downloaded_one(self):
        """v_i from w_0 near w_0, then from its stored value near w_1: not near W_i, the client's training result."""
        one = stage()
        w0 = matrix(one.model())
        w1 = mean(sgd(one, 0, w0), sgd(one, 1, w0))
        state = one.play(Ditto(lam=self.LAM), None)
        assert_close(state.models_KP[0], w1)
        v1 = [sgd(one, client, w0, self.LAM, w0) for client in (0, 1)]
        for client in (0, 1):
            assert_close(one.client_states["personal", client], v1[client])
        state = one.play(Ditto(lam=self.LAM), None, state=state, first=2)
        for client in (0, 1):
            assert_close(one.client_states["personal", client], sgd(one, client, v1[client], self.LAM, w1))
        assert_close(state.models_KP[0], mean(sgd(one, 0, w1), sgd(one, 1, w1)))

    def test_the_personal_model_of_a_late_client_starts_from_the_first_model(self):
        one = stage()
        w0 = matrix(one.model())
        one.play(Ditto(lam=self.LAM), [0], [1])
        assert_close(one.client_states["personal", 1], sgd(one, 1, w0, self.LAM, sgd(one, 0, w0)))

    def test_the_personal_model_of_a_newcomer_starts_from_the_model_it_received(self):
        one, method = stage(), Ditto(lam=self.LAM)
        state = one.play(method, [0])
        w1 = sgd(one, 0, matrix(one.model()))
        state = one.play(method, [1], state=method.join(state, one.clients([1], round=2)), first=2)
        assert_close(one.client_states["personal", 1], sgd(one, 1, w1, self.LAM, w1))
        assert state.came_N.tolist() == [False, True] and floats(one) == (15, 15)

    def test_in_asynchronous_rounds_a_newcomer_starts_from_the_version_that_it_received(self):
        one, method, versions = stage(), Ditto(lam=self.LAM), Versions()
        first = one.play(method, [0])
        first = method.join(first, one.clients([1], round=2))
        second = one.play(method, [0], state=first, first=2)
        versions.advance(1, first, second, {1})
        clients = replace(one.clients([1], round=3), received=Received(versions, {1: 1}, 2))
        method.round(second, clients, Draws(0, 3))
        w1 = sgd(one, 0, matrix(one.model()))
        assert_close(one.client_states["personal", 1], sgd(one, 1, w1, self.LAM, w1))

    def test_serves_the_personal_model_and_the_global_one_where_there_is_none(self):
        one = stage()
        method = Ditto(lam=self.LAM)
        state = one.play(method, [0])
        serving = method.serve(state, one.clients())
        assert torch.equal(serving.models_KP, state.models_KP) and serving.row_M.tolist() == [0, 0]
        assert serving.client_state.name == "personal" and [client for _, client in one.client_states] == [0]


class TestIFCA:
    @pytest.fixture
    def apart(self):
        """Two models: model k was trained on client k, so that its loss there is the least."""
        one = stage()
        models = [sgd(one, client, matrix(one.model(client)), steps=8) for client in (0, 1)]
        assert [int(np.argmin([loss(one, client, w) for w in models])) for client in (0, 1)] == [0, 1]
        state = IFCA(num_clusters=2).init(one.start())
        return one, models, state.advance(models_KP=torch.tensor(np.stack(models)).float().reshape(2, 15))

    def test_every_client_trains_the_model_with_the_least_loss(self, apart):
        one, models, state = apart
        state = one.play(IFCA(num_clusters=2), None, state=state)
        assert state.assign_N.tolist() == [0, 1]
        for k in (0, 1):
            assert_close(state.models_KP[k], sgd(one, k, models[k]))

    def test_a_model_that_no_client_chose_stays(self, apart):
        one, _, state = apart
        state = state.advance(models_KP=torch.cat([state.models_KP, torch.full((1, 15), 9.0)]))
        after = one.play(IFCA(num_clusters=3), [0], state=state)
        assert torch.equal(after.models_KP[1:], state.models_KP[1:]) and not torch.equal(
            after.models_KP[0], state.models_KP[0]
        )
        assert after.assign_N.tolist() == [0, -1]

    def test_ties_go_to_the_lowest(self, apart):
        one, _, state = apart
        state = one.play(IFCA(num_clusters=2), None, state=state.advance(models_KP=state.models_KP[:1].repeat(2, 1)))
        assert state.assign_N.tolist() == [0, 0]

    def test_serves_by_the_present_losses(self, apart):
        one, _, state = apart
        assert IFCA(num_clusters=2).serve(state, one.clients([1, 0])).row_M.tolist() == [1, 0]
        assert one.stats.traffic.down_bits == 0

    def test_compares_on_the_first_samples_only(self, apart):
        one, models, state = apart
        x, y = data(one, 0)
        works = watched(one)
        one.play(IFCA(num_clusters=2, select_samples=3), None, state=state)
        assert works[0].max_samples == 3 and works[0].num_models == 2


class TestStoCFL:
    LAM = 0.7

    def signatures(self, one: Stage) -> list[np.ndarray]:
        found = [gradient(one, client, matrix(one.model())) for client in (0, 1)]
        return [g / np.linalg.norm(g) for g in found]

    def cosine(self, one: Stage) -> float:
        a, b = self.signatures(one)
        return float((a * b).sum())

    def test_signature_is_the_direction_of_the_gradient_at_the_first_model(self):
        one = stage()
        state = one.play(StoCFL(tau=1.0), None)
        assert state.seen_S.tolist() == [0, 1]
        for client, expected in enumerate(self.signatures(one)):
            assert_close(state.signature_SF[client], expected)

    def test_displacements_have_the_learning_rate_of_the_first_round_whatever_the_schedule_says(self):
        """They are compared over all rounds, newcomers' too."""
        method, signatures = StoCFL(signature="displacement", signature_epochs=3), []
        for later in (ETA, ETA / 100, 0.0):
            one = stage()
            first = one.play(method, [0])
            one.local = replace(one.local, lr=later)
            for state in (one.play(method, [1], state=first, first=2), method.join(first, one.clients([1], round=2))):
                assert state.seen_S.tolist() == [0, 1]
                signatures.append(state.signature_SF)
        assert all(torch.equal(signatures[0], other) for other in signatures[1:])

    def test_displacement_is_the_direction_in_which_training_moves_the_anchor(self):
        """psi - W after 3 epochs, full batch here (50 >= n), as a unit vector."""
        one = stage()
        state = one.play(StoCFL(tau=1.0, signature="displacement", signature_epochs=3), None)
        for client in (0, 1):
            moved = matrix(one.model()) - sgd(one, client, matrix(one.model()), steps=3)
            assert_close(state.signature_SF[client], moved / np.linalg.norm(moved))

    def test_two_clusters_each_near_the_global_model(self):
        """theta_k = steps from theta_k with the proximal term around omega_t; omega the plain average."""
        one = stage()
        method, w = StoCFL(tau=self.cosine(one) + 1e-3, lam=self.LAM), matrix(one.model())
        state = one.play(method, None)
        assert state.assign_N.tolist() == [0, 1]
        theta = [sgd(one, client, w, self.LAM, w) for client in (0, 1)]
        omega = mean(sgd(one, 0, w), sgd(one, 1, w))
        for k in (0, 1):
            assert_close(state.models_KP[k], theta[k])
        assert_close(state.global_KP[0], omega)
        state = one.play(method, None, state=state, first=2)
        for k in (0, 1):
            assert_close(state.models_KP[k], sgd(one, k, theta[k], self.LAM, omega))
        assert_close(state.global_KP[0], mean(sgd(one, 0, omega), sgd(one, 1, omega)))
        assert_close(state.anchor_KP[0], w)

    def test_one_cluster_where_the_cosine_reaches_tau(self):
        one = stage()
        w = matrix(one.model())
        state = one.play(StoCFL(tau=self.cosine(one) - 1e-3, lam=self.LAM), None)
        assert state.assign_N.tolist() == [0, 0] and state.num_clusters == 1
        assert_close(state.models_KP[0], mean(*(sgd(one, client, w, self.LAM, w) for client in (0, 1))))

    @pytest.mark.parametrize("new_model", ["global", "initial"])
    def test_a_late_cluster_starts_from_omega_or_from_the_first_model(self, new_model):
        one = stage()
        method = StoCFL(tau=self.cosine(one) + 1e-3, lam=self.LAM, new_model=new_model)
        state = one.play(method, [0], [1])
        w, omega = matrix(one.model()), sgd(one, 0, matrix(one.model()))
        assert_close(state.models_KP[1], sgd(one, 1, omega if new_model == "global" else w, self.LAM, omega))
        assert_close(state.models_KP[0], sgd(one, 0, w, self.LAM, w))

    def test_chain_hands_the_global_model_from_client_to_client(self):
        """W_0 from omega, W_1 from W_0; omega is their mean all the same."""
        one = stage()
        w = matrix(one.model())
        state = one.play(StoCFL(tau=-1.0, global_update="chain"), None)
        first = sgd(one, 0, w)
        assert_close(state.global_KP[0], mean(first, sgd(one, 1, first)))

    @pytest.mark.parametrize("merge_model", ["larger", "mean"])
    def test_model_of_a_merged_cluster(self, merge_model):
        """Two clusters of one client each with equal signatures merge: the lower one's model, or the mean of both."""
        one = stage(steps=1)
        first = StoCFL(tau=1.0).init(one.start())
        models_KP = torch.stack([torch.full((15,), 1.0), torch.full((15,), 3.0)])
        state = first.advance(
            models_KP=models_KP,
            assign_N=np.array([0, 1], np.int32),
            seen_S=np.arange(2),
            signature_SF=torch.ones(2, 15) / 15**0.5,
        )
        method = StoCFL(tau=0.9, lam=0.0, merge_model=merge_model)
        begun = matrix(torch.full((15,), 1.0 if merge_model == "larger" else 2.0))
        state = one.play(method, None, state=state)
        assert isinstance(state, StoCFLState) and state.assign_N.tolist() == [0, 0]
        assert_close(state.models_KP[0], mean(*(sgd(one, client, begun, steps=1) for client in (0, 1))))

    def test_newcomers_are_placed_by_their_signature(self):
        """Cosine >= tau: into the cluster; below: a new one, with the most similar one's model. Costs psi and Psi_i."""
        for margin, clusters in ((-1e-3, [0, 0]), (1e-3, [0, 1])):
            one = stage()
            method = StoCFL(tau=self.cosine(one) + margin, lam=self.LAM)
            state = one.play(method, [0])
            joined = method.join(state, one.clients([1], round=2))
            assert joined.assign_N.tolist() == clusters and joined.seen_S.tolist() == [0, 1]
            assert torch.equal(joined.models_KP, state.models_KP.repeat(max(clusters) + 1, 1))
            assert (one.stats.traffic.down_bits, one.stats.traffic.up_bits) == (32 * 15, 32 * 15)
            assert method.serve(joined, one.clients()).row_M.tolist() == clusters

    @pytest.mark.parametrize("joins", [True, False])
    def test_empty_clusters_take_a_bounded_number_of_rows(self, joins):
        """Every client is a cluster of its own; two are present at a time, and come in `join` or in a round.

        In `join`, the first model of a cluster is that of the most similar one, of those that are kept.
        """
        found = {}
        for keep in (0, 3, 100):
            one = Stage(uneven([4] * 12, (5,)), lambda: nn.Linear(5, 3, bias=False), LocalSGD(steps=1, lr=ETA))
            method, models = StoCFL(tau=1.0, keep_empty=keep), []
            state = one.play(method, [0])
            for round in range(2, 13):
                present = [round - 2, round - 1]
                if joins:
                    state = method.join(state, one.clients(present[1:], round=round))
                state = one.play(method, present, state=state, first=round)
                models.append(state.models_KP[state.assign_N[present]])
                assert set(np.flatnonzero(state.assign_N >= 0)) == set(present) and state.members_K.max() == 1
                state = method.leave(state, np.array(present[:1]))
                assert len(state.empty_E) == len(state.mean_EF) == state.num_clusters - 1
            assert state.num_clusters == min(2 + keep, 12)
            found[keep] = torch.stack(models)
        assert joins or (torch.equal(found[0], found[100]) and torch.equal(found[3], found[100]))

    @pytest.mark.parametrize("tau", [-1.0, 0.5])
    def test_newcomers_before_there_is_any_cluster(self, tau):
        one = stage()
        method = StoCFL(tau=tau)
        state = method.join(method.init(one.start()), one.clients([1]))
        assert state.assign_N.tolist() == [-1, 0] and torch.equal(state.models_KP, state.global_KP)
        assert one.play(method, None, state=state).assign_N.min() == 0

    def test_signatures_of_leavers_are_dropped_and_empty_clusters_stay_for_newcomers(self):
        one = stage()
        method = StoCFL(tau=self.cosine(one) + 1e-3)
        state = one.play(method, None)
        left = method.leave(state, np.array([0]))
        assert left.seen_S.tolist() == [1] and left.assign_N.tolist() == [-1, 1]
        assert torch.equal(left.signature_SF, state.signature_SF[1:])
        assert left.empty_E.tolist() == [0] and torch.equal(left.mean_EF, state.signature_SF[:1])
        after = one.play(method, [1], state=left, first=2)
        assert after.assign_N.tolist() == [-1, 1] and torch.equal(after.models_KP[0], state.models_KP[0])
        joined = method.join(after, one.clients([0], round=3))
        again = one.play(method, None, state=after, first=3)
        for back in (joined, again):
            assert back.seen_S.tolist() == [1, 0] and back.assign_N.tolist() == [0, 1], (
                "a client that comes back is described again"
            )
            assert not len(back.empty_E) and not len(back.mean_EF)
        assert torch.equal(joined.models_KP, after.models_KP)

    def test_an_empty_cluster_survives_the_merging_of_others(self):
        one, method = groups(), StoCFL(tau=0.5)
        state = one.play(method, [1, 0, 2, 4])
        left = method.leave(state, np.array([0, 2, 4]))
        (empty,) = left.empty_E
        after = one.play(method, [3, 5], state=left, first=2)
        assert after.num_clusters == 2 and torch.equal(after.models_KP[after.empty_E[0]], state.models_KP[empty])
        joined = method.join(after, one.clients([2], round=3))
        assert (
            joined.assign_N[2] == after.empty_E[0]
            and len(set(joined.assign_N[[1, 3, 5]])) == 1
            and not len(joined.empty_E)
        )

    def test_no_known_client_and_no_valid_one(self):
        """All clients have left; then a cohort, and a join, of clients with invalid data."""
        one, method = groups(federation=Spoiled([5])), StoCFL()
        left = method.leave(one.play(method, [0, 1, 2]), np.array([0, 1, 2]))
        assert left.empty_E.tolist() == list(range(left.num_clusters))
        after = one.play(method, [5], state=left, first=2)
        for state in (after, method.join(after, one.clients([5], round=3))):
            assert torch.equal(state.models_KP, left.models_KP) and (state.assign_N == -1).all()

    def test_serves_omega_to_unknown_clients(self):
        one = stage()
        method = StoCFL()
        state = one.play(method, [1])
        serving = method.serve(state, one.clients())
        assert torch.equal(serving.models_KP[serving.row_M], torch.cat([state.global_KP, state.models_KP]))

    def test_long_signatures_are_projected(self):
        """15 coordinates in 16 features stay; in a sketch of fewer they would not: the option's least value is 16."""
        one = Stage(uneven([N_0, N_1], (9,)), lambda: nn.Linear(9, 3, bias=False), LocalSGD(steps=1, lr=ETA))
        assert one.play(StoCFL(sketch=16), None).signature_SF.shape == (2, 16)
        assert one.play(StoCFL(sketch=27), None).signature_SF.shape == (2, 27)
