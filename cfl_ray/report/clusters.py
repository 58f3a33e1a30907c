"""Figures of the clusters of a run over its rounds: their sizes, and the cluster of each client."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cfl_ray.report.drawing import COLOURS, GREY, NAMED, PageFigure, Plot, canvas, line_at, percent
from cfl_ray.report.report_data import MethodRun, ReportedExperiment
from cfl_ray.report.snapshots import evenly

MOST_ROUNDS, MOST_CLIENTS = 120, 150  # more are not drawn
MOST_BLOCKS = 24  # largest number of groups or clusters that the axis names
NO_CLUSTER = "#EEEEEE"  # colour of a client in rounds without a cluster


def cluster_figures(experiment: ReportedExperiment) -> list[PageFigure]:
    """Two figures for each method with clusters, for its first such seed: cluster sizes, and clusters of clients."""
    figures = []
    for label, run, seed in experiment.first_runs(lambda run: run.is_clustered):
        if not run.records:
            continue
        which = f" ({seed})" if seed else ""
        rounds = evenly(range(1, run.records[-1].round + 1), MOST_ROUNDS)
        figures += [_sizes(experiment, label, run, rounds, which), _places(experiment, label, run, rounds, which)]
    return figures


def _sizes(experiment: ReportedExperiment, label: str, run: MethodRun, rounds: Sequence[int], which: str) -> PageFigure:
    history = run.history
    order = _by_size(run, rounds)
    named = order[:NAMED]
    kept = [(size_K[named], size_K.sum(), size_K.max(), (size_K > 0).sum()) for size_K in history.sizes(rounds)]
    size_EK, total_E, largest_E, count_E = (np.array(values) for values in zip(*kept, strict=True))
    members_E = np.maximum(total_E, 1)
    traces = [
        _layer(rounds, size_EK[:, place] / members_E, f"cluster {history.cluster_K[row]}", COLOURS[place])
        for place, row in enumerate(named)
    ]
    if len(order) > len(named):
        rest_E = total_E - size_EK.sum(1)
        traces.append(_layer(rounds, rest_E / members_E, f"{len(order) - len(named)} others", GREY))
    figure = canvas(
        traces,
        "round",
        "share of the clients",
        hovermode="x unified",
        yaxis={"tickformat": ".0%", "range": [0, 1]},
    )
    share_E = largest_E / members_E
    peak = int(share_E.argmax())
    caption = f"{label}: the largest cluster holds {percent(share_E[-1])} of the clients in round {rounds[-1]}"
    if share_E[peak] > share_E[-1] + 0.005:
        caption += f", at most {percent(share_E[peak])} (round {rounds[peak]})"
    caption += f"; {count_E[-1]} {'cluster has' if count_E[-1] == 1 else 'clusters have'} members"
    if experiment.num_groups:
        caption += f", and there are {experiment.num_groups} true groups"
    return PageFigure(f"{label}: sizes of its clusters{which}", f"{caption}.", figure, 260)


def _by_size(run: MethodRun, rounds: Sequence[int]) -> np.ndarray:
    """Places in `ClusterHistory.cluster_K` of the clusters with members in these rounds, largest total size first."""
    total_K = sum(run.history.sizes(rounds), start=np.zeros(len(run.history.cluster_K), np.int64))
    order = np.argsort(-total_K, kind="stable")
    return order[total_K[order] > 0]


def _layer(rounds: Sequence[int], share_E: np.ndarray, name: str, colour: str) -> Plot:
    return {
        "type": "scatter",
        "x": list(rounds),
        "y": share_E,
        "name": name,
        "stackgroup": "clusters",
        "mode": "lines" if len(rounds) > 1 else "markers",
        "line": {"width": 0.8, "color": "#FFFFFF", "shape": "hv"},
        "fillcolor": colour,
        "marker": {"color": colour},
        "hovertemplate": "%{y:.0%}",
        "showlegend": True,
    }


def _places(
    experiment: ReportedExperiment, label: str, run: MethodRun, rounds: Sequence[int], which: str
) -> PageFigure:
    """A figure with a row for each client and a column for each round, in the colour of the client's cluster."""
    history, order = run.history, _by_size(run, rounds)
    rank_K = np.full(len(history.cluster_K) + 1, len(order))  # the last entry is for clients without a cluster
    rank_K[order] = np.arange(len(order))
    rank_C = rank_K[next(history.rows(rounds[-1:]))]
    group_C = experiment.groups[history.client_C]
    drawn = np.array(evenly(np.lexsort([rank_C, group_C]), MOST_CLIENTS))  # equal ranks are ordered by id
    colour_K = np.minimum(rank_K, NAMED)
    colour_K[-1] = -1
    columns = [colour_K[row_C[drawn]] for row_C in history.rows(rounds)]
    clients, groups, count = history.client_C[drawn], group_C[drawn], len(history.client_C)
    z = np.array(columns, dtype=np.int8).T
    scale = [NO_CLUSTER, *COLOURS[: min(len(order), NAMED)], *([GREY] if len(order) > NAMED else [])]
    heat = {
        "type": "heatmap",
        "x": list(rounds),
        "y": list(range(len(drawn))),
        "z": z,
        "zmin": -1.5,
        "zmax": len(scale) - 1.5,
        "colorscale": steps(scale),
        "showscale": False,
        "customdata": np.repeat(clients[:, None], len(rounds), axis=1),
        "hovertemplate": "client %{customdata}, round %{x}<extra></extra>",
    }
    axis, shapes = _group_axis(groups.tolist())
    sample = f" {len(drawn)} of {count} clients are drawn, evenly from each group."
    figure = canvas([heat], "round", xaxis={"showgrid": False}, yaxis=axis, shapes=shapes)
    return PageFigure(
        f"{label}: cluster of each client by round{which}",
        _changes_in_words(label, run) + (sample if len(drawn) < count else ""),
        figure,
        320,
    )


def steps(colours: Sequence[str]) -> list[tuple[float, str]]:
    """A Plotly colour scale of flat colours, without gradients between them."""
    count = len(colours)
    return [(edge / count, colour) for place, colour in enumerate(colours) for edge in (place, place + 1)]


def blocks(labels: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of each run of equal labels; `end` is exclusive."""
    starts = [place for place in range(len(labels)) if place == 0 or labels[place] != labels[place - 1]]
    return list(zip(starts, [*starts[1:], len(labels)], strict=True))


def _group_axis(groups: Sequence[int]) -> tuple[Plot, list[Plot]]:
    """An axis with the groups' names next to their rows, and lines between the groups."""
    axis = {"autorange": "reversed", "showgrid": False}
    rows = blocks(groups)
    if not 2 <= len(rows) <= MOST_BLOCKS:
        return axis | {"title": {"text": "client"}}, []
    names = [f"group {groups[start]}" if groups[start] >= 0 else "no group" for start, _ in rows]
    axis |= {"tickvals": [(start + end - 1) / 2 for start, end in rows], "ticktext": names}
    return axis, [line_at(start - 0.5, True, {"color": "#FFFFFF", "width": 2}) for start, _ in rows[1:]]


def _changes_in_words(label: str, run: MethodRun) -> str:
    history = run.history
    changed_C, pairs, last = np.zeros(len(history.client_C), bool), Counter[tuple[int, int]](), 0
    for round, client_R, before_R, after_R in history.changes():
        changed_C[np.searchsorted(history.client_C, client_R)] = True
        _, first_U, count_U = np.unique(
            before_R.astype(np.int64) << 32 | after_R, return_index=True, return_counts=True
        )
        for place in np.argsort(first_U):  # among equally frequent pairs, the first pair is named
            first = first_U[place]
            pairs[int(before_R[first]), int(after_R[first])] += int(count_U[place])
        last = round
    if not pairs:
        return f"{label}: none of {len(changed_C)} clients leaves its first cluster."
    (source, target), times = pairs.most_common(1)[0]
    return (
        f"{label}: {changed_C.sum()} of {len(changed_C)} clients go from one cluster to another, "
        f"{pairs.total()} times in all, most often from {source} to {target} ({times} times), and last in round {last}."
    )
