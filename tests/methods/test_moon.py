"""MOON: rounds by plain PyTorch, both first models, and its reduction to FedAvg."""

import pytest
import torch
from closeness import close
from federations import Stage
from plain import COHORTS, Torch, mean_by_samples, stage
from torch.nn.functional import cosine_similarity

from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.moon import Moon
from cfl_ray.models.cnn import lenet5


def by_torch(one: Stage, method: Moon, cohorts) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """(w, previous model of each client) by Algorithm 1."""
    clients, w, previous = Torch(one), one.model(), {}
    for round, cohort in enumerate(cohorts, 1):
        models = []
        for i in cohort:
            y, before = w, previous.get(i, one.model() if method.first == "initial" else None)
            for index_B in clients.batches(i, round):
                others = [clients.features(model, i, index_B) for model in (w, before) if model is not None]

                def contrast(features, loss):
                    e = [(cosine_similarity(features, z) / method.tau).exp() for z in others]
                    return loss - method.mu * (e[0] / sum(e)).log().mean()  # of one: 0

                y = y - one.local.lr * clients.gradient(y, i, index_B, contrast)
            previous[i] = y
            models.append(y)
        w = mean_by_samples(one, models, cohort)
    return w, previous


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method", [Moon(), Moon(mu=1.0, tau=0.2, first="initial")])
def test_three_rounds_follow_algorithm_1(method, engine):
    one = stage(engine)
    state = one.play(method, *COHORTS)
    w, previous = by_torch(one, method, COHORTS)
    assert close(state.models_KP[0], w, 5e-5)
    assert all(close(one.client_states["previous", i][: len(w)], previous[i], 5e-5) for i in previous)
    assert not close(w, stage(engine).play(FedAvg(), *COHORTS).models_KP[0], 1e-2)


def test_the_first_round_of_a_client_is_that_of_fedavg():
    """Its loss too: the contrastive loss of one model is 0."""
    one, other = stage(), stage()
    assert close(one.play(Moon(), None).models_KP, other.play(FedAvg(), None).models_KP, 1e-6)
    assert one.stats.train_loss == pytest.approx(other.stats.train_loss)


def test_a_projection_head_is_a_part_of_the_network():
    """Features are its outputs: the inputs of the last layer."""
    plain, projected = (lenet5((1, 28, 28), 10, projection=size) for size in (0, 256))
    added = sum(p.numel() for p in projected.parameters()) - sum(p.numel() for p in plain.parameters())
    assert added == (84 * 84 + 84) + (84 * 256 + 256) + (256 - 84) * 10
    assert projected[-1].in_features == 256 and projected(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
