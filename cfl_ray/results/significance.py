"""Tests of a method against the best method of its experiment, over seeds or over clients, and their correction.

J. Demsar. Statistical comparisons of classifiers over multiple data sets. JMLR 7, 2006, sections 3.1.3 (Wilcoxon) and
3.2.2 (Holm). Its section 3 is the rule of what a pair is: a test set. Repetitions on one test set, such as seeds, are
averaged, since they are not independent: pseudoreplication, S. H. Hurlbert, Ecological Monographs 54(2), 1984.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from cfl_ray.errors import ConfigError

LEVEL = 0.05
TESTS = {
    "ttest": "paired t-test over seeds",
    "wilcoxon": "Wilcoxon signed-rank test over clients",
}
EFFECTS = {"ttest": "d", "wilcoxon": "r"}  # letters of the effect sizes: Cohen's d, rank-biserial r
NEEDED = {  # for a p-value
    "ttest": "three seeds",
    "wilcoxon": "a metric of single clients (accuracy, not accuracy_worst_10), and three of them that differ",
}
CORRECTIONS = {"none": "without a correction for several methods", "holm": "Holm's correction over methods"}
FEWEST_PAIRS = 3  # fewest common seeds or clients for a test of two methods
_ROUNDING = 1e-12  # relative error up to which differences are equal: 0.6 - 0.5 is not 0.8 - 0.7


@dataclass(frozen=True)
class ChosenTest:
    """The test of a table, in the words of `compare_runs` and `cfl-ray table`. Raises ConfigError for others."""

    how: str = "ttest"  # a key of TESTS
    correction: str = "none"  # a key of CORRECTIONS
    against: str | None = None  # the method that the others are tested against; None: the best of the experiment

    def __post_init__(self) -> None:
        for name, value, known in (("test", self.how, TESTS), ("correction", self.correction, CORRECTIONS)):
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")


USUAL_TEST = ChosenTest()


@dataclass(frozen=True)
class PairedTest:
    """A test of a method against the best one; NaN without a test."""

    p: float = math.nan
    effect: float = math.nan  # ttest: Cohen's d of pairs; wilcoxon: rank-biserial correlation
    pairs: int = 0  # seeds, or clients without duplicates, that both methods have
    is_best: bool = False
    clients: int = 0  # clients that the pairs stand for, of a test over clients
    overlap: bool = False  # whether pairs have test samples in common, likewise

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

    The pairs are taken as independent: see `ClientScores.pairs`.

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
    return [replace(test, p=p) for p, test in zip(adjusted, tested, strict=True)]


def pairs_in_words(how: str, tested: Sequence[PairedTest]) -> str:
    """The number of pairs of these tests, and what a pair is, e.g. "n = 5 seeds". how: a key of TESTS.

    A test over clients says how many of them are the same test, and when no p can be below LEVEL: 2 / 2^n is the least.
    """
    known = [test for test in tested if not math.isnan(test.p)]
    pairs, clients = ([*map(attrgetter(name), known)] for name in ("pairs", "clients"))
    if how == "ttest":
        return f"n = {range_in_words(pairs)} seeds"
    text = f"n = {range_in_words(pairs)} clients, each with its mean over the seeds"
    if clients != pairs:
        text = (
            f"n = {range_in_words(pairs)} pairs of {range_in_words(clients)} clients: those with the same test samples "
            "and models count once, with the mean over the seeds"
        )
    if any(test.overlap for test in known):
        text += "; some pairs have their test samples in common, so p is too small"
    least = 2 / 2 ** max(pairs)
    return f"{text}; p is at least {least:.3g}" if least >= LEVEL else text


def tests_in_words(test: ChosenTest, tested: Sequence[PairedTest]) -> str:
    """A note on the p-values of a table: test, pairs and correction; or why there are none."""
    if all(math.isnan(one.p) for one in tested):
        return f"p: none. The {TESTS[test.how]} needs {NEEDED[test.how]}."
    other = "" if test.against is None else f" against {test.against}"
    return f"p: {TESTS[test.how]}{other}, {pairs_in_words(test.how, tested)}, {CORRECTIONS[test.correction]}."


def range_in_words(counts: Sequence[int]) -> str:
    """The least and the greatest of numbers, e.g. 3 to 5; 3 if they are equal."""
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"


def common(ours: Mapping[Any, float], best: Mapping[Any, float]) -> int:
    """The number of seeds or clients for which both have a finite value."""
    return len(_pairs(ours, best))


def _pairs(ours: Mapping[Any, float], best: Mapping[Any, float]) -> np.ndarray:
    """The finite values (n, 2) of the keys that both have, in ascending order."""
    keys = sorted(ours.keys() & best.keys())
    pairs_S2 = np.array([[ours[key], best[key]] for key in keys], float).reshape(-1, 2)
    return pairs_S2[np.isfinite(pairs_S2).all(1)]
