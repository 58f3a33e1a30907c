"""What a method clusters by: the similarity of its clients, and their signatures in the plane."""

import numpy as np
import plotly.graph_objects as go

from cfl_ray.report.drawing import MARKERS, PageFigure, canvas, number, percent
from cfl_ray.report.material import MethodRun, ReportedExperiment
from cfl_ray.report.palette import COLOURS, GREY
from cfl_ray.report.snapshots import RecordedMatrix, evenly, ranks, snapshots

MOST_ROWS, MOST_POINTS = 150, 600  # that are drawn
NAMED = len(COLOURS)


def matrix_figures(experiment: ReportedExperiment) -> list[PageFigure]:
    """Similarity or distance, ordered by cluster, and a map of signatures, for each method that has recorded them."""
    figures = []
    for label, runs in experiment.methods.items():
        for name in ("similarity", "distance"):
            if (found := _first(runs_with=list(runs), name=name)) is not None:
                figures.append(_ordered(experiment, label, name, *found, several=len(runs) > 1))
        if (found := _first(runs_with=list(runs), name="signatures")) is not None:
            figures.append(_map(experiment, label, *found, several=len(runs) > 1))
    return figures


def _first(runs_with: list[MethodRun], name: str) -> tuple[MethodRun, RecordedMatrix] | None:
    return next(((run, run.matrices[name]) for run in runs_with if name in run.matrices), None)


def _clusters_at(run: MethodRun, round: int) -> dict[int, int]:
    return next(cluster_of for _, cluster_of in snapshots(run.moves, [round]))


def _heading(label: str, what: str, matrix: RecordedMatrix, run: MethodRun, several: bool) -> str:
    seed = f", seed {run.seed}" if several else ""
    return f"{label}: {what} (round {matrix.round}{seed})"


def _ordered(
    experiment: ReportedExperiment, label: str, name: str, run: MethodRun, matrix: RecordedMatrix, several: bool
) -> PageFigure:
    cluster_of, group_of = _clusters_at(run, matrix.round), experiment.group_of
    clients = matrix.client_S.tolist()
    cluster_S = np.array([cluster_of.get(client, -1) for client in clients])
    group_S = np.array([group_of.get(client, -1) for client in clients])
    order = sorted(range(len(clients)), key=lambda place: (cluster_S[place], group_S[place], clients[place]))
    drawn = np.array(evenly(order, MOST_ROWS))
    shown = matrix.values[np.ix_(drawn, drawn)].astype(np.float32)
    rows = list(range(len(drawn)))
    heat = go.Heatmap(
        z=shown,
        x=rows,
        y=rows,
        colorscale="Cividis" if name == "similarity" else "Cividis_r",
        colorbar={"thickness": 12, "title": {"text": name, "side": "right"}},
        hovertemplate=f"{name} %{{z:.3g}}<extra></extra>",
    )
    has_groups = bool((group_S >= 0).any())
    strip = go.Heatmap(
        z=np.minimum(group_S[drawn], NAMED)[:, None].astype(np.int8),
        x=["group"],
        y=rows,
        xaxis="x2",
        zmin=-1.5,
        zmax=NAMED + 0.5,
        colorscale=[
            (edge / (NAMED + 2), colour)
            for place, colour in enumerate([GREY, *COLOURS, GREY])
            for edge in (place, place + 1)
        ],
        showscale=False,
        customdata=group_S[drawn][:, None],
        hovertemplate="true group %{customdata}<extra></extra>",
    )
    figure = canvas([heat, *([strip] if has_groups else [])])
    bare = {"showticklabels": False, "ticks": "", "showgrid": False, "showline": False}
    figure.update_layout(
        xaxis=bare | {"domain": [0.07 if has_groups else 0, 1]},
        xaxis2=bare | {"domain": [0, 0.05], "anchor": "y"},
        yaxis=bare | {"autorange": "reversed"},
    )
    _name_clusters(figure, cluster_S[drawn].tolist())
    caption = f"{label}: {_inside_and_between(matrix.values, cluster_S, name)}"
    if has_groups:
        caption += " The strip at the left has a colour for each true group: where it changes inside a block, the "
        caption += "cluster is mixed."
    if len(drawn) < len(clients):
        caption += f" {len(drawn)} of {len(clients)} clients are drawn, evenly."
    return PageFigure(
        _heading(label, f"{name} of the clients, ordered by cluster", matrix, run, several), caption, figure, 360
    )


def _name_clusters(figure: go.Figure, clusters: list[int]) -> None:
    """Lines between the blocks of clusters, and their numbers above."""
    starts = [place for place in range(len(clusters)) if place == 0 or clusters[place] != clusters[place - 1]]
    ends = [*starts[1:], len(clusters)]
    if len(starts) > 24:
        return
    for start in starts[1:]:
        for add in (figure.add_hline, figure.add_vline):
            add(start - 0.5, line={"color": "#FFFFFF", "width": 1.5})
    figure.update_layout(
        xaxis={
            "showticklabels": True,
            "side": "bottom",
            "tickvals": [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)],
            "ticktext": [str(clusters[start]) if clusters[start] >= 0 else "none" for start in starts],
            "title": {"text": "cluster"},
        }
    )


def _inside_and_between(values: np.ndarray, cluster_S: np.ndarray, name: str) -> str:
    """Means over the pairs of one cluster and over those of two."""
    pairs = ~np.eye(len(cluster_S), dtype=bool)
    same = (cluster_S[:, None] == cluster_S[None, :]) & (cluster_S >= 0)[:, None]
    inside, between = values[pairs & same], values[pairs & ~same]
    inside, between = inside[np.isfinite(inside)], between[np.isfinite(between)]
    words = [
        f"{number(float(part.mean()))} {where}"
        for part, where in ((inside, "within clusters"), (between, "between them"))
        if part.size
    ]
    return f"the mean {name} is {' and '.join(words)}." if words else f"{name} of {len(cluster_S)} clients."


def _map(
    experiment: ReportedExperiment, label: str, run: MethodRun, matrix: RecordedMatrix, several: bool
) -> PageFigure:
    cluster_of, group_of = _clusters_at(run, matrix.round), experiment.group_of
    total = len(matrix.client_S)
    chosen = np.array(evenly(np.argsort(matrix.client_S).tolist(), MOST_POINTS))
    clients = matrix.client_S[chosen].tolist()
    points_S2, share = _plane(matrix.values[chosen])
    drawn = range(len(clients))
    clusters = {place: cluster_of.get(clients[place], -1) for place in drawn}
    groups = {place: group_of.get(clients[place], -1) for place in drawn}
    sizes = {one: list(clusters.values()).count(one) for one in set(clusters.values()) if one >= 0}
    rank = ranks(sizes)
    marker_of = {group: MARKERS[place % len(MARKERS)] for place, group in enumerate(sorted(set(groups.values())))}
    traces = []
    for cluster in [*sorted(rank, key=rank.__getitem__), -1]:
        members = [place for place in drawn if clusters[place] == cluster]
        if not members:
            continue
        named = cluster >= 0 and rank[cluster] < NAMED
        traces.append(
            go.Scatter(
                x=points_S2[members, 0].astype(np.float32),
                y=points_S2[members, 1].astype(np.float32),
                mode="markers",
                marker={
                    "color": COLOURS[rank[cluster]] if named else GREY,
                    "symbol": [marker_of[groups[place]] for place in members],
                    "size": 9,
                    "line": {"width": 0.7, "color": "#FFFFFF"},
                },
                name=f"cluster {cluster}" if cluster >= 0 else "no cluster",
                customdata=[[clients[place], groups[place]] for place in members],
                hovertemplate="client %{customdata[0]}, group %{customdata[1]}",
                showlegend=named or cluster < 0,
            )
        )
    known = [group for group in marker_of if group >= 0]
    for group in known if len(known) <= NAMED else []:
        marker = {"symbol": marker_of[group], "color": "#5B6770", "size": 9}
        traces.append(go.Scatter(x=[None], y=[None], mode="markers", marker=marker, name=f"group {group}"))
    figure = canvas(traces, "first principal component", "second")
    caption = f"{label}: the plane holds {percent(share)} of the variance of {len(clients)} signatures"
    if len(known) > 1:
        caption += f"; {_purity(clusters, groups)}"
    caption += ". Colour: cluster" + ("; marker: true group." if known else ".")
    if len(drawn) < total:
        caption += f" {len(drawn)} of {total} clients are drawn."
    return PageFigure(_heading(label, "signatures of the clients", matrix, run, several), caption, figure, 320)


def _plane(values: np.ndarray) -> tuple[np.ndarray, float]:
    """The rows on their first two principal components, and these components' share of the variance."""
    centred = np.nan_to_num(values.astype(np.float64) - values.mean(0))
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    points = (left * singular)[:, :2]
    if points.shape[1] < 2:
        points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    total = float((singular**2).sum())
    return points, float((singular[:2] ** 2).sum()) / total if total else 1.0


def _purity(clusters: dict[int, int], groups: dict[int, int]) -> str:
    """How many clusters have members of one true group only."""
    members: dict[int, set[int]] = {}
    for place, cluster in clusters.items():
        if cluster >= 0:
            members.setdefault(cluster, set()).add(groups[place])
    pure = sum(len(found) == 1 for found in members.values())
    return f"{pure} of {len(members)} clusters have clients of one true group only"
