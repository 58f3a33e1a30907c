"""The division and the network of FedProto's official code for MNIST, for mnist.yaml."""

import numpy as np
from torch import nn


def ways(
    labels: np.ndarray, clients: int, draw: np.random.Generator, n: int = 3, spread: int = 2, shots: int = 100
) -> list[np.ndarray]:
    """Each client's samples: between max(2, n - spread) and n + spread random labels, `shots` samples of each.

    Of a label with fewer samples than that, its clients have equal shares.
    """
    kinds = np.unique(labels)
    numbers = draw.integers(max(2, n - spread), min(len(kinds), n + spread) + 1, clients)
    owned = [draw.choice(kinds, number, replace=False) for number in numbers]
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for kind in kinds:
        owners = [part for part, own in zip(parts, owned, strict=True) if kind in own]
        positions = draw.permutation(np.flatnonzero(labels == kind))[: shots * len(owners)]
        for part, share in zip(owners, np.array_split(positions, max(len(owners), 1))):
            part.append(share)
    return [np.concatenate(part) for part in parts]


def mnist_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two 5x5 convolutions (10 and 20 channels) with pooling and dropout, 50 features: 21,840 parameters on 1x28x28."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.Dropout2d(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(50, num_classes),
    )
