"""FedGWC: losses of single steps, interactions and splits by the formulas, and its reduction to FedAvg."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import planted
from linear import ETA, N_0, N_1, gradient, loss, matrix, stage
from rounds import groups

from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.clients import ClientProgram, LocalTraining
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedgwc import FedGWC, rewards


def losses(one, client, w, steps):
    found = []
    for _ in range(steps):
        found.append(loss(one, client, w))
        w = w - ETA * gradient(one, client, w)
    return found


@pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised", "span"])
def test_the_losses_of_the_first_steps_are_returned(engine):
    """Of 3 steps of client 0 and 2 of client 1, with 2 and 4 places for them."""
    one = stage(engine=engine)
    clients, w = one.clients(), matrix(one.model())
    for trace in (2, 4):
        how = LocalTraining(program=ClientProgram(trace=trace), steps_M=np.array([3, 2]))
        found = clients.train(clients.send(one.model()[None]), how=how, average=torch.ones(1, 2)).step_loss_MS
        expected = np.full((2, trace), np.nan)
        for client, steps in ((0, 3), (1, 2)):
            expected[client, :steps] = losses(one, client, w, steps)[:trace]
        assert close(found, expected, 1e-5)


def reward_of(loss_mS, sizes):
    """mean_s exp(-(l - mu)^2 / (2 sigma^2)), with mean and variance by samples."""
    share = np.array(sizes)[:, None] / sum(sizes)
    mu = (share * loss_mS).sum(0)
    variance = (share * (loss_mS - mu) ** 2).sum(0) + 1e-16
    return np.exp(-((loss_mS - mu) ** 2) / (2 * variance)).mean(1)


def test_interactions_follow_the_formulas():
    """Round 1 with both clients, a = 1; round 2 with client 1 alone, a = 1/2."""
    one, method, w = stage(), FedGWC(steps_sent=2), None
    w = matrix(one.model())
    reward = reward_of(np.array([losses(one, i, w, 2) for i in (0, 1)]), [N_0, N_1])
    state = one.play(method, None)
    expected = np.repeat((reward / reward.sum())[:, None], 2, 1)
    assert state.seen_S.tolist() == [0, 1] and close(state.interaction_SS, expected, 2e-5)
    v = np.square(expected - 1 / 4).mean()
    assert state.change_K[0] == pytest.approx(v, rel=1e-5)
    state = one.play(method, [1], state=state, first=2)
    after = expected.copy()
    after[1, 1] = expected[1, 1] / 2 + 1 / 2  # the only participant has the whole reward
    assert close(state.interaction_SS, after, 2e-5)
    assert state.change_K[0] == pytest.approx(v / 2 + (after[1, 1] - expected[1, 1]) ** 2 / 2, rel=1e-5)


def test_rewards_of_clients_with_few_steps_are_of_these():
    loss_mS, sizes = np.array([[1.0, 3.0], [2.0, 5.0], [4.0, np.nan]]), np.array([3, 1, 2])
    found = rewards(loss_mS, sizes)
    first = reward_of(loss_mS[:, :1], [3, 1, 2])
    second = reward_of(loss_mS[:2, 1:], [3, 1])
    assert np.allclose(found, [(first[0] + second[0]) / 2, (first[1] + second[1]) / 2, first[2]])


def test_a_settled_cluster_splits_and_its_clients_go_on_from_its_model():
    one, method = groups(), FedGWC(epsilon=10.0)
    state = one.play(method, [0, 1, 2, 3])
    group = np.arange(8) % 2
    interaction = (group[:, None] == group) + 0.05 * np.random.default_rng(1).random((8, 8))
    state = replace(
        state, seen_S=np.arange(8), interaction_SS=interaction, patient_K=np.array([1]), change_K=np.array([0.5])
    )
    after = one.play(method, [0, 1, 4, 5], state=state, first=2)
    assert agreement(group, after.assign_N)["ari"] == 1 and after.assign_N[0] == 0
    assert torch.equal(after.models_KP[0], after.models_KP[1])
    (event,) = one.stats.events
    assert (event.event, event.cluster, event.into) == ("split", 0, (0, 1)) and event.because["davies_bouldin"] < 1
    assert after.open_K.tolist() == [False, False]  # 4 clients, as many as take part in a round
    assert after.change_K.tolist() == [1, 1] and after.patient_K.tolist() == [0, 0]
    left = method.leave(after, np.array([1, 2]))
    assert left.interaction_SS.shape == (6, 6) and left.seen_S.tolist() == [0, 3, 4, 5, 6, 7]
    rows = [groups().play(FedAvg(), *[[client]] * 3).models_KP for client in (0, 1)]  # of either group
    left = left.advance(models_KP=torch.cat(rows))
    joined = method.join(left, one.clients([1, 2], round=3))
    assert joined.assign_N[[1, 2]].tolist() == [1, 0], "the cluster with the least loss"
    assert method.serve(joined, one.clients([1, 2, 0])).row_M.tolist() == [1, 0, 0]


def test_groups_that_disagree_are_found_from_the_losses_of_small_cohorts():
    """Of three clients two are of a group, and their losses nearer to the mean: both have more of the reward."""
    one, method = groups(federation=planted(12), lr=1.0), FedGWC(steps_sent=1, epsilon=7e-4, gamma=1.0, most_parts=2)
    state, draw, group = method.init(one.start()), np.random.default_rng(0), np.arange(12) % 2
    for round in range(1, 301):
        cohort = np.sort(draw.choice(12, 3, replace=False))
        state = one.play(method, cohort, state=state, first=round)
        if state.num_clusters > 1:
            break
    (event,) = one.stats.events
    assert event.event == "split" and event.because["v"] < 7e-4 and event.because["davies_bouldin"] < 1
    assert agreement(group, state.assign_N)["ari"] == 1


def test_with_all_clients_no_cluster_splits():
    state = groups().play(FedGWC(epsilon=10.0), *[None] * 4)
    assert state.num_clusters == 1
