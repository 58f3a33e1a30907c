"""Figures that compare our numbers with published numbers."""

import math
from collections.abc import Sequence

import numpy as np

from cfl_ray.report.drawing import COLOURS, PageFigure, Plot, canvas, listed, number, safe
from cfl_ray.report.report_data import Comparison
from cfl_ray.tracking.metric_titles import title_of

OURS, PUBLISHED, MISPRINT = COLOURS[0], COLOURS[1], "#6B7280"


def against_figures(comparisons: Sequence[Comparison]) -> list[PageFigure]:
    """A figure for each column of each published table: points with error bars, a row for each method."""
    columns: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in comparisons:
        columns.setdefault((comparison.table, comparison.column), []).append(comparison)
    return [_column(table, column, rows) for (table, column), rows in columns.items()]


def _column(table: str, column: str, rows: Sequence[Comparison]) -> PageFigure:
    places = np.arange(len(rows))[::-1]  # the first row is at the top
    credible = np.array([not row.misprint for row in rows])
    ours, ours_std = np.array([row.ours for row in rows]), np.array([row.ours_std for row in rows])
    mean, std = np.array([row.published for row in rows]), np.array([row.published_std for row in rows])
    traces = [
        _points(ours, ours_std, places + 0.14, "ours", OURS, "circle"),
        _points(mean[credible], std[credible], places[credible] - 0.14, "published", PUBLISHED, "diamond"),
        _points(mean[~credible], std[~credible], places[~credible] - 0.14, "published, misprint", MISPRINT, "x"),
    ]
    unit = f", {rows[0].unit}" if rows[0].unit else ""
    metrics = sorted({title_of(row.metric).text for row in rows})
    figure = canvas(
        [trace for trace in traces if len(trace["x"])],
        f"{', '.join(metrics)}{unit}",
        yaxis={"tickvals": places, "ticktext": [safe(row.row) for row in rows], "range": [-0.6, len(rows) - 0.4]},
    )
    return PageFigure(f"{table}, {column}: ours and published", _in_words(rows), figure, 90 + 46 * len(rows))


def _points(mean: np.ndarray, std: np.ndarray, y: np.ndarray, name: str, colour: str, marker: str) -> Plot:
    return {
        "type": "scatter",
        "x": mean,
        "y": y,
        "error_x": {"type": "data", "array": np.nan_to_num(std), "thickness": 1.5, "width": 4},
        "mode": "markers",
        "marker": {"color": colour, "symbol": marker, "size": 9},
        "name": name,
        "hovertemplate": "%{x:.4g}",
        "showlegend": True,
    }


def _in_words(rows: Sequence[Comparison]) -> str:
    credible = [row for row in rows if not row.misprint]
    words = []
    if credible:
        far = max(credible, key=lambda row: abs(row.ours - row.published))
        within = sum(_agrees(row) for row in credible)
        words.append(
            f"{within} of {len(credible)} published numbers lie within two standard deviations of ours or theirs; the "
            f"largest difference is {far.row}: {number(far.ours)} against {number(far.published)}."
        )
    if misprints := [row for row in rows if row.misprint]:
        words.append("Misprints: " + listed([f"{row.row} ({row.misprint})" for row in misprints]) + ".")
    return " ".join(words)


def _agrees(row: Comparison) -> bool:
    """Whether the two numbers differ by at most twice the larger of their known standard deviations."""
    stds = [std for std in (row.ours_std, row.published_std) if not math.isnan(std)]
    return abs(row.ours - row.published) <= 2 * max(stds, default=0.0)
