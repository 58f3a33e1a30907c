"""The metrics by which a method ends early and by which its best round is chosen (`stopping` and `keep`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.tracking.record import VALIDATION, score_metrics_of

if TYPE_CHECKING:
    from cfl_ray.setup.setup import Setup

_ROUNDING = 1e-12  # relative error up to which a gain is `min_delta`: 0.502 - 0.5 is not 0.002
_GROUPS = ("ari", "nmi", "purity", "correct_clients")  # metrics that compare clusters with the true groups
_TRAINING = ("train_loss", "num_clusters", "largest_cluster_share")  # metrics without test data


@dataclass(frozen=True)
class Criterion:
    """A metric whose values in evaluations are compared."""

    metric: str
    minimizes: bool = False
    min_delta: float = 0.0
    patience: int = 0

    def gain(self, value: float, reference: float | None) -> float:
        """By how much a value is better than another one; infinite if there is no other."""
        if reference is None:
            return math.inf
        return reference - value if self.minimizes else value - reference

    def is_improved(self, value: float, reference: float | None) -> bool:
        """Whether a value is better than another one by more than `min_delta`."""
        scale = max(abs(value), abs(reference or 0.0)) if self.min_delta else 0.0
        return self.gain(value, reference) > self.min_delta + _ROUNDING * scale

    @property
    def stalled_in_words(self) -> str:
        """The reason for the end of a method."""
        verb = "fallen" if self.minimizes else "risen"
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"{self.metric} has not {verb}{more} for {self.patience} evaluation{'s' * (self.patience > 1)}"

    @property
    def chosen_by(self) -> str:
        """The data that should choose nothing and that this metric measures; empty: none of these."""
        if self.metric.startswith(VALIDATION) or self.metric in _TRAINING:
            return ""
        return "the true groups" if self.metric in _GROUPS else "the clients' test data"


@dataclass(frozen=True)
class RoundChoice:
    """The criteria of a run."""

    stops_by: Criterion | None = None  # None: a method makes all rounds
    keeps_by: Criterion | None = None  # None: the models of the last round are kept

    @property
    def warnings(self) -> list[str]:
        """A line for each criterion by which data choose that are meant for the test alone."""
        lines = []
        for key, criterion in (("stopping", self.stops_by), ("keep", self.keeps_by)):
            if criterion is not None and (data := criterion.chosen_by):
                lines.append(
                    f"{key}: {data} choose the {'end' if key == 'stopping' else 'round of the kept models'} by "
                    f"{criterion.metric}, which favours the method in its own test; set data.validation and choose by "
                    f"a metric {VALIDATION}..., or name train_loss"
                )
        return lines


def round_choice(setup: Setup) -> RoundChoice:
    """The criteria of an experiment. Raises ConfigError for a metric that its evaluations do not have."""
    stopping, keep = setup.experiment.stopping, setup.experiment.keep
    if stopping is None and keep.round == "last":
        return RoundChoice()
    known = evaluated_metrics(setup)
    first = next((name for name in known if name.startswith(VALIDATION)), None)
    stops_by = keeps_by = None
    if stopping is not None:
        if (metric := stopping.metric or first) is None:
            raise ConfigError(
                "stopping.metric: without validation data there is no metric that it could mean; set data.validation, "
                f"or name one of {', '.join(known)}"
            )
        stops_by = Criterion(
            metric, _minimizes("stopping", metric, stopping.goal, known), stopping.min_delta, stopping.patience
        )
    if keep.round == "best":
        of_stopping = stops_by if keep.metric is None and keep.goal is None else None
        metric = keep.metric or (stops_by.metric if stops_by else first) or setup.task.metrics[0].name
        minimizes = of_stopping.minimizes if of_stopping else _minimizes("keep", metric, keep.goal, known)
        keeps_by = Criterion(metric, minimizes)
    return RoundChoice(stops_by, keeps_by)


def _minimizes(section: str, metric: str, goal: str | None, known: dict[str, bool | None]) -> bool:
    """Whether less of a metric is better. Raises ConfigError for a metric that is not known, or without a goal."""
    if metric not in known:
        if metric.startswith(VALIDATION) and not any(name.startswith(VALIDATION) for name in known):
            raise ConfigError(
                f"{section}.metric: {metric!r} needs validation data; set data.validation, or name a metric of the "
                f"evaluations without them: {', '.join(known)}"
            )
        raise ConfigError(
            f"{section}.metric: the evaluations of this experiment have no metric {metric!r}"
            f"{did_you_mean(metric, known)}; they have {', '.join(known)}"
        )
    if goal is not None:
        return goal == "minimize"
    if (less := known[metric]) is None:
        raise ConfigError(
            f"{section}.goal: whether more or less of {metric} is better depends on the experiment; set it to maximize "
            "or minimize"
        )
    return less


def evaluated_metrics(setup: Setup) -> dict[str, bool | None]:
    """The metrics that an evaluation can have, each with whether less of it is better; None: it depends.

    Those of the validation data come first, then those of the test data, training and clusters. Diagnostics of methods
    are not among them.
    """
    experiment, metrics = setup.experiment, setup.task.metrics
    less: dict[str, bool | None] = {metric.name: not metric.higher_is_better for metric in metrics}
    primary = metrics[0]
    settings, events = experiment.evaluation, experiment.events
    measured = {
        "_std": True,
        "_p10": primary.higher_is_better,
        "_p90": not primary.higher_is_better,
        "_local": settings.local,
        "_local_trained": settings.local,
        "_tuned": settings.tuned_epochs > 0,
        "_past": settings.past and any(event.change for event in events),
        "_honest": bool(len(setup.attack.ids)),
    }
    of_primary = [f"{primary.name}{ending}" for ending, is_measured in measured.items() if is_measured]
    if any(event.join for event in events):
        newcomer = f"newcomer_{primary.name}"
        of_primary += [newcomer, *([f"{newcomer}_tuned"] if settings.tuned_epochs else [])]
    assert {*of_primary} <= score_metrics_of([primary.name])
    less |= {name: name.endswith("_std") or not primary.higher_is_better for name in of_primary}
    less |= {"test_loss": True, "train_loss": True, "num_clusters": None, "largest_cluster_share": None}
    if setup.federation.group_N is not None:
        less |= dict.fromkeys(_GROUPS, False)
    return less
