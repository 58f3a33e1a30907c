"""Tests of a method against the best method of its experiment, over seeds or over clients, and their correction.

J. Demsar. Statistical comparisons of classifiers over multiple data sets. JMLR 7, 2006, sections 3.1.3 (Wilcoxon) and
3.2.2 (Holm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.05
TESTS = {
    "ttest": "paired t-test over seeds",
    "wilcoxon": "Wilcoxon signed-rank test over clients",
}
CORRECTIONS = {"none": "without a correction for several methods", "holm": "Holm's correction over methods"}
FEWEST_PAIRS = 3  # fewest common seeds or clients for a test of two methods
_ROUNDING = 1e-12  # relative error up to which differences are equal: 0.6 - 0.5 is not 0.8 - 0.7


@dataclass(frozen=True)
class PairedTest:
    """A test of a method against the best one; NaN without a test."""

    p: float = math.nan
    effect: float = math.nan  # ttest: Cohen's d of pairs; wilcoxon: rank-biserial correlation
    pairs: int = 0  # seeds or clients that both methods have
    is_best: bool = False

    @property
    def is_alike(self) -> bool:
        """Whether the test does not find the method worse than the best one."""
        return self.p >= LEVEL


def paired_test(ours: Mapping[int, float], best: Mapping[int, float]) -> tuple[float, float]:
    """(p, effect size) of a paired t-test of values by seed, over the seeds that both have.

    Effect size: the mean of the differences over their standard deviation (Cohen's d of pairs). Only finite values
    count; NaN for fewer than three of them, and if all differences are equal (up to rounding).
    """
    pairs_S2 = _pairs(ours, best)
    difference_S = pairs_S2[:, 0] - pairs_S2[:, 1]
    if len(difference_S) < FEWEST_PAIRS or np.ptp(difference_S) <= _ROUNDING * np.abs(pairs_S2).max():
        return math.nan, math.nan
    from scipy.stats import ttest_rel  # takes half a second, which the report of a single run avoids

    return float(ttest_rel(*pairs_S2.T).pvalue), float(difference_S.mean() / difference_S.std(ddof=1))


def signed_rank_test(ours: Mapping[Any, float], best: Mapping[Any, float]) -> tuple[float, float]:
    """(p, effect size) of Wilcoxon's signed-rank test of values by client, over the clients that both have.

    Clients with equal values (up to rounding) are left out, as in Wilcoxon's paper; equal differences have mean ranks.
    Effect size: the rank-biserial correlation, the sum of the ranks of clients that are better off minus that of the
    others, over the sum of all ranks. Only finite values count; NaN for fewer than three of them, and if all are equal.
    """
    pairs_M2 = _pairs(ours, best)
    difference_M = pairs_M2[:, 0] - pairs_M2[:, 1]
    if len(difference_M) < FEWEST_PAIRS:
        return math.nan, math.nan
    scale = np.abs(pairs_M2).max() or 1.0
    difference_M = np.round(difference_M / scale, 12)  # equal scores may differ by rounding
    difference_M = difference_M[difference_M != 0]
    if not len(difference_M):
        return math.nan, math.nan
    from scipy.stats import rankdata, wilcoxon

    rank_M = rankdata(np.abs(difference_M))
    effect = float((rank_M * np.sign(difference_M)).sum() / rank_M.sum())
    return float(wilcoxon(difference_M).pvalue), effect


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order: max over j <= i of (m - j + 1) p_(j), at most 1; NaN stays.

    m: the number of values that are not NaN.
    """
    adjusted, largest = [math.nan] * len(p), 0.0
    order = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    for rank, (value, place) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * value))
        adjusted[place] = largest
    return adjusted


def corrected(tested: Sequence[PairedTest], correction: str) -> list[PairedTest]:
    """The tests of the methods of an experiment with corrected p-values. correction: a key of CORRECTIONS."""
    if correction == "none":
        return list(tested)
    adjusted = holm([test.p for test in tested])
    return [PairedTest(p, test.effect, test.pairs, test.is_best) for p, test in zip(adjusted, tested, strict=True)]


def common(ours: Mapping[Any, float], best: Mapping[Any, float]) -> int:
    """The number of seeds or clients for which both have a finite value."""
    return len(_pairs(ours, best))


def _pairs(ours: Mapping[Any, float], best: Mapping[Any, float]) -> np.ndarray:
    """The finite values (n, 2) of the keys that both have, in ascending order."""
    keys = sorted(ours.keys() & best.keys())
    pairs_S2 = np.array([[ours[key], best[key]] for key in keys], float).reshape(-1, 2)
    return pairs_S2[np.isfinite(pairs_S2).all(1)]
