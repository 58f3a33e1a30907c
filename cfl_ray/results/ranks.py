"""Mean ranks of methods over the settings and seeds of a study, and tests of their differences.

J. Demsar. Statistical comparisons of classifiers over multiple data sets. JMLR 7, 2006: the Friedman test of all
methods, and Nemenyi's critical difference of two mean ranks.
"""

from collections.abc import Mapping

import numpy as np

from cfl_ray.report.report_data import Ranks

_LEVEL = 0.05
_FEWEST_METHODS, _FEWEST_BLOCKS = 3, 2


def ranks_of(
    run_metrics: Mapping[tuple[str, str], Mapping[int, Mapping[str, float]]], metric: str, less_is_better: bool = False
) -> Ranks | None:
    """The mean ranks of the methods (1 is the best) over the pairs (experiment, seed) in which all have the metric.

    run_metrics: metrics by (experiment, method) and seed. None with fewer than three methods or two such pairs.
    """
    methods = list(dict.fromkeys(method for _, method in run_metrics))
    blocks = sorted({(experiment, seed) for (experiment, _), of_seeds in run_metrics.items() for seed in of_seeds})
    value_BM = np.array(
        [
            [run_metrics.get((name, method), {}).get(seed, {}).get(metric, np.nan) for method in methods]
            for name, seed in blocks
        ],
        float,
    ).reshape(len(blocks), len(methods))
    value_BM = value_BM[np.isfinite(value_BM).all(1)]
    if len(methods) < _FEWEST_METHODS or len(value_BM) < _FEWEST_BLOCKS:
        return None
    from scipy.stats import friedmanchisquare, rankdata, studentized_range  # slow to import

    count, tests = len(methods), len(value_BM)
    mean_M = rankdata(value_BM if less_is_better else -value_BM, axis=1).mean(0)
    differs = bool(np.ptp(mean_M) > 0)
    # 1e6 degrees of freedom approximate infinity
    critical = studentized_range.ppf(1 - _LEVEL, count, 1e6) / np.sqrt(2) * np.sqrt(count * (count + 1) / (6 * tests))
    order = np.argsort(mean_M, kind="stable")
    return Ranks(
        metric=metric,
        mean_rank={methods[i]: float(mean_M[i]) for i in order},
        blocks=tests,
        p=float(friedmanchisquare(*value_BM.T).pvalue) if differs else 1.0,
        critical_difference=float(critical),
    )


def ranks_table(ranks: Ranks) -> str:
    """The tests as a sentence, followed by the ranks as a Markdown table."""
    lines = [ranks.in_words, "", "| method | mean rank | within the critical difference of the best |", "|---|---|---|"]
    rows = [
        f"| {method} | {rank:.1f} | {'yes' if ranks.is_near_best(method) else ''} |"
        for method, rank in ranks.mean_rank.items()
    ]
    return "\n".join([*lines, *rows])
