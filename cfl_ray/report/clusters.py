"""Figures of the clusters of a run over its rounds: their sizes, and the cluster of each client."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cfl_ray.report.drawing import PageFigure, Plot, canvas, line_at, percent
from cfl_ray.report.palette import COLOURS, GREY
from cfl_ray.report.report_data import MethodRun, ReportedExperiment
from cfl_ray.report.snapshots import changes, evenly, ranks, snapshots

MOST_ROUNDS, MOST_CLIENTS = 120, 150  # more are not drawn
MOST_BLOCKS = 24  # with more groups or clusters, the axis does not name them
NO_CLUSTER = "#EEEEEE"  # colour of a client in rounds in which it has no cluster
NAMED = len(COLOURS)  # the largest clusters, so many, have a colour each


def cluster_figures(experiment: ReportedExperiment) -> list[PageFigure]:
    """Two figures for each method with clusters, of its first such seed: sizes of clusters, and clusters of clients."""
    figures = []
    for label, runs in experiment.methods.items():
        run = next((run for run in runs if run.is_clustered), None)
        if run is None or not run.records:
            continue
        which = f" (seed {run.seed})" if len(runs) > 1 else ""
        rounds = evenly(range(1, run.records[-1].round + 1), MOST_ROUNDS)
        figures += [_sizes(experiment, label, run, rounds, which), _places(experiment, label, run, rounds, which)]
    return figures


def _sizes(experiment: ReportedExperiment, label: str, run: MethodRun, rounds: Sequence[int], which: str) -> PageFigure:
    counts = [Counter(cluster_of.values()) for _, cluster_of in snapshots(run.reassignments, rounds)]
    total = sum(counts, Counter[int]())
    rank = ranks(total)
    named = sorted(rank, key=rank.__getitem__)[:NAMED]
    members_E = np.array([max(1, sum(count.values())) for count in counts])
    traces = [
        _layer(rounds, np.array([count[cluster] for count in counts]) / members_E, f"cluster {cluster}", colour)
        for cluster, colour in zip(named, COLOURS, strict=False)
    ]
    if len(rank) > len(named):
        rest_E = np.array([sum(size for cluster, size in count.items() if cluster not in named) for count in counts])
        traces.append(_layer(rounds, rest_E / members_E, f"{len(rank) - len(named)} others", GREY))
    figure = canvas(
        traces,
        "round",
        "share of the clients",
        hovermode="x unified",
        yaxis={"tickformat": ".0%", "range": [0, 1]},
    )
    share_E = np.array([max(count.values(), default=0) for count in counts]) / members_E
    peak = int(share_E.argmax())
    caption = f"{label}: the largest cluster holds {percent(share_E[-1])} of the clients in round {rounds[-1]}"
    if share_E[peak] > share_E[-1] + 0.005:
        caption += f", at most {percent(share_E[peak])} (round {rounds[peak]})"
    caption += f"; {len(counts[-1])} {'cluster has' if len(counts[-1]) == 1 else 'clusters have'} members"
    if experiment.num_groups:
        caption += f", and there are {experiment.num_groups} true groups"
    return PageFigure(f"{label}: sizes of its clusters{which}", f"{caption}.", figure, 260)


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
    last: dict[int, int] = {}
    total: Counter[int] = Counter()
    for _, cluster_of in snapshots(run.reassignments, rounds):
        total.update(cluster_of.values())
        last = cluster_of
    rank = ranks(total)
    group_of = experiment.group_of
    clients = sorted(
        {client for _, changed in run.reassignments for client, cluster in changed if cluster >= 0},
        key=lambda client: (group_of.get(client, -1), rank.get(last.get(client, -1), len(rank)), client),
    )
    drawn = evenly(clients, MOST_CLIENTS)
    colour_of = {cluster: min(place, NAMED) for cluster, place in rank.items()}
    columns = []
    for _, cluster_of in snapshots(run.reassignments, rounds):
        columns.append([colour_of[cluster_of[client]] if client in cluster_of else -1 for client in drawn])
    z = np.array(columns, dtype=np.int8).T
    scale = [NO_CLUSTER, *COLOURS[: min(len(rank), NAMED)], *([GREY] if len(rank) > NAMED else [])]
    heat = {
        "type": "heatmap",
        "x": list(rounds),
        "y": list(range(len(drawn))),
        "z": z,
        "zmin": -1.5,
        "zmax": len(scale) - 1.5,
        "colorscale": steps(scale),
        "showscale": False,
        "customdata": np.repeat(np.array(drawn)[:, None], len(rounds), axis=1),
        "hovertemplate": "client %{customdata}, round %{x}<extra></extra>",
    }
    axis, shapes = _group_axis([group_of.get(client, -1) for client in drawn])
    figure = canvas([heat], "round", xaxis={"showgrid": False}, yaxis=axis, shapes=shapes)
    return PageFigure(
        f"{label}: cluster of each client by round{which}",
        _changes_in_words(label, run, len(clients)) + _sample_in_words(len(drawn), len(clients)),
        figure,
        320,
    )


def steps(colours: Sequence[str]) -> list[tuple[float, str]]:
    """A Plotly colour scale of flat colours, without gradients between them."""
    count = len(colours)
    return [(edge / count, colour) for place, colour in enumerate(colours) for edge in (place, place + 1)]


def blocks(labels: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of each run of equal labels; `end` is the place after the last."""
    starts = [place for place in range(len(labels)) if place == 0 or labels[place] != labels[place - 1]]
    return list(zip(starts, [*starts[1:], len(labels)], strict=True))


def _group_axis(groups: Sequence[int]) -> tuple[Plot, list[Plot]]:
    """An axis with the groups' names beside their rows, and lines between the groups."""
    axis = {"autorange": "reversed", "showgrid": False}
    rows = blocks(groups)
    if not 2 <= len(rows) <= MOST_BLOCKS:
        return axis | {"title": {"text": "client"}}, []
    names = [f"group {groups[start]}" if groups[start] >= 0 else "no group" for start, _ in rows]
    axis |= {"tickvals": [(start + end - 1) / 2 for start, end in rows], "ticktext": names}
    return axis, [line_at(start - 0.5, True, {"color": "#FFFFFF", "width": 2}) for start, _ in rows[1:]]


def _changes_in_words(label: str, run: MethodRun, count: int) -> str:
    changed = list(changes(run.reassignments))
    if not changed:
        return f"{label}: none of {count} clients leaves its first cluster."
    clients = len({client for _, client, _, _ in changed})
    (source, target), times = Counter((before, after) for _, _, before, after in changed).most_common(1)[0]
    return (
        f"{label}: {clients} of {count} clients go from one cluster to another, {len(changed)} times in all, most "
        f"often from {source} to {target} ({times} times), and last in round {changed[-1][0]}."
    )


def _sample_in_words(drawn: int, count: int) -> str:
    return f" {drawn} of {count} clients are drawn, evenly from each group." if drawn < count else ""
