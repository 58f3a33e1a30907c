"""Multi-Krum. P. Blanchard et al., NeurIPS 2017, arXiv:1703.02757, Section 4.

The mean of the m results with the least s_i, where s_i is the sum of ||W_i - W_j||^2 over the n - f - 2 results nearest
to i. Krum requires n >= 2 f + 3: with fewer results f is the largest number that satisfies it, and below 5 results,
if that number is 0, the coordinate-wise median is used (not if `attackers` is 0).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class MultiKrum:
    """Mean of the results that are nearest to the others, without weights."""

    name: ClassVar[str] = "multi_krum"
    attackers: float = 0.3  # f: share of the results in [0, 0.5), rounded down, or an int: their number
    keep: int | None = None  # m: number of results to average; None: n - f

    def __post_init__(self) -> None:
        whole = isinstance(self.attackers, int) and self.attackers >= 0
        if (
            not isinstance(self.attackers, (int, float))
            or isinstance(self.attackers, bool)
            or not (whole or 0 <= self.attackers < 0.5)
        ):
            allowed = "a share in 0 .. 0.5, without 0.5, or a whole number"
            raise ValueError(f"multi_krum.attackers must be {allowed}, got {self.attackers!r}")
        if self.keep is not None and (isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1):
            raise ValueError(f"multi_krum.keep must be a whole number from 1 on, or null, got {self.keep!r}")

    def weigh(self, squared_nn: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        chosen_m = self.chosen(squared_nn)
        found_n = np.zeros(len(squared_nn))
        found_n[chosen_m] = 1 / len(chosen_m)
        return found_n

    def suspects(self, count: int) -> int:
        """The number f among `count` results: as configured, but at most what n >= 2 f + 3 allows."""
        wanted = self.attackers if isinstance(self.attackers, int) else int(self.attackers * count + 1e-9)
        return min(wanted, max((count - 3) // 2, 0))

    def chosen(self, squared_nn: np.ndarray) -> np.ndarray:
        """Indices of the m results with the least scores, ascending; the lowest indices on ties."""
        count = len(squared_nn)
        suspects = self.suspects(count)
        others_nn = np.sort(squared_nn + np.diag(np.full(count, np.inf)), 1)
        score_n = others_nn[:, : count - suspects - 2].sum(1)
        return np.sort(np.argsort(score_n, kind="stable")[: self.keep or count - suspects])
