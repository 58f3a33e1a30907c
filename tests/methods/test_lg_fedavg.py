"""LG-FedAvg: private lower and shared upper layers by the formulas. test_fedper.py has what it shares with FedPer."""

import pytest
from closeness import close
from federations import Stage, planted, uneven
from linear import HIDDEN, assert_layers, deep_sgd, deep_stage, layers, mean
from rounds import accuracy, floats, groups, row_accuracy
from torch import nn

from cfl_ray.methods.lg_fedavg import LGFedAvg
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
        assert close(one.client_states["base", client].reshape(HIDDEN, 5), second[client][0], 1e-5)


def test_a_late_client_starts_from_the_first_lower_layers():
    one = deep_stage()
    a0, b0 = layers(one.model())
    one.play(LGFedAvg(), [0], [1])
    _, b1 = deep_sgd(one, 0, a0, b0)
    expected = deep_sgd(one, 1, a0, b1)[0]
    assert close(one.client_states["base", 1].reshape(HIDDEN, 5), expected, 1e-5)


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


def test_lenet_5_shares_the_last_two_layers():
    """FedClust's setting: 11,014 floats."""
    one = Stage(uneven([4, 4], (3, 32, 32), classes=10), lambda: lenet5((3, 32, 32), 10))
    one.play(LGFedAvg(), None)
    assert floats(one) == (2 * 11_014, 2 * 11_014)


def test_every_client_is_served_its_lower_layers_under_the_shared_ones():
    one, method = groups(), LGFedAvg()
    state = one.play(method, [0, 1], [1])
    base, expected = one.network.spec.base, []
    for client in (0, 7):
        row_P = state.models_KP[0].clone()
        base.put(row_P, one.client_states.get(("base", client), base.of(one.model())))
        expected.append(row_accuracy(one, row_P, client))
    assert accuracy(one, method, state, [0, 7]) == pytest.approx(expected)
