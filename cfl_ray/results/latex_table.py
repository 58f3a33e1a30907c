r"""Tables for papers in LaTeX: mean $\pm$ standard deviation, the best in bold, those not worse underlined.

They need the package booktabs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cfl_ray.report.drawing import p_in_words
from cfl_ray.report.report_data import mean_and_std
from cfl_ray.results.client_scores import ClientScores
from cfl_ray.results.comparison import (
    RunMetrics,
    chosen_metrics,
    is_dense,
    is_less_better,
    mean_and_spread,
    metrics_of,
    tests_of,
)
from cfl_ray.results.significance import (
    CORRECTIONS,
    LEVEL,
    NEEDED,
    TESTS,
    USUAL_TEST,
    ChosenTest,
    PairedTest,
    pairs_in_words,
)
from cfl_ray.tracking.metric_titles import PERCENT, title_of

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    letter: rf"\{letter}" for letter in "&%$#_{}"
}
# neither more nor less of them is better, so no value is the best
_UNRANKED = re.compile(
    "num_clusters|largest_cluster_share|clients_.*|cohort_size|trained_share|staleness|clip_norm|round|best_round|"
    "rounds_to_stable_.*"
)


@dataclass(frozen=True)
class _Column:
    """A column of numbers: a metric of an experiment, or the p-values of its tests."""

    title: str  # LaTeX
    metric: str
    experiment: str
    is_p: bool = False


def latex_table(
    run_metrics: RunMetrics,
    metrics: Sequence[str] = (),
    scores: ClientScores | None = None,
    test: ChosenTest = USUAL_TEST,
    p_values: bool = False,
    of_best: bool = False,
) -> str:
    """The methods of some runs as a table of LaTeX, with a caption that names the test, its correction and n.

    A row for each method; a column for each metric, or, for a single metric of several experiments, for each of these;
    several metrics of several experiments, and experiments that most methods lack, are blocks of rows. metrics: those
    asked for, in this order; empty: as `compare_runs`. p_values: whether a column of p-values follows each metric.
    of_best: whether the metrics are those of the best round of runs that have one.
    """
    shown = list(dict.fromkeys(metrics)) if metrics else chosen_metrics(run_metrics, ())
    chosen_metrics(run_metrics, shown)  # raises ConfigError for an unknown one
    tested = {metric: tests_of(run_metrics, metric, scores, test) for metric in shown}
    blocks = _blocks(run_metrics, shown)
    if p_values:
        blocks = [[each for one in of for each in (one, replace(one, title="$p$", is_p=True))] for of in blocks]
    titles = [column.title for column in blocks[0]]
    caption = _caption(run_metrics, shown, tested, test)
    if of_best:
        caption += " The numbers are those of each run's best round, whose models are kept."
    lines = [" & ".join(["method", *titles]) + r" \\"]
    for columns in blocks:
        lines.append(r"\midrule")
        if len(blocks) > 1:
            lines.append(rf"\multicolumn{{{len(titles) + 1}}}{{l}}{{{escaped(columns[0].experiment)}}} \\")
        names = {column.experiment for column in columns}
        for method in dict.fromkeys(method for experiment, method in run_metrics if experiment in names):
            cells = [_cell(run_metrics, (column.experiment, method), column, tested) for column in columns]
            lines.append(" & ".join([escaped(method), *cells]) + r" \\")
    return as_table(caption, "l" + "r" * len(titles), lines)


def _blocks(run_metrics: RunMetrics, shown: Sequence[str]) -> list[list[_Column]]:
    """The columns of each block of rows."""
    experiments = list(dict.fromkeys(experiment for experiment, _ in run_metrics))
    if len(shown) == 1 and (is_dense(run_metrics) or len(experiments) == 1):
        titles = [escaped(name) for name in experiments] if len(experiments) > 1 else [_heading(run_metrics, shown[0])]
        return [[_Column(title, shown[0], name) for title, name in zip(titles, experiments, strict=True)]]
    return [[_Column(_heading(run_metrics, name), name, one) for name in shown] for one in experiments]


def as_table(caption: str, columns: str, lines: Sequence[str], *size: str) -> str:
    """The lines of a table with its rules at both ends. caption: LaTeX. columns: alignment. size: of the letters."""
    begin = [r"\begin{table}", r"\centering", *size, rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{columns}}}"]
    return "\n".join([*begin, r"\toprule", *lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def escaped(text: str) -> str:
    """A text in which LaTeX's special characters are escaped."""
    return "".join(_SPECIAL.get(letter, letter) for letter in " ".join(str(text).split()))


def _heading(run_metrics: RunMetrics, metric: str) -> str:
    """Title, unit and direction of a metric: up if more of it is better, down if less is, none if neither."""
    if _UNRANKED.fullmatch(metric):
        return escaped(str(title_of(metric)))
    arrow = "down" if is_less_better(metric, metrics_of(run_metrics)) else "up"
    return rf"{escaped(str(title_of(metric)))} $\{arrow}arrow$"


def _cell(
    run_metrics: RunMetrics,
    key: tuple[str, str],
    column: _Column,
    tested: Mapping[str, Mapping[tuple[str, str], PairedTest]],
) -> str:
    """Mean and standard deviation of a method; empty if it was not run, or lacks the metric with a seed."""
    metric = column.metric
    values = _values(run_metrics, key, metric)
    if not len(values) or np.isnan(values).any():
        return ""
    test, bests = tested[metric][key], [other for other, one in tested[metric].items() if one.is_best]
    if column.is_p:
        return "" if math.isnan(test.p) else f"${p_in_words(test.p)}$"
    best = next((_values(run_metrics, other, metric).mean() for other in bests if other[0] == key[0]), math.nan)
    mean = float(values.mean())
    number, spread = _texts(values, metric)
    if _UNRANKED.fullmatch(metric) is None and _has_rivals(run_metrics, key[0]):
        if mean == best:
            number = rf"\mathbf{{{number}}}"
        elif test.is_alike:
            number = rf"\underline{{{number}}}"
    return f"${number}$" if not spread else rf"${number} \pm {spread}$"


def _texts(values: np.ndarray, metric: str) -> tuple[str, str]:
    """Mean and standard deviation in the metric's unit, the latter empty for a single value; percent with 0.01."""
    title = title_of(metric)
    mean, std = mean_and_std(values)
    if title.unit == PERCENT and math.isfinite(mean):
        return f"{title.factor * mean:.2f}", "" if math.isnan(std) else f"{title.factor * std:.2f}"
    text = mean_and_spread(mean, std, metric, r"{,}").replace("inf", r"\infty")
    number, _, spread = text.partition(" ± ")
    return number, spread


def _has_rivals(run_metrics: RunMetrics, experiment: str) -> bool:
    return sum(name == experiment for name, _ in run_metrics) > 1


def _values(run_metrics: RunMetrics, key: tuple[str, str], metric: str) -> np.ndarray:
    return np.array([of_seed.get(metric, np.nan) for of_seed in run_metrics.get(key, {}).values()])


def _caption(
    run_metrics: RunMetrics,
    metrics: Sequence[str],
    tested: Mapping[str, Mapping[tuple[str, str], PairedTest]],
    test: ChosenTest,
) -> str:
    """Returns the meaning of the numbers and marks: seeds, test, correction and the number of pairs."""
    seeds = sorted({len(of_seeds) for of_seeds in run_metrics.values()})
    count = _range(seeds)
    what = _heading(run_metrics, metrics[0]) if len(metrics) == 1 else "Results"
    text = f"{what}: mean $\\pm$ standard deviation over {count} seeds" if seeds[-1] > 1 else f"{what} of one seed"
    if not any(_has_rivals(run_metrics, experiment) for experiment, _ in run_metrics):
        return f"{text}."
    text += "; the best of each column in bold" if len(metrics) == 1 else "; the best of each metric in bold"
    every = [one for of_metric in tested.values() for one in of_metric.values()]
    if all(math.isnan(one.p) for one in every):
        return f"{text}. No test of differences, which needs {NEEDED[test.how]}."
    pairs = re.sub(r"\bn = (\d+)(?: to (\d+))?", _in_formula, pairs_in_words(test.how, every))
    untested = [
        escaped(title_of(name).text) for name in metrics if all(math.isnan(one.p) for one in tested[name].values())
    ]
    without = f", without {', '.join(untested)}" if untested else ""
    return (
        f"{text}, underlined if not significantly worse than the best ({TESTS[test.how]}, {pairs}, level {LEVEL:g}, "
        f"{CORRECTIONS[test.correction]}{without})."
    )


def _in_formula(count: re.Match[str]) -> str:
    least, most = count.groups()
    return f"$n = {least}$" if most is None else f"$n = {least}$--${most}$"


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]}--{counts[-1]}"
