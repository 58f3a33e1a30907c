"""ResNet-9 with group normalisation, as FedClust and PACFL train it on CIFAR-100."""

import torch
from torch import Tensor, nn

from cfl_ray.models.image_shape import image_shape


def _block(inputs: int, outputs: int, *pool: nn.Module) -> nn.Sequential:
    """3x3 convolution, group normalisation, ReLU and, if given, pooling."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(32, outputs), nn.ReLU(), *pool)


class _Residual(nn.Module):
    """x + f(x), with f two blocks of equal width."""

    def __init__(self, channels: int):
        super().__init__()
        self.blocks = nn.Sequential(_block(channels, channels), _block(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.blocks(x))


def resnet9(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Eight 3x3 convolutions with two residual connections, and one linear layer.

    6,621,540 parameters on 3x32x32 images with 100 classes.
    """
    channels, _, _ = image_shape("resnet9", input_shape, least=8)
    return nn.Sequential(
        _block(channels, 64),
        _block(64, 128, nn.MaxPool2d(2)),
        _Residual(128),
        _block(128, 256, nn.MaxPool2d(2)),
        _block(256, 512, nn.MaxPool2d(2)),
        _Residual(512),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(512, num_classes),
    )
