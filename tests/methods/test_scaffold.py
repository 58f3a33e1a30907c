"""SCAFFOLD: rounds by plain PyTorch, both options and corrections, its fixed point, and newcomers."""

from dataclasses import replace

import linear
import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage
from plain import ALL, COHORTS, LOCAL, SIZES, Torch, stage

from cfl_ray.core.method import Method
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.scaffold import Scaffold


def by_torch(one: Stage, method: Scaffold, cohorts) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
    """(x, c, c_i) by Algorithm 1, with the momentum of `torch.optim.SGD` and the options of the method."""
    local, x, clients = one.local, one.model(), Torch(one)
    c, own = torch.zeros_like(x), {}
    for round, cohort in enumerate(cohorts, 1):
        models, change = [], torch.zeros_like(x)
        for i in cohort:
            before = own.get(i, torch.zeros_like(x))
            c_i = c if method.newcomer == "c" and i not in own else before
            y, velocity, total = x.clone(), torch.zeros_like(x), 0.0
            weight = 0.0  # of the gradients in the velocity
            for index_B in clients.batches(i, round):
                g = clients.gradient(y, i, index_B) + local.weight_decay * y
                if method.correction == "gradient":
                    velocity = local.momentum * velocity + g - c_i + c
                    y = y - local.lr * velocity
                else:
                    velocity = local.momentum * velocity + g
                    y = y - local.lr * velocity - local.lr * (c - c_i)
                weight = local.momentum * weight + 1
                total += weight if method.correction == "gradient" else 1
            own[i] = clients.gradient(x, i) if method.variates == "I" else c_i - c + (x - y) / (total * local.lr)
            models.append(y)
            change = change + own[i] - before
        weights = torch.tensor([float(SIZES[i]) if method.weights == "samples" else 1.0 for i in cohort])
        x = x + method.eta_g * ((weights / weights.sum()) @ torch.stack(models) - x)
        c = c + change / len(SIZES)
    return x, c, own


CASES = [
    (Scaffold(), {}),
    (Scaffold(variates="I", eta_g=0.7), {"weight_decay": 0.01}),
    (Scaffold(newcomer="c", weights="samples"), {"momentum": 0.5, "weight_decay": 0.01}),
    (Scaffold(correction="after_step", weights="samples"), {"momentum": 0.9, "weight_decay": 0.01}),
]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method, changes", CASES)
def test_three_rounds_follow_algorithm_1(method, changes, engine):
    one = stage(engine, **changes)
    state = one.play(method, *COHORTS)
    x, c, own = by_torch(one, method, COHORTS)
    assert close(state.models_KP[0], x, 2e-5) and close(state.sum_KP[0] / len(SIZES), c, 2e-5)
    size = one.network.spec.trained
    (name,) = {name for name, _ in one.client_states}
    for i in ALL:
        assert close(one.client_states[name, i][:size], own[i], 2e-5)
        assert one.client_states[name, i][size] == sum(i in cohort for cohort in COHORTS)
    assert close(state.sum_KP[0], sum(own.values()), 2e-5)  # N c, whatever the cohorts


def residual(method: Method) -> float:
    """Norm of the gradient of the mean of f_i, a convex function, after 25 rounds of two clients."""
    one = linear.stage(steps=5, sizes=(20, 16))
    w = linear.matrix(one.play(method, *[None] * 25).models_KP[0])
    return np.linalg.norm(linear.gradient(one, 0, w) + linear.gradient(one, 1, w)) / 2


def test_its_fixed_point_is_the_optimum_that_fedavg_misses():
    """With full batches and several steps FedAvg ends where client drift balances, SCAFFOLD at a stationary point."""
    assert residual(Scaffold()) < 0.05 * residual(FedAvg(weights="uniform"))


def test_with_all_clients_and_equal_steps_c_follows_from_two_models():
    """c = (x_t - x_{t+1}) / (K eta): one row each way would do."""
    one = stage("manual", steps=3, batch_size=None)
    method = Scaffold()
    before = one.play(method, None)
    after = one.play(method, None, state=before, first=2)
    expected = (before.models_KP - after.models_KP) / (3 * one.local.lr)
    assert close(after.sum_KP / len(SIZES), expected, 1e-5)


def test_momentum_leaves_control_variates_the_size_of_gradients():
    """Option II with a_i in place of K_i; K_i would make them nearly 1 / (1 - rho) times as large."""
    one, plain = stage(momentum=0.9, lr=1e-4, steps=40), stage(lr=1e-4, steps=40)
    found, expected = (each.play(Scaffold(), None).sum_KP.norm().item() for each in (one, plain))
    assert found == pytest.approx(expected, rel=0.03)


def test_a_newcomer_at_c_trains_without_correction_and_counts_whole():
    one, other = stage(), stage()
    first = one.play(Scaffold(newcomer="c"), [0, 1, 2, 3])
    found = one.play(Scaffold(newcomer="c"), [4], state=first, first=2)
    plain = other.play(FedAvg(), [4], state=replace(first, sum_KP=torch.zeros_like(first.sum_KP)), first=2)
    assert close(found.models_KP, plain.models_KP, 1e-6)
    assert not close(one.play(Scaffold(), [4], state=first, first=2).models_KP, plain.models_KP, 1e-3)


@pytest.mark.parametrize("newcomer", ["zero", "c"])
def test_control_variates_restart_after_a_leave(newcomer):
    """The rounds after it are those of a federation that begins with the model x; a client that left comes back."""
    method = Scaffold(newcomer=newcomer, leavers="restart", weights="samples")
    one, anew = stage("sequential"), stage("sequential")
    state = method.leave(one.play(method, *COHORTS), np.array([1]))
    found = one.play(method, *COHORTS, state=state, first=4)
    first = method.init(anew.start()).advance(models_KP=state.models_KP)
    expected = anew.play(method, *COHORTS, state=first, first=4)
    assert torch.equal(found.models_KP, expected.models_KP) and torch.equal(found.sum_KP, expected.sum_KP)
    assert found.sum_KP.any() and (found.restarts, expected.restarts) == (1, 0)


def test_its_fixed_point_after_a_leave_is_the_optimum_of_those_that_are_left():
    """Unless c keeps the c_i of the client that left."""
    residuals = []
    for leavers in ("restart", "stay"):
        one, method = linear.stage(steps=5, sizes=(20, 16, 12)), Scaffold(leavers=leavers)
        state = method.leave(one.play(method, *[None] * 10), np.array([2]))
        w = linear.matrix(one.play(method, *[[0, 1]] * 25, state=state, first=11).models_KP[0])
        residuals.append(np.linalg.norm(linear.gradient(one, 0, w) + linear.gradient(one, 1, w)) / 2)
    assert residuals[0] < 0.01 * residuals[1]


def test_a_client_that_is_excluded_changes_neither_model_nor_variates():
    one = stage(lr=1e20)
    state = one.play(Scaffold(), None)
    assert torch.equal(state.models_KP[0], one.model()) and not state.sum_KP.any() and not one.client_states


def test_without_a_learning_rate_control_variates_stay():
    """As in the last round of a schedule that ends at 0."""
    one = stage()
    state = one.play(Scaffold(), None)
    one.local = replace(LOCAL, lr=0.0)
    after = one.play(Scaffold(), None, state=state, first=2)
    assert close(after.models_KP, state.models_KP, 1e-6) and torch.equal(after.sum_KP, state.sum_KP)
    assert len(one.stats.train_loss) == len(SIZES)
