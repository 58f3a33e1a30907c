"""Names of the metrics that a study's runs record, and warnings about unknown metrics in its config."""

from collections.abc import Sequence

from cfl_ray.config import Experiment
from cfl_ray.config.study import Study
from cfl_ray.core.tasks import resolve_task
from cfl_ray.errors import did_you_mean
from cfl_ray.study.plan import StudyRun
from cfl_ray.tracking.record import METRICS, cluster_diagnostics_of, score_metrics_of

_OF_TABLES = ("mbit", "seconds")


def scores_of(experiment: Experiment) -> set[str]:
    """Names of the metrics of the experiment's task."""
    return score_metrics_of(_names_of(experiment))


def metric_warnings(study: Study, runs: Sequence[StudyRun]) -> list[str]:
    """A warning for each unknown metric of the study, which is misspelt or a diagnostic of a method."""
    known = {*METRICS, *_OF_TABLES}
    for run in runs:
        known |= {*scores_of(run.experiment), *cluster_diagnostics_of(_names_of(run.experiment)[0])}
    wanted = [("metrics", name) for name in study.metrics]
    if study.sweep is not None:
        wanted.append(("sweep.metric", study.sweep.metric))
    return [
        f"{key}: {name!r} is no metric of all methods{_near(name, known)}; it is found only if a method of the study "
        "records a diagnostic of that name"
        for key, name in wanted
        if name not in known
    ]


def _names_of(experiment: Experiment) -> list[str]:
    task = resolve_task(experiment.task).with_metrics(experiment.evaluation.metrics)
    return [metric.name for metric in task.metrics]


def _near(name: str, known: set[str]) -> str:
    suggestion = did_you_mean(name, known)
    return suggestion if suggestion.startswith(" (") else ""  # not the whole list
