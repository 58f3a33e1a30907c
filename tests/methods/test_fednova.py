"""FedNova: normalised averaging by the formulas, its reduction to FedAvg and FedProx, and limits on mu."""

import numpy as np
import pytest
import torch
from federations import Stage, uneven
from linear import ETA, alike, assert_close, matrix, sgd
from rounds import assert_engines_agree
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.errors import ConfigError
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fednova import FedNova, accumulation

SIZES, EPOCHS, BATCH = [12, 4, 7], 2, 4
TAU = [6, 2, 4]


def stage(momentum: float = 0.0, engine: str = "manual") -> Stage:
    """Three clients with 6, 2 and 4 local steps; all batches of a client have one gradient."""
    local = LocalSGD(epochs=EPOCHS, batch_size=BATCH, lr=ETA, momentum=momentum)
    return Stage(alike(SIZES), lambda: nn.Linear(5, 3, bias=False), local, engine)


def closed_form(tau: int, rho: float) -> float:
    return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)


def recursion(tau: int, mu: float) -> float:
    a = 0.0
    for _ in range(tau):
        a = (1 - ETA * mu) * a + 1
    return a


def normalised_average(w: np.ndarray, results: list[np.ndarray], a: list[float], weights: list[float]) -> np.ndarray:
    """w - (sum p_i a_i) sum p_i (w - W_i) / a_i"""
    p = np.array(weights) / sum(weights)
    return w - (p * a).sum() * sum(p_i * (w - W_i) / a_i for p_i, W_i, a_i in zip(p, results, a))


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("rho, mu", [(0.0, 0.0), (0.9, 0.0), (0.0, 0.3)])
def test_updates_are_normalised_by_the_number_of_steps(rho, mu, weights):
    one = stage(rho)
    w = matrix(one.model())
    results = [sgd(one, client, w, mu, w, TAU[client], rho) for client in range(3)]
    a = [recursion(tau, mu) if mu else closed_form(tau, rho) for tau in TAU]
    expected = normalised_average(w, results, a, SIZES if weights == "samples" else [1, 1, 1])
    assert_close(one.play(FedNova(mu=mu, weights=weights), None).models_KP[0], expected)
    plain = sum(n * W for n, W in zip(SIZES, results)) / sum(SIZES)
    assert np.abs(expected - plain).max() > 1e-2, "the same as FedAvg: the test shows nothing"


def test_a_is_the_distance_covered_with_a_gradient_of_one():
    """With gradient 1 in every step, W = w - eta a."""
    for rho, mu in [(0.0, 0.0), (0.9, 0.0), (0.0, 0.3), (0.5, 0.3)]:
        moved, velocity = [0.0], 0.0
        for _ in range(7):
            velocity = rho * velocity + 1 + mu * moved[-1]
            moved.append(moved[-1] - ETA * velocity)
        expected = -np.array(moved)[[1, 7, 3]] / ETA
        assert accumulation(np.array([1, 7, 3]), rho, ETA * mu) == pytest.approx(expected), (rho, mu)


def test_a_rejected_client_is_in_no_sum():
    one = stage()
    w, train = matrix(one.model()), one.federation.train
    results = [sgd(one, client, w, steps=TAU[client]) for client in (0, 2)]
    one.federation.train = lambda client: (
        (train(client)[0] * torch.nan, train(client)[1]) if client == 1 else train(client)
    )
    state = one.play(FedNova(), None)
    assert one.stats.rejected.keys() == {1}
    assert_close(state.models_KP[0], normalised_average(w, results, [TAU[0], TAU[2]], [SIZES[0], SIZES[2]]))


def test_is_fedavg_bit_for_bit_with_unequal_samples_and_equal_steps():
    found, expected = (
        Stage(alike(SIZES), lambda: nn.Linear(5, 3), LocalSGD(epochs=5, lr=ETA)).play(method, None, [0, 1]).models_KP
        for method in (FedNova(), FedAvg())
    )
    assert torch.equal(found, expected)


def test_an_unstable_step_is_refused():
    limit = r"fednova.mu \* local.lr must be below 2, and small enough for every a_i to be positive, got 4 \* 0.5"
    with pytest.raises(ConfigError, match=limit):
        stage().play(FedNova(mu=4.0), None)
    assert not stage().play(FedNova(mu=3.9), None).models_KP.isnan().any()


def test_an_unstable_step_is_refused_also_where_a_happens_to_be_positive():
    """mu * lr = 3 and three steps: a = 1, -1, 3."""
    one = Stage(alike([3, 3]), lambda: nn.Linear(5, 3, bias=False), LocalSGD(epochs=3, lr=1.0))
    assert accumulation(np.array([3]), 0.0, 3.0)[0] == 3
    with pytest.raises(ConfigError, match="below 2"):
        one.play(FedNova(mu=3.0), None)


def test_batch_statistics_are_averaged_and_not_extrapolated():
    """Unequal steps stretch the parameters' step; running statistics are between those of the clients."""

    def model():
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    one = Stage(uneven([4, 40, 4, 80, 4], (5,)), model, LocalSGD(epochs=5, batch_size=4, lr=0.1))
    state, trained = one.play(FedNova(), None), one.network.spec.trained
    clients = one.clients()
    rows = clients.train(clients.send(one.model()[None]), features=one.network.spec.all).features_MF[:, trained:]
    found = state.models_KP[0, trained:]
    assert ((found >= rows.amin(0) - 1e-6) & (found <= rows.amax(0) + 1e-6)).all()


def test_engines_agree_with_a_proximal_term_and_momentum():
    assert_engines_agree(lambda engine: stage(0.5, engine), FedNova(mu=0.1), [None, [0, 2]])
