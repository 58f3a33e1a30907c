"""Mean ranks of methods over the settings and seeds of a study, tests of their differences, and a diagram of them.

J. Demsar. Statistical comparisons of classifiers over multiple data sets. JMLR 7, 2006: the Friedman test of all
methods, Nemenyi's critical difference of two mean ranks, and the critical difference diagram.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cfl_ray.report.drawing import COLOURS, INK, PageFigure, canvas, safe

_LEVEL = 0.05
_FEWEST_METHODS, _FEWEST_BLOCKS = 3, 2
_DIGITS = 12  # decimals of the values that are ranked


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of methods over pairs (experiment, seed), and the tests of their differences."""

    metric: str
    mean_rank: Mapping[str, float]  # by method, best first; 1 is the best rank
    blocks: int  # pairs (experiment, seed)
    p: float  # of the Friedman test of equal methods
    critical_difference: float  # of two mean ranks at level 0.05 (Nemenyi)
    of_blocks: str = "pairs of setting and seed"  # in words

    def is_near_best(self, method: str) -> bool:
        """Whether the test does not distinguish the method from the method with the best mean rank."""
        return self.mean_rank[method] - min(self.mean_rank.values()) <= self.critical_difference

    @property
    def in_words(self) -> str:
        """The tests as a sentence."""
        p = "p < 0.001" if self.p < 1e-3 else f"p = {self.p:.3f}"
        return (
            f"Mean ranks of {len(self.mean_rank)} methods by {self.metric.replace('_', ' ')} over {self.blocks} "
            f"{self.of_blocks}. Friedman test that all are alike: {p}. Two methods differ at level 0.05 if their "
            f"mean ranks are more than {self.critical_difference:.1f} apart (Nemenyi)."
        )


def ranks_of(
    run_metrics: Mapping[tuple[str, str], Mapping[int, Mapping[str, float]]], metric: str, less_is_better: bool = False
) -> Ranks | None:
    """The mean ranks of the methods (1 is the best) over the pairs (experiment, seed) in which all have the metric.

    run_metrics: metrics by (experiment, method) and seed. None with fewer than three methods or two such pairs.
    """
    methods = list(dict.fromkeys(method for _, method in run_metrics))
    blocks = sorted({(experiment, seed) for (experiment, _), of_seeds in run_metrics.items() for seed in of_seeds})
    value_BM = np.array(
        [
            [run_metrics.get((name, method), {}).get(seed, {}).get(metric, np.nan) for method in methods]
            for name, seed in blocks
        ],
        float,
    ).reshape(len(blocks), len(methods))
    # means over clients that differ only by rounding are equal
    value_BM = value_BM[np.isfinite(value_BM).all(1)].round(_DIGITS)
    if len(methods) < _FEWEST_METHODS or len(value_BM) < _FEWEST_BLOCKS:
        return None
    from scipy.stats import friedmanchisquare, rankdata, studentized_range  # slow to import

    count, tests = len(methods), len(value_BM)
    mean_M = rankdata(value_BM if less_is_better else -value_BM, axis=1).mean(0)
    differs = bool(np.ptp(mean_M) > 0)
    # 1e6 degrees of freedom approximate infinity
    critical = studentized_range.ppf(1 - _LEVEL, count, 1e6) / np.sqrt(2) * np.sqrt(count * (count + 1) / (6 * tests))
    order = np.argsort(mean_M, kind="stable")
    return Ranks(
        metric=metric,
        mean_rank={methods[i]: float(mean_M[i]) for i in order},
        blocks=tests,
        p=float(friedmanchisquare(*value_BM.T).pvalue) if differs else 1.0,
        critical_difference=float(critical),
    )


def ranks_table(ranks: Ranks) -> str:
    """The tests as a sentence, followed by the ranks as a Markdown table."""
    lines = [ranks.in_words, "", "| method | mean rank | within the critical difference of the best |", "|---|---|---|"]
    rows = [
        f"| {method} | {rank:.1f} | {'yes' if ranks.is_near_best(method) else ''} |"
        for method, rank in ranks.mean_rank.items()
    ]
    return "\n".join([*lines, *rows])


def rank_diagram(ranks: Ranks) -> PageFigure:
    """A point for each method at its mean rank; a bar spans methods that the test does not distinguish."""
    names, rank_M = list(ranks.mean_rank), np.array(list(ranks.mean_rank.values()))
    place_M = np.arange(len(names))[::-1]  # the best method is at the top
    groups = alike(rank_M, ranks.critical_difference)
    bars = [
        {
            "type": "scatter",
            "x": rank_M[[first, last]],
            "y": np.full(2, (place_M[first] + place_M[last]) / 2),
            "mode": "lines",
            "line": {"color": COLOURS[1], "width": 4},
            "hoverinfo": "skip",
        }
        for first, last in groups
    ]
    points = {
        "type": "scatter",
        "x": rank_M,
        "y": place_M,
        "mode": "markers",
        "marker": {"color": INK, "size": 8},
        "text": [safe(name) for name in names],
        "hovertemplate": "%{text}: %{x:.2f}<extra></extra>",
    }
    ticks = {"tickvals": place_M, "ticktext": [safe(name) for name in names], "range": [-0.6, len(names) - 0.4]}
    caption = (
        f"Methods under one bar do not differ at level 0.05: their mean ranks are within "
        f"{ranks.critical_difference:.1f}."
        if groups
        else f"All mean ranks are more than {ranks.critical_difference:.1f} apart."
    )
    plot = canvas([*bars, points], "mean rank, 1 the best", yaxis=ticks)
    return PageFigure("Critical difference of mean ranks", caption, plot, 90 + 22 * len(names))


def alike(rank_M: Sequence[float] | np.ndarray, critical_difference: float) -> list[tuple[int, int]]:
    """The maximal runs (first, last) of at least two ascending ranks within the critical difference."""
    last_M = np.searchsorted(rank_M, np.asarray(rank_M) + critical_difference, "right") - 1
    new_M = np.diff(last_M, prepend=-1) > 0  # a run inside the previous run is dropped
    return [(first, int(last_M[first])) for first in np.flatnonzero(new_M).tolist() if last_M[first] > first]
