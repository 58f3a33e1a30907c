"""FedProto: rounds by plain PyTorch, both predictions, labels without prototypes, and newcomers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, protected, uneven
from plain import ALL, LOCAL, SIZES, Torch, stage
from rounds import accuracy, floats, row_accuracy
from torch import nn
from torch.nn.functional import mse_loss

from cfl_ray.core.privacy import PrivacyError
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.core.state import State
from cfl_ray.errors import ConfigError
from cfl_ray.methods.fedproto import FedProto, nearest_prototype
from cfl_ray.methods.local import Local

RARE = [9, 2, 14, 7, 5, 11, 8, 6]  # samples; client 1 has none of label 1
COHORTS = [[1], [0, 1, 2, 3, 5, 6, 7], [0, 1, 4, 5, 7]]  # in the second round label 1 has no prototype
CLASSES, F = 3, 5


def by_torch(one: Stage, method: FedProto, cohorts) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """(prototype by label, model by client), with dicts of labels as the official code has them."""
    clients, models, prototypes = Torch(one), {}, {}
    for round, cohort in enumerate(cohorts, 1):
        own = {}
        for i in cohort:
            w, y = models.get(i, one.model()), one.federation.train(i)[1]
            batches = list(clients.batches(i, round))
            seen: dict[int, list[torch.Tensor]] = {}
            for step, index_B in enumerate(batches):
                if step >= len(batches) // 2:  # the last of two epochs
                    for f, label in zip(clients.features(w, i, index_B), y[index_B].tolist()):
                        seen.setdefault(label, []).append(f)

                def near(features, loss):
                    wanted = [prototypes.get(c, f.detach()) for c, f in zip(y[index_B].tolist(), features)]
                    return loss + method.lam * mse_loss(features, torch.stack(wanted))

                w = w - one.local.lr * clients.gradient(w, i, index_B, near)
            models[i] = w
            if method.prototypes == "after":
                f_nF = clients.features(w, i)
                seen = {c: list(f_nF[y == c]) for c in y.unique().tolist()}
            own[i] = {c: torch.stack(f).mean(0) for c, f in seen.items()}
        for c in range(CLASSES):
            means = [(own[i][c], (one.federation.train(i)[1] == c).sum()) for i in cohort if c in own[i]]
            if means:
                weights = [n if method.weights == "samples" else 1 for _, n in means]
                prototypes[c] = sum(n * mean for n, (mean, _) in zip(weights, means)) / sum(weights)
    return prototypes, models


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method", [FedProto(lam=0.7), FedProto(prototypes="running", weights="uniform")])
def test_three_rounds_follow_the_equations(method, engine):
    one = stage(engine, sizes=RARE)
    state = one.play(method, *COHORTS)
    prototypes, models = by_torch(one, method, COHORTS)
    assert close(state.prototype_CF, torch.stack([prototypes[c] for c in range(CLASSES)]), 2e-5)
    assert all(close(one.client_states["model", i], models[i], 2e-5) for i in ALL)
    assert torch.equal(state.models_KP[0], one.model())


def test_clients_predict_with_the_nearest_prototype():
    """Scores of the served models are those of distances; P-local are those of the clients' own last layers."""
    one, method = stage(sizes=RARE), FedProto()
    state = one.play(method, *COHORTS)
    clients, found, own = Torch(one), accuracy(one, method, state), []
    for i in ALL:
        row_P, (x, y) = one.client_states["model", i], one.federation.test(i)
        clients.load(row_P)
        f_nF = clients.module[:-1](x)
        nearest = torch.cdist(f_nF, state.prototype_CF).argmin(1)
        assert found[i] == pytest.approx((nearest == y).float().mean().item())
        own.append(row_accuracy(one, row_P, i))
    classifier = replace(method, predict="classifier")
    assert np.allclose(accuracy(one, classifier, state), own) and not np.allclose(found, own)
    measured = replace(one.clients(round=4), local_test_samples=50)
    method.round(state, measured, None)
    trained = [row_accuracy(one, one.client_states["model", i], i) for i in ALL]
    assert np.allclose([measured.stats.local_scores[i][0] for i in ALL], trained)


def test_a_label_without_a_prototype_is_farthest():
    prototype_CF = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan], [-3.0, 0.5]])
    rows, f = nearest_prototype(prototype_CF), torch.randn(50, 2) * 30
    found = (f @ rows[:, :2].T + rows[:, 2]).argmax(1)
    distance = torch.cdist(f, prototype_CF.nan_to_num(torch.inf))
    assert torch.equal(found, distance.nan_to_num(torch.inf).argmin(1)) and rows.isfinite().all()


def test_a_label_that_a_cohort_lacks_keeps_its_prototype():
    one, method = stage(sizes=RARE), FedProto()
    before = one.play(method, ALL)
    after = one.play(method, [1], state=before, first=2)
    assert torch.equal(after.prototype_CF[1], before.prototype_CF[1])
    assert not close(after.prototype_CF[::2], before.prototype_CF[::2], 1e-3)
    first = one.play(method, [1])
    assert first.prototype_CF[1].isnan().all() and first.prototype_CF[::2].isfinite().all()


def test_without_the_term_it_is_local_training():
    one, other = stage(sizes=RARE), stage(sizes=RARE)
    one.play(FedProto(lam=0.0), *COHORTS)
    other.play(Local(), *COHORTS)
    for i in ALL:
        assert close(one.client_states["model", i], other.client_states["personal", i], 1e-6)


def test_prototypes_are_all_that_is_sent():
    one, method = stage(sizes=RARE), FedProto()
    state = one.play(method, [1])
    assert floats(one) == (0, CLASSES * (F + 1))
    one.play(method, [0, 1], state=state, first=2)
    assert floats(one) == (2 * 2 * F, 2 * CLASSES * (F + 1))  # the prototypes of two labels down


def test_newcomers_train_with_the_prototypes_and_upload_nothing():
    one, method = stage(sizes=RARE), FedProto()
    state: State = one.play(method, [0, 1, 2])
    clients = one.clients([4], round=2)
    assert torch.equal(method.join(state, clients).prototype_CF, state.prototype_CF)
    assert ("model", 4) in one.client_states and ("model", 3) not in one.client_states
    assert floats(one) == (CLASSES * F, 0)


def test_what_cannot_be_is_refused():
    one = Stage(uneven(SIZES), lambda: nn.Sequential(nn.Linear(6, F), nn.Tanh(), nn.Linear(F, 3, bias=False)), LOCAL)
    with pytest.raises(ConfigError, match="needs biases in the last layer '2'.*or set predict: classifier"):
        FedProto().check_model(one.network.spec)
    FedProto(predict="classifier").check_model(one.network.spec)
    one.play(FedProto(predict="classifier"), ALL, ALL)
    with pytest.raises(PrivacyError, match="reads the prototypes that clients report of single clients"):
        method = FedProto()
        method.round(method.init(one.start()), protected(one.clients(), masks=SecureAggregation(clip=1.0)), None)
