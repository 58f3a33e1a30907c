"""The division and the networks of FedPAC's official code, for fashion_mnist.yaml and cifar10.yaml."""

import numpy as np
from torch import nn

DOMINANT = ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0))  # labels of client i: those of i mod 5


def dominated(
    labels: np.ndarray, clients: int, draw: np.random.Generator, samples: int = 600, share: float = 0.2
) -> list[np.ndarray]:
    """Each client's samples: this share of them of all labels alike, the others of three dominant labels.

    Of a label with fewer samples than its clients need, each has the same part of what it needs.
    """
    sizes = np.full((clients, 10), share * samples / 10)
    for client in range(clients):
        sizes[client, list(DOMINANT[client % 5])] += (1 - share) * samples / 3
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for kind in range(10):
        positions = draw.permutation(np.flatnonzero(labels == kind))
        wanted = sizes[:, kind] * min(1, len(positions) / sizes[:, kind].sum())
        for part, own in zip(parts, np.split(positions, np.cumsum(wanted).round().astype(int))[:clients], strict=True):
            part.append(own)
    return [np.concatenate(part) for part in parts]


def fashion_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two 5x5 convolutions (16 and 32 channels) with pooling and 128 features: 117,066 parameters on 1x28x28."""
    return _cnn(nn.Conv2d(input_shape[0], 16, 5), nn.Conv2d(16, 32, 5, padding=1), inputs=800, classes=num_classes)


def cifar_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Three convolutions (16, 32 and 64 channels) with pooling and 128 features: 107,690 parameters on 3x32x32."""
    first = nn.Conv2d(input_shape[0], 16, 5)
    second, third = nn.Conv2d(16, 32, 5, padding=1), nn.Conv2d(32, 64, 3, padding=1)
    return _cnn(first, second, third, inputs=576, classes=num_classes)


def _cnn(*convolutions: nn.Module, inputs: int, classes: int) -> nn.Module:
    layers = [layer for one in convolutions for layer in (one, nn.LeakyReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, 128), nn.LeakyReLU(), nn.Linear(128, classes))
