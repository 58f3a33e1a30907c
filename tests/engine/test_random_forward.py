"""Networks whose forward pass draws random numbers: attention, recurrent layers, noise; and functional dropout."""

from dataclasses import replace

import pytest
import torch
import training_tasks
from torch import nn
from torch.nn.functional import dropout, dropout1d
from torch.utils.checkpoint import checkpoint
from training_tasks import assert_same, rows

from cfl_ray import models
from cfl_ray.core.clients import ClientProgram
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.engine import manual, sequential, span, vectorised
from cfl_ray.engine.task import TrainingTask
from cfl_ray.errors import ConfigError, RunError
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


class Twice(nn.Module):
    """One dropout layer, called twice: on 20 values of a sample, then on `width`."""

    def __init__(self, width: int = 20):
        super().__init__()
        self.drop, self.inner, self.outer = nn.Dropout(0.5), nn.Linear(20, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.outer(self.drop(self.inner(self.drop(x.flatten(1)))))


class Checkpointed(nn.Module):
    """Repeats its dropout in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(20, 32), nn.Linear(32, 3)

    def part(self, x):
        return dropout(self.inner(x).relu(), 0.5, self.training)

    def forward(self, x):
        return self.outer(checkpoint(self.part, x.flatten(1), use_reentrant=False))


class InPlace(Functional):
    def forward(self, x):
        x = self.inner(x.flatten(1))
        if self.training:
            dropout(x, 0.5, inplace=True)
        return self.outer(x.tanh())


class WithoutBatch(Functional):
    """PyTorch drops whole samples here, which it takes for channels."""

    def forward(self, x):
        return self.outer(dropout1d(self.inner(x.flatten(1)), 0.5, self.training))


class ByValue(Functional):
    """A call more for other values than zeros."""

    def forward(self, x):
        x = dropout(self.inner(x.flatten(1)), 0.2, self.training) if x.any() else self.inner(x.flatten(1))
        return self.outer(dropout(x, 0.5, self.training))


class BySize(Functional):
    """A call for every three samples of a large batch."""

    def forward(self, x):
        parts = self.inner(x.flatten(1)).split(3)
        return self.outer(torch.cat([dropout(part, 0.5, self.training) for part in parts]))


class LayerDrop(Functional):
    """Calls that depend on chance."""

    def forward(self, x):
        x = self.inner(x.flatten(1))
        if not self.training or torch.rand(()) > 0.5:
            x = dropout(x, 0.5, self.training)
        return self.outer(x)


SHAPE = (5, 4)
RANDOM = [Transformer, lambda: Transformer(0.1, batch_first=False), Recurrent, Noise, Checkpointed]
RANDOM += [InPlace, WithoutBatch, ByValue, BySize, LayerDrop]


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

    def test_other_engines_refuse(self, factory):
        network = Network(factory, SHAPE)
        tasks = tasks_of(network)
        assert "draws random numbers" in vectorised.why_not(network, tasks)
        assert span.why_not(network, tasks) and manual.why_not(network, tasks)

    def test_all_gradients_of_a_step_are_of_one_function(self, factory):
        """A local step that asks for the gradient of its first batch twice gets the same one."""
        network = Network(factory, SHAPE)
        (task,) = tasks_of(network, 1)
        seen = []

        class Twice(ClientProgram):
            def step(self, gradient, w, held, number):
                first, second = gradient(w, 0), gradient(w, 0)
                seen.append(torch.equal(first, second))
                return first

        rows(sequential, network, [replace(task, program=Twice())])
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
    ((name, layer),) = network.dropouts.items()
    (layer.mask,) = network.masks([7], 0, 2)[0]
    first = network.module(network.input(torch.ones(2, 10_000)))
    # mean 1; standard error of 20,000 draws of 0 and 4/3: sqrt(1/3 / 20000) = 0.004
    assert abs(first.mean().item() - 1) < 0.02 and abs((first == 0).float().mean().item() - 0.25) < 0.015


def test_without_dropout_a_transformer_trains_on_both_engines():
    network = Network(lambda: Transformer(0.0), SHAPE)
    tasks = tasks_of(network)
    assert not network.random_forward
    assert_same(network, tasks, vectorised)


def test_masks_by_sample_stay_where_they_suit():
    """Dropout layers keep their masks beside attention, which draws from the global generator."""
    network = Network(lambda: Transformer(0.1), SHAPE)
    assert set(network.dropouts) == {"layer.dropout", "layer.dropout1", "layer.dropout2"} and network.random_forward


class Convolutional(nn.Sequential):
    """Whole channels, in a module that goes through its children."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(5, 8, 2)

        def forward(self, x):
            return dropout1d(self.conv(x), 0.3, self.training)

    def __init__(self):
        super().__init__(self.Block(), nn.Flatten(), nn.Linear(24, 3))


class Recursive(Functional):
    """Calls itself, with a mask for each pass."""

    def forward(self, x, inner=False):
        return super().forward(x) if inner else (self(x, True) + self(x, True)) / 2


class Empty(Functional):
    """Has containers without children."""

    def __init__(self):
        super().__init__()
        self.shortcut, self.none = nn.Sequential(), nn.ModuleList()

    def forward(self, x):
        x = self.shortcut(self.inner(x.flatten(1)))
        assert len(list(self.modules())) == 5 and not [part(x) for part in self.none]
        return self.outer(torch.dropout(x, 0.25, train=self.training))


class Half(Functional):
    """Activations of another type."""

    def forward(self, x):
        x = dropout(self.inner(x.flatten(1)).bfloat16(), 0.5, self.training)
        return nn.functional.linear(x, self.outer.weight.bfloat16()).float()


class TestFunctionalDropout:
    @pytest.mark.parametrize(
        "factory, shares",
        [
            (Functional, [0.5]),
            (Recursive, [0.5, 0.5]),
            (Empty, [0.25]),
            (Convolutional, [0.3]),
            (lambda: Twice(32), [0.5, 0.5]),
            (Twice, [0.5, 0.5]),
        ],
    )
    def test_has_masks_as_a_layer(self, factory, shares):
        """By key, in every engine, and alike whatever ran before."""
        network = Network(factory, SHAPE)
        assert not network.random_forward and [layer.p for layer in network.dropouts.values()] == shares
        tasks = tasks_of(network)
        for engine in (manual, vectorised) if network.device.type == "cpu" else (vectorised,):
            assert_same(network, tasks, engine)
        torch.manual_seed(5)
        again = Network(factory, SHAPE)
        assert torch.equal(rows(sequential, network, tasks), rows(sequential, again, tasks))
        assert list(again.spec.names) == list(dict(factory().named_parameters()))

    def test_keeps_the_type_of_activations(self):
        network = Network(Half, SHAPE)
        assert_same(network, tasks_of(network), vectorised, bound=0.02)

    def test_is_the_same_as_a_layer(self):
        class Layer(Functional):
            def __init__(self):
                super().__init__()
                self.drop = nn.Dropout(0.5)

            def forward(self, x):
                return self.outer(self.drop(self.inner(x.flatten(1))))

        trained = [rows(sequential, one, tasks_of(one)) for one in (Network(Functional, SHAPE), Network(Layer, SHAPE))]
        assert torch.equal(*trained)

    def test_two_calls_of_a_layer_have_two_masks(self):
        network = Network(Twice, SHAPE)
        first, second = network.masks([3], 0, 4)
        assert not torch.equal(first, second)

    def test_a_layer_that_is_not_called_draws_nothing(self):
        class Unused(Functional):
            def __init__(self):
                super().__init__()
                self.drop = nn.Dropout(0.3)

        assert [layer.p for layer in Network(Unused, SHAPE).dropouts.values()] == [0.5]

    def test_evaluation_has_none(self):
        network = Network(Functional, SHAPE)
        x = torch.randn(6, *SHAPE)
        assert torch.equal(network.logits(x), network.logits(x))

    def test_calls_that_depend_on_large_values_are_an_error(self):
        class Late(Functional):
            def forward(self, x):
                x = self.inner(x.flatten(1))
                for _ in range(int((x.abs() < 9).all()) + self.more):
                    x = dropout(x, 0.5, self.training)
                return self.outer(x)

        Late.more = 0
        network = Network(Late, SHAPE)
        (task,) = tasks_of(network, 1)
        with pytest.raises(RunError, match="not the same in all passes: there are 0; its first passes drop 0.5"):
            rows(sequential, network, [replace(task, x=task.x * 1e4)])
        Late.more = 1
        with pytest.raises(RunError, match="there are more than 1"):
            rows(sequential, network, [task])
        assert network.logits(torch.ones(2, *SHAPE)).isfinite().all()

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_a_pass_that_ends_early_leaves_dropout_as_it_is(self, error):
        class Stopping(Functional):
            def forward(self, x):
                if self.stops:
                    raise error
                return super().forward(x)

        Stopping.stops = False
        network = Network(Stopping, SHAPE)
        Stopping.stops = True
        with pytest.raises(error):
            rows(sequential, network, tasks_of(network, 1))
        assert set(dropout(torch.ones(100), 0.5).tolist()) == {0, 2}

    def test_it_is_refused_in_evaluation(self):
        class Always(Functional):
            def forward(self, x):
                return self.outer(dropout(self.inner(x.flatten(1))))

        with pytest.raises(ConfigError, match="Always .* calls functional dropout in evaluation, where"):
            models.recipe(Always, {}, SHAPE, 3).check()
