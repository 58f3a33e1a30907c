"""The trials of a sweep, ranked by its metric for each method in each setting."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from cfl_ray.config.keys import as_yaml
from cfl_ray.config.study import Study
from cfl_ray.results.comparison import StudyFigures
from cfl_ray.study.plan import StudyRun
from cfl_ray.study.sweep import goal_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RankedTrial:
    """One trial of one method in one setting."""

    setting: str
    method: str  # label
    parameters: Mapping[str, Any]
    values: Sequence[float]  # of the metric, by seed; empty: no run is finished

    @property
    def mean(self) -> float:
        """Mean over the seeds; NaN if no run is finished."""
        return fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        """Standard deviation of a sample over the seeds; NaN of one, and if a value is infinite."""
        return stdev(self.values) if len(self.values) > 1 and math.isfinite(sum(self.values)) else math.nan

    @property
    def overrides(self) -> str:
        """The parameters as SECTION.KEY=VALUE, quoted for a shell."""
        return shlex.join(f"{key}={as_yaml(value)}" for key, value in self.parameters.items())


def rank(study: Study, runs: Sequence[StudyRun], figures: StudyFigures) -> list[RankedTrial]:
    """The trials of a sweep, by setting and method in the order of the study, the best first; unfinished ones last."""
    assert study.sweep is not None  # it is a sweep
    metric, sign = study.sweep.metric, 1 if goal_of(study.sweep) == "minimize" else -1
    groups: dict[tuple[str, str], dict[str, list[StudyRun]]] = {}
    for run in runs:
        groups.setdefault((run.base, run.method), {}).setdefault(run.trial, []).append(run)
    ranked = []
    for (setting, method), trials in groups.items():
        of_group = []
        for of_trial in trials.values():
            found = [figures.value(run.setting, run.method, run.seed, metric) for run in of_trial]
            values = [value for value in found if value is not None and not math.isnan(value)]
            of_group.append(RankedTrial(setting, method, of_trial[0].parameters, values))
        # those with fewer seeds than others last: their mean is not comparable
        most = max(len(one.values) for one in of_group)
        ranked += sorted(of_group, key=lambda one: (len(one.values) < most, -len(one.values), sign * _known(one.mean)))
    return ranked


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def best_of(ranked: Sequence[RankedTrial]) -> list[RankedTrial]:
    """The best trial of each method in each setting, as far as any is finished."""
    best: dict[tuple[str, str], RankedTrial] = {}
    for one in ranked:
        if one.values:
            best.setdefault((one.setting, one.method), one)
    return list(best.values())


def to_frame(ranked: Sequence[RankedTrial], metric: str) -> pd.DataFrame:
    """One row for each trial: setting, method, its parameters, runs, and METRIC with METRIC_std over the seeds."""
    import pandas as pd

    rows = [
        {
            "setting": one.setting,
            "method": one.method,
            **{
                key: value if isinstance(value, int | float) else as_yaml(value)
                for key, value in one.parameters.items()
            },
            "runs": len(one.values),
            metric: one.mean,
            f"{metric}_std": one.std,
        }
        for one in ranked
    ]
    return pd.DataFrame(rows)
