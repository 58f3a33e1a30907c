"""The critical difference diagram of J. Demsar, JMLR 7, 2006: methods by mean rank, with bars over equal methods."""

from collections.abc import Sequence

import numpy as np

from cfl_ray.report.drawing import COLOURS, INK, PageFigure, canvas, safe
from cfl_ray.report.report_data import Ranks


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
