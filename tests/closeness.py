"""Comparison of arrays whose rounding errors grow with their values."""

import numpy as np
import torch


def close(found, expected, bound: float) -> bool:
    """Whether the largest difference of two arrays is at most `bound` times their largest value.

    Rounding of a sum depends on its largest terms and on the instructions of the processor, not on the sum itself, so
    neither a bound for each value nor one without a scale holds everywhere. Values that are not finite must be equal.
    A number in place of an array is expected of all values.
    """
    a, b = _array(found), _array(expected)
    if a.shape != b.shape and b.shape:
        raise ValueError(f"arrays of shapes {a.shape} and {b.shape}")
    b = np.broadcast_to(b, a.shape)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    return _largest(a[finite] - b[finite]) <= bound * max(_largest(a[finite]), _largest(b[finite]))


def negligible(values, beside, bound: float) -> bool:
    """Whether the largest of `values`, zeros up to rounding, is at most `bound` times the largest value they are of."""
    return _largest(_array(values)) <= bound * _largest(_array(beside))


def _array(values) -> np.ndarray:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values, np.float64)


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0))
