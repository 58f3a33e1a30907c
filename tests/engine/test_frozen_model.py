"""A frozen model: its logits are added to those of the trained one in training, in losses and in every prediction."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import training_tasks
from closeness import close
from federations import Stage, planted, uneven
from torch import nn
from torch.nn.functional import cross_entropy
from training_tasks import LONG, by_torch, long_mlp

from cfl_ray.config import EvaluationConfig
from cfl_ray.core.clients import LocalTraining, Proximal
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import stream
from cfl_ray.core.serving import Serving
from cfl_ray.core.work import TEST, Address
from cfl_ray.engine import span
from cfl_ray.engine.task import HeldByClient, TrainingTask
from cfl_ray.runtime.evaluation import Evaluator

ENGINES = ["sequential", "manual", "vectorised", "span"]
LOCALS = {
    "full batch": LocalSGD(epochs=4, lr=0.3),
    "mini-batches": LocalSGD(epochs=2, batch_size=4, lr=0.2),
    "momentum and weight decay": LocalSGD(epochs=3, lr=0.1, momentum=0.9, weight_decay=0.05),
}
SIZES = [10, 3, 7, 12, 5, 9, 4, 8]  # enough clients for chunks of two, which `vectorised` stacks


def with_dropout():
    return nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def stage(engine="sequential", local=LOCALS["full batch"], factory=long_mlp) -> Stage:
    return Stage(uneven(SIZES, LONG), factory, local, engine)


def loaded(one: Stage, row_P: torch.Tensor) -> nn.Module:
    return training_tasks.loaded(one.factory, one.network, row_P)


def trained_by_torch(one: Stage, client: int, start_P, frozen_P, mu: float = 0.0) -> torch.Tensor:
    """torch.optim.SGD on the cross-entropy of f(x; W) + h(x), h the frozen model, + (mu / 2) ||W - start||^2."""
    x, y = one.federation.train(client)
    steps, terms = int(one.local.steps_of(np.array([len(y)]))[0]), (Proximal(mu, start_P),)
    held = HeldByClient(proximal=terms, frozen_P=frozen_P)
    task = TrainingTask(client, start_P, x, y, steps, one.local, Address(one.seed, 1, 1), held=held)
    return by_torch(one.factory, one.network, task)[0]


@pytest.mark.parametrize("engine", ENGINES)
class TestTraining:
    @pytest.mark.parametrize("name, mu", [("full batch", 0.0), *((name, 0.4) for name in LOCALS)])
    def test_is_sgd_on_the_sum_of_logits(self, engine, name, mu):
        """Every client has its own row of two models, and its own row of two frozen ones."""
        local = LOCALS[name]
        one = stage(engine, local)
        start_KP, frozen_KP = torch.stack([one.model(0), one.model(1)]), 3 * torch.stack([one.model(2), one.model(3)])
        rows, frozen_rows = np.tile([0, 1, 1, 0], 2), np.tile([1, 1, 0, 0], 2)
        clients = one.clients()
        sent = clients.send(start_KP, rows)
        updates = clients.train(
            sent,
            how=LocalTraining(frozen_model=clients.send(frozen_KP, frozen_rows), proximal=[Proximal(mu, sent)]),
            features=one.network.spec.all,
            average=torch.ones(1, 8),
        )
        if engine == "span":
            x, y = one.federation.train(0)
            task = TrainingTask(0, start_KP[0], x, y, 4, local, Address(0, 1, 1))
            assert (span.why_not(one.network, [task]) is None) == (local.batch_size is None)
        expected = torch.stack(
            [trained_by_torch(one, i, start_KP[rows[i]], frozen_KP[frozen_rows[i]], mu) for i in range(8)]
        )
        alone = torch.stack([trained_by_torch(one, i, start_KP[rows[i]], 0 * frozen_KP[0], mu) for i in range(8)])
        assert (expected - alone).abs().max(1).values.min() > 1e-2, "the frozen model has no effect"
        assert close(updates.features_MF, expected, 2e-5)
        assert close(updates.averaged(default=start_KP[:1])[0], expected.mean(0), 2e-5)


class TestFrozen:
    def test_both_trainings_of_a_round_use_the_models_as_sent(self):
        """Additive modelling: theta with Theta_g frozen, then theta_0 with Theta_k frozen, neither of them updated."""
        one = stage()
        global_KP, cluster_KP = one.model(0)[None], torch.stack([one.model(1), one.model(2)])
        before = global_KP.clone(), cluster_KP.clone()
        clients, rows = one.clients(), np.tile([0, 1], 4)
        shared, mine = clients.send(global_KP), clients.send(cluster_KP, rows)
        first = clients.train(mine, how=LocalTraining(frozen_model=shared), features=one.network.spec.all).features_MF
        second = clients.train(shared, how=LocalTraining(frozen_model=mine), features=one.network.spec.all).features_MF
        assert torch.equal(global_KP, before[0]) and torch.equal(cluster_KP, before[1])
        for i in range(8):
            assert close(first[i], trained_by_torch(one, i, cluster_KP[rows[i]], global_KP[0]), 2e-5)
            assert close(second[i], trained_by_torch(one, i, global_KP[0], cluster_KP[rows[i]]), 2e-5)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_its_dropout_is_off(self, engine):
        """The trained model has no active dropout either: the weights of its first layer are zero."""
        one = stage(engine, factory=with_dropout)
        start_P, frozen_P = one.model(0), one.model(1)
        start_P[: 36 * 8 + 8] = 0
        clients = one.clients()
        local = LocalSGD(steps=1, lr=0.3)
        kept = clients.train(
            clients.send(start_P[None]),
            how=LocalTraining(frozen_model=clients.send(frozen_P[None]), sgd=local),
            features=one.network.spec.head,
        ).features_MF
        for client in range(8):
            x, y = one.federation.train(client)
            bias = start_P[-3:].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(cross_entropy(bias + loaded(one, frozen_P).eval()(x), y), bias)
            assert close(kept[client, -3:], start_P[-3:] - 0.3 * gradient, 1e-5)

    def test_costs_no_traffic_of_its_own(self):
        """A model that was sent once can be used any number of times."""
        one = stage()
        clients = one.clients()
        shared = clients.send(one.model()[None])
        down = one.stats.traffic.down_bits
        clients.train(
            clients.known_models(one.model(1)[None]), how=LocalTraining(frozen_model=shared), average=torch.ones(1, 8)
        )
        clients.losses(clients.known_models(one.model(1)[None]), frozen_model=shared)
        assert one.stats.traffic.down_bits == down == 8 * 32 * one.network.spec.size


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("frozen_rows", [[0] * 8, [1, 0, 1, 1] * 2])
def test_losses_are_of_the_sum_of_logits(engine, most, frozen_rows):
    one = stage(engine)
    models_KP, frozen_KP = (
        torch.stack([one.model(index) for index in range(3)]),
        torch.stack([one.model(5), one.model(6)]),
    )
    clients = one.clients()
    found = clients.losses(
        clients.known_models(models_KP), frozen_model=clients.send(frozen_KP, np.array(frozen_rows)), max_samples=most
    )
    for i in range(8):
        x, y = one.federation.train(i)
        if most is not None:
            chosen = np.sort(stream(clients.seed, 0, 0, i, "choice").permutation(len(y))[:most])
            x, y = x[chosen], y[chosen]
        offset = loaded(one, frozen_KP[frozen_rows[i]])(x)
        expected = [cross_entropy(loaded(one, row_P)(x) + offset, y).item() for row_P in models_KP]
        assert found[i].tolist() == pytest.approx(expected, rel=1e-5)


class TestPredicting:
    """Accuracies and losses of h(x) + f(x), on hold-out data and on shared test sets, in all three protocols."""

    @pytest.fixture(params=["hold-out", "shared"])
    def one(self, request):
        if request.param == "hold-out":
            return stage()
        return Stage(
            planted(8, samples=40),
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)),
            LocalSGD(epochs=2, lr=0.3),
        )

    def scores(self, one, client, row_P, frozen_P, images=None) -> tuple[float, float]:
        x, y = one.federation.test(client, images)
        logits = loaded(one, row_P)(x) + loaded(one, frozen_P)(x)
        return (logits.argmax(1) == y).float().mean().item(), cross_entropy(logits, y).item()

    def test_p_server(self, one):
        models_KP, frozen_P, row_M = (
            torch.stack([one.model(0), one.model(1)]),
            2 * one.model(2),
            np.tile([1, 0, 0, 1], 2),
        )
        found = Evaluator(EvaluationConfig(), one.federation, one.backend, 0).scores(
            Serving(models_KP, row_M, frozen_P=frozen_P), one.clients()
        )
        for i in range(8):
            accuracy, loss = self.scores(one, i, models_KP[row_M[i]], frozen_P)
            assert found[i, 0] == pytest.approx(accuracy) and found[i, -1] == pytest.approx(loss, rel=1e-5)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_p_local(self, one, engine):
        one.backend.worker.engine = engine
        clients = replace(one.clients(), local_test_samples=30)
        start_P, frozen_P = one.model(0), 2 * one.model(2)
        kept = clients.train(
            clients.send(start_P[None]),
            how=LocalTraining(frozen_model=clients.send(frozen_P[None])),
            features=one.network.spec.all,
        ).features_MF
        for i in range(8):
            assert one.stats.local_scores[i][0] == pytest.approx(self.scores(one, i, kept[i], frozen_P, 30)[0])

    def test_p_tune(self, one):
        """F epochs of the served model with the frozen one, then both predict."""
        models_KP, frozen_P = one.model(0)[None], 2 * one.model(2)
        evaluator = Evaluator(EvaluationConfig(tuned_epochs=3), one.federation, one.backend, 0)
        serving = Serving(models_KP, np.zeros(8, np.int64), frozen_P=frozen_P)
        found = evaluator.tuned_scores((TEST,), serving, one.clients(), one.local)[TEST]
        one.local = replace(one.local, epochs=3)
        for i in range(8):
            accuracy, loss = self.scores(
                one, i, trained_by_torch(one, i, models_KP[0], frozen_P), frozen_P, evaluator.settings.local_samples
            )
            assert found[i, 0] == pytest.approx(accuracy) and found[i, -1] == pytest.approx(loss, rel=1e-5)
