"""Local training beyond SGD: steps of several gradients, moving anchors, votes and tuning before a prediction.

Each is written out here in plain PyTorch. Vectorised training is compared with the sequential one; `span` does not
apply.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, planted, uneven
from torch import nn
from torch.nn.functional import cross_entropy
from training_tasks import (
    ADDRESS,
    FLAT,
    IMAGE,
    assert_same,
    loaded,
    mlp,
    results,
    rows,
    tasks_of,
    wide_cnn,
    with_batch_norm,
    with_dropout,
    with_fields,
)

from cfl_ray.config import EvaluationConfig
from cfl_ray.core.clients import ClientProgram, ClientState, LocalTraining, Proximal
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import stream, word
from cfl_ray.core.serving import Serving
from cfl_ray.core.work import TEST
from cfl_ray.data import federation_from_arrays
from cfl_ray.engine import sequential, span, vectorised
from cfl_ray.engine.task import HeldByClient, TrainingTask
from cfl_ray.engine.worker import Worker
from cfl_ray.nn.network import Network
from cfl_ray.runtime.evaluation import Evaluator

SEED, ROUND, EXCHANGE = ADDRESS.seed, ADDRESS.round, ADDRESS.exchange


@dataclass(frozen=True)
class Ahead(ClientProgram):
    """The gradient of the second batch, after a step on the first."""

    batches_per_step: ClassVar = 2

    def step(self, gradient, w, held, number):
        return gradient(w - 0.1 * gradient(w, 0), 1)


@dataclass(frozen=True)
class Around(ClientProgram):
    """As `Ahead`, minus the change of the third batch's gradient along that direction."""

    batches_per_step: ClassVar = 3

    def step(self, gradient, w, held, number):
        g = gradient(w - 0.1 * gradient(w, 0), 1)
        return g - (gradient(w + 0.1 * g, 2) - gradient(w - 0.1 * g, 2))


@dataclass(frozen=True)
class Plain(ClientProgram):
    def step(self, gradient, w, held, number):
        return gradient(w, 0)


class Masked(nn.Module):
    """Dropout with a given mask."""

    def __init__(self, p: float):
        super().__init__()
        self.p, self.mask = p, None

    def forward(self, x):
        return x * self.mask


LOCALS = {
    "full batch": LocalSGD(epochs=4, lr=0.3),
    "mini-batches, the last one partial": LocalSGD(epochs=4, batch_size=4, lr=0.2),
    "momentum and weight decay": LocalSGD(epochs=3, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.05),
    "steps": LocalSGD(steps=5, batch_size=4, lr=0.1, momentum=0.5),
}

PARTIAL = "mini-batches, the last one partial"
NETWORKS = [*((mlp, FLAT, name) for name in LOCALS), (with_dropout, FLAT, PARTIAL), (wide_cnn, IMAGE, PARTIAL)]


def batches(client: int, size: int, batch: int) -> Iterator[torch.Tensor]:
    """Shuffled anew every epoch, the last one partial."""
    draw = stream(SEED, ROUND, EXCHANGE, client, "batches")
    while True:
        yield from torch.from_numpy(draw.permutation(size)).split(batch)


def splitmix(key: int, number: int) -> int:
    """Word `number` of a key, by the published formula."""
    z = (key + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def mask_of(key: int, rows: int, width: int, p: float) -> torch.Tensor:
    """0 and 1 / (1 - p), from the halves of the words, the lower half first, each as a signed number."""
    halves = [splitmix(key, i // 2) >> 32 * (i % 2) & 0xFFFFFFFF for i in range(rows * width)]
    drawn = torch.tensor([(half + 2**31) % 2**32 for half in halves], dtype=torch.float64).view(rows, width) / 2**32
    return ((drawn >= p) / (1 - p)).float()


def by_torch(
    factory, network: Network, task: TrainingTask, batch: int, parts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(w, anchor) of one client, written out for its local step, its first proximal term and its SGD."""
    module = factory(Masked) if factory is with_dropout else factory()
    module, local = module.train(), task.local
    for name, value in network.spec.tensors(task.start_P).items():
        module.state_dict()[name].copy_(value)
    params, masked = list(module.parameters()), [m for m in module if isinstance(m, Masked)]
    key = word(SEED, ROUND, EXCHANGE, task.client, "dropout")
    drawn, term = batches(task.client, len(task.y), batch), task.held.proximal[0] if task.held.proximal else None
    anchor = None if term is None else term.anchor[: network.spec.trained].clone()
    w = torch.cat([p.detach().reshape(-1) for p in params])
    velocity = torch.zeros_like(w)
    for step in range(1, task.steps + 1):
        chosen, masks = [next(drawn) for _ in range(parts)], {}

        def gradient(row, number):
            for p, part in zip(params, row.split([p.numel() for p in params])):
                p.data = part.reshape(p.shape).clone()
            if number not in masks:  # one mask per batch and step
                widths = [m.in_features for m in module if isinstance(m, nn.Linear)][1:]
                first = ((step - 1) * parts + number) * len(masked)
                masks[number] = [
                    mask_of(splitmix(key, first + i), len(chosen[number]), width, m.p)
                    for i, (m, width) in enumerate(zip(masked, widths))
                ]
            for m, mask in zip(masked, masks[number]):
                m.mask = mask
            found = torch.autograd.grad(cross_entropy(module(task.x[chosen[number]]), task.y[chosen[number]]), params)
            return torch.cat([g.reshape(-1) for g in found])

        if parts == 1:
            direction = gradient(w, 0)
        else:
            direction = gradient(w - 0.1 * gradient(w, 0), 1)
            if parts == 3:
                direction = direction - (gradient(w + 0.1 * direction, 2) - gradient(w - 0.1 * direction, 2))
        direction = direction + local.weight_decay * w
        if term is not None:
            direction = direction + term.weight * (w - anchor)
        velocity = local.momentum * velocity + direction
        w = w - local.lr * velocity
        if term is not None and (step % term.every == 0 or step == task.steps):
            anchor = anchor - term.follow * term.weight * (anchor - w)
    statistics = [b.reshape(-1) for name, b in module.named_buffers() if b.is_floating_point()]
    return torch.cat([w, *statistics]), anchor


class TestOwnStep:
    @pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
    @pytest.mark.parametrize("factory", [mlp, with_dropout, with_batch_norm])
    @pytest.mark.parametrize("program", [Ahead(), Around()])
    def test_is_made_of_gradients_of_fresh_batches(self, program, factory, local):
        network = Network(factory, FLAT)
        (task,) = tasks_of(network, [12], local, program=program)
        batch = {None: 12 // program.batches_per_step, 4: 4}[local.batch_size]
        expected, _ = by_torch(factory, network, task, batch, program.batches_per_step)
        assert close(rows(sequential, network, [task])[0], expected, 1e-5)

    @pytest.mark.parametrize(
        "size, batch_size, program, batch, steps",
        [
            (12, None, Ahead(), 6, 4),
            (5, None, Ahead(), 3, 4),  # 3 and 2
            (5, 9, Ahead(), 3, 4),
            (7, 5, Ahead(), 5, 4),  # two batches, of 5 and 2, are enough
            (12, 4, Ahead(), 4, 6),  # 4 epochs of 3 batches
            (10, 6, Around(), 4, 4),  # two batches are not: 4, 4 and 2
            (4, None, Around(), 1, 5),  # 2 and 2 are not three
            (1, None, Ahead(), 1, 2),  # nothing to split: the same sample twice
            (1, None, Around(), 1, 1),
        ],
    )
    def test_a_client_with_too_few_batches_splits_its_samples(self, size, batch_size, program, batch, steps):
        network, local = Network(mlp, FLAT), LocalSGD(epochs=4, batch_size=batch_size, lr=0.2)
        (task,) = tasks_of(network, [size], local, program=program)
        assert task.steps == steps and int(local.batch_of(size, program.batches_per_step)) == batch
        expected, _ = by_torch(mlp, network, task, batch, program.batches_per_step)
        assert close(rows(sequential, network, [task])[0], expected, 1e-5)

    @pytest.mark.parametrize("size", range(5, 40))
    @pytest.mark.parametrize("parts, batch_size", [(2, None), (3, None), (2, 7), (3, 7)])
    def test_the_batches_of_a_step_are_of_one_epoch_where_they_can_be(self, size, parts, batch_size):
        """The batches of the first step share no sample."""
        first = list(LocalSGD(batch_size=batch_size).batches(size, parts, np.random.default_rng(0), parts))
        together = np.concatenate(first)
        assert len(first) == parts and len(np.unique(together)) == len(together) and min(map(len, first)) > 0

    def test_of_one_gradient_is_sgd(self):
        """Bit for bit, with momentum, weight decay and a proximal term."""
        network = Network(with_dropout, FLAT)
        for local in LOCALS.values():
            tasks = tasks_of(network, [10, 7], local, proximal=[(0.3, None)])
            steps = [replace(task, program=Plain()) for task in tasks]
            for one, other in zip(results(sequential, network, tasks), results(sequential, network, steps)):
                assert torch.equal(one.row_P, other.row_P) and one.train_loss == other.train_loss

    @pytest.mark.parametrize("parts", [1, 3])
    def test_gradients_of_one_batch_have_one_dropout_mask(self, parts):
        """So that a difference of two of them at one point is zero."""

        class Twice(ClientProgram):
            batches_per_step = parts

            def step(self, gradient, w, held, number):
                found.append((gradient(w, parts - 1), gradient(w, 0), gradient(w, parts - 1)))
                return found[-1][0].clone()

        network = Network(with_dropout, FLAT)
        for engine, tasks in (
            (sequential, tasks_of(network, [10], LOCALS["steps"], program=Twice())),
            (vectorised, tasks_of(network, [10, 5], LOCALS["steps"], program=Twice())),
        ):
            found = []
            list(engine.train(network, tasks))
            assert len(found) == 5 and all(torch.equal(a, b) for a, _, b in found)
            assert not torch.equal(found[0][0], found[1][0])

    @pytest.mark.parametrize("factory, shape, name", NETWORKS)
    @pytest.mark.parametrize("program", [Ahead(), Around()])
    def test_vectorised_is_sequential(self, program, factory, shape, name):
        """Clients of different sizes, so with different batches and steps; also with a term and a frozen model."""
        network, local = Network(factory, shape), LOCALS[name]
        local = replace(local, lr=local.lr / (5 if factory is wide_cnn else 1))
        assert_same(network, tasks_of(network, [10, 3, 8, 16], local, program=program), vectorised)
        options = {"program": program, "frozen_P": network.new_model(5, 0)}
        assert_same(network, tasks_of(network, [10, 3], local, [(0.3, network.spec.base)], **options), vectorised)

    @pytest.mark.parametrize("program", [Ahead(), Around()])
    def test_vectorised_is_sequential_with_batch_statistics(self, program):
        network = Network(with_batch_norm, FLAT)
        local = LocalSGD(epochs=4, batch_size=4, lr=0.1)
        assert_same(network, tasks_of(network, [12, 12], local, program=program), vectorised)
        for sizes in ([12, 7], [7, 7]):
            tasks = tasks_of(network, sizes, LOCALS["full batch"], program=program)
            assert "one size" in vectorised.why_not(network, tasks)

    def test_the_train_loss_is_that_of_the_first_gradient_of_every_step(self):
        """The mean over the last epoch: with two of four batches a step, two steps."""
        network = Network(mlp, FLAT)
        (task,) = tasks_of(network, [16], LocalSGD(epochs=2, batch_size=4, lr=0.2), program=Ahead())
        losses, drawn = [], batches(0, 16, 4)
        for steps in range(4):
            at, _ = by_torch(mlp, network, replace(task, steps=steps), 4, 2)
            first, _ = next(drawn), next(drawn)
            network.load(at)
            logits = network.module(network.input(task.x[first])).cpu()
            losses.append(cross_entropy(logits, task.y[first]).item())
        (result,) = results(sequential, network, [task])
        assert task.steps == 4 and result.train_loss == pytest.approx(np.mean(losses[2:]), rel=1e-5)

    def test_through_the_port_clients_do_as_many_steps_as_they_have_sets_of_batches(self):
        stage, works = Stage(uneven([12, 5, 30]), mlp, LocalSGD(epochs=3, batch_size=6, lr=0.1)), []
        stage.backend.run = lambda work, run=stage.backend.run: (works.append(work), run(work))[1]
        clients = stage.clients()
        clients.train(clients.send(stage.model()[None]), how=LocalTraining(program=Ahead()), average=torch.ones(1, 3))
        assert works[0].steps_M.tolist() == [3, 3, 7]  # 3 * 2 / 2, one batch as two, 3 * 5 / 2


class TestMovingAnchor:
    @pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
    @pytest.mark.parametrize("follow, every", [(0.5, 1), (0.2, 3), (1.0, 100)])
    def test_follows_after_so_many_steps_and_after_the_last(self, follow, every, local):
        network = Network(mlp, FLAT)
        (task,) = tasks_of(network, [10], local, proximal=[(0.9, None, follow, every)])
        expected, anchor = by_torch(mlp, network, task, local.batch_size or 10, 1)
        fixed = with_fields(task, proximal=(replace(task.held.proximal[0], follow=0.0),))
        moved, still = results(sequential, network, [task, fixed])
        assert close(moved.row_P, expected, 1e-5)
        assert close(moved.replacement_P, anchor, 1e-5)
        assert (anchor - task.held.proximal[0].anchor).abs().max() > 1e-2
        assert still.replacement_P is None
        assert (every == 100) == close(still.row_P, moved.row_P, 1e-4)

    def test_leaves_the_anchor_of_the_server_alone(self):
        network = Network(mlp, FLAT)
        for engine in (sequential, vectorised):
            tasks = tasks_of(network, [10, 7], LOCALS["full batch"], proximal=[(0.9, None, 0.5, 2)])
            before = [task.held.proximal[0].anchor.clone() for task in tasks]
            list(engine.train(network, tasks))
            assert all(torch.equal(task.held.proximal[0].anchor, anchor) for task, anchor in zip(tasks, before))

    def test_over_some_columns_moves_those_alone(self):
        network = Network(mlp, FLAT)
        head = network.spec.head
        (task,) = tasks_of(network, [10], LOCALS["full batch"], proximal=[(0.9, head, 0.5, 2)])
        moved, start = results(sequential, network, [task])[0].replacement_P, task.held.proximal[0].anchor
        assert torch.equal(network.spec.base.of(moved), network.spec.base.of(start))
        assert (head.of(moved) != head.of(start)).all()

    def test_carries_the_batch_statistics_of_the_model(self):
        network = Network(with_batch_norm, FLAT)
        tasks = tasks_of(network, [12, 12], LocalSGD(epochs=2, batch_size=4, lr=0.1), proximal=[(0.9, None, 0.5, 2)])
        for engine in (sequential, vectorised):
            for result in results(engine, network, tasks):
                assert torch.equal(result.replacement_P[network.spec.trained :], result.row_P[network.spec.trained :])

    @pytest.mark.parametrize("factory, shape, name", NETWORKS)
    def test_vectorised_is_sequential(self, factory, shape, name):
        """Clients with different numbers of steps: each anchor moves for the last time after its client's last step."""
        network, local = Network(factory, shape), LOCALS[name]
        local = replace(local, lr=local.lr / (5 if factory is wide_cnn else 1))
        head = network.spec.head
        tasks = tasks_of(network, [10, 3, 7, 16], local, [(0.9, None, 0.5, 3), (0.2, head)])
        assert_same(network, tasks, vectorised)
        tasks = tasks_of(network, [10, 3], local, [(0.9, head, 0.5, 2)], program=Ahead())
        assert_same(network, tasks, vectorised)

    @pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised", "span"])
    def test_the_client_uploads_the_anchor_and_keeps_the_model(self, engine):
        stage = Stage(uneven([10, 7]), mlp, LOCALS["full batch"], engine)
        clients, start = stage.clients(round=ROUND), torch.stack([stage.model(1), stage.model(2)])
        sent = clients.send(start, np.array([0, 1]))
        term = Proximal(0.9, sent, follow=0.5, every=3)
        updates = clients.train(
            sent,
            how=LocalTraining(proximal=[term]),
            client_state=ClientState("mine", private=False),
            features=stage.network.spec.all,
            average=torch.eye(2),
            defer_aggregation=True,
        )
        later = clients.average(updates, torch.ones(1, 2)).averaged(start[:1])
        for client in (0, 1):
            x, y = stage.federation.train(client)
            held = HeldByClient(proximal=(Proximal(0.9, start[client], None, 0.5, 3),))
            task = TrainingTask(client, start[client], x, y, 4, stage.local, ADDRESS, held=held)
            w, anchor = by_torch(mlp, stage.network, task, len(y), 1)
            assert close(stage.client_states["mine", client], w, 1e-5)
            assert close(updates.features_MF[client], anchor, 1e-5) and not close(w, anchor, 1e-3)
        assert close(updates.averaged(start), updates.features_MF, 1e-5)
        assert close(later[0], updates.features_MF.mean(0), 1e-5)

    def test_without_weight_the_anchor_stays_and_is_uploaded_all_the_same(self):
        stage = Stage(uneven([10, 7]), mlp, LOCALS["full batch"])
        clients = stage.clients()
        sent = clients.send(stage.model()[None])
        updates = clients.train(
            sent,
            how=LocalTraining(proximal=[Proximal(0.0, sent, follow=0.5)]),
            average=torch.ones(1, 2),
            client_state=ClientState("mine", private=False),
        )
        assert torch.equal(updates.averaged(torch.zeros(1, stage.network.spec.size))[0], stage.model())
        assert not torch.equal(stage.client_states["mine", 0], stage.model())


class TestSpan:
    """Three samples of 36 inputs, full batch, and a linear layer first: `span` applies to plain SGD only."""

    def net(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))

    @pytest.mark.parametrize(
        "program, proximal, applies",
        [
            (ClientProgram(), (), True),
            (ClientProgram(), [(0.3, None, 0.0, 1)], True),
            (Plain(), (), False),
            (Ahead(), (), False),
            (ClientProgram(), [(0.3, None, 0.5, 2)], False),
            (ClientProgram(), [(0.3, None, 0.0, 1), (0.3, None, 0.5, 2)], False),
        ],
    )
    def test_refuses_rules_and_anchors_that_move(self, program, proximal, applies):
        network = Network(self.net, IMAGE)
        tasks = tasks_of(network, [3, 5], LocalSGD(epochs=4, lr=0.3), proximal, program=program)
        assert all((span.why_not(network, [task]) is None) == applies for task in tasks)
        for task in tasks:
            expected = next(sequential.train(network, [task])).row_P.clone()
            worker = Worker(network, uneven([3, 5], network.input_shape), "span")
            found = worker.train_one(task).row_P.clone()
            assert torch.equal(found, expected) != applies and close(found, expected, 2e-5)

    @pytest.mark.parametrize("engine", ["manual", "vectorised", "span"])
    def test_a_worker_trains_them_with_every_engine(self, engine):
        found = []
        for name in ("sequential", engine):
            stage = Stage(uneven([5, 3, 7], IMAGE), self.net, LocalSGD(epochs=4, lr=0.3), name)
            clients = stage.clients()
            sent = clients.send(stage.model()[None])
            one = clients.train(sent, how=LocalTraining(program=Ahead()), average=torch.ones(1, 3)).averaged(
                stage.model()[None]
            )
            other = clients.train(
                sent, how=LocalTraining(proximal=[Proximal(0.5, sent, follow=0.5, every=2)]), average=torch.ones(1, 3)
            ).averaged(stage.model()[None])
            found.append(torch.cat([one, other]))
        assert close(*found, 1e-5) and not close(found[0][0], found[0][1], 1e-3)


def deep(outputs: int = 4):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, outputs))


def holdout():
    """Four clients of two planted groups, each with its own test samples."""
    source = planted(4, 2, 60)
    parts = [source.train(client) for client in range(4)]
    x, y = (torch.cat(values).numpy() for values in zip(*parts))
    owner, test = np.repeat(np.arange(4), 60), np.tile(np.arange(60) >= 40, 4)
    return federation_from_arrays(
        x[~test], y[~test], owner[~test], x_test=x[test], y_test=y[test], test_clients=owner[test], num_classes=4
    )


class TestServing:
    """Through the evaluation of a run, against modules of plain PyTorch."""

    IDS = [3, 0, 1]

    def stage(self, federation, engine="sequential") -> tuple[Stage, torch.Tensor]:
        """Three models of which each has seen one client."""
        stage = Stage(federation, deep, LocalSGD(epochs=1, batch_size=16, lr=0.3), engine)
        clients = stage.clients([0, 1, 2])
        start = torch.stack([stage.model(k) for k in range(3)])
        updates = clients.train(
            clients.send(start, np.arange(3)), how=LocalTraining(steps_M=np.full(3, 20)), average=torch.eye(3)
        )
        return stage, updates.averaged(start)

    def scores(self, stage: Stage, serving: Serving, tuned: int | None = None):
        clients = stage.clients(self.IDS, ROUND)
        evaluator = Evaluator(
            EvaluationConfig(local_samples=700, tuned_epochs=tuned or 0), stage.federation, stage.backend, stage.seed
        )
        return (
            evaluator.scores(serving, clients)
            if tuned is None
            else evaluator.tuned_scores((TEST,), serving, clients, stage.local)[TEST]
        )

    def adapted(self, stage: Stage, row_P: torch.Tensor, client: int, epochs: int, lr: float, batch: int) -> nn.Module:
        module, (x, y) = loaded(deep, stage.network, row_P), stage.federation.train(client)
        optimiser, draw = torch.optim.SGD(module.parameters(), lr=lr), stream(0, ROUND, -1, client, "batches")
        for _ in range(epochs):
            for chosen in torch.from_numpy(draw.permutation(len(y))).split(batch):
                optimiser.zero_grad()
                cross_entropy(module(x[chosen]), y[chosen]).backward()
                optimiser.step()
        return module

    def assert_scores(self, found, expected):
        accuracy, loss = zip(*expected)
        assert found[:, 0] == pytest.approx(accuracy) and found[:, -1] == pytest.approx(loss, rel=1e-5)

    @pytest.mark.parametrize("federation", [planted(4, 2, 60), holdout()], ids=["shared test sets", "own test data"])
    @pytest.mark.parametrize("votes", [True, False])
    def test_models_are_mixed_by_the_mean_of_their_probabilities(self, federation, votes):
        """With equal weights, a vote, or with those of each client."""
        stage, models_KP = self.stage(federation)
        count = len(models_KP)
        weight_MK = (
            np.random.default_rng(0).dirichlet(np.ones(count), 3) if not votes else np.full((3, count), 1 / count)
        )
        expected, alone = [], []
        for client, weight_K in zip(self.IDS, weight_MK):
            x, y = federation.test(client)
            with torch.no_grad():
                each = torch.stack([loaded(deep, stage.network, row_P)(x).softmax(1) for row_P in models_KP])
            p = (each * torch.from_numpy(weight_K).float()[:, None, None]).sum(0)
            expected.append(((p.argmax(1) == y).float().mean().item(), -p[range(len(y)), y].log().mean().item()))
            alone.append([(one.argmax(1) == y).float().mean().item() for one in each])
        mixture = Serving(models_KP, np.zeros(3, int), weight_MK=weight_MK)
        found = self.scores(stage, Serving.vote(models_KP, 3) if votes else mixture)
        self.assert_scores(found, expected)
        assert all(not np.allclose(found[:, 0], column) for column in np.array(alone).T), "one model decides alone"

    def test_one_model_votes_as_it_predicts(self):
        stage, models_KP = self.stage(planted(4, 2, 60))
        servings = Serving.vote(models_KP[:1], 3), Serving(models_KP[:1], np.zeros(3, int))
        one, other = (self.scores(stage, serving) for serving in servings)
        assert np.array_equal(one[:, 0], other[:, 0]) and one[:, -1] == pytest.approx(other[:, -1], rel=1e-5)

    @pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised", "span"])
    @pytest.mark.parametrize("federation", [planted(4, 2, 60), holdout()], ids=["shared test sets", "own test data"])
    def test_clients_tune_before_they_predict(self, federation, engine):
        stage, models_KP = self.stage(federation, engine)
        row_M, expected = np.array([2, 0, 0]), []
        for client, row in zip(self.IDS, row_M):
            module = self.adapted(stage, models_KP[row], client, 2, 0.2, 25)
            x, y = federation.test(client, 700) if federation.view != "holdout" else federation.test(client)
            logits = module(x).detach()
            expected.append(((logits.argmax(1) == y).float().mean().item(), cross_entropy(logits, y).item()))
        tune = LocalSGD(epochs=2, batch_size=25, lr=0.2)
        self.assert_scores(self.scores(stage, Serving(models_KP, row_M, tune=tune)), expected)
        assert stage.client_states == {}
        plain = self.scores(stage, Serving(models_KP, row_M))
        assert not np.allclose(plain[:, 0], [accuracy for accuracy, _ in expected])

    def test_tuning_starts_from_the_client_state(self):
        stage, models_KP = self.stage(planted(4, 2, 60))
        head = stage.network.spec.head
        stage.backend.restore([(("head", 0), head.of(models_KP[2]))])
        found = self.scores(
            stage,
            Serving(
                models_KP,
                np.zeros(3, int),
                client_state=ClientState("head", head),
                tune=LocalSGD(epochs=2, batch_size=25, lr=0.2),
            ),
        )
        expected = []
        for client in self.IDS:
            row_P = models_KP[0].clone()
            if client == 0:
                head.put(row_P, head.of(models_KP[2]))
            x, y = stage.federation.test(client, 700)
            logits = self.adapted(stage, row_P, client, 2, 0.2, 25)(x).detach()
            expected.append(((logits.argmax(1) == y).float().mean().item(), cross_entropy(logits, y).item()))
        self.assert_scores(found, expected)
        assert torch.equal(stage.client_states["head", 0], head.of(models_KP[2])), (
            "tuning does not change the client state"
        )

    @pytest.mark.parametrize(
        "serving", [{"weight_MK": np.full((3, 3), 1 / 3)}, {"tune": LocalSGD(epochs=5, lr=9.0)}], ids=["vote", "tune"]
    )
    def test_p_tune_trains_the_served_model_by_the_settings_of_the_run(self, serving):
        """For a mixture, model `row_M` is tuned; the tuning of the method itself is replaced."""
        stage, models_KP = self.stage(planted(4, 2, 60))
        row_M, expected = np.array([1, 1, 1]), []
        for client in self.IDS:
            x, y = stage.federation.test(client, 700)
            logits = self.adapted(stage, models_KP[1], client, 3, 0.3, 16)(x).detach()
            expected.append(((logits.argmax(1) == y).float().mean().item(), cross_entropy(logits, y).item()))
        self.assert_scores(self.scores(stage, Serving(models_KP, row_M, **serving), tuned=3), expected)
