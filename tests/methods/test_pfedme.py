"""pFedMe: theta_i and w_i by the formulas, its reduction to FedAvg, and the models that a client may predict with."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, planted
from linear import ETA, STEPS, assert_close, gradient, matrix, mean, stage
from rounds import COHORTS, accuracy, floats, groups, row_accuracy
from torch import nn

from cfl_ray.config import EvaluationConfig
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.pfedme import PFedMe
from cfl_ray.runtime.evaluation import Evaluator

OPTIONS = {"lam": 1.5, "inner_steps": 3, "personal_lr": 0.2, "mu": 0.05}


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def client(one, number, w, eta=ETA):
    """(w_i, theta_i): R = 2 steps of w_i, each after K = 3 steps of theta_i from w_i on the same samples."""
    for _ in range(STEPS):
        theta = w
        for _ in range(3):
            theta = theta - 0.2 * (gradient(one, number, theta) + 1.5 * (theta - w) + 0.05 * theta)
        w = w - eta * 1.5 * (w - theta)
    return w, theta


@pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised"])
@pytest.mark.parametrize("beta", [1.0, 0.5, 2.0])
def test_all_models_follow_the_formulas(beta, engine):
    one, state = stage(engine=engine), None
    w = matrix(one.model())
    for number in (1, 2):
        results = [client(one, i, w) for i in (0, 1)]
        w = (1 - beta) * w + beta * mean(results[0][0], results[1][0], "uniform")
        state = one.play(PFedMe(beta=beta, **OPTIONS), None, state=state, first=number)
        assert_close(state.models_KP[0], w)
        for i in (0, 1):
            assert_close(one.client_states["personal", i], results[i][1])


def test_either_model_is_kept_and_the_training_is_the_same():
    """`predict: w` keeps w_i, whose accuracy the official code prints."""
    one, other = stage(), stage()
    state, same = one.play(PFedMe(**OPTIONS), None), other.play(PFedMe(predict="w", **OPTIONS), None)
    assert torch.equal(state.models_KP, same.models_KP)
    for i in (0, 1):
        w, theta = client(one, i, matrix(one.model()))
        assert_close(one.client_states["personal", i], theta)
        assert_close(other.client_states["personal", i], w)


def test_w_is_kept_after_its_step_with_a_clipped_gradient():
    one = groups(clip_norm=0.05)
    state = one.play(PFedMe(predict="w"), [0], [0])
    assert torch.equal(one.client_states["personal", 0], state.models_KP[0])


def test_statistics_of_batch_norm_are_means_with_any_beta():
    one, other = (Stage(planted(), normalised, LocalSGD(epochs=1, batch_size=20, lr=0.1)) for _ in range(2))
    found, expected = one.play(PFedMe(beta=2.0), None), other.play(PFedMe(), None)
    trained, first_P = one.network.spec.trained, one.model()
    assert torch.equal(found.models_KP[0, trained:], expected.models_KP[0, trained:])
    change_P = expected.models_KP[0] - first_P
    assert close((found.models_KP[0] - first_P)[:trained], 2 * change_P[:trained], 2e-5)


def test_the_rate_of_w_is_at_most_1_over_lambda():
    one = stage()
    state = one.play(PFedMe(**OPTIONS | {"lam": 4.0, "personal_lr": 0.0}), [0])
    assert_close(state.models_KP[0], matrix(one.model()))  # theta_i is w_i
    for options in ({"eta": 0.01}, {}):
        one = stage()
        one.local = replace(one.local, lr=100.0)
        state = one.play(PFedMe(**OPTIONS | options), [0])
        assert_close(state.models_KP[0], client(one, 0, matrix(one.model()), options.get("eta", 1 / 1.5))[0])


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_with_one_inner_step_of_rate_1_over_lambda_it_is_fedavg(weights):
    """theta = w - g / lambda, so w - eta lambda (w - theta) = w - eta g."""
    method = PFedMe(lam=2.0, inner_steps=1, personal_lr=0.5, mu=0.0, eta=0.3, weights=weights)
    one, other = groups(batch_size=30), groups(batch_size=30)
    found, expected = one.play(method, *COHORTS), other.play(FedAvg(weights=weights), *COHORTS)
    assert close(found.models_KP, expected.models_KP, 2e-5) and floats(one) == floats(other)


def test_clients_predict_with_their_own_model_and_others_with_the_global_one():
    one, method = groups(), PFedMe()
    state = one.play(method, [0, 1], [1])
    rows = ((0, one.client_states["personal", 0]), (7, state.models_KP[0]))
    assert accuracy(one, method, state, [0, 7]) == pytest.approx([row_accuracy(one, row_P, i) for i, row_P in rows])


def test_the_score_of_the_global_model_is_a_diagnostic():
    one, method = groups(), PFedMe()
    state, clients = one.play(method, None, None), one.clients()
    evaluator = Evaluator(EvaluationConfig(local_samples=10**6), one.federation, one.backend, one.seed)
    tested = replace(clients, tester=lambda those, serving: evaluator.scores(serving, those))
    method.diagnose(state, tested)
    expected = [row_accuracy(one, state.models_KP[0], i) for i in range(8)]
    assert one.stats.diagnostics.numbers["global_score"] == pytest.approx(sum(expected) / 8)
    some = np.array([[0.5], [np.nan], [0.7]])  # client 1 has no test data
    method.diagnose(state, replace(one.clients([0, 1, 2]), tester=lambda *_: some))
    assert one.stats.diagnostics.numbers["global_score"] == pytest.approx(0.6)
    method.diagnose(state, replace(one.clients([1]), tester=lambda *_: some[1:2]))
    assert "global_score" not in one.stats.diagnostics.numbers
