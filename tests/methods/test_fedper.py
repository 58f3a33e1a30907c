"""FedPer and FedRep: base and private head by the formulas, reductions to FedAvg and local training, client state."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from linear import HIDDEN, STEPS, assert_layers, deep_sgd, deep_stage, layers, mean
from rounds import (
    COHORTS,
    OPPOSED_COHORTS,
    accuracy,
    assert_serves_groups_that_disagree,
    floats,
    groups,
    row_accuracy,
)

from cfl_ray.errors import ConfigError
from cfl_ray.methods.fedper import FedPer
from cfl_ray.methods.fedrep import FedRep
from cfl_ray.methods.lg_fedavg import LGFedAvg
from cfl_ray.methods.local import Local

BASE, HEAD = 16 * 16 + 16, 16 * 4 + 4
both = pytest.mark.parametrize("cls", [FedPer, FedRep])
every = pytest.mark.parametrize("cls, name", [(FedPer, "head"), (FedRep, "head"), (LGFedAvg, "base")])


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_bases_are_averaged_and_heads_stay(weights):
    """(phi_i, h_i) jointly, each from the averaged phi and the client's own h_i; the server's head never changes."""
    one = deep_stage()
    a0, b0 = layers(one.model())
    state = one.play(FedPer(weights=weights), None)
    first = [deep_sgd(one, client, a0, b0) for client in (0, 1)]
    a1 = mean(first[0][0], first[1][0], weights)
    assert_layers(state.models_KP[0], a1, b0)
    state = one.play(FedPer(weights=weights), None, state=state, first=2)
    second = [deep_sgd(one, client, a1, first[client][1]) for client in (0, 1)]
    assert_layers(state.models_KP[0], mean(second[0][0], second[1][0], weights), b0)
    for client in (0, 1):
        assert close(one.client_states["head", client].reshape(3, HIDDEN), second[client][1], 1e-5)


def test_a_late_client_starts_from_the_first_head():
    one = deep_stage()
    a0, b0 = layers(one.model())
    one.play(FedPer(), [0], [1])
    a1, _ = deep_sgd(one, 0, a0, b0, STEPS)
    expected = deep_sgd(one, 1, a1, b0)[1]
    assert close(one.client_states["head", 1].reshape(3, HIDDEN), expected, 1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_fedrep_trains_the_head_then_the_base(weights, decay):
    """h_i in 3 epochs with phi fixed; then phi_i with the new h_i fixed, from the averaged phi. The rest stays."""
    one, method = deep_stage(weight_decay=decay), FedRep(head_epochs=3, weights=weights)
    a, b0 = layers(one.model())
    heads, state = [b0, b0], None
    for number in (1, 2):
        heads = [deep_sgd(one, client, a, heads[client], 3, "b", decay)[1] for client in (0, 1)]
        a = mean(*(deep_sgd(one, client, a, heads[client], STEPS, "a", decay)[0] for client in (0, 1)), weights)
        state = one.play(method, None, state=state, first=number)
        assert_layers(state.models_KP[0], a, b0)
        for client in (0, 1):
            found = one.client_states["head", client].reshape(3, HIDDEN)
            assert close(found, heads[client], 1e-5)


def test_a_newcomer_of_fedrep_trains_a_head_on_the_fixed_representation():
    """h_i in 3 epochs from the first head, with the averaged phi; it uploads nothing, and has trained (P-local)."""
    one, method = deep_stage(), FedRep(head_epochs=3)
    b0 = layers(one.model())[1]
    state = one.play(method, [0])
    newcomer = replace(one.clients([1], round=2), local_test_samples=50)
    assert method.join(state, newcomer) is state
    found = one.client_states["head", 1].reshape(3, HIDDEN)
    expected = deep_sgd(one, 1, layers(state.models_KP[0])[0], b0, 3, "b")[1]
    assert close(found, expected, 1e-5) and not close(found, b0, 1e-3)
    phi = method.shared_columns(one.network.spec).of(state.models_KP[0])
    assert floats(one) == (len(phi), 0)
    held_P = state.models_KP[0].clone()
    one.network.spec.head.put(held_P, one.client_states["head", 1])
    assert one.stats.local_scores[1][0] == pytest.approx(row_accuracy(one, held_P, 1))


@pytest.mark.parametrize("method, name", [(FedPer(private_layers=2), "head"), (LGFedAvg(private_layers=9), "base")])
def test_with_all_layers_private_it_is_local_bit_for_bit(method, name):
    one, other = groups(batch_size=30), groups(batch_size=30)
    state = one.play(method, *COHORTS)
    other.play(Local(), *COHORTS)
    assert torch.equal(state.models_KP[0], one.model()) and floats(one) == (0, 0)
    for client in range(8):
        assert torch.equal(one.client_states[name, client], other.client_states["personal", client])


@every
@pytest.mark.parametrize("cohorts", OPPOSED_COHORTS)
def test_private_layers_serve_groups_that_disagree(cohorts, cls, name):
    assert_serves_groups_that_disagree(cls(), cohorts, 0.8 if name == "head" else 0.75)


@both
def test_a_client_that_never_took_part_has_the_base_and_the_first_head(cls):
    one, method = groups(), cls()
    state = one.play(method, [0, 1])
    serving = method.serve(state, one.clients())
    assert serving.row_M.tolist() == [0] * 8 and serving.client_state.name == "head"
    assert sorted(one.client_states) == [("head", 0), ("head", 1)]
    head = one.network.spec.head
    assert torch.equal(head.of(state.models_KP[0]), head.of(one.model()))
    personal = state.models_KP[0].clone()
    head.put(personal, one.client_states["head", 1])
    expected = [row_accuracy(one, row_P, client) for client, row_P in ((1, personal), (7, state.models_KP[0]))]
    assert accuracy(one, method, state, [1, 7]) == pytest.approx(expected)


@pytest.mark.parametrize("cls, name", [(FedPer, "head"), (LGFedAvg, "base")])
def test_a_client_that_left_and_returns_begins_with_the_first_private_layers(cls, name):
    one, method, fresh = groups(), cls(), groups()
    state = one.play(method, None)
    one.backend.forget(np.array([0]))
    state = method.join(method.leave(state, np.array([0])), one.clients([0], 2))
    assert floats(one) == (0, 0) and (name, 0) not in one.client_states and len(one.client_states) == 7
    if cls is FedPer:  # LG-FedAvg serves the first lower layers under the shared ones
        assert accuracy(one, method, state, [0]) == pytest.approx([row_accuracy(one, state.models_KP[0], 0)])
    one.play(method, [0], state=state, first=2)
    fresh.play(method, [0], state=state, first=2)
    assert torch.equal(one.client_states[name, 0], fresh.client_states[name, 0])


def test_private_parameters_by_name_are_those_of_the_layer():
    """The last layer by its number and by its name: the same models to the last bit."""
    states = []
    for options in ({}, {"private": [deep_stage().network.spec.layers[-1] + "."]}):
        one = deep_stage()
        states.append(one.play(FedPer(**options), None, None))
    assert torch.equal(states[0].models_KP, states[1].models_KP)
    with pytest.raises(ConfigError, match="fedper.private: no parameter starts with 'lora_'; the model has"):
        FedPer(private=["lora_"]).check_model(one.network.spec)
    with pytest.raises(ValueError, match="fedper.private: Input should be a valid string, got 1"):
        FedPer(private=1)
