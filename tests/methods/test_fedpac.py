"""FedPAC: rounds by plain PyTorch, the weights by another solver, and what is served."""

import numpy as np
import pytest
import scipy
import torch
from closeness import close
from plain import Torch, mean_by_samples, stage
from rounds import accuracy, floats, row_accuracy

from cfl_ray.methods.fedpac import FedPAC, collaboration

RARE = [9, 2, 14, 7, 5, 11, 8, 6]  # samples; client 1 has none of label 1
ALL = list(range(len(RARE)))
COHORTS = [[0, 1, 2, 3, 4, 5], ALL, [1, 2, 4, 6, 7]]
HEAD = 18  # 5 x 3 weights and 3 biases, the last columns


def by_slsqp(v, h_MX, i):
    """The minimum of a^T (diag(v) + D D^T) a over the simplex."""
    d_MX = h_MX[i] - h_MX
    q_MM = np.diag(v) + d_MX @ d_MX.T
    count = len(v)
    found = scipy.optimize.minimize(
        lambda a: a @ q_MM @ a,
        np.full(count, 1 / count),
        jac=lambda a: 2 * q_MM @ a,
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return found.x


def test_the_weights_are_the_minimum_over_the_simplex():
    draw = np.random.default_rng(0)
    v, h_MX = draw.uniform(0.01, 0.5, 9), draw.normal(0, 0.3, (9, 12))
    found = collaboration(v, h_MX, 0.0)
    assert np.allclose(found, [by_slsqp(v, h_MX, i) for i in range(9)], atol=2e-5)
    assert np.allclose(found.sum(1), 1) and (found == 0).any() and (found > 0.01).sum() > 20
    cut = collaboration(v, h_MX, 0.05)
    assert not ((cut > 0) & (found < 0.05)).any() and np.allclose(cut.sum(1), 1)


def test_weights_of_special_cases():
    same = np.ones((4, 3))
    v = np.array([1.0, 2.0, 4.0, 4.0])
    assert np.allclose(collaboration(v, same, 0.0), (1 / v) / (1 / v).sum())  # equal statistics: by 1 / v
    far = np.eye(4) * 1e3
    assert np.allclose(collaboration(v, far, 1e-3), np.eye(4))  # each alone
    assert np.allclose(collaboration(np.zeros(3), np.zeros((3, 2)), 0.0), 1 / 3)
    assert collaboration(np.ones(1), same[:1], 1e-3).tolist() == [[1.0]]
    assert np.allclose(collaboration(np.ones(3), np.zeros((3, 2)), 0.5), 1 / 3)  # all weights are below 0.5
    assert np.allclose(collaboration(np.array([1, 3, 12]), np.zeros((3, 2)), 0.5), [1, 0, 0])  # 12, 4, 1 of 17


def test_weights_of_matrices_that_are_singular_up_to_rounding():
    """Few statistics of many clients, large ones, and no variance: the weights are still of the simplex."""
    draw = np.random.default_rng(3)
    for scale in (1e-6, 1.0, 1e6):
        h_MX = scale * np.repeat(draw.normal(size=(4, 2)), 5, 0)  # five clients with each statistic
        weight_MM = collaboration(np.zeros(20), h_MX, 1e-3)
        assert (weight_MM >= 0).all() and np.allclose(weight_MM.sum(1), 1)
        error_M = np.linalg.norm(weight_MM @ h_MX - h_MX, axis=1)  # a^T D D^T a = 0 for equal clients alone
        assert error_M.max() < 1e-2 * np.abs(h_MX).max()


def by_torch(one, method, cohorts):
    clients, w, heads, prototypes = Torch(one), one.model(), {}, {}
    for round, cohort in enumerate(cohorts, 1):
        models, means, v, h = [], {}, [], []
        for i in cohort:
            y = one.federation.train(i)[1]
            row = torch.cat([w[:-HEAD], heads.get(i, w[-HEAD:])])
            f = clients.features(row, i)
            mu = {c: f[y == c].mean(0) for c in y.unique().tolist()}
            p = y.bincount(minlength=3) / len(y)
            v.append((sum(p[c] * (f[y == c] ** 2).sum(1).mean() - p[c] ** 2 * (mu[c] ** 2).sum() for c in mu)) / len(y))
            h.append(torch.cat([p[c] * mu[c] if c in mu else torch.zeros(5) for c in range(3)]))
            # exchanges: 1 describes, 2 trains the head, 3 the body
            for index_B in clients.batches(i, round, 2, epochs=1):
                row = torch.cat([row[:-HEAD], row[-HEAD:] - method.head_lr * clients.gradient(row, i, index_B)[-HEAD:]])
            for index_B in clients.batches(i, round, 3):

                def near(features, loss):
                    if not prototypes:
                        return loss
                    wanted = torch.stack([prototypes.get(c, mu[c]) for c in y[index_B].tolist()])
                    return loss + method.lam * ((features - wanted) ** 2).mean()

                step = one.local.lr * clients.gradient(row, i, index_B, near)
                row = torch.cat([(row - step)[:-HEAD], row[-HEAD:]])
            models.append(row)
            f = clients.features(row, i)
            means[i] = {c: (f[y == c].mean(0), int((y == c).sum())) for c in mu}
        w = mean_by_samples(one, models, cohort)
        for c in range(3):
            found = [means[i][c] for i in cohort if c in means[i]]
            prototypes[c] = sum(n * mean for mean, n in found) / sum(n for _, n in found)
        v, h = np.array([float(value) for value in v]), torch.stack(h).double().numpy()
        for place, i in enumerate(cohort):
            a = by_slsqp(v, h, place)
            a = torch.from_numpy(np.where(a < method.least, 0, a)).float()
            heads[i] = (a / a.sum()) @ torch.stack(models)[:, -HEAD:]
    return w, heads, prototypes


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method", [FedPAC(), FedPAC(lam=0.3, head_epochs=1, head_lr=0.5, least=0.02)])
def test_three_rounds_follow_algorithm_1(method, engine):
    one = stage(engine, sizes=RARE)
    state = one.play(method, *COHORTS)
    w, heads, prototypes = by_torch(one, method, COHORTS)
    assert close(state.models_KP[0, :-HEAD], w[:-HEAD], 1e-4)
    assert close(state.prototype_CF, torch.stack([prototypes[c] for c in range(3)]), 1e-4)
    models_KP, row_M = state.models_of(np.arange(8), one.network.spec)
    for i in ALL:
        assert close(models_KP[row_M[i], -HEAD:], heads[i], 1e-3)


def test_clients_are_served_their_mixed_heads_and_others_the_average():
    one, method = stage(sizes=RARE), FedPAC()
    state = one.play(method, [0, 1, 2, 3, 4])
    models_KP, row_M = state.models_of(np.arange(8), one.network.spec)
    assert accuracy(one, method, state) == pytest.approx(
        [row_accuracy(one, models_KP[row], i) for i, row in enumerate(row_M)]
    )
    assert row_M.tolist() == [1, 2, 3, 4, 5, 0, 0, 0] and torch.equal(models_KP[0], state.models_KP[0])
    size = one.network.spec.size
    one.play(method, [0, 5], state=state, first=2)
    assert floats(one) == (2 * (size + 15), 2 * (size + 2 * 15 + 3 + 1))


def test_a_leaver_has_no_head():
    one, method = stage(sizes=RARE), FedPAC()
    state = method.leave(one.play(method, [0, 1, 2]), np.array([1]))
    assert state.seen_S.tolist() == [0, 2] and len(state.row_SCF) == 2
