"""pFedGraph: the graph and the aggregates by the formulas, the projection onto the simplex, and its two limits."""

import numpy as np
import pytest
import scipy
import torch
from closeness import close
from linear import ETA, N_0, N_1, STEPS, assert_close, gradient, matrix, mean, sgd, stage
from rounds import accuracy, groups, row_accuracy

from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.local import Local
from cfl_ray.methods.pfedgraph import PFedGraph, projected


def client(one, number, start, a, lam):
    """theta_i after steps on f_i(theta) - lambda cos(theta, a)."""
    w = start
    for _ in range(STEPS):
        norm, cosine = np.linalg.norm(w), (w * a).sum() / np.linalg.norm(w) / np.linalg.norm(a) if a is not None else 0
        term = 0 if a is None else (a / np.linalg.norm(a) - cosine * w / norm) / norm
        w = w - ETA * (gradient(one, number, w) - lam * term)
    return w


def weights(theta, first, alpha):
    """W of two clients: w_0 on the simplex at the least alpha w^2 + (d - 2 alpha p) w, which is a parabola of w_0."""
    delta = [t - first for t in theta]
    cosine = (delta[0] * delta[1]).sum() / np.linalg.norm(delta[0]) / np.linalg.norm(delta[1])
    d = -np.array([[1, cosine], [cosine, 1]]) if cosine <= 0.9 else -np.ones((2, 2))
    p = np.array([N_0, N_1]) / (N_0 + N_1)
    w_0 = np.clip(((p[0] - p[1]) - (d[:, 0] - d[:, 1]) / (2 * alpha) + 1) / 2, 0, 1)
    return np.stack([w_0, 1 - w_0], 1)


@pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised"])
@pytest.mark.parametrize("regulariser", ["near", "away"])
def test_two_rounds_follow_the_formulas(regulariser, engine):
    one, method, state = stage(engine=engine), PFedGraph(alpha=2.0, lam=0.3, regulariser=regulariser), None
    first = matrix(one.model())
    aggregates, known = [first, first], [None, None]
    for number in (1, 2):
        sign = 1 if regulariser == "near" else -1
        theta = [client(one, i, aggregates[i], known[i], sign * 0.3) for i in (0, 1)]
        graph = weights(theta, first, 2.0)
        assert graph.min() > 0, "a case with both clients in both aggregates"
        aggregates = known = [row[0] * theta[0] + row[1] * theta[1] for row in graph]
        state = one.play(method, None, state=state, first=number)
        assert state.seen_S.tolist() == [0, 1]
        assert_close(state.models_KP[0], mean(*theta))
        for i in (0, 1):
            assert_close(state.own_SP[i], aggregates[i])


def test_the_projection_is_the_solution_of_the_quadratic_program():
    """100 random cases against a general solver, from both sides: few and many clients in an aggregate."""
    draw = np.random.default_rng(0)
    for case in range(100):
        size, alpha = int(draw.integers(1, 12)), float(draw.choice([0.05, 0.3, 0.8, 3.0]))
        p, d = draw.dirichlet(np.ones(size)), -draw.uniform(-1, 1, size)
        solved = scipy.optimize.minimize(
            lambda w: (alpha * w**2 + (d - 2 * alpha * p) * w).sum(),
            np.full(size, 1 / size),
            jac=lambda w: 2 * alpha * w + d - 2 * alpha * p,
            bounds=[(0, 1)] * size,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        (found,) = projected((p - d / (2 * alpha))[None])
        assert found.min() >= 0 and found.sum() == pytest.approx(1, rel=1e-12)
        assert close(found, solved.x, 2e-5), case


def test_with_a_large_alpha_it_is_fedavg():
    """Weights are those of the samples for everyone."""
    one, other = groups(batch_size=30), groups(batch_size=30)
    found = one.play(PFedGraph(alpha=1e9, lam=0.0), None, None)
    expected = other.play(FedAvg(), None, None)
    assert close(found.models_KP, expected.models_KP, 1e-5)
    assert close(found.own_SP, expected.models_KP.expand(8, -1), 1e-5)


def test_with_a_small_alpha_clients_that_differ_train_alone():
    """Clients 0 and 1 disagree about every label."""
    one, other = groups(batch_size=30), groups(batch_size=30)
    found = one.play(PFedGraph(alpha=1e-9, lam=0.0), [0, 1], [0, 1])
    other.play(Local(), [0, 1], [0, 1])
    for i in (0, 1):
        assert close(found.own_SP[i], other.client_states["personal", i], 1e-5)


@pytest.mark.parametrize("difference", ["all", "head"])
def test_clients_work_with_those_of_their_group(difference):
    one, method = groups(epochs=5, lr=0.5, batch_size=40), PFedGraph(alpha=0.1, difference=difference)
    state = one.play(method, *[None] * 4)
    graph = one.stats.diagnostics.array("graph").value
    same = one.federation.group_N[:, None] == one.federation.group_N
    assert graph[same].sum() == pytest.approx(8, rel=1e-5) and accuracy(one, method, state).min() > 0.9


def test_others_have_the_mean_of_all_models():
    one, method = groups(), PFedGraph()
    state = one.play(method, [0, 3, 1], [1])
    assert state.seen_S.tolist() == [0, 3, 1]
    rows = ((3, state.own_SP[1]), (7, state.models_KP[0]))
    assert accuracy(one, method, state, [3, 7]) == pytest.approx([row_accuracy(one, row_P, i) for i, row_P in rows])
    left = method.leave(state, np.array([3]))
    assert left.seen_S.tolist() == [0, 1] and torch.equal(left.own_SP, state.own_SP[[0, 2]])
    assert method.serve(left, one.clients([3, 1])).row_M.tolist() == [0, 2]


def test_a_client_without_an_aggregate_has_no_term():
    one = stage()
    state = one.play(PFedGraph(lam=5.0), [0])
    assert_close(state.own_SP[0], sgd(one, 0, matrix(one.model())))
