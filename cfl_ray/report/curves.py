"""Curves over rounds and over traffic: means over the seeds, with bands of one standard deviation."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cfl_ray.errors import counted
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
from cfl_ray.report.report_data import MethodRun, ReportedExperiment, evenly, mean_and_std
from cfl_ray.tracking.metric_titles import title_of
from cfl_ray.tracking.record import (
    BEST_ROUND,
    RoundRecord,
    is_of_validation,
    mbit,
    validation_metric,
    virtual_seconds,
)

MOST_POINTS = 250  # most points of a line
MOST_CHANGES = 30  # most changes of data that are drawn
MOST_NAME_CHARS = 26  # of a band, whose name is written downwards
NAME_SHARE = 0.075  # of the width of a narrow figure: the width of such a name


@dataclass(frozen=True)
class Series:
    """A metric of a method in its evaluated rounds."""

    round_E: np.ndarray
    mean_E: np.ndarray  # over the seeds
    std_E: np.ndarray  # sample standard deviation over the seeds; NaN for a single seed

    @classmethod
    def of(cls, values: Iterable[tuple[int, float]]) -> "Series | None":
        """Mean and standard deviation of the finite values (round, value) of each round; None if there are none."""
        values_of: dict[int, list[float]] = {}
        for round, value in values:
            if math.isfinite(value):
                values_of.setdefault(round, []).append(value)
        if not values_of:
            return None
        rounds = sorted(values_of)
        means, stds = zip(*(mean_and_std(values_of[round]) for round in rounds), strict=True)
        return cls(np.array(rounds), np.array(means), np.array(stds))

    @property
    def last(self) -> str:
        """Mean and standard deviation after the last round, as text."""
        return with_spread(float(self.mean_E[-1]), float(self.std_E[-1]))


def series(runs: Sequence[MethodRun], value_of: Callable[[RoundRecord], float]) -> Series | None:
    """Mean and standard deviation, in each round, over the runs with a finite value; None if no run has a value."""
    return Series.of((record.round, value_of(record)) for run in runs for record in run.records)


def curves(experiment: ReportedExperiment) -> list[PageFigure]:
    """The figures that have data: scores by three protocols, recovery, costs, agreement, clusters, and events."""
    score = experiment.score
    protocols = {
        score: ", P-server: the model that the server gives next",
        f"{score}_local": ": the model that a client holds",
        f"{score}_tuned": ": after further local epochs",
    }
    protocols |= {validation_metric(metric): "" for metric in protocols}
    figures = [_scores(experiment, metric, title_of(metric).text + words) for metric, words in protocols.items()]
    figures += [_recovery(experiment), *_by_costs(experiment)]
    figures += [make(experiment) for make in (_agreement, _clusters, _largest, _events)]
    return [figure for figure in figures if figure is not None]


def _phases(runs: Sequence[MethodRun]) -> list[tuple[str, int, int]]:
    """(phase, first round, last round) of the first seed's phases in order; empty if phases are not recorded."""
    phases: list[tuple[str, int, int]] = []
    for record in runs[0].records:
        if phases and phases[-1][0] == record.phase:
            phases[-1] = (record.phase, phases[-1][1], record.round)
        elif record.phase:
            phases.append((record.phase, record.round, record.round))
    return phases


def _bands(experiment: ReportedExperiment) -> list[Plot]:
    """A named band, in the method's colour, over the rounds of each phase of each method except the last phase.

    Bands that begin so close together that their names would overlap have one name in common.
    """
    bands = [
        (first, place, label, phase, last)
        for place, (label, runs) in enumerate(experiment.methods.items())
        for phase, first, last in _phases(runs)[:-1]
    ]
    shapes: list[Plot] = []
    named: list[tuple[int, Plot, list[tuple[str, str]]]] = []  # first round, shape; label and phase of each band
    rounds = max((runs[0].records[-1].round for runs in experiment.methods.values() if runs[0].records), default=0)
    for first, place, label, phase, last in sorted(bands):
        shape: Plot = {
            "type": "rect",
            "layer": "below",
            "yref": "y domain",
            "y0": 0,
            "y1": 1,
            "x0": first - 0.5,
            "x1": last + 0.5,
            "fillcolor": faint(look(place).colour, 0.1),
            "line": {"width": 0},
        }
        shapes.append(shape)
        if not named or first - named[-1][0] > NAME_SHARE * rounds:
            named.append((first, shape, []))
        named[-1][2].append((label, phase))
    for _, shape, names in named:  # downwards, right of the band's left edge
        text = safe(_name_of_bands(names))
        shape["label"] = {"text": text, "textposition": "top left", "textangle": 90, "yanchor": "bottom"}
    return shapes


def _name_of_bands(names: Sequence[tuple[str, str]]) -> str:
    """The most exact name that fits in. names: label of the method and phase of each band."""
    labels = dict.fromkeys(label for label, _ in names)
    candidates = (", ".join(f"{label}: {phase}" for label, phase in names), f"phases: {', '.join(labels)}")
    return next((name for name in candidates if len(name) <= MOST_NAME_CHARS), counted(len(names), "phase"))


def _all(experiment: ReportedExperiment, name: str) -> dict[str, Series]:
    """The series of a metric, by label of the methods that recorded it."""
    series_of = {
        label: series(runs, lambda record: record.metrics.get(name, math.nan))
        for label, runs in experiment.methods.items()
    }
    return {label: values for label, values in series_of.items() if values is not None}


def _lines(
    experiment: ReportedExperiment, lines: dict[str, tuple[np.ndarray, Series]], template: str = "%{y:.4g}"
) -> list[Plot]:
    """A line with a band for each method. lines: x and values by label. template: shows a value on hovering."""
    traces: list[Plot] = []
    for place, label in enumerate(experiment.methods):
        if label not in lines:
            continue
        x_E, values = lines[label]
        style, drawn = look(place), evenly(range(len(x_E)), MOST_POINTS)
        x, mean, std = x_E[drawn].astype(float), values.mean_E[drawn], values.std_E[drawn]
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


def _over_rounds(
    experiment: ReportedExperiment,
    series_of: dict[str, Series],
    y_title: str,
    template: str = "%{y:.4g}",
    yaxis: Plot | None = None,
    shapes: Sequence[Plot] = (),
) -> Plot:
    """A figure with the series of each method over the rounds, and bands for the phases of the methods."""
    lines = {label: (values.round_E, values) for label, values in series_of.items()}
    return canvas(
        _lines(experiment, lines, template),
        "round",
        y_title,
        hovermode="x unified",
        yaxis=yaxis,
        shapes=[*_bands(experiment), *shapes],
    )


def _ranked(series_of: dict[str, Series], higher_is_better: bool) -> list[str]:
    """Labels from the best value after the last round to the worst."""
    return sorted(series_of, key=lambda label: float(series_of[label].mean_E[-1]) * (-1 if higher_is_better else 1))


def _scores(experiment: ReportedExperiment, metric: str, title: str) -> PageFigure | None:
    scores = _all(experiment, metric)
    if not scores:
        return None
    order = _ranked(scores, experiment.higher_is_better)
    best, last = order[0], int(scores[order[0]].round_E[-1])
    caption = f"{best} ends {'best with' if len(order) > 1 else 'with'} {scores[best].last} in round {last}"
    if len(order) > 1:
        caption += f", {order[-1]} {'worst with' if len(order) > 2 else 'with'} {scores[order[-1]].last}"
    seeds = len(experiment.seeds)
    spread = f"Mean and standard deviation over {seeds} seeds." if seeds > 1 else "One seed."
    if is_of_validation(metric) and (kept := _best_rounds(experiment)):
        spread += f" Models are kept of the best round: {kept}."
    return PageFigure(title, f"{caption}. {spread}", _over_rounds(experiment, scores, title_of(metric).as_recorded))


def _best_rounds(experiment: ReportedExperiment) -> str:
    """The round of each method whose models are kept, of each seed, with `keep: best`; otherwise empty."""
    rounds = {
        label: [str(int(run.records[-1].metrics[BEST_ROUND])) for run in runs if BEST_ROUND in run.records[-1].metrics]
        for label, runs in experiment.methods.items()
    }
    return "; ".join(f"{label} {', '.join(of_seeds)}" for label, of_seeds in rounds.items() if of_seeds)


def _recovery(experiment: ReportedExperiment) -> PageFigure | None:
    """The score of the clients whose data change, with a dotted line at each change."""
    scores = {
        label: values
        for label, runs in experiment.methods.items()
        if (values := Series.of(item for run in runs for item in run.changed_scores.items())) is not None
    }
    if not scores or not experiment.changes:
        return None
    rounds, dotted = list(experiment.changes), {"color": INK, "width": 1, "dash": "dot"}
    lines = [line_at(round - 0.5, False, dotted) for round in evenly(rounds, MOST_CHANGES)]
    when = f"{'round' if len(rounds) == 1 else 'rounds'} {listed(list(map(str, rounds)))}"
    changing = sum(experiment.changes.values()) / len(rounds)
    caption = f"Data of {changing:.3g} clients{' on average' * (len(rounds) > 1)} change before {when} (dotted). "
    caption += _recovered(experiment, list(scores))
    score = title_of(experiment.score)
    figure = _over_rounds(experiment, scores, score.as_recorded, shapes=lines)
    return PageFigure(f"{score.text}, P-server, of the clients whose data change", caption, figure)


def _recovered(experiment: ReportedExperiment, labels: Sequence[str]) -> str:
    """Means over the seeds of both metrics of recovery, from the best to the worst, as text."""
    found: dict[str, dict[str, float]] = {"rounds_to_recover": {}, "backward_transfer": {}}
    for (metric, value_of), label in itertools.product(found.items(), labels):
        values = [run.recovery[metric] for run in experiment.methods[label] if metric in run.recovery]
        if len(values) == len(experiment.methods[label]):
            value_of[label] = float(np.mean(values))
    fast, kept = found["rounds_to_recover"], found["backward_transfer"]
    never = [label for label in labels if label not in fast]
    parts = [f"{label} {fast[label]:.3g}" for label in sorted(fast, key=fast.__getitem__)]
    text = f"Rounds until they score as before, within 0.02: {listed(parts)}. " if parts else ""
    text += f"Not recovered from every change: {listed(never)}. " if never else ""
    sign = -1 if experiment.higher_is_better else 1
    parts = [f"{label} {kept[label]:+.3f}" for label in sorted(kept, key=lambda label: sign * kept[label])]
    return (text + (f"Score on the data before, now minus then: {listed(parts)}." if parts else "")).strip()


def _against(
    experiment: ReportedExperiment, x_of: Callable[[RoundRecord], float]
) -> dict[str, tuple[np.ndarray, Series]]:
    """The (x, score) series of each method. x_of: a number that grows with the rounds, such as the traffic."""
    lines = {}
    for label, values in _all(experiment, experiment.score).items():
        x = series(experiment.methods[label], x_of)
        if x is not None and x.mean_E[-1] > 0:
            x_at = dict(zip(x.round_E.tolist(), x.mean_E.tolist(), strict=True))
            lines[label] = (np.array([x_at.get(round, math.nan) for round in values.round_E.tolist()]), values)
    return lines


def _ends(lines: dict[str, tuple[np.ndarray, Series]], unit: str, least: str, most: str) -> str:
    """The last x and score of the methods with the lowest and the highest last x, as text."""
    order = sorted(lines, key=lambda label: float(lines[label][0][-1]))
    ends = [
        f"{label} {number(float(lines[label][0][-1]))}{unit} for {number(float(lines[label][1].mean_E[-1]))}"
        for label in ([order[0], order[-1]] if len(order) > 1 else order)
    ]
    if lines[order[0]][0][-1] == lines[order[-1]][0][-1]:  # a single method, or equal costs
        return ", ".join(ends) + "."
    return f"{ends[0]} ({least}), {ends[1]} ({most})."


def _by_costs(experiment: ReportedExperiment) -> Iterator[PageFigure]:
    """The score over traffic, over virtual time (runs with a clock), and over epsilon (private runs)."""
    score = title_of(experiment.score)

    def epsilon(record: RoundRecord) -> float:
        return record.metrics.get("epsilon", math.nan)

    sent = "By its last evaluation a client has sent and received: "
    for name, cost, what, caption, unit, ends in (
        ("mbit", mbit, "the traffic of a client", sent, " Mbit", ("least", "most")),
        ("virtual_seconds", virtual_seconds, "virtual time", "The last evaluation is after: ", " s", ("first", "last")),
        ("epsilon", epsilon, "the privacy budget used", "The last evaluation is at epsilon: ", "", ("least", "most")),
    ):
        if lines := _against(experiment, cost):
            axis = title_of(name).as_recorded
            figure = canvas(_lines(experiment, lines), axis, score.as_recorded, hovermode="closest")
            title = f"{score.text}, P-server, against {what}"
            yield PageFigure(title, caption + _ends(lines, unit, *ends), figure)


def _agreement(experiment: ReportedExperiment) -> PageFigure | None:
    ari_of = _all(experiment, "ari")
    if not ari_of:
        return None
    order = _ranked(ari_of, higher_is_better=True)
    caption = "Clusters against the true groups (1: the same, 0: as by chance). At the end: "
    caption += listed([f"{label} {ari_of[label].mean_E[-1]:.2f}" for label in order]) + "."
    title = "Agreement of clusters with true groups (adjusted Rand index)"
    return PageFigure(title, caption, _over_rounds(experiment, ari_of, title_of("ari").text))


def _clusters(experiment: ReportedExperiment) -> PageFigure | None:
    counts = {label: count for label, count in _all(experiment, "num_clusters").items() if count.mean_E.max() > 1}
    if not counts:
        return None
    ends = listed([f"{label} {count.mean_E[-1]:.3g}" for label, count in counts.items()])
    groups = (
        f"; the clients have {counted(experiment.num_groups, 'true group')} (dotted)" if experiment.num_groups else ""
    )
    groups += " after the last round" * experiment.groups_change
    dotted = {"color": "#8A94A0", "width": 1, "dash": "dot"}
    group_line = [line_at(experiment.num_groups, True, dotted)] if experiment.num_groups else []
    figure = _over_rounds(
        experiment, counts, title_of("num_clusters").text, yaxis={"rangemode": "tozero"}, shapes=group_line
    )
    return PageFigure("Clusters that have members", f"At the end: {ends}{groups}.", figure)


def _events(experiment: ReportedExperiment) -> PageFigure | None:
    """The phases of each method as bars and the events of its clusters as markers, for the first seed."""
    rows = [label for label, runs in experiment.methods.items() if any(record.events for record in runs[0].records)]
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
    for place, (kind, events) in enumerate(of_kind.items()):
        rounds, labels, texts = zip(*events, strict=True)
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
    counts = listed([f"{kind} ({len(events)})" for kind, events in of_kind.items()]) or "none"
    caption = f"Events of the first seed: {counts}. Pointing at an event shows the values that decided it."
    why = next((f" In round {round}, {label}: {text}." for round, label, text in of_kind.get("split", [])), "")
    figure = canvas(traces, "round", "", hovermode="closest", yaxis={"automargin": True})
    figure["layout"]["barmode"] = "overlay"  # else each trace has a place of its own beside the method's row
    return PageFigure("Phases, and events of clusters", caption + why, figure, height=140 + 40 * len(rows))


def _largest(experiment: ReportedExperiment) -> PageFigure | None:
    clustered = {label for label, runs in experiment.methods.items() if any(run.is_clustered for run in runs)}
    shares = {label: share for label, share in _all(experiment, "largest_cluster_share").items() if label in clustered}
    if not shares:
        return None
    order = _ranked(shares, higher_is_better=True)
    last = int(shares[order[0]].round_E[-1])
    caption = f"{order[0]}: the largest cluster holds {percent(float(shares[order[0]].mean_E[-1]))} of the clients "
    caption += f"in round {last}"
    if len(order) > 1:
        caption += f"; {order[-1]}: {percent(float(shares[order[-1]].mean_E[-1]))}"
    if experiment.num_groups > 1:
        sizes = experiment.groups.sizes
        caption += f". The largest true group holds {percent(float(sizes.max() / sizes.sum()))}"
    yaxis: Plot = {"tickformat": ".0%", "range": [0, 1.03]}
    figure = _over_rounds(experiment, shares, "share of the clients", "%{y:.0%}", yaxis)
    return PageFigure("Share of the largest cluster: do clusters collapse into one?", f"{caption}.", figure)
