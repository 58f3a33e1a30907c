"""Figures for papers, as PDF or SVG in the width of a column: curves of a metric, and the clusters of the clients.

The same records give the same bytes: files hold no dates and no random names.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.report.clusters import blocks
from cfl_ray.report.drawing import COLOURS, GREY
from cfl_ray.report.figures import MOST, X_AXES, XAxis, line_style, whole_ticks
from cfl_ray.report.report_data import MethodRun, ReportedExperiment
from cfl_ray.system.files import SHARED, drafted
from cfl_ray.tracking.metric_titles import title_of
from cfl_ray.tracking.record import mean_of_runs

FORMATS = ("pdf", "svg")
_LOOK: Any = {
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,  # TrueType: some publishers refuse Type 3
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "cfl_ray",  # names of clip paths are random otherwise
}
_NO_DATE = {"pdf": {"CreationDate": None, "Creator": None, "Producer": None}, "svg": {"Date": None}}
_ASPECT, _LEGEND_INCHES, _LEGEND_COLUMNS = 0.68, 0.16, 3
_ROW_INCHES, _LEAST_INCHES, _MOST_INCHES = 0.12, 1.0, 3.0  # of the matrix
_MOST_CLUSTERS_NAMED = 24


def write_curves(
    folder: Path, experiment: ReportedExperiment, metric: str, x: str, width: float, style: str, prefix: str = ""
) -> Path:
    """Draws a metric of every method, the mean over seeds with a band of one standard deviation; returns the file.

    x: a key of X_AXES. width: of the figure in inches. style: an element of FORMATS. prefix: of the name of the file.
    Raises ConfigError if no record has the metric.
    """
    curves = {label: _curve(runs, metric, X_AXES[x]) for label, runs in experiment.methods.items()}
    curves = {label: curve for label, curve in curves.items() if len(curve[0])}
    if not curves:
        records = [record for runs in experiment.methods.values() for run in runs for record in run.records]
        known = dict.fromkeys(name for record in records for name in record.metrics)
        if metric in known:
            raise ConfigError(f"{experiment.name}: {metric} has no values by {x}; name another axis with --x")
        raise ConfigError(f"{experiment.name}: no run has the metric {metric!r}{did_you_mean(metric, known)}")
    with rc_context(_LOOK):
        rows = math.ceil(len(curves) / _LEGEND_COLUMNS)
        figure = Figure(figsize=(width, width * _ASPECT + rows * _LEGEND_INCHES), layout="constrained")
        axes = figure.subplots()
        for place, (label, (x_E, mean_E, std_E)) in enumerate(curves.items()):
            colour, dashes = line_style(place)
            marker = "o" if len(x_E) == 1 else ""
            axes.plot(x_E, mean_E, color=colour, linestyle=dashes, marker=marker, markersize=3, label=label)
            if np.isfinite(std_E).any():
                axes.fill_between(x_E, mean_E - std_E, mean_E + std_E, color=colour, alpha=0.18, linewidth=0)
        axes.set_xlabel(title_of(x).as_recorded)
        axes.set_ylabel(title_of(metric).as_recorded)
        axes.margins(x=0.01)
        axes.grid(axis="y", color="0.9", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        if x == "round":
            whole_ticks(axes.xaxis)
        figure.legend(loc="outside upper center", ncols=min(_LEGEND_COLUMNS, len(curves)), frameon=False)
        return _saved(figure, folder, f"{prefix}{metric}_by_{x}", style)


def write_matrix(
    folder: Path,
    experiment: ReportedExperiment,
    label: str,
    width: float,
    style: str,
    round: int | None = None,
    prefix: str = "",
) -> Path:
    """Draws which client (column) is in which cluster (row) after a round, for the method's first seed.

    Clients are in the order of their true groups, with a line between groups, and then of their clusters. For a method
    with mixtures, grey shades are the weights. round: None: the last one. Raises ConfigError for a method without
    clusters, and for a round before the first.
    """
    if label not in experiment.methods:
        known = experiment.methods
        raise ConfigError(f"{experiment.name} has no method {label!r}{did_you_mean(label, known)}")
    run = next((run for run in experiment.methods[label] if run.is_clustered or run.mixtures), None)
    if run is None:
        raise ConfigError(f"{label} has no clusters; name another method with --method")
    client_M, weight_KM, clusters = _membership(run, round)
    group_M = experiment.groups[client_M]
    order = np.lexsort([client_M, weight_KM.argmax(0), group_M])
    group_M, weight_KM = group_M[order], weight_KM[:, order]
    with rc_context(_LOOK):
        height = min(max(_ROW_INCHES * len(clusters), _LEAST_INCHES), _MOST_INCHES) + 0.45
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.imshow(weight_KM, cmap=_shades(), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        if len(clusters) <= _MOST_CLUSTERS_NAMED:
            axes.set_yticks(range(len(clusters)), [str(cluster) for cluster in clusters])
        axes.set_ylabel("cluster")
        axes.set_xlabel(_name_groups(axes, group_M.tolist()))
        return _saved(figure, folder, f"{prefix}clusters_{label}", style)


def _curve(runs: Sequence[MethodRun], metric: str, x_of: XAxis) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, standard deviation) over the rounds that all seeds have; the latter is NaN for a single seed."""
    means = [record for record in mean_of_runs([run.records for run in runs]) if metric in record.metrics]
    rounds = {record.round for record in means}
    by_seed = [
        {record.round: record.metrics[metric] for record in run.records if record.round in rounds} for run in runs
    ]
    value_SE = np.array([[of_seed[record.round] for record in means] for of_seed in by_seed]).reshape(len(runs), -1)
    x_E, mean_E = np.array([x_of(record) for record in means]), value_SE.mean(0)
    std_E = value_SE.std(0, ddof=1) if len(runs) > 1 else np.full(len(x_E), np.nan)
    drawn_E = (np.abs(x_E) < MOST) & (np.abs(mean_E) < MOST)
    return x_E[drawn_E], mean_E[drawn_E], std_E[drawn_E]


def _membership(run: MethodRun, round: int | None) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(ids of clients (M,), membership or mixture weights (K, M), numbers of the clusters)."""
    last = run.records[-1].round
    if round is not None and not 1 <= round <= last:
        raise ConfigError(f"--round {round}: the run has the rounds 1 .. {last}")
    if run.mixtures:
        known = [mixture for mixture in run.mixtures if mixture[0] <= (round or last)]
        if not known:
            raise ConfigError(f"--round {round}: mixture weights are recorded from round {run.mixtures[0][0]} on")
        _, client_M, weight_MK = known[-1]
        return np.asarray(client_M), np.nan_to_num(np.asarray(weight_MK, float)).T, list(range(weight_MK.shape[1]))
    history = run.history
    row_M = next(history.rows([round or last])).copy()
    count_K = np.bincount(row_M[row_M >= 0], minlength=len(history.cluster_K))
    present = np.flatnonzero(count_K)  # former clusters have no members
    if not len(present):
        raise ConfigError(f"no client is in a cluster after round {round or last}; name a later one with --round")
    return history.client_M, (row_M == present[:, None]).astype(float), history.cluster_K[present].tolist()


def _shades() -> ListedColormap:
    """White for weight 0, the first colour for weight 1."""
    colour = np.array([int(COLOURS[0][at : at + 2], 16) / 255 for at in (1, 3, 5)])
    share = np.linspace(0, 1, 256)[:, None]
    return ListedColormap(1 - share * (1 - colour))


def _name_groups(axes: Axes, groups: Sequence[int]) -> str:
    """Draws lines between the true groups and names them; returns the title of the axis."""
    rows = blocks(groups)
    if len(rows) < 2 or len(rows) > _MOST_CLUSTERS_NAMED:
        axes.set_xticks([])
        return f"{len(groups)} clients"
    for start, _ in rows[1:]:
        axes.axvline(start - 0.5, color=GREY, linewidth=0.6)
    names = [str(groups[start]) if groups[start] >= 0 else "none" for start, _ in rows]
    axes.set_xticks([(start + end - 1) / 2 for start, end in rows], names)
    return f"{len(groups)} clients by true group"


def _saved(figure: Figure, folder: Path, name: str, style: str) -> Path:
    path = folder / f"{re.sub(r'[^A-Za-z0-9_.=+-]+', '-', name)}.{style}"
    metadata: dict[str, Any] = _NO_DATE[style]
    with drafted(path, SHARED) as draft:
        figure.savefig(draft, format=style, metadata=metadata)
    return path
