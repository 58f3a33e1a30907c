"""FedAS: alignment, weights and models by the formulas, and its reduction to FedPer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, attack_of, planted, uneven
from linear import ETA, HIDDEN, N_0, N_1, assert_layers, data, deep_sgd, deep_stage, layers
from rounds import accuracy, floats, groups, row_accuracy
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.fedas import FedAS
from cfl_ray.methods.fedccfa import FedCCFA
from cfl_ray.methods.fedper import FedPer

LR = 0.05


def prototypes(one, client, a):
    """Mean features A x of each label; labels without samples are not used."""
    x, y = data(one, client)
    return {c: (x[y[:, c] == 1] @ a.T).mean(0) for c in range(3) if y[:, c].any()}


def aligned(one, client, a, own):
    """One full-batch step on sum_y mean over samples and features of (A x - c_y)^2."""
    x, y = data(one, client)
    step = np.zeros_like(a)
    for c, prototype in prototypes(one, client, own).items():
        x_c = x[y[:, c] == 1]
        step += 2 * (x_c @ a.T - prototype).T @ x_c / (len(x_c) * HIDDEN)
    return a - LR * step


def fisher(one, client, a, b):
    """Squared norm of the gradient of both layers, of the one batch."""
    (after_a, after_b) = deep_sgd(one, client, a, b, steps=1)
    return (((after_a - a) / ETA) ** 2).sum() + (((after_b - b) / ETA) ** 2).sum()


def test_two_rounds_follow_the_formulas():
    one, method = deep_stage(), FedAS(align_lr=LR)
    a, b = layers(one.model())
    own, state = [(a, b), (a, b)], None
    for number in (1, 2):
        for i in (0, 1):
            start = aligned(one, i, a, own[i][0])  # of the first round: to the prototypes of the received base
            own[i] = deep_sgd(one, i, start, own[i][1])
        weight = [fisher(one, i, *own[i]) for i in (0, 1)]
        a, b = (np.average([own[0][part], own[1][part]], axis=0, weights=weight) for part in (0, 1))
        state = one.play(method, None, state=state, first=number)
        assert_layers(state.models_KP[0], a, b)
        for i in (0, 1):
            assert_layers(one.client_states["model", i], *own[i])
    assert not np.allclose(weight[0] / sum(weight), N_0 / (N_0 + N_1), atol=0.05)


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_alignment_leaves_the_head_alone(epochs):
    one = groups(batch_size=50)
    method = FedAS(align_epochs=epochs, align_lr=0.5)
    one.local = LocalSGD(steps=1, lr=0.0, batch_size=50)  # no training after it
    one.play(method, [0, 3])
    spec, first_P = one.network.spec, one.model()
    for client in (0, 3):
        row_P = one.client_states["model", client]
        assert torch.equal(spec.head.of(row_P), spec.head.of(first_P))
        assert not torch.equal(spec.base.of(row_P), spec.base.of(first_P))


def test_without_alignment_and_by_samples_it_is_fedper():
    """If all clients begin in the first round: later ones begin with the averaged head."""
    one, other = groups(), groups()
    method = FedAS(align_epochs=0, weights="samples")
    found, expected = one.play(method, *[None] * 3), other.play(FedPer(), *[None] * 3)
    base, head = one.network.spec.base, one.network.spec.head
    assert close(base.of(found.models_KP), base.of(expected.models_KP), 1e-5)
    for name, client in other.client_states:
        row_P = one.client_states["model", client]
        assert close(head.of(row_P), other.client_states[name, client], 1e-5)


@pytest.mark.parametrize("new_body", [nn.Identity, lambda: nn.Linear(16, 16).requires_grad_(False)])
def test_a_base_that_is_not_trained_is_not_aligned(new_body):
    """The head is the only trained layer."""

    def new_module():
        return nn.Sequential(nn.Flatten(), new_body(), nn.Linear(16, 4))

    models = [
        Stage(planted(), new_module).play(method, None, None).models_KP for method in (FedAS(), FedAS(align_epochs=0))
    ]
    assert torch.equal(*models) and models[0].isfinite().all()


def test_a_batch_of_one_sample_that_training_leaves_out_is_not_aligned_either():
    """BatchNorm refuses it: 9 samples in batches of 8."""

    def new_module():
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))

    for drop_last in ("single", True):
        one = Stage(uneven([9, 16]), new_module, LocalSGD(batch_size=8, drop_last=drop_last))
        assert one.play(FedAS(), None, None).models_KP.isfinite().all() and not one.stats.excluded


def test_a_negative_trace_of_an_attacker_has_no_weight():
    """The colluders send -2 times what they should: the others' average remains."""
    one, other = groups(), groups()
    one.backend.worker.attack = attack_of("colluders", [6, 7], scale=2.0)
    found, expected = one.play(FedAS(), None), other.play(FedAS(), [0, 1, 2, 3, 4, 5])
    assert torch.equal(found.models_KP, expected.models_KP)


@pytest.mark.parametrize("method, failing", [(FedAS(), {"align_lr": 1e12}), (FedCCFA(), {"classifier_lr": 1e12})])
def test_a_client_whose_first_training_of_a_round_fails_has_no_weight(method, failing):
    """It would go on from the base of its last round."""
    one = groups()
    state = one.play(method, [0, 1, 2], [1, 2])
    after = one.play(replace(method, **failing), [0], state=state, first=3)
    assert torch.equal(after.models_KP, state.models_KP)
    assert list(one.stats.excluded) == [0] and not one.stats.train_loss


def test_newcomers_have_the_averaged_model_and_others_their_own():
    one, method = groups(epochs=5, lr=0.5, batch_size=40), FedAS()
    state = one.play(method, *[[0, 1, 2, 3]] * 4)
    own_P = one.client_states["model", 1]
    expected = [row_accuracy(one, own_P, 1), row_accuracy(one, state.models_KP[0], 7)]
    assert accuracy(one, method, state, [1, 7]) == pytest.approx(expected) and expected[0] > 0.9
    one.play(method, [1, 2], state=state, first=5)
    assert floats(one) == (2 * 272, 2 * (340 + 1))
