"""The plan of a study: a run for each method, setting and seed, and the names of the metrics that these record."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfl_ray.config import Experiment
from cfl_ray.config.experiment import listed_methods
from cfl_ray.config.method_entries import listed_name
from cfl_ray.config.study import Study, place_of
from cfl_ray.config.sweep import Trial
from cfl_ray.core.method import Method
from cfl_ray.core.tasks import resolve_task
from cfl_ray.data.from_config import has_validation
from cfl_ray.errors import ConfigError, UserError, did_you_mean
from cfl_ray.methods import resolve
from cfl_ray.results.recorded_runs import finished_results
from cfl_ray.results.run_record import check_hash_of_run
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking.record import METRICS, cluster_diagnostics_of, score_metrics_of, validation_metric

LONGEST_LABEL = 200  # of a method; the label is a folder name, which file systems limit to 255 bytes


@dataclass(frozen=True)
class StudyRun:
    """A run: a method in a setting with a seed.

    The experiment has this method alone, without its label; keys of `local` that the method sets are in its section
    `local`. So the run is identical in all studies that contain it.
    """

    setting: str
    method: str  # label
    seed: int
    experiment: Experiment
    base: str = ""  # the setting without the trial
    of_trial: Trial = Trial()  # of a sweep

    @property
    def trial(self) -> str:
        """The name of the trial, which is part of the name of the setting."""
        return self.of_trial.name

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters of the trial."""
        return self.of_trial.parameters

    @property
    def name(self) -> str:
        """The run as text."""
        return f"{self.setting}, {self.method}, seed {self.seed}"

    def folder(self, root: Path) -> Path:
        """The run directory below the folder of the study."""
        return RunDirectory(root).run_of(self.setting, self.method, self.seed)

    def is_finished(self, root: Path) -> bool:
        """Whether the run is complete. Raises ConfigError if the folder has a run of another config."""
        directory = RunDirectory(self.folder(root))
        if not directory.is_run:
            return False
        check_hash_of_run(directory, self.experiment)
        return finished_results(directory.path, self.experiment) is not None

    def is_live(self, root: Path) -> bool:
        """Whether a process works on the run."""
        return RunDirectory(self.folder(root)).is_live


@dataclass(frozen=True)
class Selection:
    """A part of a study's runs; an empty field selects all."""

    settings: Collection[str] = ()
    methods: Collection[str] = ()
    seeds: Collection[int] = ()

    @property
    def options(self) -> list[str]:
        """The options of commands that select these runs."""
        chosen = {"setting": self.settings, "method": self.methods, "seed": self.seeds}
        return [word for name, values in chosen.items() for value in values for word in (f"--{name}", str(value))]


ALL = Selection()


def plan(study: Study, only: Selection = ALL, trials: Sequence[Trial] = (Trial(),)) -> list[StudyRun]:
    """The runs, ordered by seed first. Raises ConfigError for an invalid run.

    trials: of a sweep; each runs in every setting that has its method.
    """
    _check(only.settings, study.setting_names, "setting")
    _check(only.seeds, study.seeds, "seed")
    runs = [
        run
        for seed in study.seeds
        if not only.seeds or seed in only.seeds
        for setting in study.setting_names
        if not only.settings or setting in only.settings
        for trial in trials
        for run in _runs_of(study, setting, trial, seed)
    ]
    for run in runs:
        if len(run.method) > LONGEST_LABEL:
            raise ConfigError(
                f"{study.name}: the label of a method names a folder of at most {LONGEST_LABEL} letters, got "
                f"{len(run.method)}; give the method a shorter `label` than {run.method}"
            )
    folders: dict[Path, StudyRun] = {}
    for run in runs:
        if (other := folders.setdefault(run.folder(Path()), run)) is not run:
            raise ConfigError(f"{study.name}: two runs are named {other.name}; rename a setting or a label")
    labels = list(dict.fromkeys(run.method for run in runs))
    _check(only.methods, labels, "method")
    return [run for run in runs if not only.methods or run.method in only.methods]


def _check(wanted: Collection[Any], known: Sequence[Any], what: str) -> None:
    for name in wanted:
        if name not in known:
            raise ConfigError(f"the study has no {what} {name!r}{did_you_mean(str(name), list(map(str, known)))}")


def _runs_of(study: Study, setting: str, trial: Trial, seed: int) -> list[StudyRun]:
    place = place_of(study, setting, trial.name)
    try:
        if trial.method is not None and not _lists(study, setting, trial):
            return []
        values = study.values(setting, trial.parameters)
        entries = entries_by_label(listed_methods(values))
        return [
            StudyRun(place, label, seed, _experiment(study, values, entry, seed), setting, trial)
            for label, entry, listed in entries
            if trial.method in (None, listed)
        ]
    except UserError as error:
        raise ConfigError(f"{study.name}, {place}: {error}") from error


def _lists(study: Study, setting: str, trial: Trial) -> bool:
    """Whether the methods of a setting, or those that the trial sets, include the method of the trial."""
    entries = trial.parameters.get("methods", listed_methods(study.values(setting, {})))
    return not isinstance(entries, list) or trial.method in [listed_name(entry) for entry in entries]


def entries_by_label(entries: Any) -> list[tuple[str, Any, str]]:
    """The entries of `methods` with their labels, and their names as they are listed (`all` for each of `all`)."""
    if not isinstance(entries, list):
        raise ConfigError(f"methods: expected a list, write [{entries}]")
    listed = [listed_name(entry) for entry in entries]
    if "all" in entries:
        position, every = entries.index("all"), resolve(["all"])
        entries = [*entries[:position], *every, *entries[position + 1 :]]
        listed = [*listed[:position], *["all"] * len(every), *listed[position + 1 :]]
    return list(zip(resolve(entries), entries, listed, strict=True))


def config_of(study: Study, setting: str, trial: Trial, method: str, seed: int) -> dict[str, Any]:
    """The keys of the experiment of a run, as the study has them, without defaults. method: label."""
    values = study.values(setting, trial.parameters)
    entries = entries_by_label(listed_methods(values))
    (entry,) = [entry for label, entry, _ in entries if label == method]
    return _values_of_run(study, values, method if isinstance(entry, Method) else entry, seed)


def _experiment(study: Study, values: dict[str, Any], entry: Any, seed: int) -> Experiment:
    """The experiment of a run."""
    experiment = study.paths_of(Experiment(**_values_of_run(study, values, entry, seed)))
    resolve(experiment.methods)
    return experiment


def _values_of_run(study: Study, values: dict[str, Any], entry: Any, seed: int) -> dict[str, Any]:
    """The keys of a run with this method alone, without its label."""
    values = copy.deepcopy(values) | {"name": study.name, "seed": seed}
    if isinstance(entry, dict):
        (name, options), *_ = entry.items()
        options = dict(options or {})
        options.pop("label", None)
        if own := options.pop("local", None):
            shared = values.get("local") or {}
            if isinstance(shared, dict):  # any other type is rejected below
                values["local"] = shared | own  # as `changed_local` does
        entry = {name: options} if options else name
    return values | {"methods": [entry]}


# ---- names of metrics


def metric_of(study: Study, runs: Sequence[StudyRun]) -> str:
    """The metric of the study's sweep; by default the score of the task, on validation data if all runs have them."""
    if study.sweep is not None and study.sweep.metric is not None:
        return study.sweep.metric
    score = _names_of(runs[0].experiment)[0]
    of_settings = {run.base: run for run in runs}.values()  # a function that is a source is called
    validated = all(has_validation(run.experiment) for run in of_settings)
    return validation_metric(score) if validated else score


def scores_of(experiment: Experiment) -> set[str]:
    """Names of the metrics of the experiment's task."""
    return score_metrics_of(_names_of(experiment))


def metric_warnings(study: Study, runs: Sequence[StudyRun]) -> list[str]:
    """A warning for each unknown metric of the study, which is misspelt or a diagnostic of a method."""
    known = {*METRICS, "mbit", "seconds"}  # the last two: of tables
    for run in runs:
        known |= {*scores_of(run.experiment), *cluster_diagnostics_of(_names_of(run.experiment)[0])}
    wanted = [("metrics", name) for name in study.metrics]
    if study.sweep is not None:
        wanted.append(("sweep.metric", metric_of(study, runs)))
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
