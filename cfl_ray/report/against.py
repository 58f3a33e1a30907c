"""Figures of our numbers beside published ones."""

import math
from collections.abc import Sequence

import numpy as np

from cfl_ray.report.drawing import PageFigure, Plot, canvas, listed, number, safe
from cfl_ray.report.palette import COLOURS
from cfl_ray.report.report_data import Comparison

OURS, PUBLISHED, MISPRINT = COLOURS[0], COLOURS[1], "#6B7280"


def against_figures(comparisons: Sequence[Comparison]) -> list[PageFigure]:
    """Points with error bars for each published table and column, a row for each method."""
    found: dict[tuple[str, str], list[Comparison]] = {}
    for one in comparisons:
        found.setdefault((one.table, one.column), []).append(one)
    return [_column(table, column, rows) for (table, column), rows in found.items()]


def _column(table: str, column: str, rows: Sequence[Comparison]) -> PageFigure:
    places = np.arange(len(rows))[::-1]  # the first one is at the top
    credible = np.array([not one.misprint for one in rows])
    ours, ours_std = np.array([one.ours for one in rows]), np.array([one.ours_std for one in rows])
    mean, std = np.array([one.published for one in rows]), np.array([one.published_std for one in rows])
    traces = [
        _points(ours, ours_std, places + 0.14, "ours", OURS, "circle"),
        _points(mean[credible], std[credible], places[credible] - 0.14, "published", PUBLISHED, "diamond"),
        _points(mean[~credible], std[~credible], places[~credible] - 0.14, "published, misprint", MISPRINT, "x"),
    ]
    unit = f", {rows[0].unit}" if rows[0].unit else ""
    metrics = sorted({one.metric.replace("_", " ") for one in rows})
    figure = canvas(
        [trace for trace in traces if len(trace["x"])],
        f"{', '.join(metrics)}{unit}",
        yaxis={
            "tickvals": places,
            "ticktext": [safe(one.row) for one in rows],
            "range": [-0.6, len(rows) - 0.4],
        },
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
    credible = [one for one in rows if not one.misprint]
    words = []
    if credible:
        far = max(credible, key=lambda one: abs(one.ours - one.published))
        within = sum(_agrees(one) for one in credible)
        words.append(
            f"{within} of {len(credible)} published numbers lie within two standard deviations of ours or theirs; the "
            f"largest difference is {far.row}: {number(far.ours)} against {number(far.published)}."
        )
    if misprints := [one for one in rows if one.misprint]:
        words.append("Misprints: " + listed([f"{one.row} ({one.misprint})" for one in misprints]) + ".")
    return " ".join(words)


def _agrees(one: Comparison) -> bool:
    stds = [std for std in (one.ours_std, one.published_std) if not math.isnan(std)]
    return abs(one.ours - one.published) <= 2 * max(stds, default=0.0)
