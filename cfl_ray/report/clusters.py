"""Figures of clusters and clients: sizes, the cluster of each client, mixture weights, and the spread of scores."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cfl_ray.errors import counted
from cfl_ray.report.drawing import COLOURS, GREY, NAMED, PageFigure, Plot, canvas, line_at, look, number, percent, safe
from cfl_ray.report.report_data import MethodRun, ReportedExperiment, evenly
from cfl_ray.tracking.metric_titles import title_of

MOST_ROUNDS, MOST_CLIENTS = 120, 150  # more are not drawn
MOST_MIXED, MOST_MIXED_ROUNDS = 60, 4  # clients and rounds whose mixture weights are drawn, at most
MOST_BLOCKS = 24  # largest number of groups or clusters that the axis names
NO_CLUSTER = "#EEEEEE"  # colour of a client in rounds without a cluster
_ROW = 1.25  # distance between the bars of two rounds; the bars have height 1
WHISKERS = (5, 25, 50, 75, 95)  # percentiles


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
        verb = "is" if experiment.num_groups == 1 else "are"
        caption += f", and there {verb} {counted(experiment.num_groups, 'true group')}"
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
    rank_M = rank_K[next(history.rows(rounds[-1:]))]
    group_M = experiment.groups[history.client_M]
    drawn = np.array(evenly(np.lexsort([rank_M, group_M]), MOST_CLIENTS))  # equal ranks are ordered by id
    colour_K = np.minimum(rank_K, NAMED)
    colour_K[-1] = -1
    columns = [colour_K[row_M[drawn]] for row_M in history.rows(rounds)]
    clients, groups, count = history.client_M[drawn], group_M[drawn], len(history.client_M)
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
    changed_M, pairs, last = np.zeros(len(history.client_M), bool), Counter[tuple[int, int]](), 0
    for round, client_R, before_R, after_R in history.changes():
        changed_M[np.searchsorted(history.client_M, client_R)] = True
        _, first_U, count_U = np.unique(
            before_R.astype(np.int64) << 32 | after_R, return_index=True, return_counts=True
        )
        for place in np.argsort(first_U):  # among equally frequent pairs, the first pair is named
            first = first_U[place]
            pairs[int(before_R[first]), int(after_R[first])] += int(count_U[place])
        last = round
    if not pairs:
        return f"{label}: none of {len(changed_M)} clients leaves its first cluster."
    (source, target), times = pairs.most_common(1)[0]
    return (
        f"{label}: {changed_M.sum()} of {len(changed_M)} clients go from one cluster to another, "
        f"{pairs.total()} times in all, most often from {source} to {target} ({times} times), and last in round {last}."
    )


def mixture_figures(experiment: ReportedExperiment) -> list[PageFigure]:
    """Stacked bars of the recorded mixture weights of each method, for the first seed with such weights."""
    return [_bars(experiment, *first) for first in experiment.first_runs(lambda run: run.mixtures)]


def _bars(experiment: ReportedExperiment, label: str, run: MethodRun, seed: str) -> PageFigure:
    """A row of bars for each drawn round, the last round on top; a bar for each client, a colour for each model."""
    shown = [run.mixtures[place] for place in evenly(range(len(run.mixtures)), MOST_MIXED_ROUNDS)]
    known_M = np.unique(np.concatenate([client_S for _, client_S, _ in shown]))
    known_M = known_M[np.argsort(experiment.groups[known_M], kind="stable")]
    clients = evenly(known_M, MOST_MIXED)
    place_of = {client: place for place, client in enumerate(clients)}
    traces: list[Plot] = []
    for k in range(max(weight_SK.shape[1] for *_, weight_SK in shown)):
        x, height, base, text = [], [], [], []
        for row, (round, client_S, weight_SK) in enumerate(shown):
            for client, weight_K in zip(client_S.tolist(), weight_SK, strict=True):
                if client in place_of and k < len(weight_K):
                    x.append(place_of[client])
                    height.append(float(weight_K[k]))
                    base.append(row * _ROW + float(weight_K[:k].sum()))
                    text.append(f"client {client}, round {round}: model {k} {weight_K[k]:.3f}")
        colour = {"color": COLOURS[k] if k < NAMED else GREY}
        traces.append(
            {"type": "bar", "x": x, "y": height, "base": base, "name": f"model {k}", "marker": colour}
            | {"hovertext": text, "hoverinfo": "text", "width": 0.9}
        )
    rounds = {"tickvals": [row * _ROW + 0.5 for row in range(len(shown))], "showgrid": False}
    figure = canvas(
        traces,
        "client",
        xaxis={"tickvals": list(range(len(clients))), "ticktext": list(map(str, clients)), "showgrid": False},
        yaxis=rounds | {"ticktext": [f"round {round}" for round, *_ in shown]},
    )
    figure["layout"] |= {"barmode": "overlay", "showlegend": True}
    last, _, last_SK = shown[-1]
    caption = (
        f"{label}: a bar for each client, divided by the weights with which it mixes the models. In round {last} the "
        f"mean of the largest weights is {np.nanmean(last_SK.max(1)):.2f}."
    )
    if experiment.groups:
        caption += " Clients of a true group stand side by side."
    if len(clients) < len(known_M):
        caption += f" {len(clients)} of {len(known_M)} clients are drawn, evenly."
    which = f" ({seed})" if seed else ""
    return PageFigure(f"{label}: mixture weights of the clients{which}", caption, figure, 120 + 90 * len(shown))


def client_figures(experiment: ReportedExperiment) -> list[PageFigure]:
    """A figure with a box for each method: P-server of the clients of all seeds in the last evaluated round."""
    scores_of: dict[str, np.ndarray] = {}
    for label, runs in experiment.methods.items():
        arrays = [run.scores[experiment.score] for run in runs if experiment.score in run.scores]
        values = np.concatenate(arrays).astype(float) if arrays else np.zeros(0)
        if np.isfinite(values).any():
            scores_of[label] = values[np.isfinite(values)]
    if not scores_of:
        return []
    traces = []
    places = list(experiment.methods)
    for label, values in reversed(scores_of.items()):  # the first method is at the top
        low, q1, median, q3, high = np.percentile(values, WHISKERS)
        style = look(places.index(label))
        traces.append(
            {
                "type": "box",
                "y": [safe(label)],
                "q1": [float(q1)],
                "median": [float(median)],
                "q3": [float(q3)],
                "lowerfence": [float(low)],
                "upperfence": [float(high)],
                "mean": [float(values.mean())],
                "orientation": "h",
                "line": {"color": style.colour, "width": 1.6},
                "fillcolor": "rgba(0,0,0,0.04)",
                "width": 0.6,
                "name": safe(label),
                "showlegend": False,
            }
        )
    score = title_of(experiment.score)
    figure = canvas(traces, score.as_recorded, yaxis={"showgrid": False})
    worst = 10 if experiment.higher_is_better else 90
    tail = {label: float(np.percentile(values, worst)) for label, values in scores_of.items()}
    order = sorted(tail, key=tail.__getitem__, reverse=experiment.higher_is_better)
    side = "at most" if experiment.higher_is_better else "at least"
    caption = f"The worst tenth of the clients has {side} {number(tail[order[0]])} with {order[0]}"
    if len(order) > 1:
        caption += f" and {side} {number(tail[order[-1]])} with {order[-1]}"
    seeds = f" of {len(experiment.seeds)} seeds together" if len(experiment.seeds) > 1 else ""
    caption += (
        f". Boxes: the middle half of the clients{seeds}, with median and dashed mean; lines reach from the 5th to the "
        "95th percentile."
    )
    title = f"{score.text}, P-server, over the clients in the last evaluation"
    return [PageFigure(title, caption, figure, 80 + 32 * len(scores_of))]
