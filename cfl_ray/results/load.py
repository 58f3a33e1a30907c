"""The recorded results of a run: finished, stopped, or live."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cfl_ray.config import Experiment
from cfl_ray.core.method import Method
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.methods import resolve
from cfl_ray.results.results import MethodResult, Results
from cfl_ray.results.study_folder import is_finished
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import read_end, read_info, read_records, redact, resolve_uri


def recorded_run(
    run_dir: Path, experiment: Experiment, open_trained: Callable[[str], TrainedMethod] | None = None
) -> Results:
    """The results of a run, read from its files. open_trained: opens the trained method with a label."""
    methods = {}
    for label in recorded_methods(run_dir, experiment):
        directory = RunDirectory(run_dir).method(label).path
        if directory.is_dir():
            methods[label] = recorded_result(label, directory, open_trained and partial(open_trained, label))
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
        infos = {file.parent.name: read_info(file.parent) for file in run_dir.glob(f"*/{RunDirectory.info.name}")}
        return dict.fromkeys(sorted(infos, key=lambda label: infos[label].time_ms))


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
    return MethodResult(label, records, dict(end.summary.metrics) if end is not None else {}, directory, trained)
