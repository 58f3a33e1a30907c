"""Layers that stand in for PyTorch's: pooling in two maxima gives the same values and the same gradients."""

import pytest
import torch
from torch import nn

from cfl_ray.nn.layers import HalvingMaxPool, replace_layers

SHAPES = [(4, 3, 8, 8), (4, 3, 7, 9), (1, 1, 2, 2), (0, 3, 8, 8), (3, 8, 8)]


def images(shape):
    """Rectified noise, so that zeros tie, with what a diverged model can hold."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).relu()
    for position, value in enumerate([float("nan"), float("inf"), float("-inf")]):
        if x.numel() > 40:
            x.view(-1)[7 * position] = value
    return x


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_pooling_is_pytorchs_bit_for_bit(shape, memory_format):
    x = images(shape)
    if len(shape) == 4:
        x = x.contiguous(memory_format=memory_format)
    found = HalvingMaxPool().eval()(x)
    assert torch.equal(found.nan_to_num(nan=-7), nn.MaxPool2d(2)(x).nan_to_num(nan=-7))


@pytest.mark.parametrize("training", [True, False])
def test_ties_share_no_gradient(training):
    x = torch.ones(1, 1, 4, 4, requires_grad=True)
    grads = [torch.autograd.grad(pool.train(training)(x).sum(), x)[0] for pool in (HalvingMaxPool(), nn.MaxPool2d(2))]
    assert torch.equal(*grads) and grads[0].max() == 1


def test_only_what_halves_is_replaced():
    others = [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
    ]
    others += [nn.MaxPool2d((2, 1)), nn.MaxPool2d(2, return_indices=True), nn.AdaptiveMaxPool2d(2), nn.MaxPool1d(2)]
    halving = [nn.MaxPool2d(2), nn.MaxPool2d((2, 2), (2, 2)), nn.MaxPool2d(2, padding=(0, 0))]
    module = nn.Sequential(nn.Sequential(*others), *halving)
    replace_layers(module)
    assert list(module[0]) == others and all(isinstance(pool, HalvingMaxPool) for pool in module[1:])
