"""The network and the learning rate of FedBABU's official code, for cifar100.yaml."""

from torch import nn

_BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))


def mobilenet(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """MobileNet for 32x32 images: 3,309,476 parameters on 3x32x32 with 100 classes."""
    depth, layers = 32, _convolution(input_shape[0], 32, 3)
    for channels, stride in _BLOCKS:
        layers += [*_convolution(depth, depth, 3, stride, groups=depth), *_convolution(depth, channels, 1)]
        depth = channels
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(depth, num_classes))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def in_steps(round: int, rounds: int) -> float:
    """Factor of the learning rate: a tenth after half of the rounds, and again after three quarters."""
    return 0.1 ** ((round > rounds / 2) + (round > rounds * 3 / 4))
