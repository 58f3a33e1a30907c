"""Reads the sections `stopping` and `keep`: which metrics an evaluation has, and which of them decide."""

from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.setup.criterion import OF_GROUPS, Criterion, RoundChoice
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking.record import is_of_validation, validation_metric


def round_choice(setup: Setup) -> RoundChoice:
    """The criteria of an experiment. Raises ConfigError for a metric that its evaluations do not have."""
    stopping, keep = setup.experiment.stopping, setup.experiment.keep
    if stopping is None and keep.which == "last":
        return RoundChoice()
    known = evaluated_metrics(setup)
    first = next((name for name in known if is_of_validation(name)), None)
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
    if keep.which == "best":
        of_stopping = stops_by if keep.metric is None and keep.goal is None else None
        metric = keep.metric or (stops_by.metric if stops_by else first) or setup.task.metrics[0].name
        minimizes = of_stopping.minimizes if of_stopping else _minimizes("keep", metric, keep.goal, known)
        keeps_by = Criterion(metric, minimizes)
    return RoundChoice(stops_by, keeps_by)


def _minimizes(section: str, metric: str, goal: str | None, known: dict[str, bool | None]) -> bool:
    """Whether less of a metric is better. Raises ConfigError for a metric that is not known, or without a goal."""
    if metric not in known:
        if is_of_validation(metric) and not any(map(is_of_validation, known)):
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
    less |= {name: name.endswith("_std") or not primary.higher_is_better for name in of_primary}
    if settings.reported is not None:
        less["reported"] = not primary.higher_is_better
    less["test_loss"] = True
    if setup.federation.validation is not None:
        # of the past, there are no validation data
        less = {validation_metric(name): of for name, of in less.items() if not name.endswith("_past")} | less
    less |= {"train_loss": True, "num_clusters": None, "largest_cluster_share": None}
    if setup.federation.group_N is not None:
        less |= dict.fromkeys(OF_GROUPS, False)
    return less
