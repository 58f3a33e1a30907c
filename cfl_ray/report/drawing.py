"""Parts that the figures of the page share: their frame, the looks of methods, numbers as text."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from cfl_ray.report.palette import COLOURS

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "triangle-down", "star", "hexagon", "pentagon")
GRID, INK = "#DDDDDD", "#1F2933"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


@dataclass(frozen=True)
class PageFigure:
    """A figure with its title and the sentence beneath it."""

    title: str
    caption: str
    plot: go.Figure
    height: int = 300  # pixels, without the legend


@dataclass(frozen=True)
class Look:
    """How one method is drawn."""

    colour: str
    dash: str
    marker: str


def look(place: int) -> Look:
    """The look of the method at this place of the list; the first 24 differ in colour or dashes."""
    return Look(COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)], MARKERS[place % len(MARKERS)])


def canvas(traces: Sequence[Any], x: str = "", y: str = "", **layout: Any) -> go.Figure:
    """A figure with these traces, titles of its axes, and further keys of Plotly's layout."""
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": "#8A94A0", "ticks": "outside", "automargin": True}
    figure = go.Figure(list(traces))
    figure.update_layout(
        template=go.layout.Template(),
        font={"family": FONT, "size": 13, "color": INK},
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        paper_bgcolor="#FFFFFF",
        plot_bgcolor="#FFFFFF",
        xaxis=axis | {"title": {"text": x, "standoff": 6}},
        yaxis=axis | {"title": {"text": y, "standoff": 6}},
        hoverlabel={"namelength": -1},
        dragmode=False,
    )
    return figure.update_layout(**layout)


def safe(text: str) -> str:
    """Text that Plotly shows as it is, rather than as markup."""
    return html.escape(str(text), quote=False)


def faint(colour: str, alpha: float = 0.16) -> str:
    """The colour of a band around a line of this colour."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def number(value: float) -> str:
    """Three decimals below 10, one above."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def with_spread(mean: float, std: float) -> str:
    """Mean and, where there is one, standard deviation."""
    return number(mean) if math.isnan(std) else f"{number(mean)} ± {number(std)}"


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.0f} %"


def listed(items: Sequence[str], most: int = 6) -> str:
    """Items with commas; of many the first ones and the number of the others."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return ", ".join([*items[:most], *more])
