"""Comparison of arrays whose rounding errors grow with their values."""

import numpy as np
import torch


def close(found, expected, bound: float) -> bool:
    """Whether the largest difference of two arrays is at most `bound` times their largest value.

    Rounding of a sum depends on its largest terms and on the instructions of the processor, not on the sum itself, so
    neither a bound for each value nor one without a scale holds everywhere. Values that are not finite must be equal.
    """
    a, b = (np.asarray(x.detach().cpu() if isinstance(x, torch.Tensor) else x, np.float64) for x in (found, expected))
    if a.shape != b.shape:
        raise ValueError(f"arrays of shapes {a.shape} and {b.shape}")
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    scale = max(np.abs(a[finite]).max(initial=0), np.abs(b[finite]).max(initial=0))
    return bool(np.abs(a[finite] - b[finite]).max(initial=0) <= bound * scale)
