"""The trials of a sweep: a grid, random draws, or Optuna's suggestions from earlier results; and their ranking.

Trials are ranked by the metric of the sweep, for each method in each setting.
"""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cfl_ray.config.section import as_yaml
from cfl_ray.config.study import RangeConfig, Study, SweepConfig, name_of, six_digits
from cfl_ray.errors import ConfigError
from cfl_ray.results.comparison import RunMetrics, is_less_better, paired_test
from cfl_ray.run_directory import RunDirectory
from cfl_ray.study.study_plan import StudyRun

if TYPE_CHECKING:
    import optuna
    import pandas as pd

_NAME = "sweep"  # name of the only Optuna study in the journal
_SEARCH = "search"  # attribute of that study: parameters, metric and goal, which all its trials share
_WARM = 10  # number of random trials at the start of TPE


def goal_of(sweep: SweepConfig) -> Literal["maximize", "minimize"]:
    """Whether the metric of a sweep is to be maximised or minimised."""
    return sweep.goal or ("minimize" if is_less_better(sweep.metric) else "maximize")


class Trials:
    """Trials that are known before the first run: a single trial without parameters, a grid, or random draws."""

    def __init__(self, parameters: Sequence[dict[str, Any]]):
        self.parameters = parameters
        self.left = list(parameters)  # trials that `next` has not returned

    def first(self) -> Sequence[dict[str, Any]]:
        """Trials whose runs are checked before the first run."""
        return self.parameters

    def open(self, root: Path) -> None:
        """Prepares the sampler for a study in this folder."""

    def next(self, together: int) -> Sequence[dict[str, Any]]:
        """Trials to run next, empty at the end. together: largest number of parallel trials."""
        trials, self.left = self.left, []
        return trials

    def tell(self, parameters: Mapping[str, Any], value: float | None) -> None:
        """Reports the result of a trial; None: it failed."""

    def so_far(self) -> Sequence[dict[str, Any]]:
        """All trials so far, those of earlier starts of the study included."""
        return self.parameters


class LearningTrials(Trials):
    """Trials from Optuna's tree-structured Parzen estimator, in batches of as many as run in parallel."""

    def __init__(self, sweep: SweepConfig):
        super().__init__([])
        try:
            import optuna
        except ImportError:
            raise ConfigError("sweep.sampler: tpe needs Optuna; install it with pip install 'cfl-ray[sweep]'") from None
        self.optuna, self.sweep = optuna, sweep
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    def first(self) -> Sequence[dict[str, Any]]:
        ends = [
            {
                key: values.at(share) if isinstance(values, RangeConfig) else values[0 if share < 1 else -1]
                for key, values in self.sweep.parameters.items()
            }
            for share in (0.0, 1.0)
        ]
        return _distinct(ends)  # the two ends are equal if every list has a single value

    def open(self, root: Path) -> None:
        """Raises ConfigError if the folder has the trials of another sweep."""
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self.study = self.optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(RunDirectory(root).trials))),
            study_name=_NAME,
            direction=goal_of(self.sweep),
            load_if_exists=True,
        )
        self._check_search(root)
        # numbers of trials without a result, by name: Optuna may suggest listed values twice
        self.numbers: dict[str, list[int]] = {}
        state = self.optuna.trial.TrialState
        # those that failed are replaced; one that was stopped while it was drawn lacks parameters
        begun = [trial for trial in self._with_parameters() if trial.state != state.FAIL]
        for trial in begun:
            if trial.state == state.RUNNING:  # of a stopped start
                self.numbers.setdefault(name_of(self._values(trial.params)), []).append(trial.number)
        # also the complete ones: this start may select more runs of them, or the study have more seeds
        self.left = [self._values(trial.params) for trial in begun]
        self.asks = max(0, (self.sweep.trials or 0) - len(begun))

    def _check_search(self, root: Path) -> None:
        """Raises ConfigError if the trials of the journal belong to another search."""
        mine = self.sweep.model_dump(mode="json", include={"parameters", "metric"}) | {"goal": goal_of(self.sweep)}
        search = json.dumps(mine, sort_keys=True)
        if (there := self.study.user_attrs.get(_SEARCH)) is None:
            self.study.set_user_attr(_SEARCH, search)
        elif there != search:
            raise ConfigError(
                f"{RunDirectory(root).trials} has the trials of another sweep: {there}, this one has {search}; "
                "choose another folder for the study"
            )

    def _with_parameters(self) -> list[optuna.trial.FrozenTrial]:
        every = self.study.get_trials(deepcopy=False)
        return [trial for trial in every if trial.params.keys() == self.sweep.parameters.keys()]

    def next(self, together: int) -> Sequence[dict[str, Any]]:
        if self.left:
            return _distinct(super().next(together))
        count = min(self.asks, together)
        self.asks -= count
        return _distinct([self._ask() for _ in range(count)])

    def _ask(self) -> dict[str, Any]:
        """A new trial, which depends only on the seed, the number of the trial, and the results so far.

        So a resumed sweep does not repeat its first draws.
        """
        number = len(self.study.get_trials(deepcopy=False))
        seed = int(np.random.default_rng([self.sweep.seed, number]).integers(2**31))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)  # constant_liar
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True, n_startup_trials=_WARM)
        trial = self.study.ask()
        parameters = self._values({key: _suggest(trial, key, values) for key, values in self.sweep.parameters.items()})
        self.numbers.setdefault(name_of(parameters), []).append(trial.number)
        return parameters

    def _values(self, suggested: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of the experiment: Optuna's texts become listed values; values of ranges have six digits."""
        parameters = {}
        for key, values in self.sweep.parameters.items():
            if not isinstance(values, RangeConfig):
                parameters[key] = values[_choices(values).index(suggested[key])]
            else:
                parameters[key] = suggested[key] if values.int_ else six_digits(suggested[key])
        return parameters

    def tell(self, parameters: Mapping[str, Any], value: float | None) -> None:
        state = self.optuna.trial.TrialState
        for number in self.numbers.pop(name_of(parameters), ()):  # none: it has a result of an earlier start
            self.study.tell(number, value, state=state.FAIL if value is None else state.COMPLETE)

    def so_far(self) -> Sequence[dict[str, Any]]:
        return _distinct([self._values(trial.params) for trial in self._with_parameters()])


def _distinct(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trials, each name once."""
    return list({name_of(parameters): parameters for parameters in trials}.values())


def _suggest(trial: optuna.Trial, key: str, values: list[Any] | RangeConfig) -> Any:
    if not isinstance(values, RangeConfig):
        return trial.suggest_categorical(key, _choices(values))
    if values.int_:
        return trial.suggest_int(key, int(values.low), int(values.high), log=values.log)
    return trial.suggest_float(key, values.low, values.high, log=values.log)


def _choices(values: list[Any]) -> list[str]:
    """The values as texts, since Optuna accepts no lists or mappings, and treats 1 and true as equal."""
    return [as_yaml(value) for value in values]


def trials_of(sweep: SweepConfig | None) -> Trials:
    """The trials of a sweep; without a sweep, a single trial without parameters. Raises ConfigError."""
    if sweep is None:
        return Trials([{}])
    return LearningTrials(sweep) if sweep.sampler == "tpe" else Trials(sweep.drawn())


# ---- ranking


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
