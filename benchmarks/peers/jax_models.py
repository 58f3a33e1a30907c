"""The models of the workloads in JAX, with convolutions as matrix products (im2col): on CPUs, XLA's own are slower.

Parameters are a list of (weight, bias), channels last; `to_jax` and `to_torch` convert from and to PyTorch's layout.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import Workload, shapes_of

Params = list[tuple[jax.Array, jax.Array]]


def to_jax(arrays: list[np.ndarray]) -> Params:
    """Parameters from arrays in the layout of PyTorch."""
    params, channels = [], 0
    for weight, bias in zip(arrays[::2], arrays[1::2]):
        if weight.ndim == 4:  # (O, I, 5, 5) -> (25 I, O)
            channels = len(weight)
            weight = weight.transpose(2, 3, 1, 0).reshape(-1, channels)
        else:
            if channels:  # the flattened (C, h, w) become (h, w, C)
                weight = _permuted(weight, channels, to_last=True)
                channels = 0
            weight = weight.T
        params.append((jnp.asarray(weight), jnp.asarray(bias)))
    return params


def to_torch(params: Params, work: Workload) -> list[np.ndarray]:
    """Arrays in the layout of PyTorch."""
    arrays, channels = [], 0
    for (weight, bias), shape in zip(params, shapes_of(work)[::2]):
        weight = np.asarray(weight)
        if len(shape) == 4:
            channels = shape[0]
            weight = weight.reshape(5, 5, shape[1], channels).transpose(3, 2, 0, 1)
        else:
            weight = weight.T
            if channels:
                weight = _permuted(weight, channels, to_last=False)
                channels = 0
        arrays += [np.ascontiguousarray(weight), np.asarray(bias)]
    return arrays


def _permuted(weight: np.ndarray, channels: int, to_last: bool) -> np.ndarray:
    """A linear layer's weights (out, in), its inputs reordered between channels first and channels last."""
    side = int(np.sqrt(weight.shape[1] // channels))
    shape, order = ((channels, side, side), (0, 2, 3, 1)) if to_last else ((side, side, channels), (0, 3, 1, 2))
    return weight.reshape(len(weight), *shape).transpose(order).reshape(len(weight), -1)


def logits(params: Params, x: jax.Array, num_convolutions: int) -> jax.Array:
    """Outputs (n, C) for inputs (n, 1, 28, 28)."""
    x = x.reshape(-1, 28, 28, 1)
    for weight, bias in params[:num_convolutions]:
        n, side = len(x), x.shape[1] - 4
        patches = jnp.stack([x[:, i : i + side, j : j + side] for i in range(5) for j in range(5)], axis=3)
        x = patches.reshape(n * side * side, -1) @ weight + bias
        x = x.reshape(n, side // 2, 2, side // 2, 2, -1).max((2, 4))
        x = jax.nn.relu(x)
    x = x.reshape(len(x), -1)
    for weight, bias in params[num_convolutions:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = params[-1]
    return x @ weight + bias


def loss(params: Params, x: jax.Array, y: jax.Array, num_convolutions: int) -> jax.Array:
    """Mean cross entropy."""
    log_p = jax.nn.log_softmax(logits(params, x, num_convolutions))
    return -jnp.take_along_axis(log_p, y[:, None], 1).mean()


def num_convolutions(work: Workload) -> int:
    """Number of convolutions of the workload's model."""
    return sum(len(shape) == 4 for shape in shapes_of(work))
