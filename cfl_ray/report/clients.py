"""A figure of how the score is spread over the clients, for each method."""

import numpy as np

from cfl_ray.report.drawing import PageFigure, canvas, look, number, safe
from cfl_ray.report.report_data import ReportedExperiment

WHISKERS = (5, 25, 50, 75, 95)  # percentiles


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
    words = experiment.score.replace("_", " ")
    figure = canvas(traces, f"{words} of a client", yaxis={"showgrid": False})
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
    title = f"{words.capitalize()}, P-server, over the clients in the last evaluation"
    return [PageFigure(title, caption, figure, 80 + 32 * len(scores_of))]
