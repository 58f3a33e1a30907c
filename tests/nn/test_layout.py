"""Functions that lose digits channels-last, and the layout of networks with them."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_tasks import tasks_of

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import manual, sequential, vectorised
from cfl_ray.models import REGISTRY
from cfl_ray.nn import layout
from cfl_ray.nn.layout import inexact_functions
from cfl_ray.nn.network import Network, template_of

pytestmark = pytest.mark.cpu
SHAPE = (1, 8, 8)


class Written(nn.Module):
    """A normalisation in functional form, without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.group_norm(x, 4)


class OnlyInEvaluation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else functional.group_norm(x, 4)


class FromMoments(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt()


class Flat(nn.Module):
    """Takes flat samples: its images are made inside."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, *SHAPE)


def behind_32_channels(*layers: nn.Module):
    def factory() -> nn.Module:
        made = [
            nn.Conv2d(1, 32, 3),
            *copy.deepcopy(layers),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 3),
        ]
        return nn.Sequential(*made)

    return factory


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.GroupNorm(32, 32), "group_norm"),
        (nn.GroupNorm(1, 32, affine=False), "group_norm"),
        (nn.BatchNorm2d(32), "batch_norm"),
        (nn.BatchNorm2d(32, affine=False, track_running_stats=False), "batch_norm"),
        (Written(), "group_norm"),
        (OnlyInEvaluation(), "group_norm"),
        (nn.InstanceNorm2d(32), None),
        (nn.LayerNorm([32, 6, 6]), None),
        (nn.LocalResponseNorm(3), None),
        (nn.LPPool2d(2, 1), None),
        (nn.Dropout2d(), None),
        (nn.FractionalMaxPool2d(2, output_size=4), None),
        (nn.Softmax2d(), None),
        (FromMoments(), None),
    ],
)
def test_networks_are_contiguous_if_a_function_loses_digits(layer, name):
    network = Network(behind_32_channels(layer), SHAPE)
    assert network.inexact == ({name} if name else set()) and network.channels_last == (name is None)


def test_images_that_a_module_makes_of_flat_samples():
    network = Network(lambda: nn.Sequential(Flat(), behind_32_channels(nn.GroupNorm(4, 32))()), (64,))
    assert network.wide and not network.channels_last


def test_zero_weights_hide_nothing():
    layer = nn.GroupNorm(4, 32)
    nn.init.zeros_(layer.weight)
    assert inexact_functions(nn.Sequential(layer), torch.rand(2, 32, 4, 4)) == {"group_norm"}


def test_scripted_modules_hide_their_functions():
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32)))
    assert inexact_functions(nn.Sequential(scripted), torch.rand(2, *SHAPE))


@pytest.mark.parametrize(("name", "contiguous"), [("resnet9", True), ("leaf_cnn", False), ("vgg16", False)])
def test_built_in_networks(name, contiguous):
    shape = (3, 32, 32)
    module = REGISTRY[name](shape, 10)
    assert bool(inexact_functions(module, torch.rand(2, *shape))) == contiguous


def test_frozen_convolutions_are_shared_in_the_contiguous_layout():
    def factory() -> nn.Module:
        module = behind_32_channels(nn.GroupNorm(4, 32))()
        module[0].requires_grad_(False)
        return module

    template = template_of(factory, 0, SHAPE)
    network = Network(factory, SHAPE, template=template)
    assert network.module[0].weight.data_ptr() == template[0].weight.data_ptr(), "no copy"
    assert network.module[0].weight.is_contiguous()


def plain_change(factory, network: Network, task, dtype: torch.dtype) -> Tensor:
    """The change of the parameters by a step of full batch in plain PyTorch, in the contiguous layout."""
    module = factory().to(dtype)
    names = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in network.spec.tensors(task.start_P).items():
            if name in names:
                names[name].copy_(value)
    loss = functional.cross_entropy(module(task.x.to(dtype)), task.y)
    grads = torch.autograd.grad(loss, list(names.values()))
    return torch.cat([-task.local.lr * grad.reshape(-1) for grad in grads])


@pytest.mark.parametrize("engine", [sequential, manual, vectorised], ids=lambda engine: engine.__name__)
@pytest.mark.parametrize("norm", [nn.GroupNorm(8, 32), nn.BatchNorm2d(32), nn.InstanceNorm2d(32, affine=True)])
@pytest.mark.parametrize("offset", [0, 100, 10_000])
def test_engines_are_as_exact_as_the_contiguous_layout(engine, norm, offset):
    factory = behind_32_channels(norm)
    network = Network(factory, SHAPE)
    (task,) = tasks_of(network, [40], LocalSGD(lr=0.1, epochs=1, batch_size=None))
    task = replace(task, x=task.x + offset)
    expected, plain = (plain_change(factory, network, task, dtype) for dtype in (torch.float64, torch.float32))
    (result,) = engine.train(network, [task])
    change = (result.row_P - task.start_P)[: network.spec.trained].double()
    assert (change - expected).norm() < 4 * (plain - expected).norm() + 1e-4 * expected.norm()


def test_equal_calls_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(layout, "_tried", {})
    monkeypatch.setattr(layout.FunctionCall, "loses_digits", lambda call: tried.append(call.name) or False)
    norm = nn.Sequential(nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.AvgPool2d(2))
    for _ in range(2):
        assert inexact_functions(norm, torch.rand(2, *SHAPE)) == frozenset()
    assert sorted(tried) == ["avg_pool2d", "group_norm"]  # not relu, which has no sums
