"""APFL: both models by the formulas, its reductions to FedAvg and local training, and the mixture that predicts."""

from dataclasses import replace

import pytest
import torch
from closeness import close
from federations import Stage, uneven
from linear import ETA, STEPS, assert_close, gradient, matrix, mean, sgd, stage
from rounds import COHORTS, OPPOSED_COHORTS, EnginesAndCheckpoints, accuracy, floats, groups, row_accuracy
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.apfl import APFL
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.local import Local


def client(one, number, w, v, alpha, decay=0.0, adaptive=False):
    """(w_i, v_i, alpha_i) after the steps; v_i, and in the first alpha_i, by the gradient before the step of w_i."""
    for step in range(STEPS):
        at_mixture = gradient(one, number, alpha * v + (1 - alpha) * w)
        slope = ((v - w) * at_mixture).sum() if adaptive and step == 0 else 0.0
        v = v - ETA * (alpha * at_mixture + decay * v)
        w = w - ETA * (gradient(one, number, w) + decay * w)
        alpha = min(max(alpha - ETA * slope, 0.0), 1.0)
    return w, v, alpha


@pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised"])
@pytest.mark.parametrize("alpha, decay, adaptive", [(0.3, 0.0, False), (0.7, 0.1, False), (0.3, 0.1, True)])
def test_both_models_and_alpha_follow_the_formulas(alpha, decay, adaptive, engine):
    one, method = stage(weight_decay=decay, engine=engine), APFL(alpha=alpha, adaptive=adaptive)
    w = matrix(one.model())
    own, state = {0: (w, alpha), 1: (w, alpha)}, None
    for number in (1, 2, 3):
        results = [client(one, i, w, *own[i], decay, adaptive) for i in (0, 1)]
        w, own = mean(results[0][0], results[1][0]), {i: results[i][1:] for i in (0, 1)}
        state = one.play(method, None, state=state, first=number)
        assert_close(state.models_KP[0], w)
        for i, (v, alpha_i) in own.items():
            kept = one.client_states["personal", i]
            assert_close(kept[: w.size], v)
            assert kept[w.size :].tolist() == ([pytest.approx(alpha_i, rel=1e-5)] if adaptive else [])
            assert not adaptive or number == 1 or abs(alpha_i - alpha) > 1e-3


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_alpha_does_not_move_before_both_models_differ(alpha):
    """In the first step of a client v_i is w_i: the first round is that of APFL with a fixed alpha, bit for bit."""
    one, other = groups(batch_size=30), groups(batch_size=30)
    adaptive, fixed = APFL(alpha=alpha, adaptive=True), APFL(alpha=alpha)
    found, expected = one.play(adaptive, None), other.play(fixed, None)
    assert torch.equal(found.models_KP, expected.models_KP) and floats(one) == floats(other)
    for i in range(8):
        *v, share = one.client_states["personal", i].tolist()
        assert v == other.client_states["personal", i].tolist() and share == pytest.approx(alpha)
    assert accuracy(one, adaptive, found).tolist() == accuracy(other, fixed, expected).tolist()


def test_alpha_stays_between_0_and_1_and_is_the_share_of_the_own_model_in_predictions():
    one, method = groups(epochs=5, lr=2.0), APFL(alpha=0.9, adaptive=True)
    state = one.play(method, *[None] * 4)
    alphas = []
    for i in range(8):
        v, alpha = one.client_states["personal", i].split([state.models_KP.shape[1], 1])
        mixed = torch.lerp(state.models_KP[0], v, float(alpha))
        assert accuracy(one, method, state, [i]) == pytest.approx([row_accuracy(one, mixed, i)])
        alphas.append(float(alpha))
    assert min(alphas) >= 0 and max(alphas) == 1


def test_with_alpha_0_clients_predict_with_the_global_model():
    one, method = groups(), APFL(alpha=0.0)
    state = one.play(method, *COHORTS)
    assert accuracy(one, method, state).tolist() == accuracy(one, FedAvg(), state).tolist()


def test_with_alpha_1_the_own_models_are_those_of_local_training():
    """From the first model: in one round, before the global model has moved."""
    one, other = groups(batch_size=30), groups(batch_size=30)
    state = one.play(APFL(alpha=1.0), [0, 1, 5])
    other.play(Local(), [0, 1, 5])
    for i in (0, 1, 5):
        found, expected = one.client_states["personal", i], other.client_states["personal", i]
        assert close(found, expected, 1e-5)
        assert accuracy(one, APFL(alpha=1.0), state, [i]) == pytest.approx([row_accuracy(one, expected, i)])


@pytest.mark.parametrize("engine", ["sequential", "manual"])
def test_both_models_have_the_batch_norm_statistics_of_all_passes(engine):
    """In the first step, w_i and the mixture are the same model: 0.9^2 of the first mean 0, the rest of the batch's."""
    module = lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    one = Stage(uneven([12, 4], (5,)), module, LocalSGD(steps=1, lr=ETA), engine)
    state = one.play(APFL(alpha=0.3), [0])
    trained, (x, _) = one.network.spec.trained, one.federation.train(0)
    mean_F = x @ one.model()[:20].reshape(4, 5).T + one.model()[20:24]
    for row_P in (state.models_KP[0], one.client_states["personal", 0]):
        assert close(row_P[trained : trained + 4], (1 - 0.9**2) * mean_F.mean(0), 1e-5)


def test_clients_predict_with_the_mixture():
    one, method = groups(), APFL(alpha=0.3)
    state = one.play(method, [0, 1], [1])
    w = state.models_KP[0]
    mixed = torch.lerp(w, one.client_states["personal", 0], 0.3)
    expected = [row_accuracy(one, row_P, i) for i, row_P in ((0, mixed), (7, w))]
    assert accuracy(one, method, state, [0, 7]) == pytest.approx(expected)


def test_a_late_client_starts_from_the_model_that_it_receives():
    one = stage()
    one.play(APFL(alpha=0.3), [0], [1])
    w1 = sgd(one, 0, matrix(one.model()))
    assert_close(one.client_states["personal", 1], client(one, 1, w1, w1, 0.3)[1])


def test_adapted_alpha_prefers_the_own_model_in_groups_that_disagree():
    one, method = groups(epochs=5, lr=0.5, batch_size=40), APFL(alpha=0.5, adaptive=True)
    state = one.play(method, *OPPOSED_COHORTS["all clients"])
    alphas = [float(one.client_states["personal", i][-1]) for i in range(8)]
    assert min(alphas) > 0.5 and accuracy(one, method, state).min() > 0.7


@pytest.mark.parametrize("adaptive", [True, False])
def test_adapted_alphas_of_all_clients_are_recorded(adaptive):
    """Those that clients keep, and the first alpha of a client that never trained; nothing is counted as traffic."""
    one, method = groups(epochs=2, lr=0.5, batch_size=40), APFL(alpha=0.4, adaptive=adaptive)
    state = one.play(method, [0, 1], [1], [1, 5])
    clients = replace(one.clients(round=3), evaluated=True)
    method.diagnose(state, clients)
    found = {name: clients.stats.diagnostics.array(name) for name in clients.stats.diagnostics.names}
    assert found.keys() == ({"alpha"} if adaptive else set()) and not clients.stats.traffic.up_bits
    if adaptive:
        kept = [float(one.client_states["personal", i][-1]) if i in (0, 1, 5) else 0.4 for i in range(8)]
        assert found["alpha"].value.tolist() == pytest.approx(kept) and len(set(kept)) > 2


@pytest.mark.parametrize("cohorts", OPPOSED_COHORTS)
def test_mixtures_serve_groups_that_disagree(cohorts):
    one, method = groups(epochs=5, lr=0.5, batch_size=40), APFL(alpha=0.75)
    assert accuracy(one, method, one.play(method, *OPPOSED_COHORTS[cohorts])).min() > 0.7


class TestEnginesWithAdaptedAlpha(EnginesAndCheckpoints):
    METHOD = APFL(alpha=0.6, adaptive=True)
