"""FedProx+: every model by the formula of FedProx, reductions to FedProx and FedAvg+."""

import pytest
from linear import assert_close, matrix, mean, sgd, stage
from rounds import assert_engines_agree, groups

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


def test_engines_agree_with_a_strong_proximal_term():
    assert_engines_agree(lambda engine: groups(engine, batch_size=30, momentum=0.5), FedProxPlus(num_models=2, mu=MU))
