"""The best round of a method, and its end when evaluations no longer improve."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from cfl_ray.core.clients import RoundStats
from cfl_ray.core.state import State
from cfl_ray.population.population import Cohort
from cfl_ray.runtime.parts.loop_part import LoopPart
from cfl_ray.setup.criterion import Criterion, RoundChoice
from cfl_ray.tracking.record import BEST_ROUND

_STOPPING, _KEEP = "stopping", "keep"  # names of the two criteria
_VALUES = "best_round"  # name of the values in a checkpoint


@dataclass(frozen=True)
class Improvement:
    """The evaluations of a method so far, by one criterion."""

    best: int = 0  # the round with the best value, the first of equal ones; 0: none had a finite value
    value: float | None = None  # of the round `best`
    improved: float | None = None  # value of the last improvement by more than `min_delta`
    stalled: int = 0  # evaluations since that improvement, or from the start if there was none

    def then(self, round: int, value: float, criterion: Criterion) -> "Improvement":
        """These and another evaluation. A value that is not finite is no improvement."""
        finite = math.isfinite(value)
        improves = finite and criterion.is_improved(value, self.improved)
        is_best = finite and criterion.gain(value, self.value) > 0
        return Improvement(
            round if is_best else self.best,
            value if is_best else self.value,
            value if improves else self.improved,
            0 if improves else self.stalled + 1,
        )


class _Improvement(BaseModel):
    """`Improvement` in a checkpoint."""

    model_config = ConfigDict(strict=True, extra="forbid")
    best: int
    value: float | None
    improved: float | None
    stalled: int


class BestRound(LoopPart):
    """The best round so far, whose checkpoint stays, and the end of the method by `stopping`.

    The last round of a run is evaluated even if its turn has not come; a run that is extended goes on as if it had not
    been. So the evaluations whose turn had come are counted apart.
    """

    def __init__(self, choice: RoundChoice, every: int):
        criteria = {_STOPPING: choice.stops_by, _KEEP: choice.keeps_by}
        self.criteria = {name: criterion for name, criterion in criteria.items() if criterion is not None}
        self.every = every
        self.regular = dict.fromkeys(self.criteria, Improvement())  # over evaluations whose turn had come
        self.present = self.regular  # over all evaluations

    # ---- for the loop

    @property
    def kept_round(self) -> int:
        return self.present[_KEEP].best if _KEEP in self.criteria else 0

    @property
    def pinned(self) -> frozenset[int]:
        rounds = {of[_KEEP].best for of in (self.regular, self.present) if _KEEP in of}
        return frozenset(rounds - {0})

    def ends(self, round: int) -> str:
        criterion = self.criteria.get(_STOPPING)
        if criterion is None or (so_far := self.regular[_STOPPING]).stalled < criterion.patience:
            return ""
        best = f"best round {so_far.best}" if so_far.best else "no evaluation had a finite value"
        return f"stopped after round {round}: {criterion.stalled_in_words}; {best}"

    # ---- hooks

    def last_round(self, saved: int, rounds: int) -> int:
        return saved if self.ends(saved) else rounds

    def cohort(self, stats: RoundStats, state: State, draw: Callable[[], Cohort]) -> Cohort:
        """Forgets the evaluation of a last round whose turn had not come, after which the run goes on."""
        self.present = self.regular
        return draw()

    def end_round(self, stats: RoundStats, cohort: Cohort, before: State, after: State) -> None:
        self._record(stats)

    def end_evaluation(self, stats: RoundStats) -> None:
        """Adds the evaluation of the round. One without the metric, as of newcomers before there are any, is none."""
        for name, criterion in self.criteria.items():
            if criterion.metric in stats.metrics:
                so_far = self.present[name].then(stats.round, stats.metrics[criterion.metric], criterion)
                self.present = self.present | {name: so_far}
        if stats.round % self.every == 0:
            self.regular = self.present
        self._record(stats)

    def _record(self, stats: RoundStats) -> None:
        if self.kept_round:
            stats.metrics[BEST_ROUND] = float(self.kept_round)

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        both = {"regular": self.regular, "present": self.present}
        values = {when: {name: asdict(so_far) for name, so_far in of.items()} for when, of in both.items()}
        return {}, {_VALUES: values}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any], state: State) -> None:
        given = values.pop(_VALUES)
        read = {
            when: {name: Improvement(**dict(_Improvement.model_validate(given[when][name]))) for name in self.criteria}
            for when in ("regular", "present")
        }
        self.regular, self.present = read["regular"], read["present"]
