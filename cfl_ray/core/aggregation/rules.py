"""The rules of this package: each is its parameters, with one of the methods of `rule`.

median          D. Yin et al., ICML 2018, arXiv:1803.01498, Definition 1
trimmed_mean    the same, Definition 2
multi_krum      P. Blanchard et al., NeurIPS 2017, arXiv:1703.02757, Section 4
norm_clipping   Z. Sun et al., 2019, arXiv:1911.07963, Section 3
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class Mean:
    """Weighted mean, computed on the hosts that train the clients."""

    name: ClassVar[str] = "mean"


@dataclass(frozen=True)
class Median:
    """Coordinate-wise median, without weights; of an even number of values, the mean of the middle two."""

    name: ClassVar[str] = "median"

    def combine(self, values_nF: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        return _mean_without(np.sort(values_nF, 0), (len(values_nF) - 1) // 2)


@dataclass(frozen=True)
class TrimmedMean:
    """Coordinate-wise mean without the b = floor(share n) least and the b greatest values, and without weights."""

    name: ClassVar[str] = "trimmed_mean"
    share: float = 0.3  # beta: share of the values to leave out at either end, in [0, 0.5)

    def __post_init__(self) -> None:
        if not _is_number(self.share) or not 0 <= self.share < 0.5:
            raise ValueError(f"trimmed_mean.share must be in 0 .. 0.5, without 0.5, got {self.share!r}")

    def combine(self, values_nF: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        # 1e-9: the product in float64 may be a little less than the whole number that it stands for.
        return _mean_without(np.sort(values_nF, 0), int(self.share * len(values_nF) + 1e-9))


@dataclass(frozen=True)
class MultiKrum:
    """Mean of the m results with the least s_i, without weights.

    s_i is the sum of ||W_i - W_j||^2 over the n - f - 2 results nearest to i. Krum requires n >= 2 f + 3: with fewer
    results f is the largest number that satisfies it, and below 5 results, if that number is 0, the coordinate-wise
    median is used (not if `attackers` is 0).
    """

    name: ClassVar[str] = "multi_krum"
    attackers: float = 0.3  # f: share of the results in [0, 0.5), rounded down, or an int: their number
    keep: int | None = None  # m: number of results to average; None: n - f

    def __post_init__(self) -> None:
        limit = np.inf if isinstance(self.attackers, int) else 0.5
        if not _is_number(self.attackers) or not 0 <= self.attackers < limit:
            allowed = "a share in 0 .. 0.5, without 0.5, or a whole number"
            raise ValueError(f"multi_krum.attackers must be {allowed}, got {self.attackers!r}")
        if self.keep is not None and (not _is_number(self.keep) or not isinstance(self.keep, int) or self.keep < 1):
            raise ValueError(f"multi_krum.keep must be a whole number from 1 on, or null, got {self.keep!r}")

    def weigh(self, squared_nn: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        chosen_m = self.chosen(squared_nn)
        share_n = np.zeros(len(squared_nn))
        share_n[chosen_m] = 1 / len(chosen_m)
        return share_n

    def suspects(self, count: int) -> int:
        """The number f among `count` results: as configured, but at most the largest with n >= 2 f + 3."""
        wanted = self.attackers if isinstance(self.attackers, int) else int(self.attackers * count + 1e-9)
        return min(wanted, max((count - 3) // 2, 0))

    def chosen(self, squared_nn: np.ndarray) -> np.ndarray:
        """Indices of the m results with the least scores, ascending; the lowest indices on ties."""
        count = len(squared_nn)
        suspects = self.suspects(count)
        others_nn = np.sort(squared_nn + np.diag(np.full(count, np.inf)), 1)
        score_n = others_nn[:, : count - suspects - 2].sum(1)
        return np.sort(np.argsort(score_n, kind="stable")[: self.keep or count - suspects])


@dataclass(frozen=True)
class NormClipping:
    """Weighted mean of w + min(1, c / ||W_i - w||) (W_i - w), with the model w that the client was sent."""

    name: ClassVar[str] = "norm_clipping"
    bound: float | None = None  # c: largest norm of a change; None: the median norm of the row's changes

    def __post_init__(self) -> None:
        if self.bound is not None and (not _is_number(self.bound) or not 0 < self.bound < np.inf):
            raise ValueError(f"norm_clipping.bound must be above 0, or null, got {self.bound!r}")

    def scale(self, distance_n: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        bound = np.median(distance_n) if self.bound is None else self.bound
        return np.minimum(1, bound / np.maximum(distance_n, 1e-300))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean_without(sorted_nF: np.ndarray, cut: int) -> np.ndarray:
    """Mean of sorted rows without the first and the last `cut`, float64 (F,)."""
    return sorted_nF[cut : len(sorted_nF) - cut].mean(0, dtype=np.float64)
