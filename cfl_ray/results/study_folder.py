"""The folder of a study, whose runs are in SETTING/METHOD/seed-SEED; read without importing torch."""

import pkgutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cfl_ray.config.method_entries import name_and_options
from cfl_ray.config.study import load_study
from cfl_ray.run_directory import File, RunDirectory
from cfl_ray.tracking import read_end, read_info


def run_folders(study: str | Path, containing: File = RunDirectory.config) -> list[tuple[str, str, Path]]:
    """Setting, method and folder of every run of a study, in the order of the study's settings, methods and seeds.

    containing: the file that marks the folder of a run.
    """
    directory = RunDirectory(study)
    settings, methods = _names_in(directory.study)

    def place(run: Path) -> tuple[Any, ...]:
        setting, method = run.parts[-3], run.parts[-2]
        return (_position(setting, settings), setting, _position(method, methods), method, directory.seed_of(run))

    return [(run.parts[-3], run.parts[-2], run) for run in sorted(directory.run_folders(containing), key=place)]


def _names_in(file: Path) -> tuple[list[str], list[str]]:
    """The settings and methods that a study names, in its order."""
    if not file.is_file():
        return [], []
    study = load_study(file)
    sections = [values for values in (study.experiment, *study.settings.values()) if "methods" in values]
    return list(study.settings), [label or name for values in sections for name, label in methods_in(values["methods"])]


def methods_in(entries: Any) -> list[tuple[str, str]]:
    """The name of each method in entries of `methods`, and its label, empty if it follows from the options."""
    listed = []
    for entry in entries if isinstance(entries, list) else ():
        name, options = name_and_options(entry)
        label = str(options.get("label") or "")
        listed += [(each, label) for each in (method_names() if entry == "all" else [name])]
    return listed


def method_names() -> list[str]:
    """Names of the published methods."""
    package = find_spec("cfl_ray.methods")  # not imported: that would import torch, which takes seconds
    assert package is not None and package.submodule_search_locations is not None
    return [module.name for module in pkgutil.iter_modules(package.submodule_search_locations)]


def _position(name: str, names: list[str]) -> int:
    """The index of a name, or of its part before a trial, in a list; the length of the list for an unknown name."""
    known = [candidate for candidate in (name, name.partition(",")[0]) if candidate in names]
    return names.index(known[0]) if known else len(names)


def begun_runs(study: Path) -> list[Path]:
    """The folders of a study's runs that have recorded a round."""
    folders = sorted(RunDirectory(study).run_folders())
    logs = ((run, RunDirectory(run).of_methods(RunDirectory.metrics)) for run in folders)
    return [run for run, files in logs if any(file.stat().st_size for file in files)]


def begun_methods(run: Path) -> list[Path]:
    """The folders of a run's methods that have begun, in the order in which they did. Runs no code of the config."""
    folders = [file.parent for file in RunDirectory(run).of_methods(RunDirectory.info)]
    return sorted(folders, key=lambda folder: read_info(folder).time_ms)


def is_finished(run: Path) -> bool:
    """Whether the run in this folder is finished."""
    end = read_end(run)
    return end is not None and end.status == "FINISHED"
