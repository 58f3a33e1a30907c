"""FedDrift: drift, new models, merging and the union of past data by the formulas, on concepts that are known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, planted
from rounds import EnginesAndCheckpoints, accuracy, assert_equal, floats, groups
from torch import nn

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.data.synthetic import ConceptFederation
from cfl_ray.methods.feddrift import FedDrift

# concept of ten clients in the first time steps: A.cp of microsoft/FedDrift (e4ac32f)
CHANGE_POINTS = [
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 1, 0, 0, 0, 0, 0, 1, 0, 0],
    [0, 1, 1, 1, 0, 1, 0, 1, 0, 0],
]
TOGETHER = [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]  # two clients drift in one step
ROUNDS = 6  # of a time step


def concepts(name: str, points: list[list[int]], samples: int = 200) -> ChangingFederation:
    """Clients with new data of these concepts in every time step: those of further clients, who are never online."""
    clients, kinds = len(points[0]), len(SOURCE_KINDS.builtin[name].load().rules)
    first = clients + -clients % kinds  # of the further clients; client i has concept i mod `kinds`
    changes = []
    for step, row in enumerate(points):
        donors = [first + kinds * (step * clients + client) + concept for client, concept in enumerate(row)]
        changes.append(DataChange(1 + step * ROUNDS, tuple(range(clients)), data_of=tuple(donors)))
    return ChangingFederation(
        ConceptFederation(first + kinds * len(points) * clients, name=name, samples=samples), changes
    )


def stage(federation: ChangingFederation, hidden: int = 8, steps: int = 10, lr: float = 0.2) -> Stage:
    inputs = federation.shape.input[0]
    local = LocalSGD(steps=steps, lr=lr, batch_size=100, momentum=0.9)
    return Stage(federation, lambda: nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 2)), local)


def steps(one: Stage, method: FedDrift, points: list[list[int]], rounds: int = ROUNDS):
    """The state after each time step."""
    state, ids = None, list(range(len(points[0])))
    for step in range(len(points)):
        state = one.play(method, *[ids] * rounds, state=state, first=1 + step * ROUNDS)
        yield state


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["sine", "circle"])
def test_concepts_are_recovered_with_change_points_of_the_official_code(name, eager):
    """With the delta of the paper. In the concepts of CIRCLE 93 and 80 % of the points have label 1: more training."""
    one = stage(concepts("sine", CHANGE_POINTS))
    if name == "circle":
        one = stage(concepts("circle", CHANGE_POINTS, samples=300), hidden=16, steps=30, lr=0.5)
    method = FedDrift(eager=eager, delta={"sine": 0.2, "circle": 0.1}[name], step_rounds=ROUNDS)
    for state, row in zip(steps(one, method, CHANGE_POINTS), CHANGE_POINTS, strict=True):
        assert state.assign_N[:10].tolist() == row and state.num_clusters == 1 + max(row)
        assert (state.model_TN[-1, :10] == np.array(row) + 1).all()
        one_round = one.clients(range(10), round=int(state.round_T[-1]))
        assert one_round.losses(one_round.broadcast(state.models_KP), errors=True)[range(10), row].max() < 0.15


def test_a_model_is_trained_on_all_data_that_were_given_to_it():
    """Of two steps of the same model: as FedAvg on the union; a client whose data of a step went elsewhere has less."""
    one = stage(concepts("sine", CHANGE_POINTS[:2]))
    method = FedDrift(delta=0.2, step_rounds=ROUNDS)
    (*_, state) = steps(one, method, CHANGE_POINTS[:2])
    clients = one.clients(range(10), round=2 * ROUNDS)
    first, second = (method.with_data_of(state, clients, k) for k in (0, 1))
    assert first.num_samples_M.tolist() == [400, 200] + [400] * 8 and first.ids_M.tolist() == list(range(10))
    assert first.replay.rounds_M[:2] == ((6, 12), (6,))
    assert second.ids_M.tolist() == [1] and second.num_samples_M.tolist() == [200]


def test_models_of_clients_that_drift_alike_merge_after_a_step():
    one, method = stage(concepts("sine", TOGETHER)), FedDrift(delta=0.5, step_rounds=ROUNDS)
    played = steps(one, method, TOGETHER)
    next(played)
    apart = next(played)
    assert apart.assign_N[:4].tolist() == [1, 2, 0, 0] and apart.born_K.tolist() == [0, 1, 1]
    # d(a, b) = max(L(a; D_b) - L(b; D_b), L(b; D_a) - L(a; D_a), 0)
    clients, loss = one.clients(range(4), round=2 * ROUNDS + 1), {}
    for b in (1, 2):
        own = method.with_data_of(apart, clients, b)
        for a in (1, 2):
            loss[a, b] = own.losses(own.known_models(apart.models_KP[a : a + 1]), errors=True).item()
    distance = max(loss[1, 2] - loss[2, 2], loss[2, 1] - loss[1, 1], 0)
    merged = method.merge(apart, clients)
    (event,) = one.stats.events
    assert (event.event, event.cluster, event.into) == ("merge", 2, (1,))
    assert event.because["distance"] == pytest.approx(distance) and distance < 0.5
    mean = (apart.models_KP[1] + apart.models_KP[2]) / 2  # a pair (client, step) each
    assert close(merged.models_KP[1], mean, 1e-6) and torch.equal(merged.models_KP[0], apart.models_KP[0])
    assert merged.assign_N[:4].tolist() == [1, 1, 0, 0] and merged.model_TN[:, :4].tolist() == [[1] * 4, [2, 2, 1, 1]]
    after = next(played)
    assert after.num_clusters == 2 and after.assign_N[:4].tolist() == [1, 1, 0, 0]
    strict = replace(method, delta=0.0).merge(apart, clients)
    assert_equal(strict, apart)


def test_concepts_that_differ_from_the_start_are_found_if_each_client_has_a_first_model():
    """Models of clients of a concept merge after the first step; with one first model there is no drift to find."""
    points = [[0, 1, 0, 1]] * 2
    one = stage(concepts("sine", points))
    method = FedDrift(delta=0.2, step_rounds=ROUNDS, first_models="each")
    apart, state = steps(one, method, points)
    assert apart.assign_N[:4].tolist() == [0, 1, 2, 3] and apart.model_TN[0, :4].tolist() == [1, 2, 3, 4]
    assert len({tuple(row) for row in apart.models_KP.tolist()}) == 4
    assert state.assign_N[:4].tolist() == [0, 1, 0, 1] and state.num_clusters == 2
    (*_, single) = steps(stage(concepts("sine", points)), replace(method, first_models="one"), points)
    assert single.num_clusters == 1
    first = one.play(method, [1, 3])
    (event,) = one.stats.events
    assert (event.event, event.into) == ("birth", (0, 1)) and first.assign_N[:4].tolist() == [-1, 0, -1, 1]
    later = one.play(method, [0, 2, 3], state=first, first=2)
    assert later.num_clusters == 2 and (later.assign_N[:4] >= 0).all(), "others take the best model"


def test_without_a_limit_only_models_that_are_compared_merge():
    method, one = FedDrift(first_models="each", delta=np.inf, step_rounds=1), groups()
    state = one.play(method, [0, 1, 2, 3], [0, 1])
    assert state.num_clusters == 3 and state.assign_N[[2, 3]].tolist() == [1, 2]


def test_more_clients_than_models_share_their_first_models_and_eager_cannot_have_them():
    with pytest.raises(ValueError, match="first_models must be one with eager"):
        FedDrift(first_models="each", eager=True)
    method, one = FedDrift(first_models="each", max_models=3), groups()
    assert one.play(method, None).assign_N.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert "the 8 clients of a round share 3 first models" in method.warning(20, 8) and not method.warning(20, 3)
    assert not FedDrift().warning(100, 100)


@pytest.mark.parametrize("now, before, delta", [(0.3, 0.2, 0.1), (0.8, 0.7, 0.1), (0.35, 0.1, 0.25)])
def test_a_difference_of_delta_is_no_drift_and_does_not_merge(now, before, delta, monkeypatch):
    """Shares of wrong predictions are rounded to float32, so that their difference may be above or below delta."""
    one, method = groups(), FedDrift(delta=delta)
    now, before = float(np.float32(now)), float(np.float32(before))
    monkeypatch.setattr(FedDrift, "losses", lambda self, clients, models_KP: np.full((len(clients), 1), now))
    monkeypatch.setattr(FedDrift, "losses_before", lambda self, state, clients: np.full(len(clients), before))
    ids = np.arange(8)
    state = method.init(one.start()).begun().given(ids, 0)
    assert method.compare(state.begun(), one.clients(round=2)).num_clusters == 1
    pair = state.with_model(state.models_KP, 2)[0].given(ids[4:], 1)
    table_NK = np.where(ids[:, None] // 4 == [0, 1], before, now)
    monkeypatch.setattr(FedDrift, "losses", lambda self, clients, models_KP: table_NK[clients.ids_M])
    assert method.merge(pair, one.clients(round=2)).num_clusters == 2


def test_merged_models_are_weighed_by_pairs_of_client_and_step():
    state = FedDrift().init(groups().start()).begun().begun()
    state = state.advance(
        models_KP=torch.tensor([[0.0], [1.0], [5.0], [9.0]]),
        model_TN=np.array([[1, 2, 2, 2], [2, 4, 0, 3]], np.int32),
        assign_N=np.array([1, 3, -1, 2], np.int32),
        used_K=np.array([0, 1, 1, 1]),
        born_K=np.array([0, 0, 1, 1]),
    )
    merged = state.merged(np.array([0, 1, 0, 1]))
    assert merged.models_KP.tolist() == pytest.approx(np.array([[(0 * 1 + 5 * 1) / 2], [(1 * 4 + 9 * 1) / 5]]))
    assert merged.assign_N.tolist() == [1, 1, -1, 0] and merged.model_TN.tolist() == [[1, 2, 2, 2], [2, 2, 0, 1]]
    assert merged.used_K.tolist() == [1, 1] and merged.born_K.tolist() == [0, 0]


def test_eager_clients_that_drift_in_a_step_share_a_model_also_in_different_rounds():
    one, method = stage(concepts("sine", TOGETHER)), FedDrift(eager=True, delta=0.2, step_rounds=ROUNDS)
    state = next(steps(one, method, TOGETHER))
    state = one.play(method, [0, 2], [1, 3], state=state, first=ROUNDS + 1)
    assert state.num_clusters == 2 and state.assign_N[:4].tolist() == [1, 1, 0, 0]


def test_a_full_pool_drops_the_model_that_is_longest_out_of_use():
    method = FedDrift(max_models=3)
    state = method.init(groups().start()).begun()
    state = state.given(np.arange(4), 0)
    row_1P = torch.full_like(state.models_KP, 7.0)
    for _ in range(2):
        state = state.begun()
        state, k = state.with_model(row_1P, 3)
        state = state.given(np.array([4, 5]), k).given(np.array([0]), 0)
    state = state.begun().given(np.array([0]), 0).given(np.array([4]), 2)  # model 1 was used last in step 1
    after, k = state.with_model(2 * row_1P, 3)
    assert k == 1 and after.num_clusters == 3 and (after.models_KP[1] == 14).all()
    assert (after.model_TN == 2).sum() == 0 and (state.model_TN == 2).sum() == 2
    again, none = after.given(np.array([6]), 1).with_model(row_1P, 3)
    assert none == -1 and again.num_clusters == 3


def test_clients_that_drift_copy_a_model_that_others_have_just_replaced(monkeypatch):
    """Client 0 copies model 1 in the place of model 0, which is the best for client 1."""
    one, method = groups(), FedDrift(max_models=2, step_rounds=1, delta=0.5)
    state, rows_KP = method.init(one.start()).begun(), torch.stack([one.model(0), one.model(1)])
    state = state.advance(models_KP=rows_KP, used_K=np.zeros(2, int), born_K=np.zeros(2, int))
    state = state.given(np.arange(2), [0, 1]).begun()
    monkeypatch.setattr(FedDrift, "losses", lambda *_: np.array([[2.0, 1.0], [1.0, 2.0], [1.0, 2.0]]))
    monkeypatch.setattr(FedDrift, "losses_before", lambda *_: np.zeros(3))
    after = method.compare(state, one.clients([0, 1, 2]))
    assert torch.equal(after.models_KP, rows_KP.flip(0))
    assert after.assign_N[:3].tolist() == [0, 1, 0]  # client 2: both are in use, and none is the one that it compared


def test_a_full_pool_keeps_the_models_of_clients_outside_the_cohort(monkeypatch):
    """Client 1 drifts: it takes the best model, or the place of model 0 if client 0, which has that, has left."""
    one, method = groups(), FedDrift(max_models=2, step_rounds=1, delta=0.5)
    state, rows_KP = method.init(one.start()).begun(), torch.stack([one.model(0), one.model(1)])
    state = state.advance(models_KP=rows_KP, used_K=np.zeros(2, int), born_K=np.zeros(2, int))
    state = state.given(np.arange(4), [0, 1, 1, 1]).begun()
    monkeypatch.setattr(FedDrift, "losses", lambda *_: np.array([[2.0, 1.0]]))
    monkeypatch.setattr(FedDrift, "losses_before", lambda *_: np.zeros(1))
    after = method.compare(state, one.clients([1]))
    assert torch.equal(after.models_KP, rows_KP) and after.assign_N[:4].tolist() == [0, 1, 1, 1]
    after = method.compare(method.leave(state, np.array([0])), one.clients([1]))
    assert torch.equal(after.models_KP, rows_KP[[1, 1]]) and after.assign_N[:4].tolist() == [-1, 0, 1, 1]


def test_the_pool_stays_bounded_whatever_drifts():
    """Before every round each client swaps two labels, in another way than the others."""
    draw = np.random.default_rng(0)
    swaps = [(step, client, draw.permutation(4)[:2]) for step in range(2, 7) for client in range(8)]
    changes = [DataChange(step, (client,), swap=tuple(pair.tolist())) for step, client, pair in swaps]
    one, found = groups(federation=ChangingFederation(planted(), changes)), []
    method, state = FedDrift(max_models=4, delta=0.02, step_rounds=1, criterion="loss"), None
    for number in range(1, 7):
        state = one.play(method, None, state=state, first=number)
        found.append(state.num_clusters)
        assert (state.assign_N >= 0).all() and state.model_TN.max() <= state.num_clusters
    assert max(found) == 4


def test_clients_compare_the_pool_in_blocks_with_the_same_result():
    states, traffic = [], []
    for block in (1, 10):
        one = stage(concepts("sine", TOGETHER))
        one.local = replace(one.local, batch_size=None, lr=1.0)  # draws of batches depend on the number of exchanges
        method = FedDrift(delta=0.2, step_rounds=ROUNDS, block=block)
        (*_, state) = steps(one, method, TOGETHER, rounds=3)
        assert state.num_clusters > 1
        states.append(state)
        traffic.append(floats(one))
    assert_equal(*states)
    assert traffic[0] == traffic[1]


def test_a_reported_change_begins_a_step_and_newcomers_take_the_best_model():
    one, method = stage(concepts("sine", TOGETHER)), FedDrift(eager=True, delta=0.2)
    state = one.play(method, *[[0, 1, 2]] * ROUNDS)
    assert state.step == 0
    state = method.drift(state, one.clients([0], ROUNDS + 1))
    state = one.play(method, *[[0, 1, 2]] * ROUNDS, state=state, first=ROUNDS + 1)
    assert state.step == 1 and state.assign_N[:4].tolist() == [1, 1, 0, -1]
    last = one.clients([3], round=2 * ROUNDS)
    assert method.join(state, last).assign_N[3] == 0
    left = method.leave(state, np.array([0, 1]))
    assert left.assign_N[:4].tolist() == [-1, -1, 0, -1] and not left.model_TN[:, :2].any()
    assert method.serve(state, last).row_M.tolist() == [2]  # the mean, until it has a model
    ids = [0, 1, 2]
    federation = one.federation
    one.federation = federation.at(2 * ROUNDS)
    assert accuracy(one, method, state, ids).min() > 0.85


class TestEngines(EnginesAndCheckpoints):
    METHOD = FedDrift(step_rounds=1, delta=0.05, criterion="loss")
