"""The trials of a sweep: a grid, random draws, or Optuna's suggestions from earlier results; and their ranking.

Trials are ranked by the metric of the sweep, for each method in each setting.
"""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cfl_ray.config.section import as_yaml
from cfl_ray.config.study import Study
from cfl_ray.config.sweep import RangeConfig, SweepConfig, Trial, six_digits
from cfl_ray.errors import ConfigError
from cfl_ray.results.comparison import RunMetrics, is_less_better
from cfl_ray.results.significance import paired_test
from cfl_ray.run_directory import RunDirectory
from cfl_ray.study.study_plan import StudyRun
from cfl_ray.tracking.record import test_metric

if TYPE_CHECKING:
    import optuna
    import pandas as pd

_NAME = "sweep"  # name of the only Optuna study in the journal; of several methods, with /METHOD
_SEARCH = "search"  # attribute of that study: parameters, metric and goal, which all its trials share
_WARM = 10  # number of random trials at the start of TPE


def goal_of(sweep: SweepConfig) -> Literal["maximize", "minimize"]:
    """Whether the metric of a sweep is to be maximised or minimised."""
    return sweep.goal or ("minimize" if is_less_better(sweep.metric or "") else "maximize")


class Trials:
    """Trials that are known before the first run: a single trial without parameters, a grid, or random draws."""

    def __init__(self, trials: Sequence[Trial]):
        self.trials = trials
        self.left = list(trials)  # trials that `next` has not returned

    def first(self) -> Sequence[Trial]:
        """Trials whose runs are checked before the first run."""
        return self.trials

    def open(self, root: Path) -> None:
        """Prepares the sampler for a study in this folder."""

    def next(self, together: int) -> Sequence[Trial]:
        """Trials to run next, empty at the end. together: largest number of parallel trials."""
        trials, self.left = self.left, []
        return trials

    def later(self) -> int:
        """Largest number of trials that `next` has not returned yet."""
        return len(self.left)

    def tell(self, trial: Trial, value: float | None) -> None:
        """The mean metric of a trial's runs; None if a run failed or lacks the metric."""

    def so_far(self) -> Sequence[Trial]:
        """All trials so far, those of earlier starts of the study included."""
        return self.trials


class LearningTrials(Trials):
    """Trials from Optuna's tree-structured Parzen estimator, in batches of as many as run in parallel.

    Each method has a search of its own, over the keys that have an effect on it.
    """

    def __init__(self, sweep: SweepConfig, keys_of: Mapping[str | None, Sequence[str]] | None = None):
        """keys_of: the keys of each method, as `Study.searches`; None: all keys, of all methods together."""
        super().__init__([])
        try:
            import optuna
        except ImportError:
            raise ConfigError("sweep.sampler: tpe needs Optuna; install it with pip install 'cfl-ray[sweep]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        keys_of = keys_of or {None: list(sweep.parameters)}
        alone = len(keys_of) == 1
        self.searches = {
            method: _Search(sweep, keys, method, _NAME if alone else f"{_NAME}/{method}")
            for method, keys in keys_of.items()
        }

    def first(self) -> Sequence[Trial]:
        return [trial for search in self.searches.values() for trial in search.ends()]

    def open(self, root: Path) -> None:
        """Raises ConfigError if the folder has the trials of another sweep."""
        from optuna import get_all_study_names
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        journal = RunDirectory(root).trials
        storage = JournalStorage(JournalFileBackend(str(journal)))
        there, names = get_all_study_names(storage), [search.name for search in self.searches.values()]
        if others := [name for name in there if (name == _NAME) != (names == [_NAME])]:
            how = "one search for all methods together" if others == [_NAME] else "a search for each of several methods"
            raise ConfigError(
                f"{journal} has the trials of another sweep: {how}. Each of the {len(names)} methods of this sweep has "
                "a search of its own; choose another folder for the study"
            )
        for search in self.searches.values():
            search.open(storage, journal)

    def next(self, together: int) -> Sequence[Trial]:
        if any(search.left for search in self.searches.values()):
            return [trial for search in self.searches.values() for trial in search.again()]
        found: list[Trial] = []
        while len(found) < together and any(search.asks for search in self.searches.values()):
            for search in self.searches.values():  # in turn, so that no method waits for the others
                if len(found) < together and search.asks:
                    found.append(search.ask())
        return _distinct(found)

    def later(self) -> int:
        return sum(len(search.left) + search.asks for search in self.searches.values())

    def tell(self, trial: Trial, value: float | None) -> None:
        self.searches[trial.method].tell(trial, value)

    def so_far(self) -> Sequence[Trial]:
        return [trial for search in self.searches.values() for trial in search.so_far()]


class _Search:
    """The search of a method: an Optuna study in the journal of the sweep."""

    def __init__(self, sweep: SweepConfig, keys: Sequence[str], method: str | None, name: str):
        import optuna

        self.optuna, self.sweep, self.method, self.name = optuna, sweep, method, name
        self.parameters = {key: sweep.parameters[key] for key in keys}
        self.left: list[Trial] = []  # those of earlier starts that this start has not given yet
        self.asks = 0  # number of trials that are still to be drawn
        # numbers of trials without a result, by name: Optuna may suggest listed values twice
        self.numbers: dict[str, list[int]] = {}

    def ends(self) -> Sequence[Trial]:
        """The trials at both ends of the ranges."""
        ends = [
            {
                key: values.at(share) if isinstance(values, RangeConfig) else values[0 if share < 1 else -1]
                for key, values in self.parameters.items()
            }
            for share in (0.0, 1.0)
        ]
        return _distinct([Trial(end, self.method) for end in ends])  # equal if every list has a single value

    def open(self, storage: optuna.storages.BaseStorage, journal: Path) -> None:
        self.study = self.optuna.create_study(
            storage=storage, study_name=self.name, direction=goal_of(self.sweep), load_if_exists=True
        )
        self._check_search(journal)
        state = self.optuna.trial.TrialState
        # those that failed are replaced; one that was stopped while it was drawn lacks parameters
        begun = [trial for trial in self._with_parameters() if trial.state != state.FAIL]
        for trial in begun:
            if trial.state == state.RUNNING:  # of a stopped start
                self.numbers.setdefault(self._trial(trial.params).name, []).append(trial.number)
        # also the complete ones: this start may select more runs of them, or the study have more seeds
        self.left = [self._trial(trial.params) for trial in begun]
        # a method without keys has a single trial
        self.asks = max(0, (self.sweep.trials or 0 if self.parameters else 1) - len(begun))

    def _check_search(self, journal: Path) -> None:
        """Raises ConfigError if the trials of the journal belong to another search."""
        mine = self.sweep.model_dump(mode="json", include={"parameters", "metric"}) | {"goal": goal_of(self.sweep)}
        mine["parameters"] = {key: mine["parameters"][key] for key in self.parameters}
        search = json.dumps(mine, sort_keys=True)
        if (there := self.study.user_attrs.get(_SEARCH)) is None:
            self.study.set_user_attr(_SEARCH, search)
        elif there != search:
            raise ConfigError(
                f"{journal} has the trials of another sweep: {there}, this one has {search}; "
                "choose another folder for the study"
            )

    def _with_parameters(self) -> list[optuna.trial.FrozenTrial]:
        every = self.study.get_trials(deepcopy=False)
        return [trial for trial in every if trial.params.keys() == self.parameters.keys()]

    def again(self) -> Sequence[Trial]:
        """The trials of earlier starts."""
        trials, self.left = self.left, []
        return _distinct(trials)

    def ask(self) -> Trial:
        """A new trial, which depends only on the seed, the number of the trial, and the results so far.

        So a resumed sweep does not repeat its first draws.
        """
        self.asks -= 1
        number = len(self.study.get_trials(deepcopy=False))
        seed = int(np.random.default_rng([self.sweep.seed, number]).integers(2**31))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)  # constant_liar
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True, n_startup_trials=_WARM)
        asked = self.study.ask()
        trial = self._trial({key: _suggest(asked, key, values) for key, values in self.parameters.items()})
        self.numbers.setdefault(trial.name, []).append(asked.number)
        return trial

    def _trial(self, suggested: Mapping[str, Any]) -> Trial:
        """The trial of Optuna's suggestions: its texts become listed values; values of ranges have six digits."""
        parameters = {}
        for key, values in self.parameters.items():
            if not isinstance(values, RangeConfig):
                parameters[key] = values[_choices(values).index(suggested[key])]
            else:
                parameters[key] = suggested[key] if values.int_ else six_digits(suggested[key])
        return Trial(parameters, self.method)

    def tell(self, trial: Trial, value: float | None) -> None:
        state = self.optuna.trial.TrialState
        for number in self.numbers.pop(trial.name, ()):  # none: it has a result of an earlier start
            self.study.tell(number, value, state=state.FAIL if value is None else state.COMPLETE)

    def so_far(self) -> Sequence[Trial]:
        """All trials so far."""
        return _distinct([self._trial(trial.params) for trial in self._with_parameters()])


def _distinct(trials: Sequence[Trial]) -> list[Trial]:
    """The trials, each name of a method once."""
    return list({(trial.method, trial.name): trial for trial in trials}.values())


def _suggest(trial: optuna.Trial, key: str, values: list[Any] | RangeConfig) -> Any:
    if not isinstance(values, RangeConfig):
        return trial.suggest_categorical(key, _choices(values))
    if values.int_:
        return trial.suggest_int(key, int(values.low), int(values.high), log=values.log)
    return trial.suggest_float(key, values.low, values.high, log=values.log)


def _choices(values: list[Any]) -> list[str]:
    """The values as texts, since Optuna accepts no lists or mappings, and treats 1 and true as equal."""
    return [as_yaml(value) for value in values]


def trials_of(study: Study) -> Trials:
    """The trials of a study's sweep; without a sweep, a single trial without parameters. Raises ConfigError."""
    if study.sweep is not None and study.learns:
        return LearningTrials(study.sweep, study.searches())
    return Trials(study.drawn())


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
    tested: Mapping[int, float] = field(default_factory=dict)  # the same on test data, if validation data choose
    trial: Trial = Trial()
    metric: str = ""
    folder: str = ""  # the setting of its runs, with the name of the trial

    @property
    def mean(self) -> float:
        """Mean over the seeds; NaN if no run is finished."""
        return fmean(self.values.values()) if self.values else math.nan

    @property
    def test_mean(self) -> float:
        """Mean over the seeds on test data; NaN without validation data."""
        return fmean(self.tested.values()) if self.tested else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation over the seeds; NaN for a single seed, and if a value is infinite."""
        values = self.values.values()
        return stdev(values) if len(values) > 1 and math.isfinite(sum(values)) else math.nan

    @property
    def in_words(self) -> str:
        """The trial with the metric that chose it, as text."""
        return f"best trial of {self.method} in {self.setting}: {self.metric} {self.mean:.6g}, {self.overrides}"

    @property
    def overrides(self) -> str:
        """The parameters as SECTION.KEY=VALUE, quoted for a shell."""
        return shlex.join(f"{key}={as_yaml(value)}" for key, value in self.parameters.items())


def rank(study: Study, runs: Sequence[StudyRun], run_metrics: RunMetrics) -> list[RankedTrial]:
    """The trials of a sweep by setting and method in the order of the study, best first, unfinished trials last."""
    assert study.sweep is not None  # only sweeps are ranked
    metric, sign = study.sweep.metric or "", 1 if goal_of(study.sweep) == "minimize" else -1
    beside_metric = test_metric(metric)
    groups: dict[tuple[str, str], dict[str, list[StudyRun]]] = {}
    for run in runs:
        groups.setdefault((run.base, run.method), {}).setdefault(run.trial, []).append(run)
    ranked = []
    for (setting, method), trials in groups.items():
        of_group = []
        for of_trial in trials.values():
            of_seeds = run_metrics.get((of_trial[0].setting, method), {})
            values, tested = (
                {
                    run.seed: value
                    for run in of_trial
                    if not math.isnan(value := of_seeds.get(run.seed, {}).get(name, math.nan))
                }
                for name in (metric, beside_metric)
            )
            beside = tested if beside_metric != metric else {}
            chosen = of_trial[0].of_trial
            of_group.append(
                RankedTrial(
                    setting,
                    method,
                    chosen.parameters,
                    values,
                    tested=beside,
                    trial=chosen,
                    metric=metric,
                    folder=of_trial[0].setting,
                )
            )

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
    """A row for each trial: setting, method, place, its parameters, runs, METRIC with METRIC_std, p and effect, folder.

    folder: that of its runs, below the folder of the study.
    """
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
            **({test_metric(metric): trial.test_mean} if test_metric(metric) != metric else {}),
            "p": trial.p,
            "effect": trial.effect,
            "folder": trial.folder,
        }
        for trial in ranked
    ]
    return pd.DataFrame(rows)
