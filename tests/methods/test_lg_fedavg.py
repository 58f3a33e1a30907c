"""LG-FedAvg: private lower and shared upper layers by the formulas, its reductions, and the client state."""

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, planted, uneven
from linear import HIDDEN, assert_layers, deep_sgd, deep_stage, layers, mean
from rounds import (
    COHORTS,
    OPPOSED_COHORTS,
    accuracy,
    assert_serves_groups_that_disagree,
    floats,
    groups,
    mlp,
    row_accuracy,
)
from torch import nn

from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.lg_fedavg import LGFedAvg
from cfl_ray.methods.local import Local
from cfl_ray.models.cnn import lenet5

BASE, HEAD = 16 * 16 + 16, 16 * 4 + 4


def four_layers() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 7),
        nn.ReLU(),
        nn.Linear(7, 6),
        nn.ReLU(),
        nn.Linear(6, 4),
    )


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_upper_layers_are_averaged_and_lower_ones_stay(weights):
    """(l_i, g_i) jointly, from the client's own l_i and the averaged g; the server's lower layers never change."""
    one = deep_stage()
    a0, b0 = layers(one.model())
    state = one.play(LGFedAvg(weights=weights), None)
    first = [deep_sgd(one, client, a0, b0) for client in (0, 1)]
    b1 = mean(first[0][1], first[1][1], weights)
    assert_layers(state.models_KP[0], a0, b1)
    state = one.play(LGFedAvg(weights=weights), None, state=state, first=2)
    second = [deep_sgd(one, client, first[client][0], b1) for client in (0, 1)]
    assert_layers(state.models_KP[0], a0, mean(second[0][1], second[1][1], weights))
    for client in (0, 1):
        assert np.allclose(one.client_states["base", client].reshape(HIDDEN, 5), second[client][0], rtol=0, atol=1e-6)


def test_a_late_client_starts_from_the_first_lower_layers():
    one = deep_stage()
    a0, b0 = layers(one.model())
    one.play(LGFedAvg(), [0], [1])
    _, b1 = deep_sgd(one, 0, a0, b0)
    expected = deep_sgd(one, 1, a0, b1)[0]
    assert np.allclose(one.client_states["base", 1].reshape(HIDDEN, 5), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("local", [{"batch_size": 30, "momentum": 0.9}, {}], ids=["mini-batches", "full batch"])
def test_without_private_layers_it_is_fedavg_bit_for_bit(local):
    one, other = groups(**local), groups(**local)
    found, expected = one.play(LGFedAvg(private_layers=0), *COHORTS), other.play(FedAvg(), *COHORTS)
    assert torch.equal(found.models_KP, expected.models_KP) and one.client_states == {} and floats(one) == floats(other)


def test_with_all_layers_private_it_is_local_bit_for_bit():
    one, other = groups(batch_size=30), groups(batch_size=30)
    state = one.play(LGFedAvg(private_layers=9), *COHORTS)
    other.play(Local(), *COHORTS)
    assert torch.equal(state.models_KP[0], one.model()) and floats(one) == (0, 0)
    for client in range(8):
        assert torch.equal(one.client_states["base", client], other.client_states["personal", client])


LAYERS = [16 * 8 + 8, 8 * 7 + 7, 7 * 6 + 6, 6 * 4 + 4]


def test_traffic_is_the_shared_part_each_way():
    """By default two of the four layers are shared."""
    cases = [(None, sum(LAYERS[2:])), (0, sum(LAYERS)), (1, sum(LAYERS[1:])), (3, LAYERS[3]), (4, 0)]
    for private, shared in cases:
        one = Stage(planted(), four_layers)
        one.play(LGFedAvg(private_layers=private), [0, 1, 2])
        assert floats(one) == (3 * shared, 3 * shared), private
        kept = {len(value) for value in one.client_states.values()}
        assert kept == ({sum(LAYERS) - shared} if private != 0 else set()), private


def test_of_two_layers_one_is_shared():
    one = groups()
    one.play(LGFedAvg(), [0, 1, 2])
    assert floats(one) == (3 * HEAD, 3 * HEAD) and len(one.client_states["base", 0]) == BASE


def test_lenet_5_shares_the_last_two_layers():
    """FedClust's setting: 11,014 floats."""
    one = Stage(uneven([4, 4], (3, 32, 32), classes=10), lambda: lenet5((3, 32, 32), 10))
    one.play(LGFedAvg(), None)
    assert floats(one) == (2 * 11_014, 2 * 11_014)


@pytest.mark.parametrize("cohorts", OPPOSED_COHORTS)
def test_private_lower_layers_serve_groups_that_disagree(cohorts):
    assert_serves_groups_that_disagree(LGFedAvg(), cohorts, 0.75)


def test_every_client_is_served_its_lower_layers_under_the_shared_ones():
    one, method = groups(), LGFedAvg()
    state = one.play(method, [0, 1], [1])
    base, expected = one.network.spec.base, []
    for client in (0, 7):
        row_P = state.models_KP[0].clone()
        base.put(row_P, one.client_states.get(("base", client), base.of(one.model())))
        expected.append(row_accuracy(one, row_P, client))
    assert accuracy(one, method, state, [0, 7]) == pytest.approx(expected)


def test_a_client_that_left_and_returns_begins_with_the_first_lower_layers():
    one, method, fresh = groups(), LGFedAvg(), groups()
    state = one.play(method, None)
    one.backend.forget(np.array([0]))
    state = method.join(method.leave(state, np.array([0])), one.clients([0], 2))
    assert floats(one) == (0, 0)
    one.play(method, [0], state=state, first=2)
    fresh.play(method, [0], state=state, first=2)
    assert torch.equal(one.client_states["base", 0], fresh.client_states["base", 0])


def test_a_rejected_client_keeps_no_layers():
    one = Stage(Spoiled([4, 5]), mlp)
    state = one.play(LGFedAvg(), [3, 4], [4, 5])
    assert one.client_states.keys() == {("base", 3)} and not state.models_KP.isnan().any()
