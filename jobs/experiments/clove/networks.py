"""The network of CLoVE's official code for CIFAR-10; for cifar10.yaml. That for MNIST is `autocfl_cnn`, (6, 16)."""

from torch import nn


def cifar10(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Four 3x3 convolutions with BatchNorm and pooling, and three linear layers with dropout.

    4,181,002 parameters on 3x32x32.
    """
    depth, layers = input_shape[0], []
    for channels in (64, 128, 256, 512):
        layers += [nn.Conv2d(depth, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]
        depth = channels
    for inputs, outputs in ((4 * depth, 1024), (1024, 512)):
        layers += [*([nn.Flatten()] if outputs == 1024 else []), nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(512, num_classes))
