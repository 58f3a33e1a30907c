"""The figures of a comparison, drawn from the records of its runs.

Colours are those of Okabe and Ito (told apart with any colour vision); from the ninth method on the line style changes. Each line carries
its name at its end, in its colour, so no legend has to be matched.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cfl_ray.tracking.files import drafted
from cfl_ray.tracking.record import RoundRecord
from cfl_ray.tracking.summary import mbit

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8C6D00")
STYLES = ("-", "--", ":")
DPI = 150
LABEL_POINTS = 9.0  # font size
LABEL_GAP_POINTS = 11.0  # between the middles of two labels
WIDTH_INCHES, MIN_HEIGHT_INCHES = 7.5, 4.2
LEFT_INCHES, RIGHT_INCHES, TOP_INCHES, BOTTOM_INCHES, BETWEEN_INCHES = 0.65, 0.15, 0.4, 0.55, 0.5
LETTER_INCHES = 0.085  # a wide one at LABEL_POINTS
LABEL_START = 1.07  # of the width of the axes

Records = Sequence[RoundRecord]
Line = tuple[list[float], list[float]]


def write_figures(directory: str | Path, records_by_method: Mapping[str, Records]) -> list[Path]:
    """Writes the figures that the records have data for, as PNG, and returns their paths."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    figures = {
        "accuracy_by_round.png": [("accuracy", "mean client accuracy", _round)],
        "accuracy_by_mbit.png": [("accuracy", "mean client accuracy", mbit)],
        "clusters_by_round.png": [("num_clusters", "clusters", _round), ("ari", "adjusted Rand index", _round)],
    }
    written = (_write(directory / name, panels, records_by_method) for name, panels in figures.items())
    return [path for path in written if path]


def _round(record: RoundRecord) -> float:
    return record.round


def _write(path: Path, panels: list[tuple[str, str, Callable[[RoundRecord], float]]], records_by_method: Mapping[str, Records]) -> Path | None:
    """Writes one figure with a panel per metric that was recorded; returns None if none was."""
    styles = {method: _style(place) for place, method in enumerate(records_by_method)}
    drawn = []
    for metric, title, x_of in panels:
        lines = {method: _line(records, metric, x_of) for method, records in records_by_method.items()}
        lines = {method: line for method, line in lines.items() if line[0]}
        if lines:
            drawn.append((metric, title, lines))
    if not drawn:
        return None
    height = max(MIN_HEIGHT_INCHES, len(records_by_method) * LABEL_GAP_POINTS / 72 * 1.4)
    figure = Figure(figsize=(WIDTH_INCHES, height * (1 if len(drawn) == 1 else 1.6)), dpi=DPI)
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False, gridspec_kw=_margins(figure, len(drawn), styles))[:, 0]
    for axes, (metric, title, lines) in zip(all_axes, drawn, strict=True):
        _draw(axes, metric, title, lines, styles)
    all_axes[-1].set_xlabel("Mbit per client, down and up" if panels[0][2] is mbit else "round")
    _label_ends(all_axes, [lines for _, _, lines in drawn], styles)
    with drafted(path) as draft:
        figure.savefig(draft)
    return path


def _margins(figure: Figure, panels: int, names: Iterable[str]) -> dict[str, float]:
    """Room for ticks, titles and the names at the right. A layout engine would find it by drawing everything twice more."""
    width, height = figure.get_size_inches()
    labels = max(map(len, names)) * LETTER_INCHES + RIGHT_INCHES
    axes = max((width - LEFT_INCHES - labels) / LABEL_START, width / 3)
    each = (height - TOP_INCHES - BOTTOM_INCHES - (panels - 1) * BETWEEN_INCHES) / panels
    margins = {"left": LEFT_INCHES / width, "right": (LEFT_INCHES + axes) / width, "top": 1 - TOP_INCHES / height, "bottom": BOTTOM_INCHES / height}
    return margins | {"hspace": BETWEEN_INCHES / each}


def _line(records: Records, metric: str, x_of: Callable[[RoundRecord], float]) -> Line:
    points = [(x_of(record), record.metrics[metric]) for record in records if math.isfinite(record.metrics.get(metric, math.nan))]
    return [x for x, _ in points], [y for _, y in points]


def _style(place: int) -> dict[str, str]:
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place // len(COLOURS) % len(STYLES)]}


def _draw(axes: Axes, metric: str, title: str, lines: dict[str, Line], styles: dict[str, dict[str, str]]) -> None:
    for method, (xs, ys) in lines.items():
        axes.plot(xs, ys, **styles[method], linewidth=1.8, marker="o" if len(xs) == 1 else "", markersize=4)
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if metric == "num_clusters":
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
    elif metric == "ari":
        axes.set_ylim(top=1.05)


def _label_ends(all_axes: Iterable[Axes], all_lines: list[dict[str, Line]], styles: dict[str, dict[str, str]]) -> None:
    """Writes each method's name right of the plot at the height of its line's end, moved apart where names would overlap."""
    gap = LABEL_GAP_POINTS * DPI / 72
    for axes, lines in zip(all_axes, all_lines, strict=True):
        axes.autoscale_view()  # otherwise done when it is drawn
        to_axes = axes.transData + axes.transAxes.inverted()
        ends = {method: to_axes.transform((xs[-1], ys[-1])) for method, (xs, ys) in lines.items()}
        order = sorted(ends, key=lambda method: ends[method][1])
        heights = spread([ends[method][1] for method in order], gap / axes.bbox.height, 0.0, 1.0)
        for method, height in zip(order, heights, strict=True):
            _label(axes, method, ends[method], height, styles[method])


def _label(axes: Axes, method: str, end: tuple[float, float], height: float, style: dict[str, str]) -> None:
    """Writes one name, with a sample of its line, led to from where the line ends (in axes coordinates)."""
    outside = {"transform": axes.transAxes, "clip_on": False}
    axes.plot([end[0], LABEL_START - 0.05], [end[1], height], color=style["color"], linewidth=0.6, alpha=0.5, **outside)
    axes.plot([LABEL_START - 0.05, LABEL_START - 0.01], [height, height], **style, linewidth=1.8, **outside)
    axes.text(LABEL_START, height, method, color=style["color"], fontsize=LABEL_POINTS, verticalalignment="center", **outside)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Returns the ascending positions `wanted`, each at least `gap` above the one before, within low..high as far as they fit."""
    placed: list[float] = []
    for position in wanted:
        placed.append(max(position, placed[-1] + gap if placed else low))
    ceiling = high
    for place in reversed(range(len(placed))):
        placed[place] = min(placed[place], ceiling)
        ceiling = placed[place] - gap
    return placed
