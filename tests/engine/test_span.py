"""The stack of the span engine: sums and checks of many clients without the weights of each."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import training_tasks
from closeness import close
from federations import Stage, attack_of, uneven
from torch import nn
from torch.nn import functional as F
from training_tasks import IMAGE, LONG, assert_same, long_mlp, rows, with_fields

from cfl_ray.core.clients import LocalTraining, Proximal
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.tasks import TASKS
from cfl_ray.engine import sequential, span
from cfl_ray.engine.attack import Attack
from cfl_ray.engine.task import TrainingTask
from cfl_ray.engine.validation import WEIGHT_POWER
from cfl_ray.nn.network import Network

SIZES = [10, 3, 18, 7]
LOCALS = {
    "SGD": LocalSGD(epochs=4, lr=0.2),
    "momentum and weight decay": LocalSGD(epochs=4, lr=0.1, momentum=0.9, weight_decay=0.05),
}


def tasks_of(network: Network, local: LocalSGD = LOCALS["SGD"], starts=(0, 1, 0, 1), **options) -> list[TrainingTask]:
    """Clients i with the start of index `starts[i]`, equal ones in one tensor, and different numbers of steps."""
    models = [network.new_model(1, index) for index in range(2)]
    tasks = training_tasks.tasks_of(network, SIZES, local, **options)
    return [replace(t, start_P=models[start], steps=n) for t, start, n in zip(tasks, starts, [4, 2, 3, 5])]


@pytest.fixture(params=[pytest.param("one by one", marks=pytest.mark.cpu), "together"])
def steps(request, monkeypatch) -> str:
    """How the steps of a stack are made: as on a CPU, and as on a GPU."""
    monkeypatch.setattr(span, "_together", lambda network: request.param == "together")
    return request.param


@pytest.mark.usefixtures("steps")
class TestStack:
    @pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
    @pytest.mark.parametrize("starts", [(0, 0, 0, 0), (0, 1, 1, 0)])
    @pytest.mark.parametrize("anchor", [None, "start", "another"])
    def test_sums_changes_as_the_rows_do(self, local, starts, anchor):
        network = Network(long_mlp, LONG)
        tasks = tasks_of(network, local, starts)
        if anchor:
            anchors = [task.start_P if anchor == "start" else network.new_model(5, task.client) for task in tasks]
            tasks = [with_fields(task, proximal=(Proximal(0.3, row, None),)) for task, row in zip(tasks, anchors)]
        change_mP = rows(sequential, network, tasks) - torch.stack([task.start_P for task in tasks])
        stack = span.SpanBatch(network, tasks)
        for weights in ({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}, {1: 2.0, 3: 0.5}, {2: 1.0}):
            expected = sum(weight * change_mP[index] for index, weight in weights.items())
            assert expected.abs().max() > 1e-2
            assert close(stack.change(weights).cpu(), expected, 2e-5)

    @pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
    @pytest.mark.parametrize("columns", ["all", "head", "base"])
    def test_is_sequential_with_proximal_terms_and_a_frozen_model(self, columns, local):
        network = Network(long_mlp, LONG)
        terms = [(weight, getattr(network.spec, columns)) for weight in (0.3, 0.15)]
        assert_same(network, tasks_of(network, local, proximal=terms), span)
        assert_same(network, tasks_of(network, local, frozen_P=network.new_model(7, 0)), span)

    @pytest.mark.parametrize(
        "rest",
        [
            lambda: [nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)],
            lambda: [nn.Tanh(), nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 3)],
            lambda: [],
        ],
        ids=["differentiated by autograd", "written out", "none"],
    )
    def test_is_sequential_with_any_layers_after_the_first(self, rest):
        for bias in (True, False):
            network = Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8, bias), *rest()), IMAGE)
            assert_same(network, tasks_of(network, LOCALS["momentum and weight decay"], proximal=[(0.3,)]), span)

    def test_without_onednn(self, monkeypatch):
        network = Network(long_mlp, LONG)
        monkeypatch.setattr(span, "_linear", None)
        assert_same(network, tasks_of(network), span)

    def test_holds_a_limited_number_of_samples(self, steps, monkeypatch):
        if steps == "together":
            pytest.skip("limited by the memory: tests/engine/test_vmap_batches.py")
        network = Network(long_mlp, LONG)
        tasks = tasks_of(network)
        monkeypatch.setattr(span, "_BATCH_SAMPLES", 14)
        assert [(first, len(stack.tasks)) for first, stack in span.batches(network, tasks)] == [(0, 2), (2, 1), (3, 1)]
        assert_same(network, tasks, span)


class Functional(nn.Module):
    """An MLP as people write it."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(36, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x.view(x.size(0), -1))))


class Residual(Functional):
    """Activations with two users, a normalisation, and a head that is used twice."""

    def __init__(self):
        super().__init__()
        self.block, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)

    def forward(self, x):
        h = torch.tanh(self.fc1(x.flatten(1)))
        h = h + F.gelu(self.block(self.norm(h)))
        return self.fc2(h) + self.fc2(h * h)


class NoBias(nn.Module):
    """An unused layer, and the first one without a bias."""

    def __init__(self):
        super().__init__()
        self.first, self.unused = nn.Linear(36, 4, bias=False), nn.Linear(4, 4)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x.reshape(len(x), 36))
        return self.last(torch.cat([h.sigmoid(), F.silu(h)], 1))


class Normalised(Functional):
    """Running statistics, which are no trained parameters."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.fc2(F.relu(self.norm(self.fc1(x.flatten(1)))))


class HeadFirst(Functional):
    def __init__(self):
        super().__init__()
        del self.fc1
        self.fc1 = nn.Linear(36, 8)


class Skipping(Functional):
    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x.flatten(1)))) + x.flatten(1)[:, :3]


class TestOwnModules:
    @pytest.mark.parametrize("own", [Functional, Residual, NoBias])
    def test_train_as_sequential_does(self, own, steps):
        network = Network(own, IMAGE)
        assert_same(network, tasks_of(network, LOCALS["momentum and weight decay"], proximal=[(0.3,)]), span)

    @pytest.mark.cpu
    def test_buffers_are_those_after_the_last_step(self):
        network = Network(Normalised, LONG)
        assert network.spec.size == network.spec.trained + 16
        assert_same(network, tasks_of(network), span)

    @pytest.mark.parametrize("task", ["regression", "multi_label"])
    def test_other_losses(self, task, steps):
        network = Network(Functional, LONG, task=TASKS.builtin[task])
        tasks = [replace(one, y=torch.rand(len(one.y), 3).round()) for one in tasks_of(network)]
        assert_same(network, tasks, span)
        assert_same(network, [with_fields(one, weight_n=torch.rand(len(one.y))) for one in tasks], span)

    @pytest.mark.parametrize(
        "own, reason",
        [
            (HeadFirst, "is not a linear layer with the first parameter"),
            (Skipping, "which alone uses the samples"),
            (lambda: nn.Sequential(nn.Unflatten(1, (6, 6)), nn.Linear(6, 3), nn.Flatten()), "first operation"),
            (lambda: nn.Sequential(nn.Unflatten(1, (1, 36)), nn.Conv1d(1, 2, 3), nn.Flatten()), "first parameter"),
        ],
        ids=["head first", "skip", "linear on an axis", "convolution"],
    )
    def test_what_does_not_begin_with_a_linear_layer_is_left(self, own, reason):
        network = Network(own, LONG)
        assert reason in span.why_not(network, tasks_of(network))


@pytest.mark.usefixtures("steps")
class TestValidity:
    def stack(self, change) -> span.SpanBatch:
        """Two valid clients after one that trains on changed inputs."""
        network = Network(long_mlp, LONG)
        first, *others = tasks_of(network)[:3]
        return span.SpanBatch(network, [replace(first, x=change(first.x)), *others])

    def test_needs_no_row_where_a_bound_shows_it(self, monkeypatch):
        stack = self.stack(lambda x: x)
        monkeypatch.setattr(span.SpanBatch, "row", None)
        assert [stack.invalid_reason(index) for index in range(3)] == [None] * 3

    def test_values_that_are_not_finite(self):
        stack = self.stack(lambda x: x * torch.nan)
        assert "not finite" in stack.invalid_reason(0) and not stack.invalid_reason(1)

    def test_of_the_other_parameters(self):
        stack = self.stack(lambda x: x)
        stack.others_mP[1, 0] = 2.0**WEIGHT_POWER
        assert "beyond 2^14" in stack.invalid_reason(1) and not stack.invalid_reason(0)

    def test_is_exact_where_the_bound_is_not(self):
        """Two coefficients that cancel: the bound is above the limit, the weights are not."""
        stack = self.stack(lambda x: x[:1].expand_as(x).contiguous())
        stack.c_HB[:, 0], stack.c_HB[:, 1] = 2.0**WEIGHT_POWER, -(2.0**WEIGHT_POWER)
        assert stack.invalid_reason(0) is None
        stack.c_HB[:, 1] = 0
        assert "beyond 2^14" in stack.invalid_reason(0)


@pytest.mark.usefixtures("steps")
class TestWorker:
    def averages(self, engine: str, attack: Attack) -> torch.Tensor:
        stage = Stage(uneven([10, 3, 18, 7, 9], LONG), long_mlp, LocalSGD(epochs=3, lr=0.2), engine)
        stage.backend.worker.attack = attack
        clients = stage.clients()
        sent = clients.send(torch.stack([stage.model(0), stage.model(1)]), np.array([0, 0, 1, 1, 0]))
        weight_RM = torch.tensor([[1.0, 2, 0, 0, 1], [0, 0, 3, 1, 1], [1, 0, 1, 0, 0]])
        updates = clients.train(sent, how=LocalTraining(proximal=[Proximal(0.1, sent)]), average=weight_RM)
        assert updates.valid_M.all() and np.isfinite(updates.train_loss_M).all()
        return updates.averaged(default=torch.zeros(3, stage.network.spec.size))

    @pytest.mark.parametrize("attack", [Attack(), attack_of("sign_flip", {2})], ids=["honest", "attacked"])
    def test_sums_are_those_of_sequential(self, attack, monkeypatch):
        """Clients of two models in three weighted means, without a row of an honest client."""
        expected = self.averages("sequential", attack)
        rows, row = [], span.SpanBatch.row
        monkeypatch.setattr(span.SpanBatch, "row", lambda stack, index: (rows.append(index), row(stack, index))[1])
        assert close(self.averages("span", attack), expected, 2e-5)
        assert len(rows) == len(attack.clients)

    def test_excludes_an_update_that_is_not_valid(self):
        found = {}
        for engine in ("sequential", "span"):
            federation = uneven([10, 3, 18], LONG)
            read = federation.train
            federation.train = lambda index, read=read: (read(index)[0] * (2e4 if index == 1 else 1), read(index)[1])
            stage = Stage(federation, long_mlp, LocalSGD(epochs=4, lr=9.0), engine)
            clients = stage.clients()
            updates = clients.train(clients.send(stage.model()[None]), average=torch.ones(1, 3))
            found[engine] = updates
            assert updates.valid_M.tolist()[1] is False and stage.stats.rejected[1].startswith("its update has ")
            assert np.isnan(updates.train_loss_M[1])
        assert found["span"].valid_M.tolist() == found["sequential"].valid_M.tolist()


@pytest.mark.cpu
def test_inputs_far_from_zero_before_batch_statistics_are_declined():
    """The Gram matrix loses their deviations, which alone are left after the normalisation; others may be far."""

    def normalised():
        return nn.Sequential(nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    for factory, offset, declined in [(normalised, 1e3, True), (normalised, 1.0, False), (long_mlp, 1e3, False)]:
        network = Network(factory, LONG)
        tasks = training_tasks.tasks_of(network, [10, 16], LocalSGD(steps=4, lr=0.05))
        tasks[1] = replace(tasks[1], x=tasks[1].x + offset)
        reason = span.why_not(network, tasks)
        assert (reason is not None and "deviations from zero" in reason) == declined, (factory, offset, reason)
