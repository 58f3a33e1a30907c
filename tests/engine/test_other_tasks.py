"""Tasks other than classification: two clients by formula, engines as `sequential`, and data that do not fit."""

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage
from torch import nn
from training_tasks import logits_of

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.tasks import TASKS
from cfl_ray.core.work import EvaluateClients, Rows
from cfl_ray.data import federation_from_arrays
from cfl_ray.engine import manual, span
from cfl_ray.engine.task import TrainingTask
from cfl_ray.engine.validation import invalid_data_reason
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.ifca import IFCA

DRAW = np.random.default_rng(0)
SIZES = [12, 4, 7]
OWNER = np.repeat(np.arange(3), SIZES)
X = DRAW.normal(size=(23, 5)).astype(np.float32)
TOKENS = DRAW.integers(0, 6, (23, 4))
TARGETS = {
    "regression": DRAW.normal(size=(23, 2)).astype(np.float32),
    "multi_label": DRAW.integers(0, 2, (23, 3)).astype(np.float32),
    "next_token": DRAW.integers(0, 6, (23, 4)),
}


class NextToken(nn.Module):
    """Logits (n, T, V)."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.out(self.embed(x).cumsum(1))


MODELS = {"regression": lambda: nn.Linear(5, 2), "multi_label": lambda: nn.Linear(5, 3), "next_token": NextToken}


def stage(name: str, engine: str = "sequential", **local) -> Stage:
    task, tokens = TASKS.builtin[name], name == "next_token"
    inputs, vocabulary = (TOKENS, 6) if tokens else (X, None)
    federation = federation_from_arrays(
        inputs,
        TARGETS[name],
        OWNER,
        targets=task.targets,
        vocabulary=vocabulary,
        x_test=inputs,
        y_test=TARGETS[name],
        test_clients=OWNER,
    )
    return Stage(federation, MODELS[name], LocalSGD(**{"lr": 0.3, "epochs": 3} | local), engine, task=task)


def test_fedavg_of_linear_regression():
    """One step each: W_i = W - eta (2 / (n d)) (X W' - Y)' X, bias likewise; then the mean by samples."""
    one = stage("regression", epochs=1, lr=0.1)
    state = one.play(FedAvg(), None)
    start_P = one.model().double().numpy()
    w, b, expected = start_P[:10].reshape(2, 5), start_P[10:], 0
    for client, size in enumerate(SIZES):
        x, y = (part.double().numpy() for part in one.federation.train(client))
        rest = 2 / (len(x) * 2) * (x @ w.T + b - y)
        moved = np.concatenate([(w - 0.1 * rest.T @ x).reshape(-1), b - 0.1 * rest.sum(0)])
        expected = expected + size / 23 * moved
    assert close(state.models_KP[0], expected, 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_vectorised_equals_sequential_with_padding(name):
    """Mini-batches of three sizes: the weights of padding leave every client its own mean."""
    found = []
    for engine in ("sequential", "vectorised"):
        one = stage(name, engine, batch_size=5, momentum=0.5)
        found.append(one.play(FedAvg(), None, None).models_KP)
    assert close(*found, 1e-5) and not close(found[0][0], one.model(), 1e-2)


@pytest.mark.parametrize("engine", ["vectorised", pytest.param("manual", marks=pytest.mark.cpu)])
def test_ignored_tokens_teach_nothing_in_any_engine(engine, monkeypatch):
    """Equal to the reference, which is another model than one that also learns the ignored tokens."""
    learned = stage("next_token", batch_size=5).play(FedAvg(), None).models_KP
    ignored = TARGETS["next_token"].clone() if torch.is_tensor(TARGETS["next_token"]) else TARGETS["next_token"].copy()
    ignored[::2, 1:] = -100
    monkeypatch.setitem(TARGETS, "next_token", ignored)
    found = [stage("next_token", one, batch_size=5).play(FedAvg(), None).models_KP for one in ("sequential", engine)]
    assert close(*found, 1e-5) and not close(found[0], learned, 1e-2)


@pytest.mark.cpu
@pytest.mark.parametrize("name", MODELS)
def test_manual_equals_sequential(name):
    found = [stage(name, one).play(FedAvg(), None).models_KP for one in ("sequential", "manual")]
    assert close(*found, 1e-5)
    one = stage(name)
    task = TrainingTask(0, one.model(), *one.federation.train(0), 3, one.local, one.clients()._next_address())
    assert manual.why_not(one.network, [task]) is None
    assert ("samples" if name != "next_token" else "first operation") in span.why_not(one.network, [task])


@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_scores(name):
    one, task = stage(name), TASKS.builtin[name]
    clients, models_KP = one.clients(), torch.stack([one.model(0), one.model(1)])
    loss_MK = clients.losses(clients.known_models(models_KP))
    scores = one.backend.run(
        EvaluateClients(
            clients._next_address(),
            clients.ids_M,
            (models_KP,),
            start=Rows(0, np.zeros(3, int)),
            num_scores=len(task.score_names),
        )
    ).arrays["scores"]
    for client in range(3):
        x, y = one.federation.train(client)
        outputs = logits_of(one.network, models_KP[0], x).cpu()
        assert loss_MK[client, 0] == pytest.approx(task.loss(outputs, y).mean().item(), rel=1e-5)
        x, y = one.federation.test(client)
        outputs = logits_of(one.network, models_KP[0], x).cpu()
        expected = [*(metric(outputs, y) for metric in task.metrics), task.loss(outputs, y).mean().item()]
        assert scores[client] == pytest.approx(expected, rel=1e-5)

    def gradient(client, anchor_P):
        return client.gradient(anchor_P)

    gradient_MF, _ = clients.describe(gradient, clients.known_models(models_KP[:1]))
    x, y = one.federation.train(1)
    one.network.load(models_KP[0])
    loss_n = task.loss(one.network.module(one.network.input(x)), y.to(one.network.device))
    grads = torch.autograd.grad(loss_n.mean(), one.network.params)
    assert close(gradient_MF[1], torch.cat([g.cpu().reshape(-1) for g in grads]), 1e-5)


def test_ifca_chooses_by_the_loss_of_the_task():
    one = stage("regression")
    method = IFCA(num_clusters=2)
    state = one.play(method, None)
    models_KP = torch.stack([one.model(0), one.model(1)])
    clients = one.clients()
    assert np.array_equal(state.assign_N, clients.losses(clients.known_models(models_KP)).argmin(1))


def test_targets_that_do_not_fit_exclude_a_client():
    shape = {name: stage(name).federation.shape for name in MODELS}
    x, y = torch.zeros(2, 5), torch.zeros(2, 2)
    assert invalid_data_reason(x, y, shape["regression"]) is None
    assert invalid_data_reason(x, y[:, 0], shape["regression"]) == (
        "2 samples and targets of shape (2,), expected (2, 2)"
    )
    assert invalid_data_reason(x, y * torch.nan, shape["regression"]) == "targets with values that are not finite"
    assert invalid_data_reason(x, y.long(), shape["regression"]).startswith(
        "inputs of torch.float32 and labels of torch.int"
    )
    assert invalid_data_reason(x, torch.full((2, 3), 0.5), shape["multi_label"]) == "labels other than 0 and 1"
    tokens = torch.zeros(2, 4, dtype=torch.long)
    assert invalid_data_reason(tokens, tokens + 6, shape["next_token"]) == "target tokens 6 .. 6, expected 0 .. 5"
    targets = tokens.clone()
    targets[:, 1] = -100
    assert invalid_data_reason(tokens, targets, shape["next_token"]) is None
    targets[1] = -100
    assert invalid_data_reason(tokens, targets, shape["next_token"]) == (
        "a sample whose targets are all -100, which is not learned"
    )
    targets[1] = -1
    assert invalid_data_reason(tokens, targets, shape["next_token"]) == "target tokens -1 .. 0, expected 0 .. 5"
