"""The trials of a sweep: a grid, random draws, or Optuna's suggestions from the results of earlier trials."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cfl_ray.config.section import as_yaml
from cfl_ray.config.study import RangeConfig, SweepConfig, name_of, six_digits
from cfl_ray.errors import ConfigError
from cfl_ray.results.comparison import is_less_better
from cfl_ray.run_directory import RunDirectory

if TYPE_CHECKING:
    import optuna

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
