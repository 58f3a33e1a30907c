r"""Tables for papers in LaTeX: mean $\pm$ standard deviation, the best in bold, those not worse underlined.

They need the package booktabs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cfl_ray.results.comparison import ClientScores, RunMetrics, chosen_metrics, mean_and_spread, tests_of
from cfl_ray.results.significance import CORRECTIONS, LEVEL, TESTS, PairedTest

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    letter: rf"\{letter}" for letter in "&%$#_{}"
}
# neither more nor less of them is better, so no value is the best
_UNRANKED = re.compile(
    "num_clusters|largest_cluster_share|clients_.*|cohort_size|trained_share|staleness|clip_norm|round|"
    "rounds_to_stable_.*"
)


@dataclass(frozen=True)
class _Column:
    """A column of numbers: a metric of an experiment."""

    title: str
    metric: str
    experiment: str


def latex_table(
    run_metrics: RunMetrics,
    metrics: Sequence[str] = (),
    test: str = "ttest",
    correction: str = "none",
    scores: ClientScores | None = None,
) -> str:
    """The methods of some runs as a table of LaTeX, with a caption that names the test, its correction and n.

    A row for each method; a column for each metric, or, for a single metric of several experiments, for each of these;
    several metrics of several experiments are blocks of rows. metrics: those asked for, in this order; empty: as
    `compare_runs`. test, correction: keys of `TESTS` and `CORRECTIONS`.
    """
    shown = list(dict.fromkeys(metrics)) if metrics else chosen_metrics(run_metrics, ())
    chosen_metrics(run_metrics, shown)  # raises ConfigError for an unknown one
    experiments = list(dict.fromkeys(experiment for experiment, _ in run_metrics))
    tested = {metric: tests_of(run_metrics, metric, test, correction, scores) for metric in shown}
    if len(shown) == 1:
        titles = experiments if len(experiments) > 1 else shown
        blocks = [[_Column(title, shown[0], name) for title, name in zip(titles, experiments, strict=True)]]
    else:
        blocks = [[_Column(metric, metric, name) for metric in shown] for name in experiments]
    titles = [escaped(column.title) for column in blocks[0]]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_caption(run_metrics, shown, tested, test, correction)}}}",
        rf"\begin{{tabular}}{{l{'r' * len(titles)}}}",
        r"\toprule",
        " & ".join(["method", *titles]) + r" \\",
    ]
    for columns in blocks:
        lines.append(r"\midrule")
        if len(blocks) > 1:
            lines.append(rf"\multicolumn{{{len(titles) + 1}}}{{l}}{{{escaped(columns[0].experiment)}}} \\")
        names = {column.experiment for column in columns}
        for method in dict.fromkeys(method for experiment, method in run_metrics if experiment in names):
            cells = [_cell(run_metrics, (column.experiment, method), column.metric, tested) for column in columns]
            lines.append(" & ".join([escaped(method), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def escaped(text: str) -> str:
    """A text in which LaTeX's special characters are escaped."""
    return "".join(_SPECIAL.get(letter, letter) for letter in " ".join(str(text).split()))


def _cell(
    run_metrics: RunMetrics,
    key: tuple[str, str],
    metric: str,
    tested: Mapping[str, Mapping[tuple[str, str], PairedTest]],
) -> str:
    """Mean and standard deviation of a method; empty if it was not run, or lacks the metric with a seed."""
    values = _values(run_metrics, key, metric)
    if not len(values) or np.isnan(values).any():
        return ""
    with np.errstate(invalid="ignore"):  # infinite values have no spread
        mean, std = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan
    text = mean_and_spread(mean, std, metric, r"{,}").replace("inf", r"\infty")
    number, _, spread = text.partition(" ± ")
    test, bests = tested[metric][key], [other for other, one in tested[metric].items() if one.is_best]
    best = next((_values(run_metrics, other, metric).mean() for other in bests if other[0] == key[0]), math.nan)
    if _UNRANKED.fullmatch(metric) is None and _has_rivals(run_metrics, key[0]):
        if mean == best:
            number = rf"\mathbf{{{number}}}"
        elif test.is_alike:
            number = rf"\underline{{{number}}}"
    return f"${number}$" if not spread else rf"${number} \pm {spread}$"


def _has_rivals(run_metrics: RunMetrics, experiment: str) -> bool:
    return sum(name == experiment for name, _ in run_metrics) > 1


def _values(run_metrics: RunMetrics, key: tuple[str, str], metric: str) -> np.ndarray:
    return np.array([of_seed.get(metric, np.nan) for of_seed in run_metrics.get(key, {}).values()])


def _caption(
    run_metrics: RunMetrics,
    metrics: Sequence[str],
    tested: Mapping[str, Mapping[tuple[str, str], PairedTest]],
    test: str,
    correction: str,
) -> str:
    """Returns the meaning of the numbers and marks: seeds, test, correction and the number of pairs."""
    seeds = sorted({len(of_seeds) for of_seeds in run_metrics.values()})
    count = _range(seeds)
    what = escaped(metrics[0]) if len(metrics) == 1 else "Results"
    text = f"{what}: mean $\\pm$ standard deviation over {count} seeds" if seeds[-1] > 1 else f"{what} of one seed"
    if not any(_has_rivals(run_metrics, experiment) for experiment, _ in run_metrics):
        return f"{text}."
    text += "; the best of each column in bold" if len(metrics) == 1 else "; the best of each metric in bold"
    pairs = sorted({one.pairs for of_metric in tested.values() for one in of_metric.values() if not math.isnan(one.p)})
    if not pairs:
        needs = "three seeds" if test == "ttest" else "the metrics of single clients"
        return f"{text}. No test of differences, which needs {needs}."
    unit = "seeds" if test == "ttest" else "clients, all seeds together"
    untested = [escaped(name) for name in metrics if all(math.isnan(one.p) for one in tested[name].values())]
    without = f", without {', '.join(untested)}" if untested else ""
    return (
        f"{text}, underlined if not significantly worse than the best ({TESTS[test]}, $n = {_range(pairs)}$ {unit}, "
        f"level {LEVEL:g}, {CORRECTIONS[correction]}{without})."
    )


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]}--{counts[-1]}"
