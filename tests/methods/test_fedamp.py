"""FedAMP: weights, attracted models and training by the formulas, and its reduction to local training."""

import numpy as np
import pytest
import torch
from linear import ETA, assert_close, gradient, matrix, stage
from rounds import EnginesAndCheckpoints, accuracy, floats, groups

from cfl_ray.methods.fedamp import FedAMP
from cfl_ray.methods.local import Local

SIZES, P = [12, 4, 8], 340
CASES = [
    {"alpha": 0.3, "sigma": 2.0, "lam": 0.2},
    {"alpha": 5.0, "sigma": 3.0, "lam": 0.7},  # weights of more than 1
    {"similarity": "cosine", "sigma": 4.0, "self_weight": 0.3},
]


def attracted(w: dict, i: int, own: np.ndarray, alpha=1.0, sigma=1.0, lam=1.0, similarity="distance", self_weight=0.5):
    """u_i of the models w by client, where client i has the model `own`."""
    others = [j for j in w if j != i]
    if not others:
        return own
    if similarity == "cosine":
        cosine = [(own * w[j]).sum() / np.sqrt((own**2).sum() * (w[j] ** 2).sum()) for j in others]
        xi = (1 - self_weight) * np.exp(sigma * np.array(cosine)) / np.exp(sigma * np.array(cosine)).sum()
    else:
        xi = alpha / sigma * np.exp([-((own - w[j]) ** 2).sum() / sigma for j in others])
        xi = xi / max(xi.sum(), 1)
    return (1 - xi.sum()) * own + sum(x * w[j] for x, j in zip(xi, others))


@pytest.mark.parametrize("options", CASES, ids=str)
def test_rounds_follow_the_formulas(options):
    """Clients that take part in some rounds, and one that begins in the second, from the mean of all models."""
    one, method, state = stage(sizes=SIZES), FedAMP(**options), None
    mu, w, first = options.get("lam", 1) / options.get("alpha", 1), {}, matrix(one.model())
    for number, cohort in enumerate(([0, 1], [0, 2], [0, 1, 2]), 1):
        before, mean = dict(w), np.mean(list(w.values()), axis=0) if w else first
        for i in cohort:
            own = before.get(i, mean)
            u = attracted(before, i, own, **options)
            for _ in range(2):
                own = own - ETA * (gradient(one, i, own) + mu * (own - u))
            w[i] = own
        state = one.play(method, cohort, state=state, first=number)
        for i in w:
            assert_close(state.all_models[state.rows_of(np.array([i]))[0]], w[i])
        assert_close(state.models_KP[0], np.mean(list(w.values()), axis=0))


@pytest.mark.parametrize("alpha, sigma", [(1.0, 1.0), (1e3, 1e3), (0.1, 1e-3)])
@pytest.mark.parametrize("similarity", ["distance", "cosine"])
def test_weights_add_up_to_one_and_none_is_negative(alpha, sigma, similarity):
    models_XP = torch.randn(6, 20, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1.0], [1], [1e-3], [1e-3], [0], [9]]
    )
    method, row_M = FedAMP(alpha=alpha, sigma=sigma, similarity=similarity), np.array([0, 1, 3, 5])
    xi_MX = method.attractions(models_XP, row_M)
    assert (xi_MX >= 0).all() and (xi_MX.sum(1) <= 1 + 1e-12).all() and np.isfinite(xi_MX).all()
    assert (xi_MX[:, 0] == 0).all() and (xi_MX[np.arange(4), row_M] == 0).all()


@pytest.mark.parametrize("similarity", ["distance", "cosine"])
def test_without_the_term_it_is_local_training_and_with_it_it_is_not(similarity):
    """Bit for bit, if all clients take part: as PFLlib's FedAMP, whose term has no gradient."""
    local = groups(batch_size=30)
    local.play(Local(), None, None, None)
    for lam, equal in ((0.0, True), (1.0, False)):
        state = groups(batch_size=30).play(FedAMP(lam=lam, similarity=similarity), None, None, None)
        same = [torch.equal(state.own_SP[i], local.client_states["personal", i]) for i in range(8)]
        assert set(same) == {equal}


def test_clients_that_come_later_receive_the_mean_and_predict_with_it():
    one, method = groups(), FedAMP()
    state = one.play(method, [0, 1])
    assert floats(one) == (2 * P, 2 * P)
    assert torch.equal(method.serve(state, one.clients([5])).models_KP[0], state.own_SP.mean(0))
    assert method.serve(state, one.clients([1, 5])).row_M.tolist() == [2, 0]
    one.play(method, [0, 4], state=state, first=2)
    assert floats(one) == (3 * P, 2 * P)


def test_groups_that_disagree_are_served():
    """Models of the other group are far, so that they have a small weight."""
    one, method = groups(epochs=5, lr=0.5, batch_size=40), FedAMP(lam=0.1, alpha=0.5)
    assert accuracy(one, method, one.play(method, *[None] * 5)).min() > 0.85


class TestDistances(EnginesAndCheckpoints):
    METHOD = FedAMP(lam=0.3)


class TestCosines(EnginesAndCheckpoints):
    METHOD = FedAMP(similarity="cosine", sigma=10.0)
