"""A run in MLflow, with idempotent operations. Only this module imports mlflow.

A process or the server can die after an operation and before the cursor of the delivery is saved; the operation is then
repeated:
    creation of a run   searches for its tag `cfl_ray.run_uid` first, unless nothing can have created it
    metrics             carry the time of their record: SQL stores drop an equal entry; for other stores the existing
                        entries are read first, where the latest value can be one of the batch
    end of a run        sets a status and replaces files, of which only those are sent that have not arrived
    models              are searched for by run and name first; a model that is not ready is sent again
"""

import getpass
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

import numpy as np
from filelock import FileLock

from cfl_ray.errors import ConfigError, DataError
from cfl_ray.errors.redaction import split
from cfl_ray.run_directory import RunDirectory
from cfl_ray.security.credentials import with_credentials
from cfl_ray.system.files import PRIVATE, private_folder, sha256, write_text
from cfl_ray.system.sqlite_uris import absolute_sqlite, sqlite_path, sqlite_uri
from cfl_ray.tracking.delivery import Undeliverable
from cfl_ray.tracking.progress import Counted, ServerProgress
from cfl_ray.tracking.record import RoundRecord, RunEnd, RunInfo, mbit, metric_names

if TYPE_CHECKING:  # importing mlflow takes a second or two, so only a delivering process does it
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

UID_TAG = "cfl_ray.run_uid"
PARENT_TAG = "mlflow.parentRunId"
PHASES_TAG = "phases"
WAIT_TAG = "last_wait"
# else MLflow opens it as an experiment with language models
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
_SOURCE_TAGS = {"mlflow.source.name": "cfl-ray", "mlflow.source.type": "LOCAL"}
_NOTE_TAG = "mlflow.note.content"  # the description of a run, Markdown
_LATEST = "Latest comparison: "  # first words of our description of an experiment
_CUT_CHARS = 60  # of the line that stands for rows of a table
MAX_PARAM_CHARS = 6000  # MLflow's limit; its client observes the limits on the request size
# of the names of a run and of its data, and of a tag's value; SQLite takes longer ones, PostgreSQL and MySQL refuse
# the run
MAX_NAME_CHARS, MAX_DATASET_CHARS, MAX_TAG_CHARS = 250, 500, 8000
MAX_EXPERIMENT_TAG_CHARS = 5000  # of a value; longer ones are refused, by newer servers beyond 20,000
CREATION_SECONDS = 60.0  # another process may be creating the same SQLite store
_CONNECT_SECONDS = 2.0
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_RETRIES_AFTER_REFUSAL = "2"
_ALLOWS_FOLDERS = "MLFLOW_ALLOW_FILE_STORE"  # variable without which newer releases refuse a folder as a store
_EXPERIMENTS: dict[tuple[str, str], str] = {}  # ids of the experiments that this process has used, by URI and name

DEFAULTS = {  # environment variables; values of the user take precedence
    _RETRIES: "0",  # a repeated request could create a second run; `delivery` retries
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the printed URI would contain credentials
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


class MlflowRun:
    """An existing run in MLflow. Methods raise MLflow's errors; the caller then opens the run again and repeats."""

    def __init__(
        self, client: "MlflowClient", uri: str, info: RunInfo, run: "Run", is_new: bool, progress: "ServerProgress"
    ) -> None:
        """run: as MLflow has it. is_new: whether it has no metrics yet."""
        self.run_id, self.experiment_id = run.info.run_id, run.info.experiment_id
        self.phases = info.tags.get(PHASES_TAG, "").split(", ")  # of the method, in order
        self._client, self._uri, self._progress = client, uri, progress
        self._is_comparison, self._status, self._place = not info.method, run.info.status, run.info.artifact_uri
        # Latest values in MLflow, as long as an earlier process may have delivered the next batches; then None.
        self._latest: dict[str, float] | None = None if is_new else dict(run.data.metrics)

    @classmethod
    def open(
        cls,
        uri: str,
        experiment: str,
        info: RunInfo,
        run_id: str | None,
        parent: Callable[[], str | None],
        may_exist: bool = True,
        progress: ServerProgress | None = None,
    ) -> "MlflowRun":
        """Returns run `run_id` if MLflow has it, otherwise the run of `info`, which is created if it does not exist.

        parent: returns the id of the parent run; called if the run is created. may_exist: whether an earlier attempt
        may have created the run of `info`. progress: counts the answers of the server.
        """
        progress = progress or ServerProgress()
        client = client_of(uri, progress)
        from mlflow.entities import Param

        run = None if run_id is None else _existing(client, run_id)
        if run is not None:
            _EXPERIMENTS.setdefault((uri, experiment), run.info.experiment_id)  # of its methods, which are next
            return cls(client, uri, info, run, False, progress)
        parent_id = parent()  # before the experiment, whose id is that of the parent
        try:
            run, is_new = _found_or_created(client, experiment_of(client, uri, experiment), info, parent_id, may_exist)
        except _mlflow_errors() as error:
            if is_refusal(error) or _EXPERIMENTS.pop((uri, experiment), None) is None:
                raise
            # the experiment may have been deleted, and the store may be another one, since this process has used it
            run, is_new = _found_or_created(client, experiment_of(client, uri, experiment), info, parent_id, True)
        names = metric_names(info.params, more=" :")  # as a key with the name of a setting, `settings.lr=0.1.local.lr`
        params = [Param(names[key], value[:MAX_PARAM_CHARS]) for key, value in info.params.items()]
        client.log_batch(run.info.run_id, params=params)
        _log_dataset(client, run.info.run_id, info)
        return cls(client, uri, info, run, is_new, progress)

    def log(self, records: Sequence[RoundRecord], more: Mapping[str, str] | None = None) -> None:
        """Sends all metrics with the round as step, the phase as its index in the tag `phases`, and the traffic so far.

        The traffic is `mbit`, an axis for charts. Tags: `phase` of the next round, `last_event` of the clusters, and
        `more`.
        """
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(name, value, record.time_ms, record.round)
            for record in records
            for name, value in self._metrics_of(record).items()
        ]
        tags = [("phase", record.next_phase) for record in records[-1:] if record.phase]
        events = [event for record in records for event in record.events]
        tags += [("last_event", f"round {event.round}: {event.text}") for event in events[-1:]]
        tags += (more or {}).items()
        if self._latest is not None and metrics:
            metrics = self._missing(metrics, self._latest)
            if metrics:  # batches are sent in order, so those after a batch that lacks an entry were never sent
                self._latest = None
        cut = [RunTag(name, value[:MAX_TAG_CHARS]) for name, value in tags]
        self._client.log_batch(self.run_id, metrics=metrics, tags=cut)

    def log_wait(self, text: str) -> None:
        """Sets the tag `last_wait`: the reason for the last wait of a round."""
        self._client.set_tag(self.run_id, WAIT_TAG, text)

    def end(self, end: RunEnd, artifacts: Path, sent: Mapping[str, str], keep: Callable[[str, str], None]) -> None:
        """Sends the metrics of the whole run, its artifacts and its status.

        sent: files that have arrived, with their digests. keep: called with the name and the digest of each that does.
        """
        _refuse_links(artifacts)
        tags = {name: str(remark) for name, remark in end.remarks.items()}
        if self._is_comparison:
            tags |= self._description(end.summary.metrics, artifacts)
        self.log([end.summary], tags)
        files = {path.relative_to(artifacts).as_posix(): path for path in sorted(artifacts.rglob("*"))}
        for name, path in files.items():
            if path.is_file() and (digest := sha256(path)) != sent.get(name):
                self._send(path, name.rpartition("/")[0] or None)
                keep(name, digest)
        self._client.set_terminated(self.run_id, end.status, end.time_ms)

    def _send(self, file: Path, folder: str | None) -> None:
        """Sends a file to a folder of the run's artifacts.

        MLflow's client would ask for the place of the artifacts first, which is known.
        """
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        with self._progress.sending(file.stat().st_size):
            if self._uri.startswith("databricks"):  # its places depend on the user's profile
                self._client.log_artifact(self.run_id, str(file), folder)
            else:
                get_artifact_repository(self._place, tracking_uri=self._uri).log_artifact(str(file), folder)

    def log_models(self, directory: Path, step: int) -> None:
        """Sends the models in the subfolders of `directory`, under the names of the folders.

        step: the round after which they were saved.
        """
        _refuse_links(directory)
        for folder in sorted(directory.iterdir()) if directory.is_dir() else ():
            self._log_model(folder, step)

    def _log_model(self, folder: Path, step: int) -> None:
        from mlflow.entities import LoggedModelOutput
        from mlflow.models import Model
        from mlflow.models.model import MLMODEL_FILE_NAME

        run = self._run()
        experiment_id, outputs = run.info.experiment_id, run.outputs.model_outputs if run.outputs else []
        wanted = f"source_run_id = '{self.run_id}' AND name = '{folder.name}'"
        logged = self._client.search_logged_models([experiment_id], wanted, max_results=1)
        model = logged[0] if logged else self._client.create_logged_model(experiment_id, folder.name, self.run_id)
        if model.status == "READY":
            return
        if model.model_id not in [output.model_id for output in outputs]:
            self._client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step)])
        metadata = Model.load(str(folder))
        metadata.model_id, metadata.run_id = model.model_id, self.run_id
        write_text(folder / MLMODEL_FILE_NAME, metadata.to_yaml())
        with self._progress.sending(sum(path.stat().st_size for path in folder.rglob("*"))):
            self._client.log_model_artifacts(model.model_id, str(folder))
        self._client.finalize_logged_model(model.model_id, "READY")

    def _metrics_of(self, record: RoundRecord) -> dict[str, float]:
        metrics = dict(record.metrics)
        if record.phase and record.phase in self.phases:
            metrics["phase"] = float(self.phases.index(record.phase))
        if {"mbit_down", "mbit_up"} <= metrics.keys():
            metrics["mbit"] = mbit(record)
        return metrics

    def _description(self, summary: Mapping[str, float], artifacts: Path) -> dict[str, str]:
        """The tag with the description of a comparison, its table and figures; empty without a table.

        Also set on the page of the experiment, as the latest comparison, unless a user has described the experiment.
        """
        run = self._run()
        table = _table(summary) or _table(run.data.metrics)  # the metrics of a study were logged before its end
        if not table:
            return {}
        experiment = self._client.get_experiment(run.info.experiment_id)
        page = page_of(experiment.experiment_id, self.run_id)
        more = "\n\n".join(["", *self._shown(artifacts, page)])
        if experiment.tags.get(_NOTE_TAG, _LATEST).startswith(_LATEST):
            link = f"{_LATEST}[{run.info.run_name}]({page})\n\n"
            latest = link + _cut(table, MAX_EXPERIMENT_TAG_CHARS - len(link + more)) + more
            self._client.set_experiment_tag(experiment.experiment_id, _NOTE_TAG, latest)
        return {_NOTE_TAG: _cut(table, MAX_TAG_CHARS - len(more)) + more}

    def _shown(self, artifacts: Path, page: str) -> Iterator[str]:
        """The figures of a comparison and a link to its report, as Markdown with URLs of the server."""
        for file in sorted(artifacts.glob("*.png")):
            address = f"get-artifact?{urlencode({'path': file.name, 'run_uuid': self.run_id})}"
            name = file.stem.replace("_", " ")
            yield f"**{name}**\n\n![{name}]({address})"  # MLflow does not show the alt text of an image
        report = artifacts / Path(RunDirectory.report.name).name
        if report.is_file():
            yield f"[Report]({page.replace('?', f'/artifacts/{report.name}?')})"

    def reopen(self) -> None:
        """Sets the status of an ended run back to RUNNING."""
        if self._status != "RUNNING":
            self._client.update_run(self.run_id, status="RUNNING")

    def _run(self) -> "Run":
        return self._client.get_run(self.run_id)

    def _missing(self, metrics: list["Metric"], latest: Mapping[str, float]) -> list["Metric"]:
        """Returns the entries that MLflow does not have. latest: the values that MLflow had when the run was opened.

        Rounds are delivered in order. So if MLflow had an entry of this batch, the latest value was that of an entry of
        it; only if it may be, the history of the metric is read.
        """
        maybe = {one.key for one in metrics if one.key in latest and not abs(one.value - latest[one.key]) > 0}
        existing = {
            (name, entry.step) for name in maybe for entry in self._client.get_metric_history(self.run_id, name)
        }
        return [metric for metric in metrics if (metric.key, metric.step) not in existing]


def page_of(experiment_id: str, run_id: str) -> str:
    """The URL of a run, relative to the server's, in MLflow's interface for models, not for language models."""
    return f"#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def _refuse_links(folder: Path) -> None:
    """Raises DataError for a link in a folder, since MLflow would send its target, which is not part of the run."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            raise DataError(f"{path} is a link, and is not sent to MLflow: remove it")


def connect(uri: str, experiment: str) -> tuple["MlflowClient", str]:
    """Returns a client and the id of the experiment; both are made if they do not exist."""
    client = client_of(uri)
    return client, experiment_of(client, uri, experiment)


def client_of(uri: str, progress: ServerProgress | None = None) -> "MlflowClient":
    """Returns a client. progress: counts its calls that have succeeded.

    An SQLite store is created if it does not exist, with its artifacts in the folder `mlartifacts` next to the file.
    """
    set_defaults()
    from mlflow import MlflowClient

    _ensure_working_directory()
    path = sqlite_path(uri)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        private_folder(path.parent / "mlartifacts")
    # MLflow fails if two processes create the tables of a new file at the same time, so they take turns.
    with FileLock(f"{path}.lock", timeout=CREATION_SECONDS, mode=PRIVATE) if path else nullcontext():
        if path:
            _create_store(path)
        try:
            client = MlflowClient(uri)
        except _mlflow_errors() as error:
            if _ALLOWS_FOLDERS not in str(error):
                raise
            raise Undeliverable(
                f"MLflow {version('mlflow')} keeps no runs in a folder: set {_ALLOWS_FOLDERS}=true, and from the next "
                "run on sqlite:///PATH/mlflow.db or a server"
            ) from None
        return cast("MlflowClient", Counted(client, progress or ServerProgress()))


def experiment_of(client: "MlflowClient", uri: str, name: str) -> str:
    """Returns the id of an experiment, which is made if it does not exist. Raises RunError if it was deleted."""
    if (uri, name) not in _EXPERIMENTS:
        path = sqlite_path(uri)
        artifacts = (path.parent / "mlartifacts").as_uri() if path else None
        _EXPERIMENTS[uri, name] = _experiment_id(client, name, artifacts)
    return _EXPERIMENTS[uri, name]


def is_refusal(error: BaseException) -> bool:
    """Whether a server refused a request because of a rate limit, so that nothing has changed on it."""
    return "too many 429 error responses" in str(error)


def is_unavailable(error: BaseException) -> bool:
    """Whether a server, or a gateway before it, said that it is not available for some time."""
    return "too many 503 error responses" in str(error)


def heed_rate_limit() -> None:
    """From now on, MLflow's client waits as long as a server with a rate limit asks for, unless the user set retries.

    Without retries it drops the header `Retry-After` of the answer.
    """
    if os.environ.get(_RETRIES) == DEFAULTS[_RETRIES]:
        os.environ[_RETRIES] = _RETRIES_AFTER_REFUSAL
        # it warns of each lost connection, with credentials of the URL
        logging.getLogger("urllib3.connectionpool").addFilter(lambda record: not record.msg.startswith("Retrying"))


def set_defaults() -> None:
    """Sets the environment variables that the user has not set; mlflow reads some of them when it is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    # with the traceback of each error of a database, which it also raises: `delivery` reports that in one line
    logging.getLogger("mlflow.store.db.utils").addFilter(_is_no_database_error)


def _is_no_database_error(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("SQLAlchemy database error")


def _create_store(path: Path) -> None:
    """Creates a missing SQLite store by renaming a complete draft.

    MLflow cannot use a store whose process was killed while it created the tables.
    """
    from mlflow import MlflowClient

    folder = path.with_name(f".{path.name}.new")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
    if path.exists():
        return
    folder.mkdir(mode=0o700, exist_ok=True)  # on a network disk the folder remains while a file in it is open
    draft = folder / uuid.uuid4().hex  # new to this process, since MLflow caches connections by name
    MlflowClient(sqlite_uri(draft))
    shutil.copyfile(draft, folder / "whole")
    (folder / "whole").chmod(PRIVATE)
    (folder / "whole").rename(path)
    shutil.rmtree(folder, ignore_errors=True)


def _ensure_working_directory() -> None:
    """Changes to the home directory if the working directory does not exist, since MLflow needs one.

    Ray removes the working directory of a live job if two nodes share a machine.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir(Path.home())


def _experiment_id(client: "MlflowClient", name: str, artifacts: str | None) -> str:
    from mlflow.exceptions import MlflowException

    if existing := client.get_experiment_by_name(name):
        if existing.lifecycle_stage == "deleted":
            raise Undeliverable(
                f"the experiment {name!r} was deleted in MLflow: restore it there "
                f"(mlflow experiments restore --experiment-id {existing.experiment_id}), or set another "
                "tracking.experiment"
            )
        return existing.experiment_id
    try:
        return client.create_experiment(name, artifacts, _EXPERIMENT_TAGS)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    created = client.get_experiment_by_name(name)  # meanwhile, by a process on another machine
    assert created is not None
    return created.experiment_id


def _mlflow_errors() -> type[Exception]:
    from mlflow.exceptions import MlflowException

    return MlflowException


def _existing(client: "MlflowClient", run_id: str) -> "Run | None":
    """Returns a run; None if the store does not have it. Raises RunError for a run that was deleted in MLflow.

    A new store does not have it; the whole run is then delivered again.
    """
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    if run.info.lifecycle_stage == "deleted":
        raise Undeliverable(
            f"run {run_id} was deleted in MLflow: restore it there, or remove {RunDirectory.mlflow.name} from the run "
            "directory"
        )
    return run


def _found_or_created(
    client: "MlflowClient", experiment_id: str, info: RunInfo, parent_id: str | None, may_exist: bool
) -> tuple["Run", bool]:
    """Returns the run of `info`, and whether it was created. may_exist: as in `MlflowRun.open`."""
    same_uid = f"tags.`{UID_TAG}` = '{info.uid}'"
    if may_exist and (known := client.search_runs([experiment_id], same_uid, max_results=1)):
        return known[0], False
    tags = {UID_TAG: info.uid, **_SOURCE_TAGS, "mlflow.user": _user_name(), **info.tags}
    if info.method:
        tags["method"] = info.method
    if parent_id:
        tags[PARENT_TAG] = parent_id
    tags = {name: value[:MAX_TAG_CHARS] for name, value in tags.items()}
    run = client.create_run(experiment_id, start_time=info.time_ms, tags=tags, run_name=info.name[:MAX_NAME_CHARS])
    if os.environ.get(_RETRIES) != DEFAULTS[_RETRIES]:  # the request may have been repeated after a lost answer
        for other in client.search_runs([experiment_id], same_uid):
            if other.info.run_id != run.info.run_id:
                client.delete_run(other.info.run_id)
    return run, True


def _user_name() -> str:
    """The name of the user for the tag of a run: MLFLOW_TRACKING_USERNAME, else the login name; "unknown" without both.

    `MlflowClient.create_run` sets no such tag, which `mlflow.start_run` does.
    """
    with suppress(ImportError, KeyError, OSError):  # a user id without a login name, as in a container
        return os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    return "unknown"


def _log_dataset(client: "MlflowClient", run_id: str, info: RunInfo) -> None:
    """Logs the data section as the data set of the run, with a digest of the section."""
    from mlflow.entities import Dataset, DatasetInput

    section = {key: value for key, value in info.params.items() if key.startswith("data.")}
    if not section:
        return
    text = json.dumps(section, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    source = json.dumps({"source": info.tags.get("dataset", ""), "partition": info.tags.get("partition", "")})
    name = info.tags.get("dataset", "data")[:MAX_DATASET_CHARS]
    data = Dataset(name, digest, "cfl_ray", source, profile=text)
    client.log_inputs(run_id, [DatasetInput(data)])


def _table(metrics: Mapping[str, float]) -> str:
    """The results of a comparison, whose metrics are named METHOD/METRIC, as Markdown; empty for a single method."""
    of_methods: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        label, slash, metric = name.rpartition("/")
        if slash:
            of_methods.setdefault(label, {})[metric] = value
    columns = list(dict.fromkeys(metric for values in of_methods.values() for metric in values))
    rows = [
        [label, *(f"{values[name]:.4g}" if name in values else "" for name in columns)]
        for label, values in of_methods.items()
    ]
    lines = [["method", *columns], ["---"] * (len(columns) + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def _cut(table: str, chars: int) -> str:
    """A table of at most this many characters: its last rows are replaced by their number."""
    if len(table) <= chars:
        return table
    rows = table.splitlines()
    lengths = accumulate(len(row) + 1 for row in rows)
    kept = max(2, sum(length <= chars - _CUT_CHARS for length in lengths))
    return "\n".join([*rows[:kept], "", f"and {len(rows) - kept} more, in the metrics of the run"])


# ---- models, written to a folder of the run directory: no server is needed until delivery


def save_model(module: Any, example: np.ndarray, outputs: np.ndarray, folder: Path) -> None:
    """Writes a PyTorch module as an MLflow model: a program exported by torch.export, without Python code.

    example: inputs (n, ...), n >= 2, which become the model's input example; outputs: those of the module for them.
    The model accepts any number of samples. Raises the errors of torch.export for a module that it cannot export.
    """
    set_defaults()
    import mlflow.pytorch
    from mlflow.models import infer_signature

    mlflow.pytorch.save_model(
        module,
        str(folder),
        signature=infer_signature(example, outputs),
        input_example=example,
        serialization_format="pt2",
        pip_requirements=[f"{name}=={version(name)}" for name in ("mlflow", "numpy", "torch")],
    )


# ---- URIs


def resolve_uri(tracking: Any, output: str | Path) -> str:
    """Returns the destination of results: `tracking.uri` of the config, MLFLOW_TRACKING_URI, or an SQLite store.

    The first that is set counts; hidden credentials in it are restored if they are known. The SQLite store is
    `mlflow.db` below `output`.
    """
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or store_below(output)
    uri = with_credentials(uri) or uri
    return absolute_sqlite(uri)  # since a later command may run in another folder


def check_destination(uri: str) -> None:
    """Raises ConfigError for the address of a server without its scheme, which MLflow takes for something else."""
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri):
        raise ConfigError(
            f"MLflow at {uri}: the URI of a server begins with http:// or https://; set tracking.uri, or "
            f"MLFLOW_TRACKING_URI, to http://{uri}"
        )


def store_below(output: str | Path) -> str:
    """Returns the URI of the SQLite store of an output folder."""
    return sqlite_uri((Path(output) / "mlflow.db").resolve())


def accepts_connection(uri: str) -> bool:
    """Returns False for a server that refuses connections or does not answer within two seconds.

    True for a file, and for a server behind a proxy, which only a request could check.
    """
    parts = split(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return True
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname):
        return True
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True
