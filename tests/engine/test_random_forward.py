"""Networks whose forward pass draws random numbers: functional dropout, attention, noise; and layers without sizes."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import training_tasks
from fake_cuda import fake_cuda
from torch import nn
from torch.nn.functional import dropout
from training_tasks import assert_same, rows

from cfl_ray.core.local_sgd import ExampleNoise, LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.engine import manual, sequential, span, vectorised
from cfl_ray.engine.client_view import ClientView
from cfl_ray.engine.task import TrainingTask
from cfl_ray.nn.network import Network


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(20, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.outer(dropout(self.inner(x.flatten(1)), 0.5, self.training))


class Transformer(nn.Module):
    def __init__(self, p: float = 0.1, batch_first: bool = True):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=p, batch_first=batch_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = x if self.layer.self_attn.batch_first else x.transpose(0, 1)
        return self.head(self.layer(x).mean(1 if self.layer.self_attn.batch_first else 0))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.5), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Noise(nn.Linear):
    def __init__(self):
        super().__init__(20, 3)

    def forward(self, x):
        x = x.flatten(1)
        return super().forward(x + torch.randn_like(x) if self.training else x)


def two_sizes():
    """One dropout layer on activations of two shapes."""

    class TwoSizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.inner, self.outer = nn.Dropout(0.5), nn.Linear(20, 32), nn.Linear(32, 3)

        def forward(self, x):
            return self.outer(self.drop(self.inner(self.drop(x.flatten(1)))))

    return TwoSizes()


SHAPE = (5, 4)
RANDOM = [Functional, Transformer, lambda: Transformer(0.1, batch_first=False), Recurrent, Noise, two_sizes]


def tasks_of(network: Network, clients: int = 3) -> list[TrainingTask]:
    return training_tasks.tasks_of(network, [8] * clients, LocalSGD(2, None, 4, 0.1))


@pytest.mark.parametrize("factory", RANDOM)
class TestRandomForward:
    def test_trains_by_address(self, factory):
        """Alone, after others, in another process state: the same row; at another address, another one."""
        network = Network(factory, SHAPE)
        tasks = tasks_of(network)
        together = rows(sequential, network, tasks)
        torch.manual_seed(5)
        alone = torch.cat([rows(sequential, Network(factory, SHAPE), [task]) for task in reversed(tasks)]).flip(0)
        assert torch.equal(together, alone) and together.isfinite().all()
        elsewhere = [replace(task, address=Address(0, 4, 1)) for task in tasks]
        same_batches = [replace(task, local=LocalSGD(4, None, None, 0.1)) for task in (*tasks, *elsewhere)]
        drawn = rows(sequential, network, same_batches)
        assert not torch.equal(drawn[:3], drawn[3:]), (
            "full batches differ in the random draws of the forward pass alone"
        )

    def test_leaves_the_global_generator_alone(self, factory):
        before = torch.get_rng_state()
        network = Network(factory, SHAPE)
        rows(sequential, network, tasks_of(network))
        assert torch.equal(before, torch.get_rng_state())

    def test_other_engines_refuse_or_draw_the_same(self, factory):
        network = Network(factory, SHAPE)
        tasks = tasks_of(network)
        assert "draws random numbers" in vectorised.why_not(network, tasks)
        assert span.why_not(network, tasks)
        if manual.why_not(network, tasks) is None:  # functional dropout
            assert_same(network, tasks, manual)

    def test_all_gradients_of_a_step_are_of_one_function(self, factory):
        """A local step that asks for the gradient of its first batch twice gets the same one."""
        network = Network(factory, SHAPE)
        (task,) = tasks_of(network, 1)
        seen = []

        class Twice:
            batches_per_step = 1

            def __call__(self, gradient, w):
                first, second = gradient(w, 0), gradient(w, 0)
                seen.append(torch.equal(first, second))
                return first

        rows(sequential, network, [replace(task, local_step=Twice())])
        assert seen == [True] * 4


def test_functional_dropout_drops_the_share_and_keeps_the_mean():
    class Identity(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return dropout(x * self.scale, 0.25, self.training)

    network = Network(Identity, (10_000,))
    network.module.train()
    with network.draws_from(7):
        first = network.module(network.input(torch.ones(2, 10_000)))
    with network.draws_from(7):
        again = network.module(network.input(torch.ones(2, 10_000)))
    assert torch.equal(first, again)
    # mean 1; standard error of 20,000 draws of 0 and 4/3: sqrt(1/3 / 20000) = 0.004
    assert abs(first.mean().item() - 1) < 0.02 and abs((first == 0).float().mean().item() - 0.25) < 0.015


def test_without_dropout_a_transformer_trains_on_both_engines():
    network = Network(lambda: Transformer(0.0), SHAPE)
    tasks = tasks_of(network)
    assert not network.random_forward
    assert_same(network, tasks, vectorised)


def test_masks_by_sample_stay_where_they_suit():
    """A dropout layer that is called once per forward pass keeps its addressed masks; only others draw globally."""
    network = Network(lambda: Transformer(0.1), SHAPE)
    assert set(network.dropouts) == {"layer.dropout", "layer.dropout1", "layer.dropout2"}
    assert not Network(two_sizes, SHAPE).dropouts and np.prod(SHAPE) == 20


def test_cudnn_is_not_used_where_its_recurrent_layers_have_no_gradient(monkeypatch):
    """It refuses a backward pass in evaluation mode, and vmap has no rule for it."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x):
            used.append(torch.backends.cudnn.enabled)
            return self.head(self.lstm(x)[0][:, -1])

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: None)  # of cuDNN
    used, found = [], {}
    for device, context in (("cpu", nullcontext()), ("cuda", fake_cuda())):
        with context:
            network = Network(Plain, SHAPE, device)
            tasks = tasks_of(network)
            noisy = replace(tasks[0].local, examples=ExampleNoise(1.0, 1.0))
            view = ClientView(0, tasks[0].x, tasks[0].y, network, tasks[0].address, tasks[0].local, lambda task: task)
            used.clear()
            gradient = view.gradient(tasks[0].start_P)
            trained = rows(vectorised, network, tasks)
            private = rows(sequential, network, [replace(tasks[0], local=noisy)])
            assert set(used) == {device == "cpu"}
            rows(sequential, network, tasks)
            assert used[-1]
            found[device] = [gradient, trained.cpu(), private.cpu()]
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        assert torch.allclose(here, there, atol=1e-6)
