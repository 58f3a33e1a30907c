"""PNG figures that compare the methods of a run, drawn from their records.

Each method has a colour; from the ninth method on, colours repeat with another line style.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from cfl_ray.report.drawing import COLOURS
from cfl_ray.system.files import drafted, private_folder
from cfl_ray.tracking.metric_titles import title_of
from cfl_ray.tracking.record import RoundRecord, is_evaluated, mbit, primary_of, validation_metric, virtual_seconds

_DASHES = ("-", "--", ":")
DPI = 100  # 750 pixels: as wide as the description of a run in MLflow, which cuts wider ones off
WIDTH_INCHES, MIN_HEIGHT_INCHES = 7.5, 4.2
MOST = 1e300  # largest value that matplotlib can draw with its margins and ticks
LEGEND_INCHES = 0.22  # height of a method in the legend
# fixed, because `layout="constrained"` draws all texts twice to measure them
_LEFT_INCHES, _RIGHT_INCHES, _TOP_INCHES, _BOTTOM_INCHES, _BETWEEN_INCHES = 0.55, 0.15, 0.36, 0.5, 0.4
_TICK_INCHES, _CHARACTER_INCHES = 0.15, 0.09  # left of the panels: the ticks, and a character of their labels at most

Records = Sequence[RoundRecord]
Points = list[tuple[float, float]]  # x, y
XAxis = Callable[[RoundRecord], float]
X_AXES: Mapping[str, XAxis] = {"round": lambda record: record.round, "mbit": mbit, "virtual_seconds": virtual_seconds}


class Panel(NamedTuple):
    """A plot of a metric."""

    metric: str
    x: str  # a key of X_AXES


def write_figures(directory: str | Path, records_by_method: Mapping[str, Records], prefix: str = "") -> list[Path]:
    """Writes as PNG the figures that have data in the records, and returns their paths. prefix: of the file names."""
    directory = Path(directory)
    private_folder(directory)
    every_metrics = (record.metrics for records in records_by_method.values() for record in records)
    score = next((primary_of(metrics) for metrics in every_metrics if is_evaluated(metrics)), "accuracy")
    figures = {f"{score}_by_{x}.png": [Panel(score, x)] for x in X_AXES}
    figures[f"{score}_by_round.png"].append(Panel(validation_metric(score), "round"))
    figures["clusters_by_round.png"] = [Panel("num_clusters", "round"), Panel("ari", "round")]
    written = (_write(directory / f"{prefix}{name}", panels, records_by_method) for name, panels in figures.items())
    return [path for path in written if path]


def line_style(place: int) -> tuple[str, str]:
    """Colour and dashes of the method in a place of a figure, counted from 0."""
    return COLOURS[place % len(COLOURS)], _DASHES[place // len(COLOURS) % len(_DASHES)]


def _write(path: Path, panels: Sequence[Panel], records_by_method: Mapping[str, Records]) -> Path | None:
    """Writes a figure with a panel for each recorded metric, and returns its path; None without a recorded metric."""
    drawn = [(panel, lines) for panel in panels if (lines := _lines(records_by_method, panel))]
    if not drawn:
        return None
    height = max(MIN_HEIGHT_INCHES, len(records_by_method) * LEGEND_INCHES)
    size = WIDTH_INCHES, height * (1 if len(drawn) == 1 else 1.6)
    figure = Figure(figsize=size, dpi=DPI)
    all_axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    places = {method: place for place, method in enumerate(records_by_method)}
    line_of: dict[str, Line2D] = {}
    for axes, (panel, lines) in zip(all_axes, drawn, strict=True):
        line_of |= _draw(axes, panel, lines, places)
    all_axes[-1].set_xlabel(title_of(panels[0].x).as_recorded)
    methods = [method for method in records_by_method if method in line_of]
    legend = figure.legend([line_of[method] for method in methods], methods, loc="upper right", frameon=False)
    _set_margins(figure, size, list(all_axes), legend.get_window_extent().width / DPI)
    with drafted(path) as draft:
        figure.savefig(draft)
    return path


def _set_margins(figure: Figure, size: tuple[float, float], all_axes: Sequence[Axes], legend_inches: float) -> None:
    """Leaves room for titles, for ticks (a fifth of the width at most) and for the legend (three quarters at most)."""
    (width, height), panels = size, len(all_axes)
    labels = (
        label for axes in all_axes for label in axes.yaxis.get_major_formatter().format_ticks(list(axes.get_yticks()))
    )
    label_inches = _TICK_INCHES + _CHARACTER_INCHES * max(map(len, labels), default=0)
    left_inches = min(max(_LEFT_INCHES, label_inches), width / 5)
    panel_inches = (height - _TOP_INCHES - _BOTTOM_INCHES - (panels - 1) * _BETWEEN_INCHES) / panels
    figure.subplots_adjust(
        left=left_inches / width,
        right=1 - (_RIGHT_INCHES + min(legend_inches, width * 3 / 4)) / width,
        top=1 - _TOP_INCHES / height,
        bottom=_BOTTOM_INCHES / height,
        hspace=_BETWEEN_INCHES / panel_inches,
    )


def _lines(records_by_method: Mapping[str, Records], panel: Panel) -> dict[str, Points]:
    """The points of each method that recorded the panel's metric, without values that cannot be drawn."""
    lines = {}
    for method, records in records_by_method.items():
        points = [(X_AXES[panel.x](record), record.metrics.get(panel.metric, math.nan)) for record in records]
        if drawable := [(x, y) for x, y in points if abs(x) < MOST and abs(y) < MOST]:  # NaN is not
            lines[method] = drawable
    return lines


def _draw(axes: Axes, panel: Panel, lines: Mapping[str, Points], places: Mapping[str, int]) -> dict[str, Line2D]:
    """Draws a panel, and returns the drawn line of each method. places: of all methods, for `line_style`."""
    line_of = {}
    for method, points in lines.items():
        xs, ys = zip(*points, strict=True)
        marker = "o" if len(xs) == 1 else ""
        colour, dashes = line_style(places[method])
        (line_of[method],) = axes.plot(
            xs, ys, color=colour, linestyle=dashes, linewidth=1.8, marker=marker, markersize=4
        )
    axes.set_title(title_of(panel.metric).as_recorded, loc="left", fontsize=11, y=1.0)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if panel.x == "round":
        whole_ticks(axes.xaxis)
    if panel.metric == "num_clusters":
        axes.set_ylim(bottom=0)
        whole_ticks(axes.yaxis)
    elif panel.metric == "ari":
        axes.set_ylim(top=1.05)
    return line_of


def whole_ticks(axis: Axis) -> None:
    """Sets ticks at whole numbers only."""
    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
