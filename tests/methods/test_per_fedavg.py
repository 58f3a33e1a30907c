"""Per-FedAvg: both variants of the meta step by the formulas, adaptation before prediction, plain SGD."""

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, planted
from linear import alike, assert_close, gradient, matrix
from rounds import COHORTS, accuracy, assert_engines_agree, groups
from torch import nn
from torch.nn.functional import cross_entropy

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import stream
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.per_fedavg import PerFedAvg

ALPHA, BETA, DELTA = 0.3, 0.5, 0.1
SIZES = [12, 4]


def stage(**local) -> Stage:
    """All batches of a client have one gradient, whichever are drawn. The method does not use momentum and lr."""
    settings = LocalSGD(**{"epochs": 1, "lr": 9.0, "momentum": 0.9} | local)
    return Stage(alike(SIZES), lambda: nn.Linear(5, 3, bias=False), settings)


def trained(one: Stage, client: int, w: np.ndarray, order: str, steps: int) -> np.ndarray:
    for _ in range(steps):
        g = gradient(one, client, w - ALPHA * gradient(one, client, w))
        if order == "second":
            curvature = (gradient(one, client, w + DELTA * g) - gradient(one, client, w - DELTA * g)) / (2 * DELTA)
            g = g - ALPHA * curvature
        w = w - BETA * g
    return w


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize(
    "order, epochs, batch, steps",
    [
        ("first", 3, None, [3, 3]),  # one batch, split in two
        ("first", 2, 2, [6, 2]),  # E ceil(n / B) / 2
        ("second", 3, None, [3, 4]),  # one batch, split in three; 4 samples make four batches of one
        ("second", 3, 3, [4, 4]),  # E ceil(n / B) / 3; two batches, split further
    ],
)
def test_a_step_is_the_gradient_at_the_adapted_model(order, epochs, batch, steps, weights):
    one = stage(epochs=epochs, batch_size=batch)
    w = matrix(one.model())
    results = [trained(one, client, w, order, count) for client, count in zip((0, 1), steps)]
    p = np.array(SIZES if weights == "samples" else [1, 1])
    method = PerFedAvg(order=order, alpha=ALPHA, beta=BETA, delta=DELTA, weights=weights)
    assert_close(one.play(method, None).models_KP[0], (p[0] * results[0] + p[1] * results[1]) / p.sum())


@pytest.mark.parametrize("order", ["first", "second"])
def test_without_beta_the_meta_step_has_the_learning_rate_of_the_run(order):
    found, expected = (
        stage(lr=lr).play(PerFedAvg(order=order, beta=beta), None).models_KP for lr, beta in ((BETA, None), (9.0, BETA))
    )
    assert torch.equal(found, expected)


def test_the_second_order_term_is_there():
    """Between FO and MAML's own gradient (I - alpha H) g', the finite differences are close to the latter."""
    one = stage()
    w = matrix(one.model())
    x, y = one.federation.train(0)
    row = torch.tensor(w, requires_grad=True)
    adapted = row - ALPHA * torch.autograd.grad(cross_entropy(x.double() @ row.T, y), row, create_graph=True)[0]
    exact = torch.autograd.grad(cross_entropy(x.double() @ adapted.T, y), row)[0].numpy()
    states = {
        order: one.play(PerFedAvg(order=order, alpha=ALPHA, beta=BETA, delta=0.01), [0]).models_KP[0]
        for order in ("first", "second")
    }
    errors = {order: np.abs((w - matrix(found)) / BETA - exact).max() for order, found in states.items()}
    assert errors["second"] < 1e-3 < 1e-2 < errors["first"]


@pytest.mark.parametrize("batch_size", [None, 30, 150])
def test_without_adaptation_it_is_fedavg_on_the_second_batch_of_every_pair(batch_size):
    """alpha = 0: plain SGD with lr beta on batches 2, 4, ...: half of the batches, half of the steps."""
    one = groups(batch_size=batch_size, momentum=0.9)
    state = one.play(PerFedAvg(alpha=0.0, beta=BETA), [0, 3, 5])
    batch, results = min(batch_size or 200, 150 if batch_size == 150 else 100), []
    for client in (0, 3, 5):
        x, y = (part.to(one.network.device) for part in one.federation.train(client))
        draw, batches = stream(0, 1, 1, client, "batches"), []
        for _ in range(3):
            batches += torch.from_numpy(draw.permutation(200)).split(batch)
        one.network.load(one.model())
        module = one.network.module.train()
        optimiser = torch.optim.SGD(module.parameters(), lr=BETA)
        for chosen in batches[1 : 2 * (len(batches) // 2) : 2]:
            optimiser.zero_grad()
            cross_entropy(module(x[chosen]), y[chosen]).backward()
            optimiser.step()
        results.append(one.network.row().cpu().clone())
    assert close(state.models_KP[0], torch.stack(results).mean(0), 1e-5)


def test_without_adaptation_and_with_alike_samples_it_is_fedavg_of_half_the_steps():
    local = {"momentum": 0.0, "batch_size": 2}
    halves = [
        stage(steps=count, lr=BETA, **local).play(FedAvg(), [client]).models_KP[0] for client, count in ((0, 6), (1, 2))
    ]
    found = stage(epochs=2, **local).play(PerFedAvg(alpha=0.0, beta=BETA), None).models_KP[0]
    assert close(found, (12 * halves[0] + 4 * halves[1]) / 16, 1e-5)


def test_clients_adapt_on_their_training_data_before_they_predict():
    """One epoch of SGD(alpha), in batches, without momentum; whatever local.epochs and local.steps say."""
    one, method = groups(batch_size=50, momentum=0.9, steps=7), PerFedAvg(alpha=0.4, beta=0.3)
    state = one.play(method, *COHORTS)
    expected = []
    for client in (0, 1, 5):
        x, y = (part.to(one.network.device) for part in one.federation.train(client))
        order = stream(0, 1, -1, client, "batches").permutation(200)
        one.network.load(state.models_KP[0])
        module = one.network.module.train()
        optimiser = torch.optim.SGD(module.parameters(), lr=0.4)
        for chosen in torch.from_numpy(order).split(50):
            optimiser.zero_grad()
            cross_entropy(module(x[chosen]), y[chosen]).backward()
            optimiser.step()
        x, y = (part.to(one.network.device) for part in one.federation.test(client))
        expected.append((module.eval()(x).argmax(1) == y).float().mean().item())
    assert accuracy(one, method, state, [0, 1, 5]) == pytest.approx(expected)


@pytest.mark.parametrize(
    "order, cohorts",
    [("second", [None] * 8), ("first", [[0, 1], [2, 3], [4, 5, 6], [6, 7, 0], [1, 2, 3], [4, 5, 7]] * 4)],
    ids=["second, all clients", "first, 30 %"],
)
def test_one_epoch_adapts_to_groups_that_disagree(order, cohorts):
    """The model itself is as bad as any single one; after one epoch of adaptation it fits the group."""
    one = groups(federation=planted(samples=100), epochs=3, batch_size=10)
    method = PerFedAvg(order=order, alpha=0.5, beta=0.3)
    state = one.play(method, *cohorts)
    assert accuracy(one, method, state).mean() > 0.8
    assert accuracy(one, FedAvg(), state).mean() < 0.55


@pytest.mark.parametrize("order", ["first", "second"])
def test_engines_agree(order):
    assert_engines_agree(
        lambda engine: groups(engine, batch_size=30), PerFedAvg(order=order, alpha=0.1, beta=0.3, delta=0.01)
    )


def test_persistent_momentum_changes_nothing_with_any_engine():
    """Neither the meta step nor the adaptation has momentum, so there is no buffer to keep."""
    for engine in ("sequential", "vectorised", "span"):
        for order in ("first", "second"):
            method, found = PerFedAvg(order=order, alpha=0.1, beta=0.3), []
            for persist in (True, False):
                one = groups(engine, planted(samples=30), epochs=1, batch_size=8, momentum=0.9, persist=persist)
                state = one.play(method, [0, 1, 2], [1, 2, 5])
                found.append((state.models_KP, accuracy(one, method, state)))
                assert one.client_states == {}, (engine, order, persist)
            (models_KP, accuracy_M), (expected_KP, expected_M) = found
            assert torch.equal(models_KP, expected_KP) and np.array_equal(accuracy_M, expected_M), (engine, order)


def test_no_state_of_a_leaver_remains():
    one, method = groups(), PerFedAvg()
    state = method.leave(one.play(method, [0, 1]), np.array([1]))
    serving = method.serve(method.join(state, one.clients([1, 7])), one.clients([1, 7]))
    assert torch.equal(serving.models_KP, state.models_KP) and serving.row_M.tolist() == [0, 0]
