"""The results of a run from its files: finished, stopped, or live."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from cfl_ray.config import Experiment
from cfl_ray.errors import DataError
from cfl_ray.methods import resolve
from cfl_ray.results.results import MethodResult, Results
from cfl_ray.results.trained import TrainedMethod, load_trained
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.prepare import Setup, prepare
from cfl_ray.runtime.trust import load_record
from cfl_ray.tracking import read_end, read_records


def load_run(run_dir: str | Path, experiment: Experiment | None = None, trust: bool = False) -> Results:
    """The recorded results of a run; for a live or stopped run, models are those of the last checkpoint.

    experiment: the experiment of the run, required if it has objects made in Python (a Federation, a model, a method).
    trust: True imports the Python files that the run names, even if this user did not start it on this machine; False
        raises ConfigError for such files.
    Raises ConfigError if `run_dir` holds no run. Data are read when a model is requested.
    """
    directory = Path(run_dir).absolute()
    RunDirectory(run_dir).require_run()
    is_given = experiment is not None
    experiment = experiment or load_record(directory, trust, connects=False)

    @cache
    def setup() -> Setup:
        if not is_given:
            load_record(directory, trust)  # the data are read, wherever the record says that they are
        return prepare(experiment)

    methods = {label: _method(setup, label, directory) for label in resolve(experiment.methods)}
    return Results(methods, directory)


def _method(setup: Callable[[], Setup], label: str, run_dir: Path) -> MethodResult:
    directory = RunDirectory(run_dir).method(label).path
    if not directory.is_dir():
        return MethodResult(label, [], {}, directory)

    def trained() -> TrainedMethod:
        return load_trained(setup(), label, run_dir)

    return recorded_result(label, directory, trained)


def recorded_result(label: str, directory: Path, trained: Callable[[], TrainedMethod] | None = None) -> MethodResult:
    """The result of a method as its folder has it on record.

    Raises DataError where the method is finished and the file of its metrics is missing, empty or too short.
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
