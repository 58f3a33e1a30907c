"""Successive halving: trials of a sweep that cannot win end early.

K. Jamieson, A. Talwalkar. Non-stochastic Best Arm Identification and Hyperparameter Optimization. AISTATS 2016. The
trials of a method are compared after round `first`; the best of each `factor` go on, to `factor` times the rounds, and
so on to the last round. All trials of a stage end before the next one begins, so results do not depend on which runs
are parallel.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from cfl_ray.config.sweep import HalvingConfig, Trial
from cfl_ray.run_directory import RunDirectory
from cfl_ray.study.study_plan import StudyRun
from cfl_ray.tracking import read_records


@dataclass(frozen=True)
class Stage:
    """A stage of the training of several trials."""

    until: int | None  # round after which they are compared; None: the last round
    later: float  # the work of the stages that follow, in trials of this stage


def stages_of(halving: HalvingConfig, trials: int, rounds: int) -> list[Stage]:
    """The stages of some trials of a run of some rounds."""
    ends: list[int] = []
    end = halving.first
    while end < rounds:
        ends.append(end)
        end *= halving.factor
    counts = [trials]
    for _ in ends:
        counts.append(math.ceil(counts[-1] / halving.factor))
    lengths = [after - before for before, after in zip([0, *ends], [*ends, rounds], strict=True)]
    work = [count * length for count, length in zip(counts, lengths, strict=True)]
    return [Stage(until, sum(work[place + 1 :]) / lengths[place]) for place, until in enumerate([*ends, None])]


def survivors(
    trials: Sequence[Trial], values: Mapping[tuple[str | None, str], float], factor: int, minimize: bool
) -> list[Trial]:
    """Of the trials of each method the best of each `factor`, rounded up; equal ones by their order.

    values: mean metric by (method, name of the trial), NaN if a run failed or has no evaluation: such trials end.
    """
    going = []
    for method in dict.fromkeys(trial.method for trial in trials):
        known = [
            trial for trial in trials if trial.method == method and not math.isnan(values[trial.method, trial.name])
        ]
        known.sort(key=lambda trial: values[trial.method, trial.name] * (1 if minimize else -1))
        count = sum(trial.method == method for trial in trials)
        going += known[: math.ceil(count / factor)]
    return [trial for trial in trials if trial in going]


def has_round(run: StudyRun, root: Path, round: int | None) -> bool:
    """Whether a run has recorded a round; False for None."""
    return round is not None and any(record >= round for record in _rounds(run, root))


def mean_at(runs: Sequence[StudyRun], root: Path, metric: str, round: int) -> float:
    """Mean of a metric over runs, in their last evaluation up to a round; NaN if a run has none."""
    values = [_value_at(run, root, metric, round) for run in runs]
    return fmean(values) if values else math.nan


def _value_at(run: StudyRun, root: Path, metric: str, round: int) -> float:
    value = math.nan
    for method in _methods(run, root):
        for record in read_records(method):
            if record.round <= round:
                value = record.metrics.get(metric, value)
    return value


def _rounds(run: StudyRun, root: Path) -> list[int]:
    return [record.round for method in _methods(run, root) for record in read_records(method)]


def _methods(run: StudyRun, root: Path) -> list[Path]:
    """The folders of the methods of a run that have recorded rounds."""
    return [log.parent for log in RunDirectory(run.folder(root)).of_methods(RunDirectory.metrics)]
