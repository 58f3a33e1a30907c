"""Figures of classes: the accuracy of each in each cluster, and confusion matrices."""

import math
from collections.abc import Sequence

import numpy as np

from cfl_ray.report.drawing import INK, PageFigure, Plot, canvas, listed, number, percent, safe
from cfl_ray.report.report_data import (
    ALL_CLIENTS,
    RecordedConfusion,
    ReportedExperiment,
    accuracy_of_classes,
    evenly,
)

MOST_CLASSES = 100  # of more, those with the most samples are drawn
_MOST_PARTS = 12  # largest clusters of a method that are rows, at most
_MOST_PANELS, _IN_A_ROW = 6, 2  # confusion matrices of a method
_MOST_NUMBERED = 12  # classes whose values are written into the cells
_MOST_NAMED, _MOST_NAMED_IN_PANEL = 62, 12  # classes that an axis names; of more, some
_LETTERS = 14  # of a name on an axis
_ROW_PIXELS, _PANEL_PIXELS, _AROUND_PIXELS = 26, 190, 110


def class_figures(experiment: ReportedExperiment) -> list[PageFigure]:
    """The accuracy of each class by method and cluster, and each method's confusion matrices; of the first seeds."""
    found = [
        (label, run.confusion, seed)
        for label, run, seed in experiment.first_runs(lambda run: run.confusion is not None)
        if run.confusion is not None and run.confusion.counts_KCC.any()
    ]
    if not found:
        return []
    return [_accuracies(found), *(_confusions(*one) for one in found)]


def _drawn(recorded: RecordedConfusion) -> tuple[np.ndarray, str]:
    """(the classes that are drawn, a note if there are more)."""
    samples_C = recorded.counts_KCC.sum((0, 2))
    if len(samples_C) <= MOST_CLASSES:
        return np.arange(len(samples_C)), ""
    drawn = np.sort(np.argsort(-samples_C, kind="stable")[:MOST_CLASSES])
    return drawn, f" The {MOST_CLASSES} of {len(samples_C)} classes with the most samples are drawn."


def _parts(recorded: RecordedConfusion, most: int) -> tuple[dict[str, np.ndarray], str]:
    """(counts of all clients and of the `most` clusters with the most samples, a note if there are more)."""
    parts = recorded.parts
    clusters = sorted(list(parts)[1:], key=lambda name: -int(parts[name].sum()))
    kept = set(clusters[:most])
    note = f" Of {len(clusters)} clusters the {most} with the most test samples are drawn." * (len(clusters) > most)
    return {name: counts_CC for name, counts_CC in parts.items() if name == ALL_CLIENTS or name in kept}, note


def _accuracies(found: Sequence[tuple[str, RecordedConfusion, str]]) -> PageFigure:
    rows: list[str] = []
    values: list[np.ndarray] = []
    captions, notes = [], ""
    drawn, note = _drawn(found[0][1])
    for label, recorded, seed in found:
        parts, more = _parts(recorded, _MOST_PARTS)
        notes += more.replace(" Of", f" Of {label}'s") if more else ""
        rows += [f"{label}, {part}" for part in parts]
        values += [accuracy_of_classes(counts_CC)[drawn] for counts_CC in parts.values()]
        accuracy_C, samples_C = accuracy_of_classes(parts[ALL_CLIENTS]), parts[ALL_CLIENTS].sum(1)
        known = np.flatnonzero(samples_C)
        worst, best = known[accuracy_C[known].argmin()], known[accuracy_C[known].argmax()]
        captions.append(
            f"{label} {'(' + seed + ') ' if seed else ''}from {number(float(accuracy_C[worst]))} "
            f"({recorded.names[worst]}) to {number(float(accuracy_C[best]))} ({recorded.names[best]})"
        )
    names = [safe(found[0][1].names[place]) for place in drawn]
    heat = _heat(np.array(values), names, [safe(row) for row in rows], len(names) <= _MOST_NUMBERED)
    heat |= {"hovertemplate": "%{y}, class %{x}: %{z:.3f}<extra></extra>"}
    axis = {"type": "category", "showgrid": False} | _ticks(names, _MOST_NAMED)
    plot = canvas([heat], "class", xaxis=axis, yaxis={"autorange": "reversed", "type": "category", "showgrid": False})
    text = f"Of the test samples of all clients: {listed(captions)}. White: no samples.{note}{notes}"
    return PageFigure("Accuracy of each class", text, plot, _ROW_PIXELS * len(rows) + _AROUND_PIXELS)


def _heat(values: np.ndarray, x: Sequence[str], y: Sequence[str], numbered: bool) -> Plot:
    heat: Plot = {
        "type": "heatmap",
        "z": values.astype(np.float32),
        "x": list(x),
        "y": list(y),
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Cividis",
        "colorbar": {"thickness": 12},
        "hoverongaps": False,
    }
    return heat | ({"texttemplate": "%{z:.2f}"} if numbered else {})


def _ticks(names: Sequence[str], most: int) -> Plot:
    """Keys of an axis that names at most so many classes, by their first letters."""
    kept = [names[place] for place in evenly(range(len(names)), most)]
    short = [name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…" for name in kept]
    return {"tickmode": "array", "tickvals": kept, "ticktext": short}


def _confusions(label: str, recorded: RecordedConfusion, seed: str) -> PageFigure:
    """A panel for all clients and for each of the largest clusters."""
    drawn, note = _drawn(recorded)
    parts, more = _parts(recorded, _MOST_PANELS - 1)
    names = [safe(recorded.names[place]) for place in drawn]
    grid = min(len(parts), _IN_A_ROW), math.ceil(len(parts) / _IN_A_ROW), len(parts)
    plot = canvas([])
    plot["layout"]["annotations"] = []
    for place, (part, counts_CC) in enumerate(parts.items()):
        _add_panel(plot, place, grid, safe(part), names, counts_CC, drawn)
    text = "Shares of the test samples of each class (rows) by predicted class (columns). "
    text += f"{_most_confused(recorded)}{note}{more}"
    when = ", ".join(filter(None, [f"round {recorded.round}", seed]))
    return PageFigure(f"{label}: confusion of classes ({when})", text, plot, _PANEL_PIXELS * grid[1] + _AROUND_PIXELS)


def _add_panel(
    plot: Plot,
    place: int,
    grid: tuple[int, int, int],
    title: str,
    names: Sequence[str],
    counts_CC: np.ndarray,
    drawn: np.ndarray,
) -> None:
    """Adds a confusion matrix at a place of the grid (columns, lines, number of places) to a figure."""
    (columns, lines, count), (line, column) = grid, divmod(place, _IN_A_ROW)
    key = str(place + 1) if place else ""
    across = [(column + 0.02) / columns, (column + 0.9) / columns]
    down = [1 - (line + 0.9) / lines, 1 - (line + 0.1) / lines]
    total_C1 = counts_CC.sum(1, keepdims=True)
    share_CC = np.divide(counts_CC, total_C1, out=np.full(counts_CC.shape, np.nan), where=total_C1 > 0)
    shown = np.ix_(drawn, drawn)
    heat = _heat(share_CC[shown], names, names, numbered=False)
    heat |= {"xaxis": f"x{key}", "yaxis": f"y{key}", "showscale": not place, "customdata": counts_CC[shown]}
    heat |= {"hovertemplate": "%{y} predicted as %{x}: %{customdata} samples, %{z:.3f}<extra></extra>"}
    plot["data"].append(heat)
    axis = {"type": "category", "showgrid": False, "ticks": "", "tickfont": {"size": 10}}
    axis |= _ticks(names, _MOST_NAMED_IN_PANEL)
    layout = plot["layout"]
    is_lowest = place + columns >= count
    layout[f"xaxis{key}"] = axis | {"domain": across, "anchor": f"y{key}", "tickangle": -90}
    layout[f"xaxis{key}"] |= {"showticklabels": is_lowest, "automargin": True}
    layout[f"yaxis{key}"] = axis | {"domain": down, "anchor": f"x{key}", "autorange": "reversed"}
    layout[f"yaxis{key}"] |= {"showticklabels": not column, "automargin": True}
    above = {"xref": "paper", "yref": "paper", "x": across[0], "y": down[1], "xanchor": "left", "yanchor": "bottom"}
    layout["annotations"].append({"text": title, "showarrow": False, "font": {"color": INK}} | above)


def _most_confused(recorded: RecordedConfusion) -> str:
    """The most frequent confusion of all clients, as a sentence."""
    counts_CC = recorded.counts_KCC.sum(0)
    wrong_CC = counts_CC - np.diag(np.diag(counts_CC))
    true, predicted = divmod(int(wrong_CC.argmax()), len(wrong_CC))
    if not wrong_CC[true, predicted]:
        return "No test sample is wrong."
    count, of = int(wrong_CC[true, predicted]), int(counts_CC[true].sum())
    return (
        f"The most frequent confusion: {recorded.names[true]} as {recorded.names[predicted]}, {count} of {of} samples "
        f"({percent(count / of)})."
    )
