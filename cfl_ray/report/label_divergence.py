"""A figure that compares a recorded matrix (clients, clients) with the similarity of the clients' labels.

Labels are compared by the Jensen-Shannon divergence, which is symmetric, bounded, and defined even if a client lacks a
class. The Kullback-Leibler divergence between clients with different classes is infinite, or depends on how the label
counts are smoothed.
"""

import math

import numpy as np

from cfl_ray.report.drawing import COLOURS, GREY, PageFigure, Plot, canvas, number
from cfl_ray.report.snapshots import PerClient, RecordedMatrix, evenly

MOST_PAIRS = 2_000  # more pairs are not drawn
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
        "Jensen-Shannon divergence of the clients' labels (bits)",
        name,
    )
    caption = (
        f"{label}: Spearman's rank correlation of the {name} and the divergence of labels is {number(correlation)} "
        f"over {len(pairs):,} pairs of {len(known):,} clients. The divergence is 0 for clients with the same shares of "
        "labels, and 1 for those without a common label."
    )
    if len(drawn) < len(pairs):
        caption += f" {len(drawn):,} of {len(pairs):,} pairs are drawn, evenly in the order of divergence."
    return PageFigure(title, caption, figure, 320)


def divergences(counts_SC: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergences of all pairs of rows of counts, in bits (0..1), condensed as in SciPy."""
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
