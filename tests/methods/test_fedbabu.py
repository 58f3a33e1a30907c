"""FedBABU: bodies under a fixed head by the formulas, the fine-tuned model, and its head that nothing changes."""

import numpy as np
import pytest
import torch
from federations import Stage, linear, planted
from linear import ETA, STEPS, assert_layers, deep_sgd, deep_stage, layers, mean
from rounds import EnginesAndCheckpoints, accuracy, groups

from cfl_ray.errors import ConfigError
from cfl_ray.methods.fedbabu import FedBABU


@pytest.mark.parametrize("decay, weights", [(0.0, "uniform"), (0.3, "samples")])
def test_bodies_are_averaged_under_the_first_head(decay, weights):
    """Three rounds of phi_i alone, full batch: the head is that of w_0 to the last bit, also with weight decay."""
    one, method, state = deep_stage(weight_decay=decay), FedBABU(weights=weights), None
    a, b0 = layers(one.model())
    for number in (1, 2, 3):
        a = mean(*(deep_sgd(one, client, a, b0, STEPS, "a", decay)[0] for client in (0, 1)), weights)
        state = one.play(method, None, state=state, first=number)
        assert_layers(state.models_KP[0], a, b0)
    head = one.network.spec.head
    assert torch.equal(head.of(state.models_KP[0]), head.of(one.model()))
    assert all(torch.equal(value, head.of(one.model())) for value in one.client_states.values())


def test_clients_predict_after_fine_tuning_of_both_layers():
    """3 steps from (phi, h^0) at the learning rate of the option, as deep_sgd makes them, scored by NumPy."""
    one, method = deep_stage(), FedBABU(tune_epochs=3, tune_lr=ETA)
    state = one.play(method, None, None)
    expected = []
    for client in (0, 1):
        a, b = deep_sgd(one, client, *layers(state.models_KP[0]), 3)
        x, y = one.federation.test(client)
        expected.append(((x.double().numpy() @ a.T @ b.T).argmax(1) == y.numpy()).mean())
    assert np.allclose(accuracy(one, method, state), expected)
    tune = method.serve(state, one.clients()).tune
    assert (tune.epochs, tune.steps, tune.lr) == (3, None, ETA)
    assert FedBABU(tune_lr=None).serve(state, one.clients()).tune.lr == one.local.lr


def test_fine_tuning_personalises_what_a_shared_model_cannot():
    """Two groups disagree about every label, so that without fine-tuning half of the labels are right."""
    found = {}
    for epochs in (0, 10):
        one, method = groups(epochs=5, lr=0.5, batch_size=40), FedBABU(tune_epochs=epochs, tune_lr=0.5)
        found[epochs] = accuracy(one, method, one.play(method, *[None] * 4))
    assert found[0].mean() < 0.55 and found[10].min() > 0.8


def test_a_newcomer_fine_tunes_the_body_of_the_others():
    one, method = groups(), FedBABU(tune_lr=0.5)
    state = one.play(method, [0, 1, 2])
    assert method.join(state, one.clients([5], round=2)) is state
    assert accuracy(one, method, state, [5])[0] > accuracy(one, FedBABU(tune_epochs=0), state, [5])[0]


def test_a_model_of_one_layer_is_refused():
    spec = groups().network.spec
    FedBABU().check_model(spec)
    with pytest.raises(ConfigError, match="fedbabu trains all layers but the last, and the model has a single layer"):
        FedBABU().check_model(Stage(planted(), linear).network.spec)


class TestAll(EnginesAndCheckpoints):
    METHOD = FedBABU()
