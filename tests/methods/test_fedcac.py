"""FedCAC: masks, overlaps, collaborators and models by the formulas, and its reductions."""

import numpy as np
import pytest
import torch
from closeness import close
from linear import assert_close, matrix, mean, sgd, stage
from rounds import EnginesAndCheckpoints, accuracy, floats, groups, row_accuracy

from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedcac import FedCAC, collaborators, critical, overlaps


def top(theta, start, tau):
    """The tau n largest of |(theta - start) theta|, of the one layer."""
    c = np.abs((theta - start) * theta)
    return c >= np.sort(c.ravel())[-int(tau * c.size)]


@pytest.mark.parametrize("tau", [0.4, 1.0])
def test_two_rounds_follow_the_formulas(tau):
    """Two clients have the two overlaps of the mean, or below: with the threshold at the mean the larger one counts."""
    one, method, state = stage(), FedCAC(tau=tau, beta=100), None
    starts = [matrix(one.model())] * 2
    for number in (1, 2):
        theta = [sgd(one, i, starts[i]) for i in (0, 1)]
        mask = [top(theta[i], starts[i], tau) for i in (0, 1)]
        overlap = [1 - (mask[0] ^ mask[1]).sum() / (2 * mask[i].sum()) for i in (0, 1)]
        least = np.mean(overlap) + number / 100 * (max(overlap) - np.mean(overlap))
        custom = [np.mean(theta, axis=0) if overlap[i] >= least else theta[i] for i in (0, 1)]
        w = mean(*theta)
        starts = [np.where(mask[i], custom[i], w) for i in (0, 1)]
        state = one.play(method, None, state=state, first=number)
        assert_close(state.models_KP[0], w)
        for i in (0, 1):
            assert_close(state.starts[1 + i], starts[i])
            assert_close(state.own_SP[i], custom[i])


def test_masks_are_of_each_layer():
    one = groups()
    spec, draw = one.network.spec, torch.Generator().manual_seed(0)
    theta, start = torch.randn(3, 340, generator=draw), torch.randn(3, 340, generator=draw)
    mask, at = critical(theta, start, np.arange(len(theta)), spec, 0.3), 0
    for shape in spec.shapes:
        size = int(np.prod(shape))
        assert (mask[:, at : at + size].sum(1) == int(0.3 * size)).all()
        at += size
    assert not critical(theta, theta, np.arange(len(theta)), spec, 0.3).any()


def test_overlaps_and_collaborators():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    found = overlaps(mask)
    for i in range(3):
        for j in range(4):
            assert found[i, j] == 1 - (mask[i] ^ mask[j]).sum() / (2 * mask[i].sum())
    three = found[:3, :3]
    least, most = three[~np.eye(3, dtype=bool)].mean(), three[~np.eye(3, dtype=bool)].max()
    assert (collaborators(three, 0.0) == (np.eye(3, dtype=bool) | (three >= least))).all()
    assert (collaborators(three, 1.0) == (np.eye(3, dtype=bool) | (three >= most))).all()
    assert (collaborators(three, 1.1) == np.eye(3, dtype=bool)).all()
    assert collaborators(np.ones((1, 1)), 0.5).tolist() == [[True]]
    equal = np.where(np.eye(6, dtype=bool), 1, 0.2)
    assert equal[~np.eye(6, dtype=bool)].mean() > 0.2, "by rounding"
    assert all(collaborators(equal, progress).all() for progress in (0.01, 1.0, 1.5))


def test_with_critical_parameters_alone_it_is_fedavg_with_uniform_weights():
    """All masks are equal, and so are all overlaps: everyone works with everyone."""
    one, other = stage(), stage()
    found, expected = one.play(FedCAC(tau=1.0), None, None), other.play(FedAvg(weights="uniform"), None, None)
    assert found.mask_SP.all()
    for i in (0, 1):
        assert_close(found.starts[1 + i], matrix(expected.models_KP[0]))


def test_after_beta_rounds_the_critical_parameters_are_the_clients_own():
    one, method = groups(batch_size=30), FedCAC(beta=1)
    state = one.play(method, [0, 1, 2, 5], first=1)
    alone = one.play(method, [0, 1, 2, 5], state=state, first=2)
    other = groups(batch_size=30)
    clients = other.clients([0, 1, 2, 5], 2)
    trained = clients.train(clients.send(state.starts, state.rows_of(clients.ids_M)), features=clients.spec.all)
    assert close(alone.own_SP, trained.features_MF, 1e-5)


def test_traffic_has_a_bit_for_each_parameter():
    one = groups()
    state = one.play(FedCAC(), [0, 1])
    assert floats(one) == (2 * 340, 2 * (340 + 11))  # 340 bits in 11 words of 32 bits
    one.play(FedCAC(), [1, 2, 3], state=state, first=2)
    assert floats(one) == (4 * 340, 3 * (340 + 11))  # client 1 receives w and u_1


def test_clients_start_from_both_models_and_others_from_the_global_one():
    one, method = groups(), FedCAC()
    state = one.play(method, [0, 3], [3])
    mixed = torch.where(state.mask_SP[1], state.own_SP[1], state.models_KP[0])
    rows = ((3, mixed), (7, state.models_KP[0]))
    assert accuracy(one, method, state, [3, 7]) == pytest.approx([row_accuracy(one, row_P, i) for i, row_P in rows])
    left = method.leave(state, np.array([0]))
    assert left.seen_S.tolist() == [3] and torch.equal(left.mask_SP, state.mask_SP[1:])
    assert torch.equal(left.starts[1], state.starts[2])


class TestEngines(EnginesAndCheckpoints):
    METHOD = FedCAC(beta=10)
