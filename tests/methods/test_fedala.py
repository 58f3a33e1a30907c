"""FedALA: rounds by plain PyTorch in the form of the authors' code, weights within 0 and 1, and what is served."""

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage
from plain import ALL, COHORTS, Torch, mean_by_samples, mlp, stage
from rounds import accuracy, row_accuracy
from torch import nn
from torch.nn.functional import cross_entropy

from cfl_ray.core.rng import stream
from cfl_ray.methods.fedala import FedALA
from cfl_ray.methods.fedavg import FedAvg

TOP = 18  # 5 x 3 weights and 3 biases


def adapted(one, method, i, theta, v, weights, first, place):
    """(t, W) by passes over a contiguous part of the samples."""
    x, y = one.federation.train(i)
    count = max(int(method.share / 100 * len(y)), 1)
    start = min(int(np.float32(place) * (len(y) - count + 1)), len(y) - count)
    x, y, losses = x[start : start + count], y[start : start + count], []
    diff = (theta - v)[-TOP:]
    t = theta.clone()
    t[-TOP:] = v[-TOP:] + diff * weights
    while True:
        for x_B, y_B in zip(x.split(4), y.split(4)):
            module = mlp()
            nn.utils.vector_to_parameters(t.clone(), module.parameters())
            loss = cross_entropy(module(x_B), y_B)
            gradients = torch.autograd.grad(loss, list(module[-1].parameters()))
            weights = (weights - method.eta * torch.cat([g.reshape(-1) for g in gradients]) * diff).clamp(0, 1)
            t[-TOP:] = v[-TOP:] + diff * weights
        losses.append(loss.item())
        if not first or len(losses) >= method.first_passes:
            return t, weights, len(losses)
        if len(losses) > 10 and np.std(losses[-10:]) < method.threshold:
            return t, weights, len(losses)


def by_torch(one: Stage, method: FedALA, cohorts):
    clients, theta, v, weights, passes = Torch(one), one.model(), {}, {}, []
    for round, cohort in enumerate(cohorts, 1):
        models = []
        for i in cohort:
            y, place = theta, stream(one.seed, round, 0, i, "place").random()
            if i in v:
                before = weights.get(i, torch.ones(TOP))
                y, weights[i], count = adapted(one, method, i, theta, v[i], before, i not in weights, place)
                passes.append(count)
            for index_B in clients.batches(i, round):
                y = y - one.local.lr * clients.gradient(y, i, index_B)
            v[i] = y
            models.append(y)
        theta = mean_by_samples(one, models, cohort)
    return theta, v, weights, passes


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method", [FedALA(eta=30.0), FedALA(eta=200.0, share=50.0, threshold=1e-5, first_passes=15)])
def test_three_rounds_follow_the_authors_code(method, engine):
    one = stage(engine)
    state = one.play(method, *COHORTS)
    theta, v, weights, passes = by_torch(one, method, COHORTS)
    assert close(state.models_KP[0], theta, 5e-5)
    for i in v:
        row_P, w_X, flags = one.client_states["personal", i].split([len(theta), TOP, 2])
        assert close(row_P, v[i], 5e-5) and close(w_X, weights.get(i, torch.ones(TOP)), 1e-4)
        assert flags.tolist() == [1, i in weights]
    assert 1 in passes and max(passes) == (11 if method.threshold == 0.1 else 15)
    w_X = torch.stack(list(weights.values()))
    assert w_X.min() < 0.95 and w_X.max() <= 1 and w_X.min() >= 0


def test_clients_are_served_the_newest_model_after_the_aggregation():
    """Client 5 has trained once, and so adapts for the first time; clients 6 and 7 have not."""
    one, method = stage(), FedALA(eta=30.0)
    state = one.play(method, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    theta, found, changed = state.models_KP[0], accuracy(one, method, state), 0
    for i in ALL:
        row_P = theta
        if ("personal", i) in one.client_states:
            v, w_X, flags = one.client_states["personal", i].split([len(theta), TOP, 2])
            row_P = adapted(one, method, i, theta, v, w_X, not flags[1], 0.0)[0]
            changed += not close(row_P, theta, 1e-3)
        assert found[i] == pytest.approx(row_accuracy(one, row_P, i))
    assert changed == 6


def test_without_adaptation_it_is_fedavg():
    """W stays 1, so that every client starts from theta."""
    assert close(stage().play(FedALA(eta=0.0), *COHORTS).models_KP, stage().play(FedAvg(), *COHORTS).models_KP, 1e-5)
