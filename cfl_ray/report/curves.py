"""Curves over rounds and over traffic: mean over the seeds, with a band of one standard deviation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cfl_ray.report.drawing import (
    INK,
    MARKERS,
    PageFigure,
    Plot,
    canvas,
    faint,
    line_at,
    listed,
    look,
    number,
    percent,
    safe,
    with_spread,
)
from cfl_ray.report.report_data import MethodRun, ReportedExperiment
from cfl_ray.report.snapshots import evenly
from cfl_ray.tracking.record import RoundRecord
from cfl_ray.tracking.summary import mbit

MOST_POINTS = 250  # of one line


@dataclass(frozen=True)
class Series:
    """One metric of one method over its evaluated rounds."""

    round_E: np.ndarray
    mean_E: np.ndarray  # over the seeds
    std_E: np.ndarray  # of a sample; NaN of one seed

    @property
    def last(self) -> str:
        """Mean and spread after the last round."""
        return with_spread(float(self.mean_E[-1]), float(self.std_E[-1]))


def series(runs: Sequence[MethodRun], value_of: Callable[[RoundRecord], float]) -> Series | None:
    """Mean and spread over the runs that have a finite value in a round; None where no run has any."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for record in run.records:
            if math.isfinite(value := value_of(record)):
                found.setdefault(record.round, []).append(value)
    if not found:
        return None
    rounds = sorted(found)
    means = [float(np.mean(found[round])) for round in rounds]
    stds = [float(np.std(found[round], ddof=1)) if len(found[round]) > 1 else math.nan for round in rounds]
    return Series(np.array(rounds), np.array(means), np.array(stds))


def curves(experiment: ReportedExperiment) -> list[PageFigure]:
    """Scores of the three protocols, agreement and clusters over the rounds, and the score over the traffic."""
    score = experiment.score
    words = score.replace("_", " ")
    titles = {
        score: f"{words.capitalize()}, P-server: the model that the server gives next",
        f"{score}_local": f"{words.capitalize()}, P-local: the model that a client holds",
        f"{score}_tuned": f"{words.capitalize()}, P-tune: after further local epochs",
    }
    figures = [_scores(experiment, metric, title) for metric, title in titles.items()]
    figures += [_by_traffic(experiment), _agreement(experiment), _clusters(experiment), _largest(experiment)]
    figures += [_events(experiment)]
    return [figure for figure in figures if figure is not None]


def _phases(runs: Sequence[MethodRun]) -> list[tuple[str, int, int]]:
    """(phase, first round, last round) of the first seed, in their order; empty where they are not recorded."""
    found: list[tuple[str, int, int]] = []
    for record in runs[0].records:
        if found and found[-1][0] == record.phase:
            found[-1] = (record.phase, found[-1][1], record.round)
        elif record.phase:
            found.append((record.phase, record.round, record.round))
    return found


def _bands(experiment: ReportedExperiment) -> list[Plot]:
    """A band, in the colour of its method, over the rounds of every phase but the last one, with the phase's name."""
    return [
        {
            "type": "rect",
            "layer": "below",
            "yref": "y domain",
            "y0": 0,
            "y1": 1,
            "x0": first - 0.5,
            "x1": last + 0.5,
            "fillcolor": faint(look(place).colour, 0.1),
            "line": {"width": 0},
            "label": {"text": f"{safe(label)}: {safe(phase)}", "textposition": "top left", "textangle": 90},
        }
        for place, (label, runs) in enumerate(experiment.methods.items())
        for phase, first, last in _phases(runs)[:-1]
    ]


def _metric(name: str) -> Callable[[RoundRecord], float]:
    return lambda record: record.metrics.get(name, math.nan)


def _all(experiment: ReportedExperiment, name: str) -> dict[str, Series]:
    found = {label: series(runs, _metric(name)) for label, runs in experiment.methods.items()}
    return {label: one for label, one in found.items() if one is not None}


def _lines(
    experiment: ReportedExperiment, lines: dict[str, tuple[np.ndarray, Series]], template: str = "%{y:.4g}"
) -> list[Plot]:
    """A line with a band for each method; x, and the values. template: of a value on hovering."""
    traces: list[Plot] = []
    for place, label in enumerate(experiment.methods):
        if label not in lines:
            continue
        x_E, one = lines[label]
        style, drawn = look(place), evenly(range(len(x_E)), MOST_POINTS)
        x, mean, std = x_E[drawn].astype(float), one.mean_E[drawn], one.std_E[drawn]
        shared = {"type": "scatter", "legendgroup": safe(label)}
        if np.isfinite(std).any():
            low, high = mean - np.nan_to_num(std), mean + np.nan_to_num(std)
            traces.append(
                shared
                | {
                    "x": np.concatenate([x, x[::-1]]),
                    "y": np.concatenate([high, low[::-1]]),
                    "fill": "toself",
                    "fillcolor": faint(style.colour),
                    "line": {"width": 0},
                    "mode": "lines",
                    "hoverinfo": "skip",
                    "showlegend": False,
                }
            )
        traces.append(
            shared
            | {
                "x": x,
                "y": mean,
                "name": safe(label),
                "mode": "lines+markers",
                "line": {"color": style.colour, "dash": style.dash, "width": 2},
                "marker": {"symbol": style.marker, "size": 7, "maxdisplayed": 8},
                "hovertemplate": template,
                "showlegend": True,
            }
        )
    return traces


def _spread_note(experiment: ReportedExperiment) -> str:
    count = len(experiment.seeds)
    return f" Mean and standard deviation over {count} seeds." if count > 1 else " One seed."


def _ranked(found: dict[str, Series], higher_is_better: bool) -> list[str]:
    """Labels from the best value after the last round to the worst."""
    return sorted(found, key=lambda label: float(found[label].mean_E[-1]) * (-1 if higher_is_better else 1))


def _scores(experiment: ReportedExperiment, metric: str, title: str) -> PageFigure | None:
    found = _all(experiment, metric)
    if not found:
        return None
    order = _ranked(found, experiment.higher_is_better)
    best, last = order[0], int(found[order[0]].round_E[-1])
    caption = f"{best} ends {'best with' if len(order) > 1 else 'with'} {found[best].last} in round {last}"
    if len(order) > 1:
        caption += f", {order[-1]} {'worst with' if len(order) > 2 else 'with'} {found[order[-1]].last}"
    return PageFigure(
        title,
        f"{caption}.{_spread_note(experiment)}",
        canvas(
            _lines(experiment, {label: (one.round_E, one) for label, one in found.items()}),
            "round",
            metric.replace("_", " "),
            hovermode="x unified",
            shapes=_bands(experiment),
        ),
    )


def _by_traffic(experiment: ReportedExperiment) -> PageFigure | None:
    scores = _all(experiment, experiment.score)
    lines = {}
    for label, one in scores.items():
        traffic = series(experiment.methods[label], mbit)
        if traffic is not None and traffic.mean_E[-1] > 0:
            mbit_of = dict(zip(traffic.round_E.tolist(), traffic.mean_E.tolist(), strict=True))
            lines[label] = (np.array([mbit_of[round] for round in one.round_E.tolist()]), one)
    if not lines:
        return None
    order = sorted(lines, key=lambda label: float(lines[label][0][-1]))
    ends = [
        f"{label} {number(float(lines[label][0][-1]))} Mbit for {number(float(lines[label][1].mean_E[-1]))}"
        for label in ([order[0], order[-1]] if len(order) > 1 else order)
    ]
    words = experiment.score.replace("_", " ")
    caption = f"By its last evaluation a client has sent and received: {' (least), '.join(ends)}"
    caption += " (most)." if len(ends) > 1 else "."
    return PageFigure(
        f"{words.capitalize()}, P-server, against the traffic of a client",
        caption,
        canvas(_lines(experiment, lines), "Mbit per client, down and up", words, hovermode="closest"),
    )


def _agreement(experiment: ReportedExperiment) -> PageFigure | None:
    found = _all(experiment, "ari")
    if not found:
        return None
    order = _ranked(found, higher_is_better=True)
    caption = "Clusters against the true groups (1: the same, 0: as by chance). At the end: "
    caption += listed([f"{label} {found[label].mean_E[-1]:.2f}" for label in order]) + "."
    return PageFigure(
        "Agreement of clusters with true groups (adjusted Rand index)",
        caption,
        canvas(
            _lines(experiment, {label: (one.round_E, one) for label, one in found.items()}),
            "round",
            "ARI",
            hovermode="x unified",
            shapes=_bands(experiment),
        ),
    )


def _clusters(experiment: ReportedExperiment) -> PageFigure | None:
    found = {label: one for label, one in _all(experiment, "num_clusters").items() if one.mean_E.max() > 1}
    if not found:
        return None
    ends = listed([f"{label} {one.mean_E[-1]:.3g}" for label, one in found.items()])
    groups = f"; the clients have {experiment.num_groups} true groups (dotted)" if experiment.num_groups else ""
    dotted = {"color": "#8A94A0", "width": 1, "dash": "dot"}
    figure = canvas(
        _lines(experiment, {label: (one.round_E, one) for label, one in found.items()}),
        "round",
        "clusters",
        hovermode="x unified",
        yaxis={"rangemode": "tozero"},
        shapes=[
            *_bands(experiment),
            *([line_at(experiment.num_groups, True, dotted)] if experiment.num_groups else []),
        ],
    )
    return PageFigure("Clusters that have members", f"At the end: {ends}{groups}.", figure)


def _events(experiment: ReportedExperiment) -> PageFigure | None:
    """Phases of each method as bars, and events of its clusters on them, of the first seed."""
    rows = [label for label, runs in experiment.methods.items() if any(one.events for one in runs[0].records)]
    if not rows:
        return None
    of_kind: dict[str, list[tuple[int, str, str]]] = {}
    traces: list[Plot] = []
    for label in rows:
        colour = look(list(experiment.methods).index(label)).colour
        for phase, first, last in _phases(experiment.methods[label][0:1]):
            faded = colour if phase == "federate" else INK
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "base": [first - 0.5],
                    "x": [last - first + 1],
                    "y": [safe(label)],
                    "width": 0.5,
                    "marker": {"color": faint(faded, 0.25)},
                    "hovertext": f"{safe(label)}: phase {safe(phase)}, rounds {first} to {last}",
                    "hoverinfo": "text",
                    "showlegend": False,
                }
            )
        for record in experiment.methods[label][0].records:
            for event in record.events:
                of_kind.setdefault(event.event, []).append((event.round, safe(label), safe(event.text)))
    for place, (kind, found) in enumerate(of_kind.items()):
        rounds, labels, texts = zip(*found, strict=True)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": list(rounds),
                "y": list(labels),
                "text": list(texts),
                "marker": {"symbol": MARKERS[place], "size": 11, "color": INK},
                "hovertemplate": "round %{x}: %{text}<extra></extra>",
                "showlegend": True,
            }
        )
    counts = listed([f"{len(found)} of kind {kind}" for kind, found in of_kind.items()])
    caption = f"Of the first seed: {counts}. Each event says which figures decided it."
    why = next((f" In round {round}, {label}: {text}." for round, label, text in of_kind.get("split", [])), "")
    figure = canvas(traces, "round", "", hovermode="closest", yaxis={"automargin": True})
    return PageFigure("Phases, and events of clusters", caption + why, figure, height=140 + 40 * len(rows))


def _largest(experiment: ReportedExperiment) -> PageFigure | None:
    clustered = {label for label, runs in experiment.methods.items() if any(run.is_clustered for run in runs)}
    found = {label: one for label, one in _all(experiment, "largest_cluster_share").items() if label in clustered}
    if not found:
        return None
    order = _ranked(found, higher_is_better=True)
    last = int(found[order[0]].round_E[-1])
    caption = f"{order[0]}: the largest cluster holds {percent(float(found[order[0]].mean_E[-1]))} of the clients "
    caption += f"in round {last}"
    if len(order) > 1:
        caption += f"; {order[-1]}: {percent(float(found[order[-1]].mean_E[-1]))}"
    if experiment.num_groups > 1 and (largest := _largest_group(experiment)):
        caption += f". The largest true group holds {percent(largest)}"
    figure = canvas(
        _lines(experiment, {label: (one.round_E, one) for label, one in found.items()}, "%{y:.0%}"),
        "round",
        "share of the clients",
        hovermode="x unified",
        yaxis={"tickformat": ".0%", "range": [0, 1.03]},
        shapes=_bands(experiment),
    )
    return PageFigure("Share of the largest cluster: do clusters collapse into one?", f"{caption}.", figure)


def _largest_group(experiment: ReportedExperiment) -> float:
    groups = list(experiment.group_of.values())
    return max(groups.count(group) for group in set(groups)) / len(groups)
