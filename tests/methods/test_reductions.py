"""Special cases: with certain values of its parameters, a method is a simpler one, bit for bit."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from rounds import COHORTS, floats, groups

from cfl_ray.methods.apfl import APFL
from cfl_ray.methods.cfl import CFL
from cfl_ray.methods.ditto import Ditto
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedavg_plus import FedAvgPlus
from cfl_ray.methods.fedcac import FedCAC
from cfl_ray.methods.feddrift import FedDrift
from cfl_ray.methods.fedgwc import FedGWC
from cfl_ray.methods.fednova import FedNova
from cfl_ray.methods.fedper import FedPer
from cfl_ray.methods.fedprox import FedProx
from cfl_ray.methods.fedprox_plus import FedProxPlus
from cfl_ray.methods.fedrep import FedRep
from cfl_ray.methods.fesem import FeSEM
from cfl_ray.methods.fl_hc import FLHC
from cfl_ray.methods.ifca import IFCA
from cfl_ray.methods.lg_fedavg import LGFedAvg
from cfl_ray.methods.local import Local
from cfl_ray.methods.stocfl import StoCFL

FULL, MINI, PLAIN = {}, {"batch_size": 30, "momentum": 0.9}, {"batch_size": 30}
BOTH = [FULL, MINI]  # a method with further exchanges draws other mini-batches: FULL alone
INF = float("inf")
CASES = [  # special case, the method that it is, local settings
    (FedProx(mu=0), FedAvg(), BOTH),
    (IFCA(num_clusters=1), FedAvg(), [FULL]),
    (IFCA(num_clusters=1, share_base=True), FedAvg(), [FULL]),
    (IFCA(num_clusters=1, select="test_accuracy"), FedAvg(), [FULL]),
    (IFCA(num_clusters=1, select_samples=5), FedAvg(), [FULL]),
    (IFCA(num_clusters=1, warmup_rounds=3), FedAvg(), [FULL]),
    (IFCA(num_clusters=1, warmup_rounds=4), FedAvg(), [MINI]),
    (StoCFL(tau=-1.0, lam=0.0), FedAvg(), [FULL]),
    (Ditto(), FedAvg(), [FULL]),  # its global model
    *((APFL(alpha=alpha, adaptive=adapts), FedAvg(), [PLAIN]) for alpha in (0.0, 0.4, 1.0) for adapts in (False, True)),
    (FedAvgPlus(num_models=1), FedAvg(), [MINI]),
    (FedProxPlus(num_models=1, mu=0.4), FedProx(mu=0.4), BOTH),
    (FedProxPlus(num_models=2, mu=0), FedAvgPlus(num_models=2), [MINI]),
    (FedNova(), FedAvg(), BOTH),  # with equal steps
    (FedNova(mu=0.1), FedProx(mu=0.1), BOTH),
    (FedPer(private_layers=0), FedAvg(), BOTH),
    (FedRep(private_layers=0), FedAvg(), BOTH),
    (LGFedAvg(private_layers=0), FedAvg(), BOTH),
    (FedCAC(tau=0.0), FedAvg(), [MINI]),
    (FedDrift(delta=INF, step_rounds=2), FedAvg(), [MINI]),
    (FedDrift(delta=INF, step_rounds=2, eager=True), FedAvg(), [MINI]),
    (FedGWC(epsilon=0.0), FedAvg(), [MINI]),
    (FeSEM(num_clusters=1), FedAvg(), BOTH),
    (CFL(eps1=0.0, eps2=0.0, min_rounds=0), FedAvg(), [MINI]),
    (FLHC(), FedAvg(), [MINI]),  # before the round of the clustering
]
UPLOADS_MORE = {"ifca", "stocfl", "fednova", "fedcac", "fedgwc"}  # test_traffic.py
KEEPS_STATE = {"ditto", "apfl"}


def play(method, cohorts=COHORTS, **local):
    one = groups(**local)
    return one, one.play(method, *cohorts)


@functools.cache
def played(plain, **local):
    """The same of a simple method, which is that of several cases."""
    return play(plain, **local)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize(
    "special, plain, local",
    [(special, plain, local) for special, plain, settings in CASES for local in settings],
    ids=lambda value: ", ".join(map(str, value)) if isinstance(value, dict) else value.name,
)
def test_is_the_simpler_method(special, plain, local, weights):
    one, found = play(replace(special, weights=weights), **local)
    other, expected = played(replace(plain, weights=weights), **local)
    assert torch.equal(found.models_KP, expected.models_KP)
    assert floats(one) == floats(other) or special.name in UPLOADS_MORE
    assert one.client_states == {} or special.name in KEEPS_STATE


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
        assert close(state.models_KP[state.assign_N[client]], mine, 1e-6), client
    assert np.array_equal(np.sort(state.assign_N), np.arange(8))
