"""The trials of a sweep, ranked by its metric for each method in each setting."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from cfl_ray.config.section import as_yaml
from cfl_ray.config.study import Study
from cfl_ray.results.comparison import RunMetrics, paired_test
from cfl_ray.study.plan import StudyRun
from cfl_ray.study.sweep import goal_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RankedTrial:
    """A trial of a method in a setting."""

    setting: str
    method: str  # label
    parameters: Mapping[str, Any]
    values: Mapping[int, float]  # of the metric, by seed; empty: no run is finished
    place: int = 1  # 1: the best; equal trials have the same place
    p: float = math.nan  # of a paired t-test against the first trial, over common seeds; NaN without a test
    effect: float = math.nan  # effect size: mean of the differences over their standard deviation

    @property
    def mean(self) -> float:
        """Mean over the seeds; NaN if no run is finished."""
        return fmean(self.values.values()) if self.values else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation over the seeds; NaN for a single seed, and if a value is infinite."""
        values = self.values.values()
        return stdev(values) if len(values) > 1 and math.isfinite(sum(values)) else math.nan

    @property
    def overrides(self) -> str:
        """The parameters as SECTION.KEY=VALUE, quoted for a shell."""
        return shlex.join(f"{key}={as_yaml(value)}" for key, value in self.parameters.items())


def rank(study: Study, runs: Sequence[StudyRun], run_metrics: RunMetrics) -> list[RankedTrial]:
    """The trials of a sweep by setting and method in the order of the study, best first, unfinished trials last."""
    assert study.sweep is not None  # only sweeps are ranked
    metric, sign = study.sweep.metric, 1 if goal_of(study.sweep) == "minimize" else -1
    groups: dict[tuple[str, str], dict[str, list[StudyRun]]] = {}
    for run in runs:
        groups.setdefault((run.base, run.method), {}).setdefault(run.trial, []).append(run)
    ranked = []
    for (setting, method), trials in groups.items():
        of_group = []
        for of_trial in trials.values():
            of_seeds = run_metrics.get((of_trial[0].setting, method), {})
            found = {run.seed: of_seeds.get(run.seed, {}).get(metric, math.nan) for run in of_trial}
            values = {seed: value for seed, value in found.items() if not math.isnan(value)}
            of_group.append(RankedTrial(setting, method, of_trial[0].parameters, values))

        def goodness(trial: RankedTrial) -> tuple[int, float]:
            mean = 0.0 if math.isnan(trial.mean) else trial.mean
            return -len(trial.values), sign * mean  # means over fewer seeds are not comparable

        of_group.sort(key=goodness)
        order = [goodness(trial) for trial in of_group]
        for trial in of_group:
            p, effect = paired_test(trial.values, of_group[0].values)
            ranked.append(replace(trial, place=1 + order.index(goodness(trial)), p=p, effect=effect))
    return ranked


def best_of(ranked: Sequence[RankedTrial]) -> list[RankedTrial]:
    """The best trial of each method in each setting, if any trial has a finished run."""
    best: dict[tuple[str, str], RankedTrial] = {}
    for trial in ranked:
        if trial.values:
            best.setdefault((trial.setting, trial.method), trial)
    return list(best.values())


def to_frame(ranked: Sequence[RankedTrial], metric: str) -> pd.DataFrame:
    """A row for each trial: setting, method, place, its parameters, runs, METRIC with METRIC_std, p and effect."""
    import pandas as pd

    rows = [
        {
            "setting": trial.setting,
            "method": trial.method,
            "place": trial.place,
            **{
                key: value if isinstance(value, int | float) else as_yaml(value)
                for key, value in trial.parameters.items()
            },
            "runs": len(trial.values),
            metric: trial.mean,
            f"{metric}_std": trial.std,
            "p": trial.p,
            "effect": trial.effect,
        }
        for trial in ranked
    ]
    return pd.DataFrame(rows)
