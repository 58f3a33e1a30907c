"""The recorded results of runs: finished, stopped, or live; in one folder, or in the folders below it."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cfl_ray.config import Experiment
from cfl_ray.core.method import Method
from cfl_ray.errors import ConfigError, DataError, command
from cfl_ray.errors.redaction import redact
from cfl_ray.methods import resolve
from cfl_ray.results.kept_code import versions_in_words, with_code_of
from cfl_ray.results.results import MethodResult, Results
from cfl_ray.results.study_folder import begun_methods, is_finished, run_folders
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.results.trust import load_record
from cfl_ray.run_directory import RUNS_OF_STUDY, RunDirectory
from cfl_ray.tracking import read_end, read_records, resolve_uri


def recorded_run(
    run_dir: Path, experiment: Experiment, open_trained: Callable[[str], TrainedMethod] | None = None
) -> Results:
    """The results of a run, read from its files. open_trained: opens the trained method with a label.

    Raises DataError if the run is finished and the folder of a method is missing, and as `recorded_result`.
    """
    methods = {}
    for label in recorded_methods(run_dir, experiment):
        directory = RunDirectory(run_dir).method(label).path
        if directory.is_dir():
            methods[label] = recorded_result(label, directory, open_trained and partial(open_trained, label))
        elif is_finished(run_dir):
            raise lost_method(directory)
        else:
            methods[label] = MethodResult(label, [], {}, directory)
    return Results(methods, run_dir)


def recorded_methods(run_dir: Path, experiment: Experiment) -> dict[str, Method[Any] | None]:
    """The methods of a run by label.

    If one of them was made in Python, or its file is missing: the labels of those that have begun, each with None.
    """
    try:
        return dict(resolve(experiment.methods))
    except ConfigError:
        return dict.fromkeys(folder.name for folder in begun_methods(run_dir))


def finished_results(
    run_dir: str | Path, experiment: Experiment, open_trained: Callable[[str], TrainedMethod] | None = None
) -> Results | None:
    """The results of a finished run; None for a live or incomplete run.

    open_trained: as in `recorded_run`.
    """
    run = RunDirectory(Path(run_dir).absolute())
    if run.is_live or not all(
        map(is_finished, [run.path, *map(run.path.joinpath, recorded_methods(run.path, experiment))])
    ):
        return None
    uri = resolve_uri(experiment.tracking, experiment.output) if experiment.tracking.uses_mlflow else None
    return replace(recorded_run(run.path, experiment, open_trained), tracking=redact(uri) if uri else None)


def lost_method(directory: Path) -> DataError:
    """The error for the folder of a method that a finished run lacks."""
    return DataError(
        f"{directory} is missing, although the run has finished; restore it, or repeat the method: "
        + command("resume", directory.parent)
    )


def recorded_result(label: str, directory: Path, trained: Callable[[], TrainedMethod] | None = None) -> MethodResult:
    """The result of a method, read from its folder.

    Raises DataError if the method is finished and the file of its metrics is missing, empty or too short.
    """
    records, end = list(read_records(directory)), read_end(directory)
    if end is not None and end.status == "FINISHED" and (not records or records[-1].round < end.summary.round):
        last, final = records[-1].round if records else 0, end.summary.round
        what = f"ends with round {last} of {final}" if records else "is missing or empty"
        raise DataError(
            f"{RunDirectory(directory).metrics} {what}, although the method has finished; restore it, or remove the "
            "folder of the run and run it again"
        )
    summary, ended = (dict(end.summary.metrics), end.reason) if end is not None else ({}, "")
    return MethodResult(label, records, summary, directory, trained, ended=ended)


# ---- search for runs in folders and their subfolders


@dataclass(frozen=True)
class FoundRun:
    """A run with its records, and its place in a study."""

    directory: Path
    experiment: Experiment
    results: Results
    study: Path | None = None  # folder of the study
    setting: str | None = None
    method: str | None = None  # its label in the study
    was_named: bool = False  # whether its folder was given, not a folder above it
    notes: Sequence[str] = ()  # on the user's code that has changed since

    @property
    def methods(self) -> dict[str, MethodResult]:
        """Results by label; for a run of a study, by the method's label in the study.

        In a study only finished methods count, as in its tables, unless the run was named.
        """
        evaluated = {
            label: result
            for label, result in self.results.methods.items()
            if result.final
            and (self.study is None or self.was_named or result.directory is None or is_finished(result.directory))
        }
        return {self.method: next(iter(evaluated.values()))} if self.method and len(evaluated) == 1 else evaluated


def find_runs(paths: Sequence[str | Path], trust: bool = False, code: str | None = None) -> list[FoundRun]:
    """The runs in and below the paths, each once: runs of a study in its order, other runs ordered by folder.

    trust, code: as in `load_run`. Raises ConfigError if a path has no runs.
    """
    runs: dict[Path, FoundRun] = {}
    for path in map(Path, paths):
        below = list(_runs_below(path, trust, code))
        if not below:
            raise ConfigError(
                f"{path} holds no run: neither it nor a folder below it has {RunDirectory.config.name} and "
                f"{RunDirectory.info.name}"
            )
        for run in below:
            runs.setdefault(run.directory.resolve(), run)
    return list(runs.values())


def _runs_below(path: Path, trust: bool, code: str | None) -> Iterator[FoundRun]:
    for folder, inner, files in os.walk(path):
        directory = Path(os.path.abspath(folder))  # equal for all runs of a study, independent of the given path
        if RunDirectory(directory).is_study and any(RunDirectory(directory).run_folders()):
            inner.clear()  # otherwise it may be the user's folder, with a study's file beside runs/
            for setting, method, run in run_folders(directory):
                if RunDirectory(run).info.is_file():
                    yield open_run(run, trust, (directory, setting, method), code)
        elif {RunDirectory.config.name, RunDirectory.info.name} <= {*files}:
            inner.clear()  # no run is inside another run
            found = open_run(directory, trust, _place_in_study(directory), code)
            yield replace(found, was_named=directory == Path(os.path.abspath(path)))
        inner.sort()


_Place = tuple[Path, str, str] | tuple[None, None, None]  # folder of a study, setting, method


def _place_in_study(directory: Path) -> _Place:
    """Study, setting and method of a run folder; None for a run outside of studies."""
    parents = directory.parents
    study = parents[2] if directory.match(RUNS_OF_STUDY) and len(parents) > 2 else None
    return (study, parents[1].name, parents[0].name) if study and RunDirectory(study).is_study else (None, None, None)


def say_code(runs: Sequence[FoundRun], warn: Callable[[str], None]) -> None:
    """Warns, once each, of the user's code that has changed since runs, and of runs of several versions."""
    for line in dict.fromkeys(note for run in runs for note in run.notes):
        warn(line)
    for line in versions_in_words(run.directory for run in runs):
        warn(line)


def open_run(directory: Path, trust: bool, place: _Place = (None, None, None), code: str | None = None) -> FoundRun:
    """A run with its records. Raises ConfigError for a folder that holds no run.

    place: in a study. code: as in `load_run`.
    """
    RunDirectory(directory).require_run()
    directory = directory.absolute()
    notes: list[str] = []
    experiment = with_code_of(directory, load_record(directory, trust, connects=False), code, notes.append)
    study, setting, method = place
    return FoundRun(directory, experiment, recorded_run(directory, experiment), study, setting, method, notes=notes)
