"""Multi-layer perceptrons: 784-200-10 (IFCA) and 784-2048-10 (StoCFL), for any input."""

import math

from torch import nn


def mlp(input_shape: tuple[int, ...], num_classes: int, hidden: int = 200) -> nn.Module:
    """One hidden layer of `hidden` units with ReLU; 0: none, which is multinomial logistic regression.

    On 28x28 images with 10 classes, 200 units give 159,010 and 2048 units give 1,628,170 parameters.
    """
    size = math.prod(input_shape)
    if not hidden:
        return nn.Sequential(nn.Flatten(), nn.Linear(size, num_classes))
    return nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
