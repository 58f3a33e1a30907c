"""IFCA's gradient averaging, weight sharing, warm-up and selection; Algorithm 1 itself is in `test_formulas`."""

import numpy as np
import pytest
import torch
from closeness import close
from federations import Spoiled, Stage, planted
from linear import ETA, assert_close, assert_layers, deep_sgd, deep_stage, gradient, layers, matrix, mean, sgd, stage
from rounds import (
    COHORTS,
    accuracy,
    assert_engines_agree,
    assert_survives_an_interruption,
    floats,
    groups,
    make_late_in_choices,
    mlp,
)

from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.ifca import IFCA

BASE, HEAD = 16 * 16 + 16, 16 * 4 + 4
OPTIONS = [
    {"average": "gradients"},
    {"share_base": True},
    {"share_base": True, "average": "gradients"},
    {"warmup_rounds": 2},
    {"select": "test_accuracy"},
]


def names(value) -> str | None:
    return ", ".join(f"{key} {option}" for key, option in value.items()) if isinstance(value, dict) else None


def apart(method: IFCA, models: int = 2):
    """A stage and a state in which client k prefers model k."""
    one = stage()
    w = [sgd(one, client, matrix(one.model(client)), steps=8) for client in (0, 1)]
    w += [np.full((3, 5), 9.0)] * (models - 2)
    return one, w, method.init(one.start()).advance(models_KP=torch.tensor(np.stack(w)).float().reshape(models, 15))


def trained_on(one: Stage, client: int) -> torch.Tensor:
    return one.play(FedAvg(), *[[client]] * 6).models_KP[0]


class TestGradientAveraging:
    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    def test_divides_by_all_participants(self, weights):
        """theta_k - (gamma / m) sum of g_i: one of two clients moves its model by half a step.

        The local settings do not matter.
        """
        method = IFCA(num_clusters=3, average="gradients", weights=weights)
        one, w, state = apart(method, 3)
        one.local = LocalSGD(epochs=7, batch_size=2, momentum=0.9, lr=ETA)
        after = one.play(method, None, state=state)
        for k in (0, 1):
            assert_close(after.models_KP[k], w[k] - ETA / 2 * gradient(one, k, w[k]))
        assert torch.equal(after.models_KP[2], state.models_KP[2])
        alone = one.play(method, [1], state=state)
        assert_close(alone.models_KP[1], w[1] - ETA * gradient(one, 1, w[1]))
        assert torch.equal(alone.models_KP[0], state.models_KP[0])

    def test_two_clients_of_a_cluster_count_alike(self):
        one = stage()
        w = matrix(one.model())
        state = one.play(IFCA(num_clusters=1, average="gradients"), None)
        assert_close(state.models_KP[0], w - ETA / 2 * (gradient(one, 0, w) + gradient(one, 1, w)))

    def test_a_rejected_client_is_not_counted_as_participant(self):
        method = IFCA(num_clusters=2, average="gradients")
        one, w, state = apart(method)
        train = one.federation.train
        one.federation.train = lambda client: (train(client)[0] * (torch.nan if client == 0 else 1), train(client)[1])
        after = one.play(method, None, state=state)
        assert one.stats.rejected.keys() == {0} and torch.equal(after.models_KP[0], state.models_KP[0])
        assert_close(after.models_KP[1], sgd(one, 1, w[1], steps=1))


class TestWeightSharing:
    def start(self, **options):
        """Two heads over one base; client 1 prefers the second head."""
        one, method = deep_stage(), IFCA(num_clusters=2, share_base=True, **options)
        state = method.init(one.start())
        a, other = layers(state.models_KP[1])
        for _ in range(20):
            other = deep_sgd(one, 1, a, other, steps=1)[1]
        models_KP = state.models_KP.clone()
        models_KP[1, 20:] = torch.tensor(other).float().reshape(-1)
        state = state.advance(models_KP=models_KP)
        assert method.serve(state, one.clients()).row_M.tolist() == [0, 1]
        return one, method, state, layers(models_KP[0]), layers(models_KP[1])

    def test_models_start_with_one_base_and_different_heads(self):
        one = groups()
        state = IFCA(num_clusters=3, share_base=True).init(one.start())
        assert torch.equal(state.models_KP[:, :BASE], one.model()[:BASE].repeat(3, 1))
        for k in range(3):
            assert torch.equal(state.models_KP[k, BASE:], one.model(k)[BASE:])

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    def test_the_base_is_averaged_over_all_participants_and_heads_per_cluster(self, weights):
        one, method, state, first, second = self.start(weights=weights)
        after = one.play(method, None, state=state)
        (a0, b0), (a1, b1) = deep_sgd(one, 0, *first), deep_sgd(one, 1, *second)
        base = mean(a0, a1, weights)
        assert after.assign_N.tolist() == [0, 1]
        assert_layers(after.models_KP[0], base, b0)
        assert_layers(after.models_KP[1], base, b1)

    def test_a_head_that_no_client_chose_stays_while_its_base_moves(self):
        one, method, state, first, second = self.start()
        after = one.play(method, [1], state=state)
        a1, b1 = deep_sgd(one, 1, *second)
        assert_layers(after.models_KP[0], a1, first[1])
        assert_layers(after.models_KP[1], a1, b1)

    def test_with_gradients(self):
        """The base takes a whole step of the mean gradient, a head half of one."""
        one, method, state, first, second = self.start(average="gradients")
        after = one.play(method, None, state=state)
        (a0, b0), (a1, b1) = deep_sgd(one, 0, *first, steps=1), deep_sgd(one, 1, *second, steps=1)
        assert_layers(after.models_KP[0], (a0 + a1) / 2, (first[1] + b0) / 2)
        assert_layers(after.models_KP[1], (a0 + a1) / 2, (second[1] + b1) / 2)


class TestWarmUp:
    def test_is_an_equal_random_split_that_stays(self):
        one, method = groups(), IFCA(num_clusters=3, warmup_rounds=2)
        split = one.play(method, None).assign_N
        assert sorted(np.bincount(split)) == [2, 3, 3]
        assert np.array_equal(one.play(method, None, None).assign_N, split)
        state = one.play(method, [1, 6], [0, 2])
        assert np.array_equal(state.assign_N[[0, 1, 2, 6]], split[[0, 1, 2, 6]])
        assert (state.assign_N[[3, 4, 5, 7]] == -1).all()
        assert not np.array_equal(Stage(planted(), mlp, seed=1).play(method, None).assign_N, split)

    def test_the_split_stays_when_the_federation_grows_and_is_what_clients_are_served(self):
        one, method = groups(), IFCA(num_clusters=3, warmup_rounds=2)
        state = one.play(method, None)
        assert state.phase == "warmup" and np.array_equal(method.serve(state, one.clients()).row_M, state.assign_N)
        grown = Stage(planted(20), mlp, LocalSGD(epochs=3, lr=0.3))
        assert np.array_equal(grown.play(method, None).assign_N[:8], state.assign_N)
        after = one.play(method, None, state=state, first=2)
        assert after.phase == "federate" and len(set(method.serve(after, one.clients()).row_M)) < 3

    def test_trains_by_the_split_and_then_by_choice(self):
        method = IFCA(num_clusters=2, warmup_rounds=1)
        one, w, state = apart(method)
        swapped = state.advance(models_KP=state.models_KP.flip(0))
        split = one.play(method, None, state=state).assign_N
        assert sorted(split) == [0, 1]
        against = state if split[0] == 1 else swapped
        after = one.play(method, None, state=against)
        for client in (0, 1):
            assert_close(after.models_KP[split[client]], sgd(one, client, matrix(against.models_KP[split[client]])))
        assert one.play(method, None, state=against, first=2).assign_N.tolist() == [1 - split[0], 1 - split[1]]

    @pytest.mark.parametrize("warm_up", [0, 1])
    def test_trains_a_model_that_no_client_would_choose(self, warm_up):
        one, method = groups(), IFCA(num_clusters=2, warmup_rounds=warm_up)
        models_KP = method.init(one.start()).models_KP * torch.tensor([[1.0], [4.0]])
        state = one.play(method, None, None, state=method.init(one.start()).advance(models_KP=models_KP))
        assert torch.equal(state.models_KP[1], models_KP[1]) == (warm_up == 0)

    def test_groups_are_found_from_random_starts(self):
        one, method = groups(lr=0.5), IFCA(num_clusters=2, warmup_rounds=1)
        state = one.play(method, *[None] * 6)
        assert agreement(one.federation.group_N, state.assign_N)["ari"] == 1
        assert accuracy(one, method, state).mean() > 0.8


class TestSelectionByTestAccuracy:
    def test_takes_the_model_that_is_right_most_often_on_the_test_data(self):
        method = IFCA(num_clusters=3, select="test_accuracy")
        one = groups()
        state = method.init(one.start())
        state = state.advance(models_KP=torch.stack([one.model(7), *(trained_on(one, k) for k in (1, 0))]))
        assert one.play(method, [0, 1, 2, 5], state=state).assign_N.tolist() == [2, 1, 2, -1, -1, 1, -1, -1]
        assert method.serve(state, one.clients([3, 4])).row_M.tolist() == [1, 2] and floats(one) == (0, 0)

    def test_differs_from_the_training_loss(self):
        """Test labels alone decide: with those of the other group a client chooses the other model."""
        one = groups()
        models_KP = torch.stack([trained_on(one, k) for k in (0, 1)])
        one.federation.test = lambda client, images=None, test=one.federation.test: test(1 - client % 2, images)
        for select, expected in (("train_loss", [0, 1]), ("test_accuracy", [1, 0])):
            method = IFCA(num_clusters=2, select=select)
            state = method.init(one.start()).advance(models_KP=models_KP)
            assert method.serve(state, one.clients([0, 1])).row_M.tolist() == expected

    def test_ties_go_to_the_lowest(self):
        one, method = groups(), IFCA(num_clusters=3, select="test_accuracy")
        state = method.init(one.start()).advance(models_KP=one.model().repeat(3, 1))
        assert one.play(method, None, state=state).assign_N.tolist() == [0] * 8


class TestOfOneCluster:
    @pytest.mark.parametrize("share_base", [False, True])
    def test_of_gradients_is_fedavg_of_one_whole_step_bit_for_bit(self, share_base):
        method = IFCA(num_clusters=1, average="gradients", share_base=share_base)
        found = groups(batch_size=30, momentum=0.9).play(method, *COHORTS).models_KP
        assert torch.equal(found, groups(steps=1).play(FedAvg(weights="uniform"), *COHORTS).models_KP)


@pytest.mark.parametrize(
    "options", [{}, {"average": "gradients"}, {"share_base": True}, {"select": "test_accuracy"}], ids=names
)
@pytest.mark.parametrize("participation", [1.0, 0.3])
def test_groups_are_found_from_an_easy_start(options, participation):
    """Model k has seen one client of group k."""
    one, method = groups(epochs=5, lr=0.5), IFCA(num_clusters=2, **options)
    warm = torch.stack([trained_on(one, k) for k in (0, 1)])
    if "share_base" in options:
        warm = torch.stack([torch.cat([warm.mean(0)[:BASE], row_P[BASE:]]) for row_P in warm])
    state = method.init(one.start()).advance(models_KP=warm)
    draws = np.random.default_rng(0)
    cohorts = [None] * 5 if participation == 1 else [draws.choice(8, 3, replace=False) for _ in range(12)]
    state = one.play(method, *cohorts, state=state)
    chosen = method.serve(state, one.clients()).row_M
    assert agreement(one.federation.group_N, chosen)["ari"] == 1
    assert (state.assign_N >= 0).all() and np.array_equal(state.assign_N, chosen)
    assert accuracy(one, method, state).mean() > (0.9 if options == {} else 0.7)


@pytest.mark.parametrize("options", [{}, *OPTIONS[:3]], ids=names)
def test_a_client_whose_choice_comes_late_counts_in_no_average(options):
    """It could train in time, but has chosen no model: the round is that of the others."""
    method, one, other = IFCA(num_clusters=2, **options), groups(), groups()
    make_late_in_choices(one, 3)
    found, expected = one.play(method, [0, 1, 2, 3]), other.play(method, [0, 1, 2])
    assert one.stats.late.keys() == {3} and found.assign_N.tolist() == expected.assign_N.tolist()
    assert close(found.models_KP, expected.models_KP, 1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=names)
class TestEveryOption:
    def test_engines_agree(self, options):
        assert_engines_agree(
            lambda engine: groups(engine, batch_size=30, momentum=0.5), IFCA(num_clusters=3, **options)
        )

    def test_survives_an_interruption(self, options, tmp_path):
        """The warm-up of two rounds is interrupted in the middle, at its end and after it."""
        assert_survives_an_interruption(
            lambda: groups(batch_size=30), IFCA(num_clusters=3, **options), COHORTS, tmp_path
        )

    def test_newcomers_choose_when_they_are_served_and_leavers_leave_nothing(self, options):
        one, method = groups(), IFCA(num_clusters=2, **options)
        state = one.play(method, [0, 1, 2, 3])
        left = method.leave(state, np.array([0, 2]))
        assert left.assign_N[[0, 2]].tolist() == [-1, -1] and torch.equal(left.models_KP, state.models_KP)
        joined = method.join(left, one.clients([0, 6]))
        assert floats(one) == (0, 0) and np.array_equal(joined.assign_N, left.assign_N)
        expected = method.serve(state, one.clients([0, 6])).row_M
        assert np.array_equal(method.serve(joined, one.clients([0, 6])).row_M, expected)
        assert one.play(method, [0], state=joined, first=4).assign_N[0] >= 0

    def test_a_cohort_without_a_valid_update_changes_no_model(self, options):
        one, method = Stage(Spoiled([4, 5]), mlp), IFCA(num_clusters=2, **options)
        before = method.init(one.start())
        assert torch.equal(one.play(method, [4, 5]).models_KP, before.models_KP) and one.stats.rejected.keys() == {4, 5}

    def test_one_client_and_more_models_than_clients(self, options):
        one, method = Stage(planted(1, 1), mlp), IFCA(num_clusters=4, **options)
        state = one.play(method, None, None, None)
        assert state.num_clusters == 4 and state.assign_N[0] >= 0 and not state.models_KP.isnan().any()
