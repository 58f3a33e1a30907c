"""FedProx+: every model by the formula of FedProx, reductions to FedProx and FedAvg+, and soft voting."""

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage
from linear import assert_close, matrix, mean, sgd, stage
from rounds import COHORTS, accuracy, assert_engines_agree, floats, groups, mlp

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


@pytest.mark.parametrize("method", [FedProxPlus(num_models=2), FedAvgPlus(num_models=2)])
def test_clients_that_return_choose_none_of_the_models_that_vote(method):
    one = groups()
    left = method.leave(one.play(method, None), np.array([1, 4]))
    back = method.join(left, one.clients([1, 4], round=2))
    assert floats(one) == (0, 0)
    assert np.array_equal(back.assign_N, left.assign_N)


def test_without_its_term_it_is_fedavg_plus_bit_for_bit():
    found, expected = (
        groups(batch_size=30).play(method, *COHORTS[1:]).models_KP
        for method in (FedProxPlus(num_models=2, mu=0), FedAvgPlus(num_models=2))
    )
    assert torch.equal(found, expected)


def test_the_models_vote_by_their_mean_probabilities():
    one, method = groups(), FedProxPlus(num_models=3)
    state, votes = one.play(method, *COHORTS), []
    x, y = one.federation.test_set(1)
    for row_P in state.models_KP:
        one.network.load(row_P)
        votes.append(one.network.module.eval()(x).detach().softmax(1))
    together = (torch.stack(votes).mean(0).argmax(1) == y).float().mean().item()
    alone = [(vote.argmax(1) == y).float().mean().item() for vote in votes]
    assert accuracy(one, method, state, [1, 3]) == pytest.approx([together] * 2, abs=1e-6)
    assert min(abs(together - one) for one in alone) > 2e-3


def test_traffic_of_one_model_is_one_model_each_way():
    one = groups()
    one.play(FedProxPlus(num_models=1), [0, 1, 2])
    assert floats(one) == (3 * 340, 3 * 340)


def test_no_state_of_a_leaver_remains():
    one, method = groups(), FedProxPlus(num_models=2)
    state = method.leave(one.play(method, [0, 1]), np.array([1]))
    assert state.assign_N[:3].tolist() == [0, -1, 0]
    serving = method.serve(method.join(state, one.clients([1, 7])), one.clients([1, 7]))
    assert torch.equal(serving.models_KP, state.models_KP) and serving.vote


def test_a_cohort_without_a_valid_update_changes_nothing():
    one = Stage(Spoiled([4, 5]), mlp)
    state = one.play(FedProxPlus(num_models=2), [4, 5])
    assert torch.equal(state.models_KP, torch.stack([one.model(0), one.model(1)]))


def test_engines_agree_with_a_strong_proximal_term():
    assert_engines_agree(lambda engine: groups(engine, batch_size=30, momentum=0.5), FedProxPlus(num_models=2, mu=MU))
