"""Coordinate-wise median. D. Yin et al., ICML 2018, arXiv:1803.01498, Definition 1."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Median:
    """Coordinate-wise median, without weights; of an even number of values, the mean of the middle two."""

    name: ClassVar[str] = "median"

    def combine(self, values_nF: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        return mean_without(np.sort(values_nF, 0), (len(values_nF) - 1) // 2)


def mean_without(sorted_nF: np.ndarray, cut: int) -> np.ndarray:
    """Mean of sorted rows without the first and the last `cut`, float64 (F,)."""
    return sorted_nF[cut : len(sorted_nF) - cut].mean(0, dtype=np.float64)
