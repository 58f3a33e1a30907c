"""`local.persist`: a client keeps its momentum buffer between rounds, as the official code of CFL does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, planted, uneven
from rounds import COHORTS, assert_engines_agree, assert_survives_an_interruption, groups
from torch import nn
from torch.nn.functional import cross_entropy
from training_tasks import logits_of

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import span
from cfl_ray.engine.task import TrainingTask
from cfl_ray.methods.cfl import CFL
from cfl_ray.methods.ditto import Ditto
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedem import FedEM
from cfl_ray.methods.fedper import FedPer
from cfl_ray.methods.fedrc import FedRC

SIZES, STEPS, LR, RHO, DECAY = [12, 4, 7], 3, 0.2, 0.9, 0.01


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def stage(engine: str = "manual", persist: bool = True, momentum: float = RHO) -> Stage:
    return Stage(
        uneven(SIZES, (5,)),
        model,
        LocalSGD(steps=STEPS, lr=LR, momentum=momentum, weight_decay=DECAY, persist=persist),
        engine,
    )


class Clients:
    """PyTorch's own optimisers, one per client and model."""

    def __init__(self, one: Stage):
        self.one, self.optimisers = one, {}

    def train(
        self,
        client: int,
        row_P: torch.Tensor,
        lam: float = 0.0,
        to: torch.Tensor | None = None,
        model: int = 0,
        weight_n: torch.Tensor | float = 1.0,
    ) -> torch.Tensor:
        module, optimiser = self.optimisers.setdefault((client, model), self._new())
        nn.utils.vector_to_parameters(row_P.clone(), module.parameters())
        x, y = self.one.federation.train(client)
        for _ in range(STEPS):
            optimiser.zero_grad()
            loss = (weight_n * cross_entropy(module(x), y, reduction="none")).mean()
            if lam:
                loss = loss + lam / 2 * (nn.utils.parameters_to_vector(module.parameters()) - to).square().sum()
            loss.backward()
            optimiser.step()
        return nn.utils.parameters_to_vector(module.parameters()).detach().clone()

    def _new(self):
        module = model()
        return module, torch.optim.SGD(module.parameters(), lr=LR, momentum=RHO, weight_decay=DECAY)


@pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised", "span"])
def test_a_client_has_one_optimiser_for_all_rounds(engine):
    one, cohorts = stage(engine), [[0, 1], [0, 2], [0, 1, 2]]
    clients, w = Clients(one), one.model()
    for ids in cohorts:
        size = torch.tensor([SIZES[client] for client in ids], dtype=torch.float32)
        w = (torch.stack([clients.train(client, w) for client in ids]) * size[:, None]).sum(0) / size.sum()
    found = one.play(FedAvg(), *cohorts).models_KP[0]
    assert close(found, w, 2e-5)
    assert not close(stage(engine, persist=False).play(FedAvg(), *cohorts).models_KP[0], w, 1e-3)


def test_clients_with_fewer_steps_than_others_of_a_stack_keep_their_last_buffer():
    """Epochs of 3, 1 and 2 steps, trained side by side."""
    local = LocalSGD(epochs=1, batch_size=4, lr=LR, momentum=RHO, persist=True)
    rows = []
    for engine in ("sequential", "vectorised"):
        one = Stage(uneven(SIZES, (5,)), model, local, engine)
        one.play(FedAvg(), None, None)
        rows.append(torch.stack([one.client_states["momentum", client] for client in range(3)]))
    assert close(*rows, 1e-5) and (rows[0].norm(dim=1) > 1e-3).all()


def test_a_personal_model_has_its_own_buffer():
    """Ditto: the buffer of v_i is kept with v_i; the global training always begins with an empty one."""
    one, lam = stage(), 0.3
    v, w = Clients(one), one.model()
    personal = dict.fromkeys(range(3), w)
    for _ in range(3):
        personal = {client: v.train(client, row, lam, w) for client, row in personal.items()}
        trained = torch.stack([Clients(one).train(client, w) for client in range(3)])
        w = (trained * torch.tensor(SIZES)[:, None]).sum(0) / sum(SIZES)
    method = Ditto(lam=lam)
    state = one.play(method, None, None, None)
    assert close(state.models_KP[0], w, 2e-5)
    size = one.network.spec.size
    for client in range(3):
        kept = one.client_states["personal", client]
        assert len(kept) == 2 * size and close(kept[:size], personal[client], 2e-5)


@pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised", "span"])
def test_a_client_of_a_mixture_has_an_optimiser_for_each_model(engine):
    """As in the official code of FedEM."""
    one, cohorts, count = stage(engine), [[0, 1], [0, 2], [0, 1, 2]], 2
    clients, w = Clients(one), [one.model(k) for k in range(count)]
    pi = {client: torch.full((count,), 1 / count) for client in range(3)}
    for ids in cohorts:
        trained = []
        for client in ids:
            x, y = one.federation.train(client)
            logits = [logits_of(one.network, row, x).cpu() for row in w]
            loss_nK = torch.stack([cross_entropy(each, y, reduction="none") for each in logits], 1)
            q_nK = (pi[client].log() - loss_nK).softmax(1)
            pi[client] = q_nK.mean(0)
            trained.append([clients.train(client, w[k], model=k, weight_n=q_nK[:, k]) for k in range(count)])
        size = torch.tensor([SIZES[client] for client in ids], dtype=torch.float32)
        w = [(torch.stack(of_model) * size[:, None]).sum(0) / size.sum() for of_model in zip(*trained)]
    found = one.play(FedEM(num_models=count), *cohorts).models_KP
    assert close(found, torch.stack(w), 2e-5)
    assert one.client_states.keys() == {(f"momentum-{k}", client) for k in range(count) for client in range(3)}
    fresh = stage(engine, persist=False).play(FedEM(num_models=count), *cohorts).models_KP
    assert not close(fresh, found, 1e-3)


def test_without_momentum_nothing_is_kept():
    one = stage(momentum=0.0)
    one.play(FedAvg(), None)
    assert one.client_states == {}


def test_the_shortcut_for_full_batches_does_not_apply():
    one = stage()
    x, y = one.federation.train(1)
    task = TrainingTask(1, one.model(), x[:2], y[:2], 3, one.local, one.clients()._next_address())
    assert "momentum that persists between rounds" in span.why_not(one.network, [task])
    assert span.why_not(one.network, [replace(task, local=replace(one.local, persist=False))]) is None


@pytest.mark.parametrize(
    "method",
    [CFL(min_rounds=1, eps1=10.0, eps2=0.0), FedPer(), Ditto(), FedEM(num_models=2), FedRC(num_models=2)],
    ids=lambda method: method.name,
)
class TestWithMethods:
    LOCAL = {"persist": True, "momentum": 0.5, "batch_size": 30, "federation": planted(samples=60)}

    def test_engines_agree(self, method):
        assert_engines_agree(lambda engine="manual": groups(engine, **self.LOCAL), method)

    def test_an_interruption_changes_nothing(self, method, tmp_path):
        assert_survives_an_interruption(
            lambda engine="manual": groups(engine, **self.LOCAL), method, COHORTS[:3], tmp_path
        )

    def test_a_client_that_leaves_has_no_buffer_left(self, method):
        one = groups(**self.LOCAL)
        one.play(method, None)
        one.backend.forget(np.array([3]))
        assert {client for _, client in one.client_states} == {0, 1, 2, 4, 5, 6, 7}
