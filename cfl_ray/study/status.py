"""The progress of a study, read from its folder without importing torch."""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cfl_ray.config.experiment import listed_methods
from cfl_ray.config.method_entries import listed_name
from cfl_ray.config.study import ALL_SETTINGS, Study, load_study, place_of
from cfl_ray.config.sweep import Trial
from cfl_ray.errors import ConfigError, command, counted
from cfl_ray.results.study_folder import is_finished, method_names, methods_in, run_folders
from cfl_ray.run_directory import RunDirectory


@dataclass(frozen=True)
class StudyStatus:
    """The progress of a study."""

    study: str
    state: str  # live, finished, or stopped
    runs: int  # total number
    finished: int
    live: list[str] = field(default_factory=list)  # live runs
    failed: dict[str, str] = field(default_factory=dict)  # reason, by failed run
    stopped: list[str] = field(default_factory=list)  # runs that have begun and are neither live nor finished
    next: str | None = None  # the command that continues the study
    pruned: int = 0  # runs of trials that ended early

    @property
    def left(self) -> int:
        """Number of runs that are neither finished nor ended early."""
        return max(0, self.runs - self.finished - self.pruned)


def study_status(folder: str | Path) -> StudyStatus:
    """The progress of a study, read from its folder. Raises ConfigError if it holds no study."""
    root = Path(folder)
    if not RunDirectory(root).is_study:
        raise ConfigError(f"{folder} holds no study: there is no {RunDirectory(root).study}")
    study = load_study(RunDirectory(root).study)
    planned = PlannedRuns(study)
    finished, pruned, live, stopped = 0, 0, [], []
    trials: set[tuple[str, str]] = set()  # with the method
    for setting, method, run in run_folders(root):
        if not planned.has(setting, method, RunDirectory.seed_of(run)):
            continue  # of another version of the study
        trials.add((planned.trial_of(setting), method))
        if RunDirectory(run).is_live:
            live.append(_in_words(setting, method, run))
        elif is_finished(run):
            finished += 1
        elif RunDirectory(run).pruned.is_file():
            pruned += 1
        elif not RunDirectory(run).failure.is_file():
            stopped.append(_in_words(setting, method, run))
    failed = {
        _in_words(setting, method, run): RunDirectory(run).failure.read_text().partition("\n")[0]
        for setting, method, run in run_folders(root, RunDirectory.failure)
        if planned.has(setting, method, RunDirectory.seed_of(run))
    }
    # a sweep that learns may draw listed values again, which makes no further run
    runs = planned.of_trials(trials) if study.learns and is_finished(root) else planned.count
    state = "live" if RunDirectory(root).is_live else "finished" if finished + pruned >= runs else "stopped"
    again = command("resume", root) if state == "stopped" else None
    return StudyStatus(study.name, state, runs, finished, live, failed, stopped, again, pruned)


def left_out_of(folder: str | Path) -> str:
    """The number of a study's runs that its tables do not show, as a sentence; empty if all runs are finished."""
    found = study_status(folder)
    if not found.left:
        return ""
    failed = f", {len(found.failed)} failed" if found.failed else ""
    return (
        f"Not in the table: {found.left} of the {counted(found.runs, 'run')} of {folder}, which are not "
        f"finished{failed}; see {command('status', folder)}."
    )


def _in_words(setting: str, method: str, run: Path) -> str:
    return f"{setting}, {method}, seed {RunDirectory.seed_of(run)}"


class PlannedRuns:
    """The runs of the present study; its folder may also hold runs of an earlier version of the study."""

    def __init__(self, study: Study):
        self.seeds = frozenset(study.seeds)
        self.labels: dict[str, frozenset[str] | None] = {}  # of the methods by setting; None: not known without torch
        # names of trials that depend on results are not known, only their settings
        self.bases = {f"{setting},": setting for setting in study.settings} if study.learns else None
        self.count = 0
        trials = study.drawn() if study.sweep is None or not study.learns else [Trial()]
        trials_of = dict.fromkeys(study.searches(), 1)  # number of trials whose names are not known, by method
        if study.sweep is not None and study.learns:
            trials_of = {method: study.sweep.trials or 0 if keys else 1 for method, keys in study.searches().items()}
        for setting, trial in itertools.product(study.setting_names, trials):
            listed = _entries(study, setting, trial)
            place = setting if study.learns else place_of(study, setting, trial.name)
            labels = _labels(listed)
            others = self.labels.get(place, frozenset[str]())
            self.labels[place] = None if labels is None or others is None else others | labels
            for entry in listed:
                more = trials_of.get(listed_name(entry), 1) if study.learns else 1
                self.count += more * len(methods_in([entry])) * len(self.seeds)

    def of_trials(self, trials: Collection[tuple[str, str]]) -> int:
        """Number of runs of these pairs (name of a trial, method)."""
        settings = self.labels.values()
        return sum(len(self.seeds) for _, method in trials for labels in settings if labels is None or method in labels)

    def has(self, setting: str, method: str, seed: int) -> bool:
        """Whether the study has this run."""
        if seed not in self.seeds:
            return False
        if self.bases is not None:
            setting = self.bases.get(self._start_of(setting), ALL_SETTINGS)
        if setting not in self.labels:
            return False
        labels = self.labels[setting]
        return labels is None or method in labels

    def trial_of(self, setting: str) -> str:
        """The name of a setting's folder without the setting that its trial is part of."""
        return setting.removeprefix(self._start_of(setting))

    def _start_of(self, setting: str) -> str:
        return next((start for start in self.bases or () if setting.startswith(start)), "")


def _entries(study: Study, setting: str, trial: Trial) -> list[Any]:
    """The entries of `methods` in a setting that a trial is for."""
    listed = trial.parameters.get("methods") or listed_methods(study.values(setting, {}))
    entries = listed if isinstance(listed, list) else []
    mine = [entry for entry in entries if trial.method in (None, listed_name(entry))]
    if not mine or not trial.parameters:
        return mine
    entries = listed_methods(study.values(setting, trial.parameters))
    return [entry for entry in entries if trial.method in (None, listed_name(entry))]


def _labels(entries: list[Any]) -> frozenset[str] | None:
    """The labels of these entries of `methods`; None if they follow from options or from files."""
    published, listed = method_names(), methods_in(entries)
    if any(not label and name not in published for name, label in listed):
        return None
    labels = frozenset(label or name for name, label in listed)
    return labels if len(labels) == len(listed) else None
