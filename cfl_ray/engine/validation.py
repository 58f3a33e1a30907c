"""Checks of client data and results. Each returns the reason why they are not valid, or None."""

import math

import torch
from torch import Tensor

from cfl_ray.core.metrics import IGNORED
from cfl_ray.data.federation import DataShape
from cfl_ray.errors import counted

# powers of 2 above all inputs, all trained weights, all buffers and signatures; changes below 2^21 have exact sums
INPUT_POWER, WEIGHT_POWER, ANY_POWER = 16, 14, 20


def invalid_data_reason(x: Tensor, y: Tensor, shape: DataShape, least: int = 1) -> str | None:
    """Reason why samples are not valid, to follow "its data have"; None if they are valid.

    Detects errors that training does not report: another shape of the same size, labels outside 0 .. C-1, a single NaN.
    least: smallest number of samples.
    """
    if x.dtype != shape.dtype or y.dtype != shape.target_dtype:
        return f"inputs of {x.dtype} and labels of {y.dtype}, expected {shape.dtype} and {shape.target_dtype}"
    if tuple(x.shape[1:]) != tuple(shape.input):
        return f"shape {tuple(x.shape[1:])}, expected {tuple(shape.input)}"
    if y.shape != (expected := (len(x), *shape.target_shape)):
        what, wanted = ("targets", expected) if shape.target_shape else ("labels", "one label for each")
        return f"{counted(len(x), 'sample')} and {what} of shape {tuple(y.shape)}, expected {wanted}"
    if len(y) < least:
        return f"{counted(len(y), 'sample')}, expected at least {least}"
    if not len(y):
        return None
    if reason := _invalid_target_reason(y, shape):
        return reason
    return invalid_input_reason(x, shape)


def invalid_input_reason(x: Tensor, shape: DataShape) -> str | None:
    """Reason why the values of inputs are not valid, to follow "its data have"; None if they are valid."""
    if shape.vocabulary is None or not x.numel():
        return invalid_value_reason(x, INPUT_POWER)
    low, high = (int(value) for value in torch.aminmax(x))
    return (
        None if 0 <= low <= high < shape.vocabulary else f"tokens {low} .. {high}, expected 0 .. {shape.vocabulary - 1}"
    )


def _invalid_target_reason(y: Tensor, shape: DataShape) -> str | None:
    if shape.targets == "real":
        reason = invalid_value_reason(y, ANY_POWER)
        return reason and f"targets with {reason}"
    if shape.targets == "binary":
        return None if bool(((y == 0) | (y == 1)).all()) else "labels other than 0 and 1"
    if shape.targets == "tokens":
        counts = y != IGNORED
        if not bool(counts.flatten(1).any(1).all()):
            return f"a sample whose targets are all {IGNORED}, which is not learned"
        y = y[counts]
    low, high = (int(value) for value in torch.aminmax(y))
    if low >= 0 and high < shape.num_classes:
        return None
    what = "labels" if shape.targets == "class" else "target tokens"
    return f"{what} {low} .. {high}, expected 0 .. {shape.num_classes - 1}"


def invalid_value_reason(values: Tensor, power: int) -> str | None:
    """Reason why values are not finite and below 2^power, to follow "has" or "have"; None if they are."""
    if not values.numel():
        return None
    low, high = torch.aminmax(values)  # NaN if any value is
    return _beyond(max(-low.item(), high.item()), power)


def _beyond(largest: float, power: int) -> str | None:
    """Reason why values with this largest absolute value are not valid; None if they are."""
    if largest < 2**power:
        return None
    return f"values up to {largest:.3g}, beyond 2^{power}" if math.isfinite(largest) else "values that are not finite"


def invalid_update_reason(row_P: Tensor, trained: int) -> str | None:
    """Reason why a row (P,) of weights (its first `trained` columns) and buffers is not valid; None if it is valid."""
    return invalid_value_reason(row_P[:trained], WEIGHT_POWER) or invalid_value_reason(row_P[trained:], ANY_POWER)


def invalid_largest_reason(largest: tuple[float, float]) -> str | None:
    """`invalid_update_reason`, from the largest absolute values of the weights and of the buffers."""
    weights, buffers = largest
    return _beyond(weights, WEIGHT_POWER) or _beyond(buffers, ANY_POWER)
