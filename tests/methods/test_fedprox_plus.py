"""FedProx+: every model by the formula of FedProx, reductions to FedProx and FedAvg+."""

import pytest
import torch
from linear import assert_close, matrix, mean, sgd, stage
from rounds import COHORTS, accuracy, assert_engines_agree, floats, groups

from cfl_ray.methods.fedavg_plus import FedAvgPlus
from cfl_ray.methods.fedprox import FedProx
from cfl_ray.methods.fedprox_plus import FedProxPlus

MU = 0.4


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_the_proximal_term_of_every_model_is_to_that_model_as_received(weights):
    one = stage()
    w = [matrix(one.model(k)) for k in range(3)]
    state = one.play(FedProxPlus(num_models=3, mu=MU, weights=weights), None, [1])
    for k in range(3):
        first = mean(sgd(one, 0, w[k], MU, w[k]), sgd(one, 1, w[k], MU, w[k]), weights)
        assert_close(state.models_KP[k], sgd(one, 1, first, MU, first))


@pytest.mark.parametrize("local", [{"batch_size": 30, "momentum": 0.9}, {}], ids=["mini-batches", "full batch"])
def test_of_one_model_it_is_fedprox_bit_for_bit(local):
    one, other = groups(**local), groups(**local)
    found, expected = one.play(FedProxPlus(num_models=1, mu=MU), *COHORTS), other.play(FedProx(mu=MU), *COHORTS)
    assert torch.equal(found.models_KP, expected.models_KP) and floats(one) == floats(other)
    assert accuracy(one, FedProxPlus(num_models=1), found) == pytest.approx(accuracy(other, FedProx(), expected))


def test_without_its_term_it_is_fedavg_plus_bit_for_bit():
    found, expected = (
        groups(batch_size=30).play(method, *COHORTS[1:]).models_KP
        for method in (FedProxPlus(num_models=2, mu=0), FedAvgPlus(num_models=2))
    )
    assert torch.equal(found, expected)


def test_engines_agree_with_a_strong_proximal_term():
    assert_engines_agree(lambda engine: groups(engine, batch_size=30, momentum=0.5), FedProxPlus(num_models=2, mu=MU))
