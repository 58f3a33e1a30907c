"""Norm clipping. Z. Sun et al., 2019, arXiv:1911.07963, Section 3.

The weighted mean of w + min(1, c / ||W_i - w||) (W_i - w), with the model w that the client was sent.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class NormClipping:
    """Weighted mean of results whose changes are scaled down to a common largest norm."""

    name: ClassVar[str] = "norm_clipping"
    bound: float | None = None  # c: largest norm of a change; None: the median norm of the row's changes

    def __post_init__(self) -> None:
        number = isinstance(self.bound, (int, float)) and not isinstance(self.bound, bool)
        if self.bound is not None and (not number or not 0 < self.bound < np.inf):
            raise ValueError(f"norm_clipping.bound must be above 0, or null, got {self.bound!r}")

    def scale(self, distance_n: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        bound = np.median(distance_n) if self.bound is None else self.bound
        return np.minimum(1, bound / np.maximum(distance_n, 1e-300))
