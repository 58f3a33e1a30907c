"""One run in MLflow, written so that doing anything twice is the same as doing it once. The only module that imports mlflow.

How "once" is kept, where a process or the server can die between doing a thing and noting that it was done:
    the run       is searched for by its tag `cfl_ray.run_uid` before it is created
    its metrics   carry the time of their record; SQL stores drop an equal one, and what other stores already hold is read back first
    its end       sets a state and replaces files
"""

import os
import shutil
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from cfl_ray.core.errors import RunError
from cfl_ray.tracking.record import RoundRecord, RunEnd, RunInfo
from cfl_ray.tracking.uri import sqlite_path

if TYPE_CHECKING:  # importing mlflow takes a second or two: only a process that delivers pays it
    from mlflow import MlflowClient
    from mlflow.entities import Metric

UID_TAG = "cfl_ray.run_uid"
PARENT_TAG = "mlflow.parentRunId"
MAX_PARAM_CHARS = 6000  # MLflow's limit; its other limits, on the size of a request, its client sees to itself
CREATION_SECONDS = 60.0  # another process may be creating the tables of a new SQLite store

DEFAULTS = {  # of our processes; what the user's environment says stands
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # a repeated "create run" could make two; the delivery has its own retries
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # it would print the URI with its credentials
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


class MlflowRun:
    """A run that exists in MLflow. Every method raises what MLflow raises; the caller then opens the run again and repeats."""

    def __init__(self, client: "MlflowClient", run_id: str):
        self.run_id = run_id
        self._client = client
        self._unsure = True  # until a batch comes of which nothing is there: an earlier process may have delivered it

    @classmethod
    def open(cls, uri: str, experiment: str, info: RunInfo, run_id: str | None, parent_id: str | None) -> "MlflowRun":
        """Returns run `run_id` while MLflow has it, else the run of `info`, created if it is not there."""
        client, experiment_id = connect(uri, experiment)
        if run_id is None or not _exists(client, run_id):
            run_id = _find(client, experiment_id, info.uid) or _create(client, experiment_id, info, parent_id)
            _log_params(client, run_id, info)
        return cls(client, run_id)

    def log(self, records: Sequence[RoundRecord]) -> None:
        """Sends every metric at step = round."""
        from mlflow.entities import Metric

        metrics = [Metric(name, value, record.time_ms, record.round) for record in records for name, value in record.metrics.items()]
        if self._unsure and metrics:
            missing = self._not_there_yet(metrics)
            self._unsure = len(missing) < len(metrics)
            metrics = missing
        self._client.log_batch(self.run_id, metrics=metrics)

    def end(self, end: RunEnd, artifacts: Path) -> None:
        """Sends the figures of the whole run, its files and its status."""
        self.log([end.summary])
        if any(artifacts.iterdir()):
            self._client.log_artifacts(self.run_id, str(artifacts))
        self._client.set_terminated(self.run_id, end.status, end.time_ms)

    def reopen(self) -> None:
        """Marks a run that had ended as running again."""
        self._client.update_run(self.run_id, status="RUNNING")

    def _not_there_yet(self, metrics: list["Metric"]) -> list["Metric"]:
        there = {(name, entry.step) for name in {metric.key for metric in metrics} for entry in self._client.get_metric_history(self.run_id, name)}
        return [metric for metric in metrics if (metric.key, metric.step) not in there]


def connect(uri: str, experiment: str) -> tuple["MlflowClient", str]:
    """Returns a client and the id of the experiment. An SQLite store is created if absent, its artifacts in `mlartifacts` beside it."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    _stand_somewhere()
    path = sqlite_path(uri)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes that both create the tables of a new file collide inside MLflow; one after the other they do not.
    with FileLock(f"{path}.lock", timeout=CREATION_SECONDS) if path else nullcontext():
        if path:
            _create_store(path)
        client = MlflowClient(uri)
        artifacts = (path.parent / "mlartifacts").as_uri() if path else None
        return client, _experiment_id(client, experiment, artifacts)


def _create_store(path: Path) -> None:
    """A whole SQLite store, where there is none: MLflow could not go on with one whose tables a killed process had begun."""
    from mlflow import MlflowClient

    folder = path.with_name(f".{path.name}.new")
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    if path.exists():
        return
    folder.mkdir(exist_ok=True)  # a network disk keeps what is open
    draft = folder / uuid.uuid4().hex  # a name that this process has not used: MLflow keeps the files that it opened
    MlflowClient(f"sqlite:///{draft}")
    shutil.copyfile(draft, folder / "whole")
    (folder / "whole").rename(path)
    shutil.rmtree(folder, ignore_errors=True)


def _stand_somewhere() -> None:
    """MLflow asks for the working directory. Ray removes that of a job while it is at work, when two nodes share a machine."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir(Path.home())


def _experiment_id(client: "MlflowClient", name: str, artifacts: str | None) -> str:
    from mlflow.exceptions import MlflowException

    if found := client.get_experiment_by_name(name):
        return found.experiment_id
    try:
        return client.create_experiment(name, artifact_location=artifacts)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":  # a process on another machine was faster
            raise
        return client.get_experiment_by_name(name).experiment_id


def _exists(client: "MlflowClient", run_id: str) -> bool:
    """Returns False for a run that the store does not know, as after it was set up anew; then the whole run is delivered again."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    if run.info.lifecycle_stage == "deleted":
        raise RunError(f"run {run_id} was deleted in MLflow: restore it there, or remove mlflow.json from the run directory")
    return True


def _find(client: "MlflowClient", experiment_id: str, uid: str) -> str | None:
    runs = client.search_runs([experiment_id], f"tags.`{UID_TAG}` = '{uid}'", max_results=1)
    return runs[0].info.run_id if runs else None


def _create(client: "MlflowClient", experiment_id: str, info: RunInfo, parent_id: str | None) -> str:
    tags = {UID_TAG: info.uid, **info.tags}
    if info.method:
        tags["method"] = info.method
    if parent_id:
        tags[PARENT_TAG] = parent_id
    return client.create_run(experiment_id, start_time=info.time_ms, tags=tags, run_name=info.name).info.run_id


def _log_params(client: "MlflowClient", run_id: str, info: RunInfo) -> None:
    from mlflow.entities import Param

    client.log_batch(run_id, params=[Param(key, value[:MAX_PARAM_CHARS]) for key, value in info.params.items()])
