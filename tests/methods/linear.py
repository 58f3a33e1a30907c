"""Two clients with a linear model, full batch: the expected models as formulas in numpy.

With weights W (C, D), a client's gradient is g(W) = (softmax(X W') - Y)' X / n, and one step is W - eta g(W).
With two layers A (H, D) and B (C, H), logits are X A' B'.
"""

from collections.abc import Sequence

import numpy as np
import torch
from closeness import close
from federations import Stage, uneven
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.data import Federation, federation_from_arrays

ETA, N_0, N_1 = 0.5, 12, 4
STEPS = 2


def stage(
    steps: int | None = STEPS, sizes: Sequence[int] = (N_0, N_1), seed: int = 0, engine: str = "manual", **changes
) -> Stage:
    """Clients 0 and 1 have 12 and 4 samples with 5 inputs, of 3 classes. seed: of the data."""
    local = LocalSGD(**{"steps": steps, "lr": ETA} | changes)
    return Stage(uneven(sizes, (5,), seed=seed), lambda: nn.Linear(5, 3, bias=False), local, engine)


def data(one: Stage, client: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = one.federation.train(client)
    return x.double().numpy(), np.eye(3)[y]


def loss(one: Stage, client: int, w: np.ndarray) -> float:
    x, y = data(one, client)
    return -np.log((np.exp(x @ w.T) / np.exp(x @ w.T).sum(1, keepdims=True) * y).sum(1)).mean()


def gradient(one: Stage, client: int, w: np.ndarray) -> np.ndarray:
    x, y = data(one, client)
    return (np.exp(x @ w.T) / np.exp(x @ w.T).sum(1, keepdims=True) - y).T @ x / len(x)


def sgd(
    one: Stage,
    client: int,
    w: np.ndarray,
    mu: float = 0.0,
    anchor: np.ndarray | float = 0.0,
    steps: int = STEPS,
    momentum: float = 0.0,
    frozen: np.ndarray | float = 0.0,
) -> np.ndarray:
    """`steps` times v <- momentum v + g(W + frozen) + mu (W - anchor), W <- W - eta v, from v = 0.

    frozen: weights of a frozen model, whose logits are added: X W' + X F' = X (W + F)'.
    """
    v = 0.0
    for _ in range(steps):
        v = momentum * v + gradient(one, client, w + frozen) + mu * (w - anchor)
        w = w - ETA * v
    return w


def matrix(row_P: torch.Tensor) -> np.ndarray:
    return row_P.double().reshape(3, 5).numpy()


def assert_close(row_P: torch.Tensor, expected: np.ndarray):
    assert close(matrix(row_P), expected, 1e-5), np.abs(matrix(row_P) - expected).max()


def mean(a: np.ndarray, b: np.ndarray, weights: str = "samples") -> np.ndarray:
    """(n_0 a + n_1 b) / (n_0 + n_1), or (a + b) / 2."""
    return (N_0 * a + N_1 * b) / (N_0 + N_1) if weights == "samples" else (a + b) / 2


def alike(sizes: Sequence[int], shape: tuple[int, ...] = (5,), classes: int = 3) -> Federation:
    """Client i has one random sample `sizes[i]` times: all its batches, of whatever size, have one gradient."""
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((len(sizes), *shape)).astype(np.float32), draw.integers(0, classes, len(sizes))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return federation_from_arrays(
        x[owner], y[owner], owner, x_test=x, y_test=y, test_clients=np.arange(len(sizes)), num_classes=classes
    )


HIDDEN = 4


def deep_stage(steps: int = STEPS, **changes) -> Stage:
    """The same clients with two layers: A (4, 5), then B (3, 4)."""
    return Stage(
        uneven([N_0, N_1], (5,)),
        lambda: nn.Sequential(nn.Linear(5, HIDDEN, bias=False), nn.Linear(HIDDEN, 3, bias=False)),
        LocalSGD(steps=steps, lr=ETA, **changes),
    )


def layers(row_P: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(A, B) of a model's row."""
    a, b = row_P.double().split([HIDDEN * 5, 3 * HIDDEN])
    return a.reshape(HIDDEN, 5).numpy(), b.reshape(3, HIDDEN).numpy()


def deep_sgd(
    one: Stage, client: int, a: np.ndarray, b: np.ndarray, steps: int = STEPS, layers: str = "ab", decay: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """`steps` full-batch steps of the layers that are named."""
    x, y = data(one, client)
    for _ in range(steps):
        logits = x @ a.T @ b.T
        error = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True) - y) / len(x)
        step_a, step_b = b.T @ error.T @ x + decay * a, error.T @ (x @ a.T) + decay * b
        a, b = a - ETA * ("a" in layers) * step_a, b - ETA * ("b" in layers) * step_b
    return a, b


def assert_layers(row_P: torch.Tensor, a: np.ndarray, b: np.ndarray):
    for found, expected in zip(layers(row_P), (a, b)):
        assert close(found, expected, 1e-5), np.abs(found - expected).max()
