"""Coordinate-wise trimmed mean. D. Yin et al., ICML 2018, arXiv:1803.01498, Definition 2.

In each coordinate, the mean without the b = floor(share n) least and the b greatest values.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cfl_ray.core.aggregation.median import mean_without


@dataclass(frozen=True)
class TrimmedMean:
    """Coordinate-wise mean without the least and the greatest values, and without weights."""

    name: ClassVar[str] = "trimmed_mean"
    share: float = 0.3  # beta: share of the values to leave out at either end, in [0, 0.5)

    def __post_init__(self) -> None:
        if not isinstance(self.share, (int, float)) or isinstance(self.share, bool) or not 0 <= self.share < 0.5:
            raise ValueError(f"trimmed_mean.share must be in 0 .. 0.5, without 0.5, got {self.share!r}")

    def combine(self, values_nF: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        # 1e-9: the product in float64 may be a little less than the whole number that it stands for.
        return mean_without(np.sort(values_nF, 0), int(self.share * len(values_nF) + 1e-9))
