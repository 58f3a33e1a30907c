"""Special cases: with certain values of its parameters, a method is a simpler one, bit for bit.

Full batch throughout: with mini-batches the draws differ, because a method with more exchanges has other addresses.
"""

import numpy as np
import pytest
import torch
from federations import Stage, planted
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods.ditto import Ditto
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedprox import FedProx
from cfl_ray.methods.ifca import IFCA
from cfl_ray.methods.local import Local
from cfl_ray.methods.stocfl import StoCFL

COHORTS = [[0, 1, 2, 5], [3, 4, 5, 6, 7], [1], [0, 2, 4, 7]]


def play(method, cohorts=COHORTS, **local):
    one = Stage(
        planted(),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        LocalSGD(**{"epochs": 3, "lr": 0.3} | local),
    )
    return one, one.play(method, *cohorts)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize(
    "special",
    [
        lambda weights: FedProx(mu=0, weights=weights),
        lambda weights: IFCA(num_clusters=1, weights=weights),
        lambda weights: StoCFL(tau=-1.0, lam=0.0, weights=weights),
        lambda weights: Ditto(weights=weights),
    ],
    ids=["FedProx, mu = 0", "IFCA, K = 1", "StoCFL, tau = -1, lambda = 0", "the global model of Ditto"],
)
def test_is_fedavg(special, weights):
    _, expected = play(FedAvg(weights=weights))
    _, found = play(special(weights))
    assert torch.equal(found.models_KP, expected.models_KP)


def test_fedprox_without_its_term_is_fedavg_with_mini_batches_and_momentum_too():
    """It has FedAvg's exchanges, so also its batches."""
    one, other = (play(method, batch_size=30, momentum=0.9)[1].models_KP for method in (FedAvg(), FedProx(mu=0)))
    assert torch.equal(one, other)


def test_the_personal_models_of_ditto_without_its_term_are_local():
    one, _ = play(Ditto(lam=0))
    other, _ = play(Local())
    assert one.client_states.keys() == other.client_states.keys() and len(one.client_states) == 8
    assert all(torch.equal(value, other.client_states[key]) for key, value in one.client_states.items())


def test_the_global_model_of_stocfl_is_fedavg_whatever_its_clusters():
    _, expected = play(FedAvg())
    _, found = play(StoCFL(tau=0.5))
    assert found.num_clusters == 2 and torch.equal(found.global_KP, expected.models_KP)


def test_a_chain_of_one_client_is_parallel():
    cohorts = [[3], [0], [3], [6]]
    states = [play(StoCFL(global_update=update), cohorts, batch_size=30)[1] for update in ("parallel", "chain")]
    for (name, one), other in zip(states[0].to_checkpoint()[0].items(), states[1].to_checkpoint()[0].values()):
        assert torch.equal(one, other), name


def test_a_chain_of_several_is_not():
    states = [play(StoCFL(global_update=update))[1] for update in ("parallel", "chain")]
    assert (states[0].global_KP - states[1].global_KP).abs().max() > 1e-3


def test_stocfl_with_tau_of_one_is_ditto_like():
    """No clusters merge: each client has its own cluster model, trained near omega, as are Ditto's personal models."""
    stocfl, state = play(StoCFL(tau=1.0, lam=0.2, new_model="initial"))
    ditto, _ = play(Ditto(lam=0.2))
    assert state.num_clusters == 8
    for client in range(8):
        mine = ditto.client_states["personal", client]
        assert torch.allclose(state.models_KP[state.assign_N[client]], mine, rtol=0, atol=1e-7), client
    assert np.array_equal(np.sort(state.assign_N), np.arange(8))
