"""Common functions for the figures of the page: frame, colours and markers of methods, numbers as text.

Figures are plain dictionaries in Plotly's schema, since Plotly's Python classes would take a second at the end of every
run. The tests check the dictionaries against these classes.
"""

import base64
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# any colour vision can distinguish them; after Okabe and Ito, with black and a brown instead of yellow
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8C6D00")
NAMED = len(COLOURS)  # number of largest clusters with a separate colour
GREY = "#B8B8B8"  # for smaller clusters, and for clients without a cluster
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "triangle-down", "star", "hexagon", "pentagon")
GRID, INK = "#DDDDDD", "#1F2933"
Plot = dict[str, Any]  # data and layout; values may be NumPy arrays
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


@dataclass(frozen=True)
class PageFigure:
    """A figure with its title and caption."""

    title: str
    caption: str
    plot: Plot
    height: int = 300  # pixels, without the legend


@dataclass(frozen=True)
class Look:
    """How a method is drawn."""

    colour: str
    dash: str
    marker: str


def look(place: int) -> Look:
    """The look of the method at this place of the list. The first 24 looks differ in colour or dashes."""
    return Look(COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)], MARKERS[place % len(MARKERS)])


def canvas(
    traces: Sequence[Plot],
    x: str = "",
    y: str = "",
    xaxis: Plot | None = None,
    yaxis: Plot | None = None,
    xaxis2: Plot | None = None,
    shapes: Sequence[Plot] = (),
    hovermode: str = "closest",
) -> Plot:
    """A figure with these traces. x, y: titles of the axes. xaxis, yaxis: further keys. xaxis2: a second x axis."""
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": "#8A94A0", "ticks": "outside", "automargin": True}
    frame = {
        "font": {"family": FONT, "size": 13, "color": INK},
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "#FFFFFF",
        "plot_bgcolor": "#FFFFFF",
        "xaxis": axis | {"title": {"text": x, "standoff": 6}} | (xaxis or {}),
        "yaxis": axis | {"title": {"text": y, "standoff": 6}} | (yaxis or {}),
        "hoverlabel": {"namelength": -1},
        "dragmode": False,
        "hovermode": hovermode,
        "shapes": list(shapes),
    }
    return {"data": list(traces), "layout": frame | ({"xaxis2": xaxis2} if xaxis2 else {})}


def line_at(value: float, horizontal: bool, line: Plot) -> Plot:
    """A line across the whole figure."""
    along, across = ("x", "y") if horizontal else ("y", "x")
    ends = {f"{along}0": 0, f"{along}1": 1, f"{across}0": value, f"{across}1": value}
    return {"type": "line", f"{along}ref": f"{along} domain", f"{across}ref": across, **ends, "line": line}


def as_json(plot: Plot) -> str:
    """A figure as JSON, with arrays in Plotly's binary form."""
    return json.dumps(plot, default=_array, allow_nan=False, separators=(",", ":"))


def _array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a figure cannot hold {type(value).__name__}")
    kind = "f4" if value.dtype.kind == "f" else "i1" if value.dtype == np.int8 else "i4"
    data = base64.b64encode(np.ascontiguousarray(value, f"<{kind}").tobytes()).decode()
    shape = {"shape": ", ".join(map(str, value.shape))} if value.ndim > 1 else {}
    return {"dtype": kind, "bdata": data, **shape}


def safe(text: str) -> str:
    """The text, escaped so that Plotly does not interpret it as markup."""
    return html.escape(str(text), quote=False)


def faint(colour: str, alpha: float = 0.16) -> str:
    """The colour of a band around a line of this colour."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def number(value: float) -> str:
    """A number as text: three decimals below 10, otherwise a single decimal."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def with_spread(mean: float, std: float) -> str:
    """Mean and standard deviation (NaN: none) as text, with the decimals of `number`; tiny numbers with two digits."""
    if 0 < max(abs(mean), 0.0 if math.isnan(std) else std) < 0.0005:  # 0.000 with three decimals
        return f"{mean:.2g}" if math.isnan(std) else f"{mean:.2g} ±\u00a0{std:.2g}"
    digits = 3 if abs(mean) < 10 else 1
    return number(mean) if math.isnan(std) else f"{number(mean)} ±\u00a0{std:.{digits}f}"


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.0f} %"


def listed(items: Sequence[str], most: int = 6) -> str:
    """The first `most` items joined by commas, and the number of further items."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return ", ".join([*items[:most], *more])


def p_in_words(p: float) -> str:
    """A p-value with three decimals; below 0.0005, which they would show as 0.000, with two digits."""
    return f"{p:{'.3f' if p >= 0.0005 else '.2g'}}"


def tested_in_words(p: float, effect: float, runs: float, rivals: float, letter: str = "d") -> str:
    """The text of a cell for a paired test: p and effect size, a reason if seeds are missing, else empty.

    rivals: number of methods of the experiment. letter: of the effect size; d: of a t-test, which needs three seeds.
    """
    if not math.isnan(p):
        return f"{p_in_words(p)} ({letter} {effect:.1f})"
    return "needs three seeds" if runs < 3 and rivals > 1 and letter == "d" else ""
