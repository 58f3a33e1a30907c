"""The plan of a study: a run for each method, setting and seed, and the names of the metrics that these record."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cfl_ray.config import Experiment
from cfl_ray.config.study import Study, name_of, place_of
from cfl_ray.core.tasks import resolve_task
from cfl_ray.errors import ConfigError, UserError, did_you_mean
from cfl_ray.methods import resolve
from cfl_ray.results.recorded_runs import finished_results
from cfl_ray.results.run_record import check_hash_of_run
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking.record import METRICS, cluster_diagnostics_of, score_metrics_of

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
    trial: str = ""  # of a sweep; it is part of the name of the setting
    base: str = ""  # the setting without the trial
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the trial

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


def plan(study: Study, only: Selection = ALL, trials: Sequence[Mapping[str, Any]] = ({},)) -> list[StudyRun]:
    """The runs, ordered by seed first. Raises ConfigError for an invalid run.

    trials: parameters of each trial of a sweep; every trial runs in every setting. {}: no sweep.
    """
    _check(only.settings, study.setting_names, "setting")
    _check(only.seeds, study.seeds, "seed")
    runs = [
        run
        for seed in study.seeds
        if not only.seeds or seed in only.seeds
        for setting in study.setting_names
        if not only.settings or setting in only.settings
        for parameters in trials
        for run in _runs_of(study, setting, parameters, seed)
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


def _runs_of(study: Study, setting: str, parameters: Mapping[str, Any], seed: int) -> list[StudyRun]:
    trial = name_of(parameters) if parameters else ""
    place = place_of(study, setting, trial)
    try:
        values = study.values(setting, parameters)
        entries = _by_label(values.get("methods", Experiment.model_fields["methods"].default))
        return [
            StudyRun(place, label, seed, _experiment(study, values, entry, seed), trial, setting, parameters)
            for label, entry in entries
        ]
    except UserError as error:
        raise ConfigError(f"{study.name}, {place}: {error}") from error


def _by_label(entries: Any) -> list[tuple[str, Any]]:
    """The entries of `methods` with their labels."""
    if not isinstance(entries, list):
        raise ConfigError(f"methods: expected a list, write [{entries}]")
    if "all" in entries:
        position = entries.index("all")
        entries = [*entries[:position], *resolve(["all"]), *entries[position + 1 :]]
    return list(zip(resolve(entries), entries, strict=True))


def _experiment(study: Study, values: dict[str, Any], entry: Any, seed: int) -> Experiment:
    """The experiment of a run."""
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
    experiment = study.paths_of(Experiment(**values | {"methods": [entry]}))
    resolve(experiment.methods)
    return experiment


# ---- names of metrics


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
