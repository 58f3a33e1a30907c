"""Shifts of ANDA, from which FLUX and Feroma have their clients, at heterogeneity level 3, and the network of both."""

from itertools import permutations

import numpy as np
from torch import nn

MIXED = (1, 4, 7)  # labels whose meaning, or whose images, differ between clients


def relabelled(x: np.ndarray, y: np.ndarray, group: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """P(Y|X): the labels of `MIXED` in another order in each of six groups."""
    places = np.arange(10)
    places[list(MIXED)] = list(permutations(MIXED))[group]
    return x, places[y]


def turned(x: np.ndarray, y: np.ndarray, group: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """P(X|Y): images with a label of `MIXED` are turned, by an angle for each label that a group draws once."""
    x = x.copy()
    for label, quarters in zip(MIXED, np.random.default_rng(group).integers(4, size=len(MIXED)), strict=True):
        x[y == label] = np.rot90(x[y == label], quarters, axes=(2, 3))
    return x, y


def lenet5(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """LeNet-5 with a padded first convolution and average pooling: 61,706 parameters on 1x28x28."""
    channels, height, width = input_shape
    size = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(size, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )
