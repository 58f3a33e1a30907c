"""Earlier versions of models: their past through averages, copies and moves, and the formulas of stale updates."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, linear, planted

from cfl_ray.core.clients import LocalTraining
from cfl_ray.core.state import State
from cfl_ray.core.versions import NotAsynchronous, Received, Versions
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.ifca import IFCA


def state(*rows: float) -> State:
    return State(models_KP=torch.tensor([[float(row)] * 3 for row in rows]), assign_N=np.zeros(4, np.int32))


def sent(versions: Versions, models_KP: torch.Tensor, version: int) -> list[float]:
    found = versions.sent(models_KP, np.array([version]))
    return models_KP[:, 0].tolist() if found is None else found[0][found[1][0], 0].tolist()


class TestPast:
    def test_of_an_average_is_that_of_the_model_that_it_moved(self):
        versions = Versions()
        for step in range(3):
            before, after = state(step, 10 + step), state(step + 1, 11 + step)
            versions.follow(before.models_KP, after.models_KP)
            versions.advance(step, before, after, {0, 1, 2})
        assert [sent(versions, after.models_KP, version) for version in range(4)] == [
            [0, 10],
            [1, 11],
            [2, 12],
            [3, 13],
        ]

    def test_follows_models_that_change_places_and_copies(self):
        versions, before = Versions(), state(1, 2, 3)
        moved = torch.tensor([[4.0] * 3, [5.0] * 3, [6.0] * 3])
        versions.follow(before.models_KP, moved)
        after = state(6, 4, 4)  # the second is gone, and the first one's model has been copied
        versions.advance(0, before, after, {0})
        assert sent(versions, after.models_KP, 0) == [3, 1, 1]

    def test_is_that_of_the_same_row_if_a_method_computes_on(self):
        versions, before = Versions(), state(1, 2)
        versions.follow(before.models_KP, before.models_KP + 5)
        after = state(6.5, 7.5)
        versions.advance(0, before, after, {0})
        assert sent(versions, after.models_KP, 0) == [1, 2]

    def test_of_a_new_model_is_itself(self):
        versions, before, after = Versions(), state(1, 2), state(1, 2, 9)
        versions.advance(0, before, after, {0})
        assert sent(versions, after.models_KP, 0) == [1, 2, 9]
        versions.strict = True
        with pytest.raises(NotAsynchronous, match="computes within the round"):
            sent(versions, after.models_KP, 0)

    def test_versions_that_no_client_has_are_dropped(self):
        versions, rows = Versions(), [state(k) for k in range(4)]
        versions.advance(0, rows[0], rows[1], {0})
        versions.advance(1, rows[1], rows[2], {1})
        versions.advance(2, rows[2], rows[3], {1})
        assert versions.past.keys() == {1}

    def test_survives_a_checkpoint(self):
        versions, before, after = Versions(), state(1, 2), state(3, 4)
        versions.advance(0, before, after, {0})
        again = Versions.restored(versions.to_tensors())
        assert sent(again, after.models_KP, 0) == [1, 2]


def stage() -> Stage:
    return Stage(planted(4), linear)


def stale_round(method, weight_of=None, **settings):
    """The state after two rounds, then that after a third in which client 1 starts from the version before the present
    one; and W_i - w_i of clients 0 and 1, by FedAvg of each alone."""
    one, versions = stage(), Versions()
    first = method.init(one.start())
    second = one.play(method, None, state=first)
    versions.advance(0, first, second, {0})
    received = Received(versions, {1: 0}, 1, weight_of or {}, **settings)
    clients = one.clients([0, 1], 2)
    after = method.round(second, replace(clients, received=received), None)
    changes = [
        one.play(method, [client], state=start, first=2).models_KP - start.models_KP
        for client, start in ((0, second), (1, first))
    ]
    return first, second, after, changes


def test_a_model_moves_by_the_mean_of_changes_from_the_received_versions():
    """w + (D_0 + D_1) / 2, as both clients have as many samples; FedBuff without staleness weights."""
    _, second, after, (fresh, stale) = stale_round(FedAvg())
    assert close(after.models_KP, second.models_KP + (fresh + stale) / 2, 1e-5)


def test_staleness_reduces_the_step():
    """w + alpha (D_0 + s D_1) / 2: weights are not normalised again, so that a stale buffer moves less."""
    _, second, after, (fresh, stale) = stale_round(FedAvg(), {1: 0.25}, mixing=0.5)
    assert close(after.models_KP, second.models_KP + 0.5 * (fresh + 0.25 * stale) / 2, 1e-5)


def test_fedasync_mixes_models():
    """(1 - a) w + a (W_0 + s W_1) / (1 + s) with a = alpha (1 + s) / 2."""
    first, second, after, (fresh, stale) = stale_round(FedAvg(), {1: 0.5}, mixing=0.8, mix_models=True)
    w, a = second.models_KP, 0.8 * 1.5 / 2
    mean = (w + fresh + 0.5 * (first.models_KP + stale)) / 1.5
    assert close(after.models_KP, (1 - a) * w + a * mean, 1e-5)


@pytest.mark.parametrize("mixed", [False, True])
def test_staleness_counts_once_in_a_step_that_is_divided_by_all_clients(mixed):
    """theta_j + (s / m) (W_i - theta_j) with m = 2, where each client has chosen another model."""
    one, weight = stage(), {0: 0.25, 1: 1.0}
    models_KP = torch.cat([one.play(FedAvg(), [client], [client]).models_KP for client in (0, 1)])
    state = State(models_KP=models_KP, assign_N=np.full(4, -1, np.int32))
    clients = replace(one.clients([0, 1], 2), received=Received(Versions(), {}, 1, weight, mix_models=mixed))
    after = IFCA(num_clusters=2, average="gradients").round(state, clients, None)
    assert after.assign_N[:2].tolist() == [0, 1]
    for client in (0, 1):
        alone = one.play(IFCA(num_clusters=2, average="gradients"), [client], state=state, first=2).models_KP[client]
        expected = models_KP[client] + weight[client] / 2 * (alone - models_KP[client])
        assert close(after.models_KP[client], expected, 1e-6)


def test_clients_choose_among_the_models_of_their_version():
    """In version 0 the models are in the other order of their losses for client 1, so its choice differs."""
    one, versions, method = stage(), Versions(), IFCA(num_clusters=2)
    good = one.play(FedAvg(), None, None, None).models_KP
    first = State(models_KP=torch.cat([good, -good]), assign_N=np.full(4, -1, np.int32))
    second = first.advance(models_KP=torch.cat([-good * 1.001, good * 1.001]))
    versions.follow(first.models_KP, second.models_KP)
    versions.advance(0, first, second, {0})
    clients = one.clients([0, 1], 2)
    clients = replace(clients, received=Received(versions, {1: 0}, 1))
    received = clients.broadcast(second.models_KP)
    assert received.num_models == 2 and clients.losses(received).argmin(1).tolist() == [1, 0]
    assert clients.accuracies(received).argmax(1).tolist() == [1, 0]
    share_MK = clients.losses(received, errors=True)
    assert share_MK.argmin(1).tolist() == [1, 0] and share_MK.max() <= 1
    assert method.round(second, clients, None).assign_N[:2].tolist() == [1, 0]


def test_mixtures_and_chains_are_refused():
    one = stage()
    clients = one.clients([0, 1])
    clients = replace(clients, received=Received(Versions(), {}, 0))
    sent = clients.broadcast(one.model()[None])
    with pytest.raises(NotAsynchronous, match="mixture"):
        clients.train_mixture(sent, average=np.ones(2))
    with pytest.raises(NotAsynchronous, match="chained"):
        clients.train(sent.choose([0, 0]), how=LocalTraining(chained=True))
