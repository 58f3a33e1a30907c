"""The trials of a sweep: those of a grid, drawn at random, or suggested by the results of earlier ones (Optuna)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cfl_ray.config.study import RangeConfig, SweepConfig, name_of
from cfl_ray.core.errors import ConfigError

if TYPE_CHECKING:
    import optuna

_STORAGE = "optuna.log"  # journal of the trials, in the folder of the study
_WARM = 10  # trials of TPE that are drawn at random


class Trials:
    """Trials that are known before the first run: one without parameters, those of a grid, or random ones."""

    def __init__(self, parameters: Sequence[dict[str, Any]]):
        self.parameters, self.given = parameters, False

    def first(self) -> Sequence[dict[str, Any]]:
        """Trials whose runs are checked before anything starts."""
        return self.parameters

    def open(self, root: Path) -> None:
        """Makes the sampler ready for a study in this folder."""

    def next(self, at_once: int) -> Sequence[dict[str, Any]]:
        """Trials to run now, empty at the end. at_once: runs at the same time."""
        if self.given:
            return []
        self.given = True
        return self.parameters

    def tell(self, parameters: Mapping[str, Any], value: float | None) -> None:
        """Reports the result of a trial; None: it failed."""


class LearningTrials(Trials):
    """Trials that Optuna's tree-structured Parzen estimator suggests, as many at a time as run at once."""

    def __init__(self, sweep: SweepConfig):
        super().__init__([])
        try:
            import optuna
        except ImportError:
            raise ConfigError("sweep.sampler: tpe needs Optuna; install it with pip install 'cfl-ray[sweep]'") from None
        self.optuna, self.sweep = optuna, sweep
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    def first(self) -> Sequence[dict[str, Any]]:
        return [
            {
                key: values.at(share) if isinstance(values, RangeConfig) else values[0 if share < 1 else -1]
                for key, values in self.sweep.parameters.items()
            }
            for share in (0.0, 1.0)
        ]

    def open(self, root: Path) -> None:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        sampler = self.optuna.samplers.TPESampler(seed=self.sweep.seed, constant_liar=True, n_startup_trials=_WARM)
        self.study = self.optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(root / _STORAGE))),
            study_name=root.name,
            direction=self.sweep.goal,
            sampler=sampler,
            load_if_exists=True,
        )
        self.numbers: dict[str, list[int]] = {}  # of trials without a result, by name: choices may be suggested twice
        running = self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.RUNNING,))
        self.left = [self._known(trial.number, trial.params) for trial in running]  # of a study that stopped

    def _known(self, number: int, parameters: dict[str, Any]) -> dict[str, Any]:
        self.numbers.setdefault(name_of(parameters), []).append(number)
        return parameters

    def next(self, at_once: int) -> Sequence[dict[str, Any]]:
        if self.left:
            found, self.left = self.left, []
            return found
        missing = (self.sweep.trials or 0) - len(self.study.get_trials(deepcopy=False))
        asked = [self._ask() for _ in range(min(missing, at_once))]
        return list({name_of(one): one for one in asked}.values())

    def _ask(self) -> dict[str, Any]:
        trial = self.study.ask()
        return self._known(trial.number, {key: _suggest(trial, key, of) for key, of in self.sweep.parameters.items()})

    def tell(self, parameters: Mapping[str, Any], value: float | None) -> None:
        state = self.optuna.trial.TrialState
        for number in self.numbers.pop(name_of(parameters)):
            self.study.tell(number, value, state=state.FAIL if value is None else state.COMPLETE)


def _suggest(trial: optuna.Trial, key: str, values: list[Any] | RangeConfig) -> Any:
    if not isinstance(values, RangeConfig):
        return trial.suggest_categorical(key, values)
    if values.int_:
        return trial.suggest_int(key, int(values.low), int(values.high), log=values.log)
    return trial.suggest_float(key, values.low, values.high, log=values.log)


def trials_of(sweep: SweepConfig | None) -> Trials:
    """The trials of a sweep; of a study without one, a single trial that changes nothing. Raises ConfigError."""
    if sweep is None:
        return Trials([{}])
    return LearningTrials(sweep) if sweep.sampler == "tpe" else Trials(sweep.drawn())
