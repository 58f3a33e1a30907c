"""Figures of the matrices that methods report: similarities of clients, and a map of their signatures."""

import math
from dataclasses import dataclass

import numpy as np

from cfl_ray.report.clusters import MOST_BLOCKS, blocks, steps
from cfl_ray.report.drawing import COLOURS, GREY, MARKERS, NAMED, PageFigure, Plot, canvas, line_at, number, percent
from cfl_ray.report.report_data import MethodRun, PerClient, RecordedMatrix, ReportedExperiment, evenly

MOST_ROWS, MOST_POINTS, MOST_PAIRS = 150, 600, 2_000  # more are not drawn


@dataclass(frozen=True)
class _Reported:
    """A matrix of a method, as reported in its first run."""

    experiment: ReportedExperiment
    label: str
    run: MethodRun
    seed: str  # empty: the method has a single run
    name: str
    matrix: RecordedMatrix

    def heading(self, what: str) -> str:
        when = ", ".join(filter(None, [f"round {self.matrix.round}", self.seed]))
        return f"{self.label}: {self.name} of the clients{what} ({when})"

    def clusters_and_groups(self, client_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cluster and true group of these clients in the round of the matrix, (S,) each; below 0: none."""
        return self.run.history.clusters_at(self.matrix.round)[client_S], self.experiment.groups[client_S]


def matrix_figures(experiment: ReportedExperiment) -> list[PageFigure]:
    """Figures of each method's matrices: pairs of clients ordered by cluster, and maps of signatures."""
    figures = []
    for label, run, seed in experiment.first_runs(lambda run: run.matrices):
        for key, matrix in run.matrices.items():
            one = _Reported(experiment, label, run, seed, key.replace("_", " "), matrix)
            if not np.isfinite(matrix.values).any():
                continue
            if not matrix.of_pairs:
                figures.append(_map(one))
                continue
            figures.append(_ordered(one))
            heading = one.heading(", against their labels")
            if against := against_labels(heading, label, one.name, matrix, experiment.groups):
                figures.append(against)
    return figures


def _ordered(one: _Reported) -> PageFigure:
    matrix, name = one.matrix, one.name
    clients = matrix.client_S.tolist()
    cluster_S, group_S = one.clusters_and_groups(matrix.client_S)
    order = sorted(range(len(clients)), key=lambda place: (cluster_S[place], group_S[place], clients[place]))
    drawn = np.array(evenly(order, MOST_ROWS))
    shown = matrix.values[np.ix_(drawn, drawn)].astype(np.float32)
    rows = list(range(len(drawn)))
    heat = {
        "type": "heatmap",
        "z": shown,
        "x": rows,
        "y": rows,
        "colorscale": "Cividis",
        "reversescale": "distance" in name,
        "colorbar": {"thickness": 12, "title": {"text": name, "side": "right"}},
        "hovertemplate": f"{name} %{{z:.3g}}<extra></extra>",
    }
    strip = {
        "type": "heatmap",
        "z": np.minimum(group_S[drawn], NAMED)[:, None].astype(np.int8),
        "x": ["group"],
        "y": rows,
        "xaxis": "x2",
        "zmin": -1.5,
        "zmax": NAMED + 0.5,
        "colorscale": steps([GREY, *COLOURS, GREY]),
        "showscale": False,
        "customdata": group_S[drawn][:, None],
        "hovertemplate": "true group %{customdata}<extra></extra>",
    }
    has_groups = bool((group_S >= 0).any())
    bare = {"showticklabels": False, "ticks": "", "showgrid": False, "showline": False}
    axis, shapes = _cluster_axis(cluster_S[drawn].tolist())
    figure = canvas(
        [heat, *([strip] if has_groups else [])],
        "cluster",
        xaxis=bare | {"domain": [0.07 if has_groups else 0, 1]} | axis,
        yaxis=bare | {"autorange": "reversed"},
        shapes=shapes,
        xaxis2=bare | {"domain": [0, 0.05], "anchor": "y"} if has_groups else None,
    )
    caption = f"{one.label}: {_inside_and_between(matrix.values, cluster_S, name)}"
    if has_groups:
        caption += " The strip at the left has a colour for each true group: where it changes inside a block, the "
        caption += "cluster is mixed."
        caption += one.experiment.when_grouped
    if len(drawn) < len(clients):
        caption += f" {len(drawn)} of {len(clients)} clients are drawn, evenly."
    return PageFigure(one.heading(", ordered by cluster"), caption, figure, 360)


def _cluster_axis(clusters: list[int]) -> tuple[Plot, list[Plot]]:
    """Keys of an axis with the clusters' numbers at their blocks, and lines between the blocks."""
    ranges = blocks(clusters)
    if len(ranges) > MOST_BLOCKS:
        return {}, []
    axis = {
        "showticklabels": True,
        "tickvals": [(start + end - 1) / 2 for start, end in ranges],
        "ticktext": [str(clusters[start]) if clusters[start] >= 0 else "none" for start, _ in ranges],
    }
    white = {"color": "#FFFFFF", "width": 1.5}
    return axis, [line_at(start - 0.5, horizontal, white) for start, _ in ranges[1:] for horizontal in (True, False)]


def _inside_and_between(values: np.ndarray, cluster_S: np.ndarray, name: str) -> str:
    """A sentence with the mean over pairs in the same cluster and the mean over pairs in different clusters."""
    pairs = ~np.eye(len(cluster_S), dtype=bool)
    same = (cluster_S[:, None] == cluster_S[None, :]) & (cluster_S >= 0)[:, None]
    inside, between = values[pairs & same], values[pairs & ~same]
    inside, between = inside[np.isfinite(inside)], between[np.isfinite(between)]
    means = ((inside, "within clusters"), (between, "between them"))
    words = [f"{number(float(chosen.mean()))} {place}" for chosen, place in means if chosen.size]
    return f"the mean {name} is {' and '.join(words)}." if words else f"{name} of {len(cluster_S)} clients."


def _map(one: _Reported) -> PageFigure:
    matrix = one.matrix
    defined = np.isfinite(matrix.values).any(1)
    order = np.argsort(matrix.client_S)
    chosen = np.array(evenly(order[defined[order]], MOST_POINTS), int)
    points_S2, share = _plane(matrix.values[chosen])
    client_S = matrix.client_S[chosen]
    cluster_S, group_S = one.clusters_and_groups(client_S)
    marker_of = {group: MARKERS[place % len(MARKERS)] for place, group in enumerate(sorted({*group_S.tolist()}))}
    number_K, size_K = np.unique(cluster_S[cluster_S >= 0], return_counts=True)
    largest_first = number_K[np.argsort(-size_K, kind="stable")].tolist()
    traces: list[Plot] = []
    keys: list[Plot] = []
    for rank, cluster in enumerate([*largest_first, -1]):
        members = np.flatnonzero(cluster_S == cluster)
        if not len(members):
            continue
        named = cluster >= 0 and rank < NAMED
        colour = COLOURS[rank] if named else GREY
        name_of_cluster = f"cluster {cluster}" if cluster >= 0 else "no cluster"
        symbols = [marker_of[group] for group in group_S[members].tolist()]
        labels = np.stack([client_S[members], group_S[members]], 1)
        traces.append(_points(points_S2[members], colour, symbols, labels, name_of_cluster))
        if named or cluster < 0:
            keys.append(_key(name_of_cluster, {"color": colour, "symbol": "circle"}))
    known = [group for group in marker_of if group >= 0]
    for group in known if len(known) <= NAMED else []:
        keys.append(_key(f"group {group}", {"color": "#5B6770", "symbol": marker_of[group]}))
    figure = canvas([*traces, *keys], "first principal component", "second")
    caption = (
        f"{one.label}: the plane holds {percent(share)} of the variance of the recorded {one.name} of {len(chosen)} "
        "clients"
    )
    if len(known) > 1:
        pure = sum(len({*group_S[cluster_S == cluster].tolist()}) == 1 for cluster in largest_first)
        caption += f"; {pure} of {len(largest_first)} clusters have clients of one true group only"
    caption += ". Colour: cluster" + ("; marker: true group." if known else ".")
    caption += one.experiment.when_grouped
    if len(chosen) < len(defined):
        caption += f" {len(chosen)} of {len(defined)} clients are drawn."
    if undefined := int((~defined).sum()):
        caption += f" Of {undefined} the {one.name} are not defined."
    return PageFigure(one.heading(""), caption, figure, 320)


def _points(points_S2: np.ndarray, colour: str, symbols: list[str], labels_S2: np.ndarray, cluster: str) -> Plot:
    """The clients of a cluster in the plane. labels_S2: id and true group of each, for hovering."""
    return {
        "type": "scatter",
        "x": points_S2[:, 0],
        "y": points_S2[:, 1],
        "mode": "markers",
        "marker": {"color": colour, "symbol": symbols, "size": 9, "line": {"width": 0.7, "color": "#FFFFFF"}},
        "customdata": labels_S2,
        "hovertemplate": f"client %{{customdata[0]}}, group %{{customdata[1]}}<extra>{cluster}</extra>",
        "showlegend": False,
    }


def _key(name: str, marker: Plot) -> Plot:
    """An entry of the legend."""
    point = {"type": "scatter", "x": [None], "y": [None], "mode": "markers"}
    return point | {"name": name, "marker": marker | {"size": 9}}


def _plane(values: np.ndarray) -> tuple[np.ndarray, float]:
    """Coordinates (S, 2) of the rows on the first two principal components, and their share of the variance (0..1)."""
    known = np.isfinite(values)
    means = np.where(known, values, 0.0).sum(0, dtype=np.float64) / np.maximum(known.sum(0), 1)
    centred = np.where(known, values - means, 0.0)  # an undefined value is replaced by the mean of its column
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    points = np.pad(left * singular, ((0, 0), (0, 2)))[:, :2]  # there may be a single component
    total = float((singular**2).sum())
    return points, float((singular[:2] ** 2).sum()) / total if total else 1.0


# ---- against the similarity of the clients' labels


_GROUPS = (  # (1: both clients have the same true group, 0: different groups, -1: not known; name, colour, marker)
    (0, "different true groups", COLOURS[1], "x-thin-open"),
    (1, "same true group", COLOURS[0], "circle"),
    (-1, "true group not known", GREY, "circle"),
)


def against_labels(title: str, label: str, name: str, matrix: RecordedMatrix, groups: PerClient) -> PageFigure | None:
    """A point for each pair of clients: the divergence of their labels against their value in the matrix.

    None if label counts are not recorded, or if the divergence or the value is equal for all pairs.
    """
    import pandas as pd  # other figures do not need it

    if matrix.label_counts_SC is None:
        return None
    known = np.flatnonzero(np.isfinite(matrix.label_counts_SC).all(1))
    i_E, j_E = np.triu_indices(len(known), 1)
    divergence_E = divergences(matrix.label_counts_SC[known])
    values = matrix.values[np.ix_(known, known)].astype(np.float64)
    value_E = (values[i_E, j_E] + values[j_E, i_E]) / 2
    finite = np.flatnonzero(np.isfinite(value_E))
    pairs = pd.DataFrame({"divergence": divergence_E[finite], "value": value_E[finite]})
    correlation = float(pairs.corr("spearman").to_numpy()[0, 1])
    if math.isnan(correlation):
        return None
    order = finite[np.argsort(divergence_E[finite], kind="stable")]
    drawn = np.array(evenly(order.tolist(), MOST_PAIRS))
    client_E2 = matrix.client_S[known][np.stack([i_E[drawn], j_E[drawn]], 1)]
    figure = canvas(
        _traces(name, client_E2, divergence_E[drawn], value_E[drawn], groups),
        "divergence of labels (bits)",
        name,
    )
    caption = (
        f"{label}: Spearman's rank correlation of the {name} and the divergence of labels is {number(correlation)} "
        f"over {len(pairs):,} pairs of {len(known):,} clients. The Jensen-Shannon divergence is 0 for clients with "
        "the same shares of labels, and 1 for those without a common label."
    )
    if len(drawn) < len(pairs):
        caption += f" {len(drawn):,} of {len(pairs):,} pairs are drawn, evenly in the order of divergence."
    return PageFigure(title, caption, figure, 320)


def divergences(counts_SC: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergences of all pairs of rows of counts, in bits (0..1), condensed as in SciPy.

    They are symmetric, bounded, and defined even if a client lacks a class. The Kullback-Leibler divergence between
    clients with different classes is infinite, or depends on how the label counts are smoothed.
    """
    import scipy

    if len(counts_SC) < 2:
        return np.zeros(0)
    share_SC = counts_SC.astype(np.float64) / counts_SC.sum(1, keepdims=True)
    root_nats = scipy.spatial.distance.pdist(share_SC, "jensenshannon")  # square root of the divergence, in nats
    return np.clip(np.nan_to_num(root_nats) ** 2 / math.log(2), 0, 1)  # NaN if rounding makes the divergence negative


def _traces(
    name: str, client_E2: np.ndarray, divergence_E: np.ndarray, value_E: np.ndarray, groups: PerClient
) -> list[Plot]:
    """The points of the pairs, coloured by whether the two clients have the same true group."""
    group_E2 = groups[client_E2.reshape(-1)].reshape(-1, 2)
    same_E = np.where((group_E2 >= 0).all(1), group_E2[:, 0] == group_E2[:, 1], -1)
    has_groups = bool((same_E >= 0).any())
    traces = []
    for same, group, colour, marker in _GROUPS:
        here = np.flatnonzero(same_E == same)
        if len(here):
            traces.append(
                {
                    "type": "scatter",
                    "x": divergence_E[here],
                    "y": value_E[here],
                    "mode": "markers",
                    "name": group,
                    "showlegend": has_groups,
                    "marker": {"color": colour, "symbol": marker, "size": 5, "opacity": 0.6},
                    "customdata": client_E2[here],
                    "hovertemplate": "clients %{customdata[0]} and %{customdata[1]}: divergence %{x:.3f}, "
                    + f"{name} %{{y:.3g}}<extra></extra>",
                }
            )
    return traces
