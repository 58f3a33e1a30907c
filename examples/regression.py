"""Real numbers as targets: sensors of two types, whose readings follow the temperature in opposite directions."""

import numpy as np
from torch import Tensor


def sensors(clients: int = 8, samples: int = 40) -> dict:
    """Two readings (n, 2) per sample, from four measured values; odd clients have the other type of sensor."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(clients * samples, 4)).astype("float32")
    client = np.repeat(np.arange(clients), samples)
    sign = np.where(client % 2, -1, 1)[:, None]
    y = sign * np.stack([x[:, 0] + x[:, 1], np.tanh(x[:, 2])], 1) + 0.1 * draw.normal(size=(len(x), 2))
    return {"x": x, "y": y, "clients": client, "groups": client % 2}


def pinball(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of the 90 % quantile, of each sample: too low costs nine times as much as too high."""
    missing = targets.reshape(outputs.shape) - outputs
    return (0.9 * missing).maximum(-0.1 * missing).mean(1)


def share_below(outputs: Tensor, targets: Tensor) -> float:
    """Share of the readings that lie below the model's answer: 0.9 where it is the 90 % quantile."""
    return (targets.reshape(outputs.shape) < outputs).double().mean().item()
