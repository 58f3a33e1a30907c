"""What makes a client's data and results sound, and what an exchange brings back of a client that is left out."""

import math

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.work import Describe, Losses, MixPending, TestClients, TestShared, Train, Work
from cfl_ray.data.federation import Shape

INPUT, WEIGHT, ANY = 16, 14, 20  # powers of 2 that inputs, trained weights, and buffers and signatures stay below; exact sums need the last


def data_flaw(x: Tensor, y: Tensor, shape: Shape, least: int = 1) -> str | None:
    """What is wrong with samples, in words that follow "its data have"; None: nothing.

    Exact about what nothing else would notice: a shape that fits by chance, a label outside 0 .. C-1, one value that is not a number.
    """
    if x.dtype != torch.float32 or y.dtype != torch.int64:
        return f"inputs of {x.dtype} and labels of {y.dtype}, expected torch.float32 and torch.int64"
    if tuple(x.shape[1:]) != tuple(shape.input):
        return f"shape {tuple(x.shape[1:])}, expected {tuple(shape.input)}"
    if y.shape != x.shape[:1]:
        return f"{len(x)} samples and labels of shape {tuple(y.shape)}, expected one label for each"
    if len(y) < least:
        return f"{len(y)} samples, expected at least {least}"
    if not len(y):
        return None
    low, high = (int(value) for value in torch.aminmax(y))
    if low < 0 or high >= shape.num_classes:
        return f"labels {low} .. {high}, expected 0 .. {shape.num_classes - 1}"
    return value_flaw(x, INPUT)


def value_flaw(values: Tensor, power: int) -> str | None:
    """What is wrong with numbers that should be below 2^power, in words that follow "has" or "have"; None: nothing."""
    if not values.numel():
        return None
    low, high = torch.aminmax(values)  # NaN where any value is
    largest = max(-low.item(), high.item())
    if largest < 2**power:
        return None
    return f"values up to {largest:.3g}, beyond 2^{power}" if math.isfinite(largest) else "values that are not finite"


def update_flaw(row_P: Tensor, trained: int) -> str | None:
    """The same of a row whose first `trained` columns are weights and the others buffers."""
    return value_flaw(row_P[:trained], WEIGHT) or value_flaw(row_P[trained:], ANY)


def blank(work: Work, num_classes: int) -> dict[str, np.ndarray]:
    """What an exchange brings back of clients that it knows nothing about: no update, no model that fits, no score.

    Features of signatures get their length from those of other clients.
    """
    size = len(work.ids_M)
    match work:
        case Losses():
            return {"losses": np.full((size, work.num_models), np.inf)}
        case Describe():
            return {"features": np.zeros((size, 0), np.float32), "floats": np.zeros(size, np.int64), "ok": np.zeros(size, bool)}
        case TestClients():
            return {"scores": np.full((size, 3), np.nan)}
        case TestShared():
            return {"confusion": np.zeros((size, num_classes, num_classes), np.int64), "loss": np.zeros((size, num_classes))}
        case MixPending():
            return {"ok": np.zeros(size, bool)}
        case Train():
            arrays = {"ok": np.zeros(size, bool), "train_loss": np.full(size, np.nan)}
            if work.keep is not None:
                arrays |= {"kept": np.full((size, work.keep.count), np.nan, np.float32), "norm": np.full(size, np.nan)}
            if work.measure:
                arrays["held"] = np.full((size, 2), np.nan)
            if work.lengths:
                arrays["length"] = np.full(size, np.nan)
            return arrays
    raise TypeError(f"no blank result for {type(work).__name__}")
