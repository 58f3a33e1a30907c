"""Search for runs in folders and their subfolders."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cfl_ray.config import Experiment
from cfl_ray.errors import ConfigError
from cfl_ray.results.load import recorded_run
from cfl_ray.results.results import MethodResult, Results
from cfl_ray.results.study_folder import run_folders
from cfl_ray.results.trust import load_record
from cfl_ray.run_directory import RunDirectory


@dataclass(frozen=True)
class FoundRun:
    """A run with its records, and its place in a study."""

    directory: Path
    experiment: Experiment
    results: Results
    study: Path | None = None  # folder of the study
    setting: str | None = None
    method: str | None = None  # its label in the study

    @property
    def methods(self) -> dict[str, MethodResult]:
        """Results by label; for a run of a study, by the method's label in the study."""
        evaluated = {label: result for label, result in self.results.methods.items() if result.final}
        return {self.method: next(iter(evaluated.values()))} if self.method and len(evaluated) == 1 else evaluated


def find_runs(paths: Sequence[str | Path], trust: bool = False) -> list[FoundRun]:
    """The runs in and below the paths, each once: runs of a study in its order, other runs ordered by folder.

    Raises ConfigError if a path has no runs.
    """
    runs: dict[Path, FoundRun] = {}
    for path in map(Path, paths):
        below = list(_runs_below(path, trust))
        if not below:
            raise ConfigError(
                f"{path} holds no run: neither it nor a folder below it has {RunDirectory.config.name} and "
                f"{RunDirectory.info.name}"
            )
        for run in below:
            runs.setdefault(run.directory.resolve(), run)
    return list(runs.values())


def _runs_below(path: Path, trust: bool) -> Iterator[FoundRun]:
    for folder, inner, files in os.walk(path):
        directory = Path(os.path.abspath(folder))  # equal for all runs of a study, independent of the given path
        if RunDirectory(directory).is_study:
            inner.clear()
            for setting, method, run in run_folders(directory):
                if RunDirectory(run).info.is_file():
                    yield open_run(run, trust, directory, setting, method)
        elif {RunDirectory.config.name, RunDirectory.info.name} <= {*files}:
            inner.clear()  # no run is inside another run
            yield open_run(directory, trust, *_place_in_study(directory))
        inner.sort()


def _place_in_study(directory: Path) -> tuple[Path, str, str] | tuple[None, None, None]:
    """Study, setting and method of a run folder; None for a run outside of studies."""
    parents = directory.parents
    study = parents[2] if len(parents) > 2 else None
    return (study, parents[1].name, parents[0].name) if study and RunDirectory(study).is_study else (None, None, None)


def open_run(
    directory: Path, trust: bool, study: Path | None = None, setting: str | None = None, method: str | None = None
) -> FoundRun:
    """A run with its records. Raises ConfigError for a folder that holds no run."""
    RunDirectory(directory).require_run()
    directory = directory.absolute()
    experiment = load_record(directory, trust, connects=False)
    return FoundRun(directory, experiment, recorded_run(directory, experiment), study, setting, method)
