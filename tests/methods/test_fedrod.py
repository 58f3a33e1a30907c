"""FedRoD: rounds by plain PyTorch, both predictions, and rare labels."""

from dataclasses import replace

import pytest
import torch
from closeness import close
from federations import Stage
from plain import ALL, COHORTS, Torch, mean_by_samples, mlp, stage
from rounds import accuracy, row_accuracy
from torch import nn
from torch.nn.functional import cross_entropy

from cfl_ray.core.serving import Serving
from cfl_ray.methods.fedrod import FedRoD

RARE = [9, 2, 14, 7, 5, 11, 8, 6]  # samples; client 1 has none of label 1


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def by_torch(one: Stage, method: FedRoD, cohorts) -> tuple[torch.Tensor, dict[int, nn.Linear]]:
    """(generic model, personal heads) as modules, both differentiated by autograd."""
    clients, w, personal = Torch(one), one.model(), {}
    for round, cohort in enumerate(cohorts, 1):
        models = []
        for i in cohort:
            x, y = one.federation.train(i)
            generic = one.factory()
            nn.utils.vector_to_parameters(w.clone(), generic.parameters())
            if i not in personal:
                personal[i] = nn.Linear(5, 3, bias=generic[-1].bias is not None)
                state = generic[-1].state_dict()
                kept = state if method.start == "copy" else {name: torch.zeros_like(v) for name, v in state.items()}
                personal[i].load_state_dict(kept)
            log_n = y.bincount(minlength=3).float().log()
            lr = one.local.lr if method.personal_lr is None else method.personal_lr
            parts = [(list(generic.parameters()), one.local.lr), (list(personal[i].parameters()), lr)]
            for index_B in clients.batches(i, round):
                f = generic[:-1](x[index_B])
                logits = generic[-1](f)
                losses = [
                    cross_entropy(logits + log_n, y[index_B]),
                    cross_entropy(logits.detach() + personal[i](f.detach()), y[index_B]),
                ]
                gradients = [torch.autograd.grad(loss, part) for loss, (part, _) in zip(losses, parts)]
                with torch.no_grad():
                    for (part, rate), gradient in zip(parts, gradients):
                        torch._foreach_sub_(part, gradient, alpha=rate)
            models.append(nn.utils.parameters_to_vector(generic.parameters()).detach())
        w = mean_by_samples(one, models, cohort)
    return w, personal


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method, factory", [(FedRoD(), mlp), (FedRoD(personal_lr=0.5, start="copy"), without_bias)])
def test_three_rounds_follow_algorithm_1(method, factory, engine):
    one = stage(engine, factory, RARE)
    state = one.play(method, *COHORTS)
    w, personal = by_torch(one, method, COHORTS)
    assert close(state.models_KP[0], w, 2e-5)
    for i, head in personal.items():
        rows = torch.cat([p.reshape(3, -1) for p in head.parameters()], 1).detach().reshape(-1)
        assert close(one.client_states["personal_head", i][:-1], rows, 2e-5)


def test_clients_predict_with_the_sum_of_both_heads_and_others_with_the_generic_one():
    one, method = stage(), FedRoD(personal_lr=1.0)
    state = one.play(method, *COHORTS)
    w, personal = by_torch(one, method, COHORTS)
    module, found = mlp(), accuracy(one, method, state)
    nn.utils.vector_to_parameters(w, module.parameters())
    for i in ALL:
        x, y = one.federation.test(i)
        f = module[:-1](x)
        logits = module[-1](f) + (personal[i](f) if i in personal else 0)
        assert found[i] == pytest.approx((logits.argmax(1) == y).float().mean().item())
    measured = []
    clients = replace(one.clients(round=4), tester=lambda _, serving: measured.append(serving) or found[:, None])
    method.diagnose(state, clients)
    assert isinstance(measured[0], Serving) and measured[0].client_state is None


def test_p_local_measures_both_heads():
    """One client, whose upload is the next generic model."""
    one, method = stage(), FedRoD(personal_lr=1.0)
    clients = replace(one.clients([2]), local_test_samples=50)
    state = method.round(method.init(one.start()), clients, None)
    both_P = method.kept(one.network.spec).predicts(state.models_KP[0].clone(), one.client_states["personal_head", 2])
    assert clients.stats.local_scores[2][0] == pytest.approx(row_accuracy(one, both_P, 2))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_label_without_samples_has_no_infinite_loss(engine):
    """Client 1 has none of label 1; its batches of different sizes are padded with samples of some label."""
    one = stage(engine, sizes=RARE, batch_size=3)
    assert not (one.federation.train(1)[1] == 1).any()
    state = one.play(FedRoD(), None, None)
    assert set(one.stats.train_loss) == set(ALL) and state.models_KP.isfinite().all()
    assert all(0 < loss < 10 for loss in one.stats.train_loss.values())
