"""FedAvg+: K models that are each averaged as by FedAvg. With FedProx+: the vote, and clients that leave."""

import numpy as np
import pytest
import torch
from closeness import close
from linear import assert_close, matrix, mean, sgd, stage
from rounds import COHORTS, accuracy, floats, groups

from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedavg_plus import FedAvgPlus
from cfl_ray.methods.fedprox_plus import FedProxPlus

both = pytest.mark.parametrize("voting", [FedAvgPlus, FedProxPlus])


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_every_model_is_averaged_on_its_own(weights):
    one = stage()
    w = [matrix(one.model(k)) for k in range(3)]
    state = one.play(FedAvgPlus(num_models=3, weights=weights), None, [1])
    for k in range(3):
        assert_close(state.models_KP[k], sgd(one, 1, mean(sgd(one, 0, w[k]), sgd(one, 1, w[k]), weights)))


def test_the_first_model_is_that_of_fedavg_and_the_others_draw_other_batches():
    one, method = groups(batch_size=30), FedAvgPlus(num_models=2)
    found = one.play(method, *COHORTS[:2]).models_KP
    expected = groups(batch_size=30).play(FedAvg(), *COHORTS[:2]).models_KP
    assert torch.equal(found[0], expected[0]) and not close(found[1], expected[0], 1e-2)
    twins = method.init(one.start()).advance(models_KP=one.model().repeat(2, 1))
    twins = one.play(method, COHORTS[0], state=twins).models_KP
    assert not close(twins[0], twins[1], 1e-4)


@both
def test_the_models_vote_by_their_mean_probabilities(voting):
    one, method = groups(), voting(num_models=3)
    state, votes = one.play(method, *COHORTS), []
    x, y = one.federation.test_set(1)
    for row_P in state.models_KP:
        one.network.load(row_P)
        votes.append(one.network.module.eval()(one.network.input(x)).detach().cpu().softmax(1))
    together = (torch.stack(votes).mean(0).argmax(1) == y).float().mean().item()
    alone = [(vote.argmax(1) == y).float().mean().item() for vote in votes]
    assert accuracy(one, method, state, [1, 3]) == pytest.approx([together] * 2)
    assert min(abs(together - each) for each in alone) > 2e-3


def test_p_local_and_the_train_loss_are_of_the_first_model():
    one, other = groups(), groups()
    found = []
    for each, method in ((one, FedAvgPlus(num_models=3)), (other, FedAvg())):
        each.play(method, [0, 1])
        found.append(each.stats.train_loss)
    assert found[0] == found[1]


@both
def test_evaluation_costs_no_traffic(voting):
    one, method = groups(), voting(num_models=2)
    state = one.play(method, [0, 1, 2])
    assert floats(one) == (3 * 2 * 340, 3 * 2 * 340)
    accuracy(one, method, state)
    assert floats(one) == (0, 0)


@both
def test_leavers_are_forgotten_and_choose_no_model_when_they_return(voting):
    one, method = groups(), voting(num_models=2)
    state = method.leave(one.play(method, [0, 1]), np.array([1]))
    assert state.assign_N[:3].tolist() == [0, -1, 0]
    joined = method.join(state, one.clients([1, 7], round=2))
    assert floats(one) == (0, 0) and np.array_equal(joined.assign_N, state.assign_N)
    serving = method.serve(joined, one.clients([1, 7]))
    assert torch.equal(serving.models_KP, state.models_KP) and (serving.weight_MK == 1 / len(state.models_KP)).all()
