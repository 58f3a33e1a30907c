"""The manual engine equals the sequential one, for every layer and every kind of local training that it supports."""

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, uneven
from torch import nn
from torch.nn.functional import cross_entropy, group_norm, max_pool2d
from training_tasks import FLAT, assert_same, mlp, rows, tasks_of

from cfl_ray.core.clients import ClientProgram
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import manual, sequential
from cfl_ray.engine.open_chunk import Trainer
from cfl_ray.errors import RunError
from cfl_ray.models import REGISTRY, recipe
from cfl_ray.nn import operations
from cfl_ray.nn.network import Network
from cfl_ray.nn.operations import GroupNorm, MaxPool, PatchConvolution
from cfl_ray.nn.passes import Passes, passes_of

pytestmark = pytest.mark.cpu

IMAGE, COLOUR = (1, 16, 16), (3, 17, 16)
UNSUPPORTED_MODELS = {"resnet9"}
LARGER_IMAGES = {"vgg16"}  # of at least 32x32


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(125, 3)
    )


def strides_and_padding():
    return nn.Sequential(
        nn.Conv2d(3, 4, (3, 5), stride=2, padding=(1, 2), bias=False),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, stride=(2, 1), padding=1),
        nn.Sigmoid(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 2 * 4, 3),
    )


def pool_of_odd_sizes():
    """17 x 16 and then 7 x 7 values: the last row and column are in no window."""
    return nn.Sequential(
        nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3)
    )


def dropouts():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Dropout(0.3), nn.Tanh(), nn.Linear(840, 3)
    )


def activations():
    """An activation after another does not overwrite what the first one's gradient needs."""
    return nn.Sequential(
        nn.Linear(6, 8), nn.Sigmoid(), nn.Tanh(), nn.ReLU(), nn.Sequential(nn.Linear(8, 5, bias=False)), nn.Linear(5, 3)
    )


def wide():
    """32 channels: convolutions of PyTorch, channels-last."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Conv2d(32, 4, 3, bias=False),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.AvgPool2d((1, 3)),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


NETWORKS = {
    factory.__name__: (factory, shape)
    for factory, shape in (
        (small_cnn, IMAGE),
        (strides_and_padding, COLOUR),
        (pool_of_odd_sizes, COLOUR),
        (dropouts, COLOUR),
        (activations, FLAT),
        (wide, COLOUR),
        (mlp, FLAT),
    )
}
NETWORKS |= {
    f"{name} {shape}": (lambda name=name, shape=shape: recipe(name, {}, shape, 3)(), shape)  # built by its test
    for name in sorted(REGISTRY.keys() - UNSUPPORTED_MODELS - LARGER_IMAGES)
    for shape in (IMAGE, COLOUR)
}
LOCALS = {
    "full batch": LocalSGD(epochs=4, lr=0.3),
    "mini-batches, the last one partial": LocalSGD(epochs=3, batch_size=4, lr=0.05),
    "momentum and weight decay": LocalSGD(epochs=3, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.05),
    "steps ending within an epoch": LocalSGD(steps=7, batch_size=4, lr=0.1, momentum=0.5),
}


@dataclass(frozen=True)
class Around(ClientProgram):
    """The change of one batch's gradient along that of another."""

    batches_per_step: ClassVar = 2

    def step(self, gradient, w, held, number):
        g = gradient(w - 0.1 * gradient(w, 0), 1)
        return g - (gradient(w + 0.1 * g, 0) - gradient(w - 0.1 * g, 0))


@dataclass(frozen=True)
class NearOther(ClientProgram):
    """Half the loss, and the distances of features and outputs to those of a held model."""

    def loss(self, batch, held):
        other = batch.forward("other")
        of_features_B = (batch.features - other.features).square().mean(1)
        of_outputs_B = (batch.outputs - other.outputs).square().mean(1)
        return 0.5 * batch.loss + held["weight"] * batch.mean(of_features_B + of_outputs_B)


@dataclass(frozen=True)
class FeaturesAlone(ClientProgram):
    """The mean square of the features, times a number that depends on values."""

    one_by_one: ClassVar = True

    def loss(self, batch, held):
        return batch.mean(batch.features.square().mean(1)) * (2 if batch.y.max() > 1 else 1)


@dataclass(frozen=True)
class NearMean(NearOther):
    """The held model follows the trained one; each step counts the outputs at both rows that it takes gradients of."""

    batches_per_step: ClassVar = 2
    moves: ClassVar = ("other", "sums")

    def step(self, gradient, w, held, number):
        v = w - 0.05 * gradient(w, 0)
        seen = gradient.forward(v, 1)
        held["sums"].add_(seen.outputs.mean(-2) + gradient.forward("other", 0).outputs.mean(-2))
        held["other"].lerp_(w, 0.5)
        return gradient(v, 1) + 0.1 * gradient(w, 1)


@dataclass(frozen=True)
class Flat(ClientProgram):
    """The loss, and the square of its gradient at the features: what comes after them is a part of the loss."""

    def loss(self, batch, held):
        (g_BF,) = torch.autograd.grad(batch.loss, batch.features, create_graph=True, materialize_grads=True)
        return batch.loss + 100 * g_BF.square().sum()


@dataclass(frozen=True)
class InPlace(ClientProgram):
    """Twice the outputs, in their memory."""

    def loss(self, batch, held):
        return cross_entropy(batch.outputs.mul_(2), batch.y)


@dataclass(frozen=True)
class Constant(ClientProgram):
    def loss(self, batch, held):
        return batch.loss.detach()


def single_layer():
    """Its features are the samples."""
    return nn.Sequential(nn.Linear(6, 3))


class SimilarToRows(nn.Module):
    """Its last layer is called on parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.rows, self.last = nn.Linear(6, 4), nn.Parameter(torch.ones(3, 5)), nn.Linear(5, 4)

    def forward(self, x):
        return self.first(x) @ self.last(self.rows).T


@pytest.mark.parametrize("factory, shape", NETWORKS.values(), ids=NETWORKS)
def test_is_sequential_for_all_layers(factory, shape):
    network = Network(factory, shape)
    assert_same(network, tasks_of(network, [10, 5], LOCALS["momentum and weight decay"]), manual)


class TestIsSequentialFor:
    @pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
    @pytest.mark.parametrize("factory, shape", [(small_cnn, IMAGE), (wide, COLOUR), (mlp, FLAT)])
    def test_all_batches(self, factory, shape, local):
        network = Network(factory, shape)
        assert_same(network, tasks_of(network, [10, 3, 7], local), manual)

    @pytest.mark.parametrize("columns", ["all", "head", "base"])
    @pytest.mark.parametrize("follow", [0.0, 0.5])
    @pytest.mark.parametrize("factory, shape", [(small_cnn, IMAGE), (wide, COLOUR)])
    def test_proximal_terms(self, factory, shape, follow, columns):
        network = Network(factory, shape)
        columns = getattr(network.spec, columns)
        terms = [(0.3, columns), (0.15, columns, follow, 2)]
        assert_same(network, tasks_of(network, [10, 3], LOCALS["momentum and weight decay"], terms), manual)

    def test_a_frozen_model(self):
        network = Network(small_cnn, IMAGE)
        for name in ("full batch", "steps ending within an epoch"):
            assert_same(network, tasks_of(network, [10, 3], LOCALS[name], frozen_P=network.new_model(7, 0)), manual)

    @pytest.mark.parametrize("factory, shape", [(small_cnn, IMAGE), (dropouts, COLOUR)])
    def test_steps_of_several_gradients(self, factory, shape):
        network = Network(factory, shape)
        tasks = tasks_of(network, [10, 3], LOCALS["momentum and weight decay"], program=Around())
        assert_same(network, tasks, manual)

    def test_a_persistent_momentum_buffer(self):
        network = Network(small_cnn, IMAGE)
        local = replace(LOCALS["momentum and weight decay"], persist=True)
        velocity = 0.1 * torch.randn(network.spec.trained, generator=torch.Generator().manual_seed(0))
        before = velocity.clone()
        assert_same(network, tasks_of(network, [10], local, velocity=velocity), manual)
        assert_same(network, tasks_of(network, [10], local), manual)
        assert torch.equal(velocity, before), "the stored buffer is not changed in place"


class TestOwnLosses:
    """They are differentiated at features and outputs; the written-out passes go on from there."""

    def held(self, network, **others):
        return {"models": {"other": network.new_model(7, 0)}, "numbers": {"weight": torch.tensor(0.3)} | others}

    @pytest.mark.parametrize(
        "factory, shape, program",
        [
            (small_cnn, IMAGE, NearOther()),
            (dropouts, COLOUR, NearOther()),
            (dropouts, COLOUR, FeaturesAlone()),
            (wide, COLOUR, NearOther()),
            (single_layer, FLAT, NearOther()),
        ],
    )
    def test_are_those_of_sequential(self, factory, shape, program):
        network = Network(factory, shape)
        weight_n, frozen_P = torch.linspace(0.5, 1.5, 10), network.new_model(8, 0)
        fields = self.held(network) | {"program": program, "frozen_P": frozen_P, "weight_n": weight_n}
        tasks = tasks_of(network, [10, 10], LOCALS["mini-batches, the last one partial"], **fields)
        assert_same(network, tasks, manual)

    @pytest.mark.parametrize("steps", [1, 6])
    def test_held_models_pass_samples_once(self, steps, monkeypatch):
        """In batches of 4, unless the steps use fewer samples than the client's 10."""
        network, passed = Network(mlp, FLAT), []
        evaluated = network.evaluated
        monkeypatch.setattr(network, "evaluated", lambda row_P, x: passed.append(len(x)) or evaluated(row_P, x))
        local = LocalSGD(steps=steps, batch_size=4, lr=0.1)
        list(manual.train(network, tasks_of(network, [10], local, program=NearOther(), **self.held(network))))
        assert passed == ([10] if steps == 6 else [4])

    @pytest.mark.parametrize("factory, shape", [(small_cnn, IMAGE), (dropouts, COLOUR)])
    def test_with_steps_that_move_a_model(self, factory, shape):
        network = Network(factory, shape)
        fields = self.held(network, sums=torch.zeros(3))
        tasks = tasks_of(network, [10, 3], LOCALS["mini-batches, the last one partial"], program=NearMean(), **fields)
        assert_same(network, tasks, manual)
        for one, other in zip(manual.train(network, tasks), sequential.train(network, tasks)):
            assert all(close(one.moved[name], other.moved[name], 1e-5) for name in ("other", "sums"))

    def test_a_pass_that_its_gradient_uses_is_made_once(self, monkeypatch):
        """Two of the four passes of a step of `NearMean`: those at w on batch 0, at v, and at w on batch 1."""
        network, passed = Network(mlp, FLAT), []
        forward = Passes.forward
        monkeypatch.setattr(Passes, "forward", lambda *given: passed.append(1) or forward(*given))
        fields = self.held(network, sums=torch.zeros(3)) | {"program": NearMean()}
        list(manual.train(network, tasks_of(network, [10], LocalSGD(steps=5, batch_size=4, lr=0.1), **fields)))
        assert len(passed) == 5 * 3

    @pytest.mark.parametrize("program", [Flat(), InPlace()], ids=lambda program: type(program).__name__)
    def test_of_more_than_features_and_outputs_are_left_to_sequential(self, program):
        network = Network(mlp, FLAT)
        (task,) = tasks_of(network, [10], LOCALS["full batch"], program=program)
        trainer = Trainer(network, "manual")
        row_P = trainer(task).row_P.clone()
        (reason,) = trainer.fallbacks
        assert f"the loss of {type(program).__name__}" in reason
        assert torch.equal(row_P, rows(sequential, network, [task])[0])

    def test_that_fail_have_the_message_of_sequential(self):
        network = Network(mlp, FLAT)
        (task,) = tasks_of(network, [10], LOCALS["full batch"], program=Constant())
        with pytest.raises(RunError, match="Constant.*: loss returned a constant, a number without a gradient"):
            Trainer(network, "manual")(task)

    def test_need_the_inputs_of_the_last_layer(self):
        network = Network(SimilarToRows, FLAT)
        plain, own = (tasks_of(network, [10], LocalSGD(), program=kind())[0] for kind in (ClientProgram, FeaturesAlone))
        assert manual.why_not(network, [plain]) is None
        assert "inputs of the last layer (last) are no activation" in manual.why_not(network, [own])


class TestConvolution:
    @pytest.mark.parametrize("small", [None, 200])  # 200: parts of lines have few values
    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("kernel", [(1, 1), (2, 4), (5, 3)])
    @pytest.mark.parametrize("stride", [(1, 1), (1, 2), (2, 1), (3, 2)])
    @pytest.mark.parametrize("padding", [(0, 0), (2, 1)])
    def test_is_that_of_pytorch(self, channels, kernel, stride, padding, small, monkeypatch):
        if small:
            monkeypatch.setattr(operations, "_SMALL", small)
            monkeypatch.setattr(operations, "_LEAST_PART", 1)
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(4, channels, *kernel, generator=draw)
        grad_weight = np.empty(weight.shape, np.float32)
        ours = PatchConvolution(weight.numpy(), grad_weight, stride, padding)
        for height, width, batch in ((7, 8, 3), (9, 6, 1), (7, 8, 3)):  # arrays are kept by shape
            x = torch.randn(batch, channels, height, width, generator=draw).requires_grad_()
            w = weight.clone().requires_grad_()
            out = torch.conv2d(x, w, None, stride, padding)
            grad = torch.randn(out.shape, generator=draw)
            expected = out, *torch.autograd.grad(out, (w, x), grad)
            innermost = ours.forward(x.detach().movedim(0, -1).contiguous().numpy()).copy()
            from_grad = ours.backward(np.moveaxis(grad.numpy(), 0, -1), True)  # not contiguous
            found = [torch.from_numpy(array) for array in (innermost, grad_weight, from_grad)]
            for value, other in zip(
                (found[0].movedim(-1, 0), found[1], found[2].movedim(-1, 0)), expected, strict=True
            ):
                assert close(value, other, 1e-5)


class TestMaxPool:
    @pytest.mark.parametrize("height, width", [(6, 8), (7, 5)])
    def test_divides_ties_as_pytorch_does(self, height, width):
        """Of inputs with many equal values, in both layouts."""
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(0, 3, (5, 4, height, width), generator=draw).float().requires_grad_()
        out = max_pool2d(x, 2)
        grad = torch.randn(out.shape, generator=draw)
        (expected,) = torch.autograd.grad(out, x, grad)
        for order in ((1, 2, 3, 0), (0, 2, 3, 1)):  # (C, H, W, B) and (B, H, W, C)
            pool, back = MaxPool(), tuple(np.argsort(order))
            found = pool.forward(x.detach().permute(order).contiguous().numpy())
            assert torch.equal(torch.from_numpy(found).permute(back), out)
            found = pool.backward(grad.permute(order).contiguous().numpy(), True)
            assert torch.equal(torch.from_numpy(found).permute(back), expected)

    def test_is_moved_before_bias_and_activation(self):
        network = Network(small_cnn, IMAGE)
        kinds = [type(step.operation).__name__ for step in passes_of(network).steps]
        assert kinds[:4] == ["PatchConvolution", "MaxPool", "Bias", "Activation"]


class TestGroupNorm:
    @pytest.mark.parametrize("groups", [1, 3, 6])
    @pytest.mark.parametrize("centre", [0, 100])
    @pytest.mark.parametrize("affine", [True, False])
    def test_is_that_of_pytorch_in_float64(self, groups, centre, affine):
        """In both layouts; with values far from zero too, of which a mean of squares would lose the variance."""
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(4, 6, 5, 7, generator=draw) + centre
        weight, bias, grad = (torch.randn(shape, generator=draw) for shape in (6, 6, x.shape))
        leaves = [part.double().requires_grad_() for part in ([x, weight, bias] if affine else [x])]
        out = group_norm(leaves[0], groups, *leaves[1:], eps=1e-3)
        expected = [out, *torch.autograd.grad(out, leaves, grad.double())]
        for order in ((1, 2, 3, 0), (0, 2, 3, 1)):  # (C, H, W, B) and (B, H, W, C)
            pairs = [(part.numpy(), np.empty(6, np.float32)) if affine else None for part in (weight, bias)]
            norm, back = GroupNorm(groups, *pairs, 1e-3, wide=order[0] == 0), tuple(np.argsort(order))
            found = [torch.from_numpy(norm.forward(x.permute(order).contiguous().numpy())).permute(back)]
            found += [torch.from_numpy(norm.backward(grad.permute(order).contiguous().numpy(), True)).permute(back)]
            found += [torch.from_numpy(pair[1]) for pair in pairs if pair]
            for value, other in zip(found, expected, strict=True):
                assert close(value.double(), other, 1e-4 if centre else 1e-5)

    @pytest.mark.parametrize("channels", [4, 32])
    def test_is_written_out(self, channels):
        network = Network(
            lambda: nn.Sequential(
                nn.Conv2d(3, channels, 3),
                nn.GroupNorm(2, channels),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(channels * 210, 3),
            ),
            COLOUR,
        )
        assert "GroupNorm" in [type(step.operation).__name__ for step in passes_of(network).steps]


def test_a_result_does_not_depend_on_earlier_ones():
    """The arrays are reused for other clients and other batch sizes: the bits are those of a new network."""
    for factory, shape in ((small_cnn, IMAGE), (wide, COLOUR)):
        network = Network(factory, shape)
        tasks = tasks_of(network, [4, 30, 9], LocalSGD(epochs=2, lr=0.1))
        for task, row_P in zip(tasks, rows(manual, network, tasks)):
            assert torch.equal(rows(manual, Network(factory, shape), [task])[0], row_P)


def test_samples_and_starts_are_not_changed():
    network = Network(mlp, FLAT)
    (task,) = tasks_of(network, [10], LOCALS["full batch"])
    x, start_P = task.x.clone(), task.start_P.clone()
    list(manual.train(network, [task]))
    assert torch.equal(task.x, x) and torch.equal(task.start_P, start_P)


def test_divergence_raises_no_warning():
    network = Network(small_cnn, IMAGE)
    (task,) = tasks_of(network, [10], LocalSGD(epochs=20, lr=1e6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (result,) = manual.train(network, [task])
    assert not np.isfinite(result.train_loss)


def test_does_not_apply_to_large_batches():
    network = Network(mlp, FLAT)
    small, large = tasks_of(network, [256, 257], LocalSGD())
    assert manual.why_not(network, [small]) is None and manual.why_not(network, [large])
    assert manual.why_not(network, [replace(large, local=LocalSGD(batch_size=20))]) is None


def test_a_worker_uses_it(monkeypatch):
    stage = Stage(uneven([9, 4]), mlp, LocalSGD(batch_size=4), "manual")
    monkeypatch.setattr(sequential, "train", None)
    clients = stage.clients()
    updates = clients.train(clients.send(stage.model()[None]), features=stage.network.spec.all)
    assert updates.valid_M.all()
