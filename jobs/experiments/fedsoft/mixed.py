"""Clients with images of two distributions in shares 30:70, as in FedSoft's experiments; for mixtures.yaml."""

import numpy as np


def mixed(x: np.ndarray, y: np.ndarray, group: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Of a client of group 0, 30 % of the images are turned by 90 degrees; of group 1, 70 %."""
    turned = draw.random(len(x)) < (0.3, 0.7)[group]
    return np.where(turned[:, None, None, None], np.rot90(x, axes=(-2, -1)), x), y
