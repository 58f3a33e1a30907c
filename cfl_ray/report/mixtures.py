"""Figures of mixture weights: the share of each model for each client, over the rounds."""

import numpy as np

from cfl_ray.report.drawing import COLOURS, GREY, NAMED, PageFigure, Plot, canvas
from cfl_ray.report.report_data import MethodRun, ReportedExperiment
from cfl_ray.report.snapshots import evenly

MOST_CLIENTS, MOST_ROUNDS = 60, 4  # more are not drawn
_ROW = 1.25  # distance between the bars of two rounds; the bars have height 1


def mixture_figures(experiment: ReportedExperiment) -> list[PageFigure]:
    """Stacked bars of the recorded mixture weights of each method, for the first seed with such weights."""
    return [_bars(experiment, *first) for first in experiment.first_runs(lambda run: run.mixtures)]


def _bars(experiment: ReportedExperiment, label: str, run: MethodRun, seed: str) -> PageFigure:
    """A row of bars for each drawn round, the last round on top; a bar for each client, a colour for each model."""
    shown = [run.mixtures[place] for place in evenly(range(len(run.mixtures)), MOST_ROUNDS)]
    known_C = np.unique(np.concatenate([client_S for _, client_S, _ in shown]))
    known_C = known_C[np.argsort(experiment.groups[known_C], kind="stable")]
    clients = evenly(known_C, MOST_CLIENTS)
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
    if len(clients) < len(known_C):
        caption += f" {len(clients)} of {len(known_C)} clients are drawn, evenly."
    which = f" ({seed})" if seed else ""
    return PageFigure(f"{label}: mixture weights of the clients{which}", caption, figure, 120 + 90 * len(shown))
