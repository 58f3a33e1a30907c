"""PNG figures that compare the methods of a run, drawn from their records.

Each method has a colour; from the ninth method on, colours repeat with another line style. The name of a method is at
the end of its line, instead of a legend.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cfl_ray.report.palette import COLOURS
from cfl_ray.system.files import drafted, private_folder
from cfl_ray.tracking.record import RoundRecord, is_evaluated, primary_of
from cfl_ray.tracking.summary import mbit, virtual_seconds

STYLES = ("-", "--", ":")
DPI = 100  # 750 pixels: as wide as the description of a run in MLflow, which cuts wider ones off
LABEL_POINTS = 9.0  # font size
LABEL_GAP_POINTS = 11.0  # between the centres of two labels
WIDTH_INCHES, MIN_HEIGHT_INCHES = 7.5, 4.2
LEFT_INCHES, RIGHT_INCHES, TOP_INCHES, BOTTOM_INCHES, BETWEEN_INCHES = 0.65, 0.15, 0.4, 0.55, 0.5
LETTER_INCHES = 0.085  # width of a wide letter at LABEL_POINTS
LABEL_START = 1.07  # distance of the labels from the left end of the axes, in widths of the axes

Records = Sequence[RoundRecord]
Line = tuple[list[float], list[float]]  # x, y
LineStyle = dict[str, Any]  # colour and dashes of a method's lines, as Matplotlib's keyword arguments
XAxis = Callable[[RoundRecord], float]


_X_TITLES: Mapping[XAxis, str] = {mbit: "Mbit per client, down and up", virtual_seconds: "virtual time, s"}


class Panel(NamedTuple):
    """A plot of a metric."""

    metric: str
    title: str
    x_of: XAxis


def write_figures(directory: str | Path, records_by_method: Mapping[str, Records], prefix: str = "") -> list[Path]:
    """Writes as PNG the figures that have data in the records, and returns their paths. prefix: of the file names."""
    directory = Path(directory)
    private_folder(directory)
    clusters = [Panel("num_clusters", "clusters", _round), Panel("ari", "adjusted Rand index", _round)]
    every_metrics = (record.metrics for records in records_by_method.values() for record in records)
    score = next((primary_of(metrics) for metrics in every_metrics if is_evaluated(metrics)), "accuracy")
    figures = {
        f"{score}_by_round.png": [Panel(score, f"mean client {score.replace('_', ' ')}", _round)],
        f"{score}_by_mbit.png": [Panel(score, f"mean client {score.replace('_', ' ')}", mbit)],
        f"{score}_by_virtual_seconds.png": [Panel(score, f"mean client {score.replace('_', ' ')}", virtual_seconds)],
        "clusters_by_round.png": clusters,
    }
    written = (_write(directory / f"{prefix}{name}", panels, records_by_method) for name, panels in figures.items())
    return [path for path in written if path]


def _round(record: RoundRecord) -> float:
    return record.round


def _write(path: Path, panels: Sequence[Panel], records_by_method: Mapping[str, Records]) -> Path | None:
    """Writes a figure with a panel for each recorded metric, and returns its path; None without a recorded metric."""
    styles = {method: _style(place) for place, method in enumerate(records_by_method)}
    drawn = [(panel, lines) for panel in panels if (lines := _lines(records_by_method, panel))]
    if not drawn:
        return None
    height = max(MIN_HEIGHT_INCHES, len(records_by_method) * LABEL_GAP_POINTS / 72 * 1.4)
    figure = Figure(figsize=(WIDTH_INCHES, height * (1 if len(drawn) == 1 else 1.6)), dpi=DPI)
    FigureCanvasAgg(figure)
    margins = _margins(figure, len(drawn), styles)
    all_axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False, gridspec_kw=margins)[:, 0]
    for axes, (panel, lines) in zip(all_axes, drawn, strict=True):
        _draw(axes, panel, lines, styles)
    all_axes[-1].set_xlabel(_X_TITLES.get(panels[0].x_of, "round"))
    for axes, (_, lines) in zip(all_axes, drawn, strict=True):
        _label_ends(axes, lines, styles)
    with drafted(path) as draft:
        figure.savefig(draft)
    return path


def _margins(figure: Figure, panels: int, names: Iterable[str]) -> dict[str, float]:
    """Margins for ticks, titles and names, as keyword arguments of a grid.

    Computed here, since Matplotlib's layout engines would draw the figure twice more.
    """
    width, height = figure.get_size_inches()
    labels = max(map(len, names)) * LETTER_INCHES + RIGHT_INCHES
    axes = max((width - LEFT_INCHES - labels) / LABEL_START, width / 3)
    each = (height - TOP_INCHES - BOTTOM_INCHES - (panels - 1) * BETWEEN_INCHES) / panels
    margins = {
        "left": LEFT_INCHES / width,
        "right": (LEFT_INCHES + axes) / width,
        "top": 1 - TOP_INCHES / height,
        "bottom": BOTTOM_INCHES / height,
    }
    return margins | {"hspace": BETWEEN_INCHES / each}


def _lines(records_by_method: Mapping[str, Records], panel: Panel) -> dict[str, Line]:
    """The line of each method that recorded the panel's metric."""
    lines = {method: _line(records, panel) for method, records in records_by_method.items()}
    return {method: line for method, line in lines.items() if line[0]}


def _line(records: Records, panel: Panel) -> Line:
    points = [(panel.x_of(record), record.metrics.get(panel.metric, math.nan)) for record in records]
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    return [x for x, _ in finite], [y for _, y in finite]


def _style(place: int) -> LineStyle:
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place // len(COLOURS) % len(STYLES)]}


def _draw(axes: Axes, panel: Panel, lines: Mapping[str, Line], styles: Mapping[str, LineStyle]) -> None:
    for method, (xs, ys) in lines.items():
        axes.plot(xs, ys, **styles[method], linewidth=1.8, marker="o" if len(xs) == 1 else "", markersize=4)
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if panel.x_of is _round:
        _whole_ticks(axes.xaxis)
    if panel.metric == "num_clusters":
        axes.set_ylim(bottom=0)
        _whole_ticks(axes.yaxis)
    elif panel.metric == "ari":
        axes.set_ylim(top=1.05)


def _whole_ticks(axis: Axis) -> None:
    """Sets ticks at whole numbers only."""
    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def _label_ends(axes: Axes, lines: Mapping[str, Line], styles: Mapping[str, LineStyle]) -> None:
    """Writes each method's name right of the plot, at the end of its line, but apart from overlapping names."""
    gap = LABEL_GAP_POINTS * DPI / 72
    axes.autoscale_view()  # otherwise Matplotlib does it when it draws
    to_axes = axes.transData + axes.transAxes.inverted()
    ends: dict[str, tuple[float, float]] = {}  # in axes coordinates
    for method, (xs, ys) in lines.items():
        x, y = to_axes.transform((xs[-1], ys[-1]))
        ends[method] = (float(x), float(y))
    order = sorted(ends, key=lambda method: ends[method][1])
    heights = spread([ends[method][1] for method in order], gap / axes.bbox.height, 0.0, 1.0)
    for method, height in zip(order, heights, strict=True):
        _label(axes, method, ends[method], height, styles[method])


def _label(axes: Axes, method: str, end: tuple[float, float], height: float, style: LineStyle) -> None:
    """Writes a method's name and a sample of its line, connected by a thin line to `end`, the end of the line."""
    colour, in_axes = style["color"], axes.transAxes
    sample = [LABEL_START - 0.05, LABEL_START - 0.01]
    axes.plot(
        [end[0], sample[0]], [end[1], height], color=colour, linewidth=0.6, alpha=0.5, transform=in_axes, clip_on=False
    )
    axes.plot(sample, [height, height], **style, linewidth=1.8, transform=in_axes, clip_on=False)
    axes.text(
        LABEL_START,
        height,
        method,
        color=colour,
        fontsize=LABEL_POINTS,
        verticalalignment="center",
        transform=in_axes,
        clip_on=False,
    )


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The ascending positions `wanted`, moved so that each is at least `gap` above the previous position.

    They stay within low..high if all fit.
    """
    placed: list[float] = []
    for position in wanted:
        placed.append(max(position, placed[-1] + gap if placed else low))
    ceiling = high
    for place in reversed(range(len(placed))):
        placed[place] = min(placed[place], ceiling)
        ceiling = placed[place] - gap
    return placed
