"""Max pooling of large batches: the values of PyTorch's function, and that function where it is as fast."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from cfl_ray.models.factory import ModelRecipe
from cfl_ray.nn import network
from cfl_ray.nn.pooling import FastPooling, max_pool


@pytest.fixture
def images():
    """Images (8, 6, 20, 21) with ties, NaN and infinities."""
    x = torch.randn(8, 6, 20, 21, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    x[0, 0, 3, 4], x[1, 2, 5, 6], x[2, 3, 0, 0] = torch.nan, torch.inf, -torch.inf
    return x


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (3, {"stride": 2}),
        ((2, 3), {"stride": (1, 2)}),
        (5, {"stride": ()}),
        ((1, 2), {}),
        (2, {"padding": 1}),
        (2, {"dilation": 2}),
        (3, {"ceil_mode": True}),
        (1, {}),
    ],
    ids=str,
)
def test_values_are_those_of_pytorch_in_the_same_layout(images, size, options):
    """In modules and functions; also for what PyTorch itself computes: padding, dilation, ceil_mode and copies."""
    same = {"stride": options["stride"] or None} if "stride" in options else {}
    expected = functional.max_pool2d(images, size, **options | same)
    with torch.no_grad(), FastPooling():
        found = [nn.MaxPool2d(size, **options | same)(images), torch.max_pool2d(images, size, **options)]
        found.append(functional.max_pool2d(images[0].expand(8, *images[0].shape).contiguous(), size, **options | same))
    for one in found[:2]:
        assert torch.equal(one.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)) and one.is_contiguous()
        assert one.stride() == expected.stride()
        assert one.data_ptr() != images.data_ptr()
    assert torch.equal(found[2][3].nan_to_num(nan=7.0), expected[0].nan_to_num(nan=7.0))
    ours = max_pool(images, size, **options)
    is_ours = not options.keys() & {"padding", "dilation", "ceil_mode"} and size != 1
    assert (ours is not None) == is_ours


@pytest.mark.parametrize(
    "change",
    [lambda x: x[:1, :1], lambda x: (10 * x).nan_to_num().int(), lambda x: x.clone().requires_grad_()],
    ids=["small", "integers", "with a gradient"],
)
def test_other_inputs_are_left_to_pytorch(images, change):
    assert max_pool(images, 2) is not None and max_pool(change(images), 2) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_with_channels_last_only_halves_are_faster(images, dtype):
    x = images.to(dtype).to(memory_format=torch.channels_last)
    found, expected = max_pool(x, 2), functional.max_pool2d(x, 2)
    assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)) and found.stride() == expected.stride()
    assert max_pool(x, 3) is None and max_pool(x, 2, stride=1) is None


def test_ties_share_no_gradient():
    """Training keeps PyTorch's function, whose gradient goes to one of the largest values."""
    x = torch.ones(8, 6, 20, 20, requires_grad=True)
    with FastPooling():
        (grad,) = torch.autograd.grad(nn.MaxPool2d(2)(x).sum(), x)
    assert grad.max() == 1 and grad.sum() == 8 * 6 * 10 * 10


def test_evaluations_pool_in_this_way(monkeypatch):
    """Modules and functions of a network, whose outputs are those of its plain forward pass, if it has any."""

    class Pools(nn.Sequential):
        def forward(self, x):
            return super().forward(functional.max_pool2d(x, 3, stride=1))

    made = []

    class Kept(FastPooling):
        def __init__(self):
            super().__init__()
            made.append(self)

    factory = ModelRecipe(lambda: Pools(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(81, 3)), (1, 20, 20), 3)
    net, x = network.Network(factory, (1, 20, 20)), torch.randn(300, 1, 20, 20)
    without = network.Network(lambda: nn.Linear(4, 3), (4,))
    monkeypatch.setattr(network, "FastPooling", Kept)
    with torch.no_grad():
        expected = torch.cat([net.module(part) for part in x.split(256)])
    assert torch.equal(net.logits(x), expected) and [one.calls for one in made] == [2 * 2]  # 256 samples a pass
    assert without.logits(torch.ones(300, 4)).shape == (300, 3) and len(made) == 1


def test_errors_and_indices_are_those_of_pytorch(images):
    with FastPooling():
        values, indices = functional.max_pool2d(images, 2, return_indices=True)
        assert values.shape == indices.shape == (8, 6, 10, 10)
        with pytest.raises(RuntimeError, match="too small"):
            functional.max_pool2d(images, 30)
