"""Concepts and corruptions of clients, as in FedRC's Fashion-MNIST-C; for fashion_mnist_c.yaml."""

import numpy as np

SIGMAS = (0.04, 0.06, 0.08, 0.09, 0.10)  # noise of severity 1 to 5, in units of the pixel range


def concepts(x: np.ndarray, y: np.ndarray, group: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Group 0 keeps its labels, 1 reverses them, 2 moves them by one; two clients of five have noisy images."""
    if draw.random() < 0.4:
        top = 255 if x.max() > 16 else 16
        x = np.clip(x + draw.normal(0, draw.choice(SIGMAS) * top, x.shape), 0, top).round().astype(x.dtype)
    return x, (y, 9 - y, (y + 1) % 10)[group]
