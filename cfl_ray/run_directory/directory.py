"""The files of a run directory, which no other module names.

A run directory holds a folder for each method, and the folder of a study holds run directories in
SETTING/METHOD/seed-SEED. The three kinds of folder share a class, because the parent run of a comparison and that of a
study have the files of a tracked run, as a method has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal, overload

from filelock import FileLock, Timeout

from cfl_ray.errors import ConfigError, DataError, RunError, counted
from cfl_ray.run_directory.lock import hold, is_held
from cfl_ray.security.signing import is_signed, sign
from cfl_ray.system.files import PRIVATE, opened, read_json, sync, write_json

Owner = Literal["run", "method", "study"]
FORMAT = 3  # of the files; config.yaml has a line with it
_FORMAT_LINE = re.compile(rb"^# format ([0-9]{1,9})$", re.MULTILINE)
_HEADER_BYTES = 1 << 10
_PURPOSE = "names in the record of a run"
_SEED = "seed-"
RUNS_OF_STUDY = f"*/*/{_SEED}*"  # SETTING/METHOD/seed-SEED: the run directories in the folder of a study


def check_inside(key: str, name: str) -> None:
    """Raises ConfigError if `name`, the value of `key`, is not a file or folder inside the directory."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(f"{key} must be a name in the directory of each method, got {name!r}")


class UntrustedError(ConfigError):
    """Code, a file or a server that is used only if the user trusts it explicitly."""


@dataclass(frozen=True)
class File:
    """A file of the layout, or a folder if the name ends with a slash; its path if read from a `RunDirectory`."""

    name: str
    of: tuple[Owner, ...]  # kinds of folder that have it
    contents: str
    writer: str

    @overload
    def __get__(self, directory: None, owner: type) -> File: ...
    @overload
    def __get__(self, directory: RunDirectory, owner: type) -> Path: ...
    def __get__(self, directory: RunDirectory | None, owner: type) -> File | Path:
        return self if directory is None else directory.path / self.name


class RunDirectory:
    """The directory of a run, of one of its methods, or of a study. Creating the object accesses no file."""

    config = File(
        "config.yaml", ("run",), "the experiment, without credentials; locked while the run is live", "driver"
    )
    signature = File("signature.json", ("run", "study"), "this user's signature of what the record names", "driver")
    environment = File(
        "environment.json",
        ("run",),
        "engine and the reason of its choice, why it did not train some clients, device, CPU instructions, version of "
        "PyTorch, digests of the data and of the user's files, on which results depend besides the config hash",
        "driver",
    )
    user_code = File(
        "user_code/",
        ("run", "study"),
        "copies of the user's files that the run imported, shared by the runs of a study",
        "driver",
    )
    session = File("session.json", ("run",), "address of the server while the run is live, signed", "driver")
    start_lock = File("start.lock", ("run",), "held by the process that started the run", "driver")
    failure = File("failure.txt", ("run",), "why a run of a study failed", "study")
    pruned = File("pruned.txt", ("run",), "after which round a trial of a sweep ended early", "study")

    info = File("run.json", ("run", "method", "study"), "identity, tags and parameters", "driver")
    metrics = File("metrics.jsonl", ("run", "method", "study"), "a line for each round", "driver")
    end = File("end.json", ("run", "method", "study"), "status and metrics of the whole run", "driver")
    mlflow = File("mlflow.json", ("run", "method", "study"), "how much of the run MLflow has, signed", "tracker")
    mlflow_lock = File("mlflow.lock", ("run", "method", "study"), "held while results go to MLflow", "tracker")
    artifacts = File("artifacts/", ("run", "method", "study"), "figures and tables", "driver")
    report = File("artifacts/report.html", ("run", "study"), "the report", "driver")
    models = File("models/", ("method",), "logged models (with `tracking.log_models`)", "driver")

    reassignments = File("reassignments.arrow", ("method",), "clients that changed their cluster", "driver")
    client_metrics = File("client_metrics.arrow", ("method",), "metrics of each client", "driver")
    diagnostics = File("diagnostics.arrow", ("method",), "diagnostics of the method", "driver")
    events = File("events.jsonl", ("method",), "granted requests", "server")
    assignments = File("artifacts/assignments.parquet", ("method",), "every client's clusters", "driver")
    cluster_events = File("artifacts/cluster_events.jsonl", ("method",), "a line for each event of a cluster", "driver")
    checkpoints = File("checkpoints/", ("method",), "checkpoints", "server; client states: hosts")
    writer = File(
        "writer.json", ("method",), "which process may write checkpoints, and how hosts know the directory", "server"
    )
    privacy_key = File(
        "privacy.key",
        ("method",),
        "key of the noise of a private run: whoever has it can subtract the noise",
        "server",
    )
    writer_lock = File("writer.lock", ("method",), "held while checkpoints are written", "server")

    study = File("study.yaml", ("study",), "the study, without credentials", "study")
    study_lock = File("study.lock", ("study",), "held by the process that runs the study", "study")
    trials = File("optuna.log", ("study",), "trials of a sweep that learns from results", "study")
    results_table = File("artifacts/results.csv", ("study",), "a row for each run", "study")
    trials_table = File("artifacts/trials.csv", ("study",), "a row for each trial of a sweep", "study")
    best = File("artifacts/best/", ("study",), "the config of each method's best trial in a sweep", "study")
    best_study = File("artifacts/best_study.yaml", ("study",), "a study of the best trials of a sweep", "study")
    table = File("artifacts/table.md", ("study",), "the table of the study", "study")

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @classmethod
    def layout(cls) -> dict[str, File]:
        """The files by the name of their attribute."""
        return {name: value for name, value in vars(cls).items() if isinstance(value, File)}

    @classmethod
    def names_in(cls, owner: Owner) -> list[str]:
        """The names at the top level of a folder of this kind."""
        return [
            file.name.rstrip("/") for file in cls.layout().values() if owner in file.of and "/" not in file.name[:-1]
        ]

    def method(self, label: str) -> RunDirectory:
        """The directory of a method."""
        return RunDirectory(self.path / label)

    def of_methods(self, file: File) -> list[Path]:
        """The places of a file in the folders of a run's methods that have it, ordered by the method."""
        return sorted(self.path.glob(f"*/{file.name}"))

    def cursor(self, tracker: str) -> Path:
        """The file that says how much of the run a tracker has (tracker-NAME.json, or mlflow.json)."""
        return (
            self.mlflow
            if tracker == "mlflow"
            else self.path / f"tracker-{re.sub('[^A-Za-z0-9_-]+', '-', tracker)}.json"
        )

    def artifact(self, file: Path) -> Path:
        """The copy of a file among the artifacts."""
        return self.artifacts / file.name

    # ---- trust

    def sign(self, names: Sequence[str]) -> None:
        """Signs `names` and the links in this directory, for this directory.

        names: the things outside the directory that the record of this user's run or study names.
        """
        names = [*names, *self.links()]
        if names and (signature := sign(_PURPOSE, self.path, names)):
            write_json(self.signature, {"names": names, "signature": signature})

    def require_signed(self, names: Sequence[str], record: str = "folder", known: Sequence[str] = ()) -> None:
        """Raises UntrustedError for names, and for links, that this user has not signed for this directory.

        record: the part that contains the names, for the message. known: names that need no signature.
        """
        names = [name for name in (*names, *self.links()) if name not in known]
        signed = self._signed() if names else []
        if unknown := [name for name in names if name not in signed]:
            kept = f". Its {self.signature.name} is of another folder, of another key or of an earlier version"
            raise UntrustedError(
                f"{self.path} was not made by you on this machine, and its {record} names {', '.join(unknown)}; what "
                "it names is imported, read, written or connected to. Look at it, and say --trust (trust=True in "
                "Python) if you trust it. If it is yours, give its key instead: CFL_RAY_KEY or CFL_RAY_KEY_FILE"
                + (kept if not signed and self.signature.exists() else "")
            )

    def _signed(self) -> list[str]:
        """The names in signature.json; empty if this user has not signed them for this directory."""
        with suppress(DataError):
            values = read_json(self.signature) or {}
            names = values.get("names")
            if isinstance(names, list) and is_signed(_PURPOSE, self.path, names, values.get("signature")):
                return [str(name) for name in names]
        return []

    def links(self) -> list[str]:
        """The symbolic links in the directory, each with its target, which is not part of the run."""
        links: list[str] = []
        for folder, folders, files in os.walk(self.path):
            paths = (path for name in (*folders, *files) if (path := Path(folder) / name).is_symlink())
            links += [f"the link {path.relative_to(self.path)} -> {os.readlink(path)}" for path in paths]
        return sorted(links)

    # ---- kind

    @property
    def is_run(self) -> bool:
        """Whether the folder holds a run."""
        return self.config.is_file()

    @property
    def is_study(self) -> bool:
        """Whether the folder holds a study."""
        return self.study.is_file()

    def require_run(self) -> None:
        """Raises ConfigError for a folder that holds no run, or a run in another format than `FORMAT`."""
        if self.is_run:
            if (number := self._format()) != FORMAT:
                raise ConfigError(
                    f"{self.config} has format {number}, and this cfl_ray reads format {FORMAT}: use the version that "
                    "wrote it"
                )
            return
        if self.is_study:
            raise ConfigError(
                f"{self.path} is the folder of a study; name one of its runs: {self.path}/SETTING/METHOD/seed-SEED"
            )
        if self.start_lock.is_file() and is_held(self.start_lock):
            raise ConfigError(
                f"a run is starting in {self.path}; ask again in a moment, or end it with Ctrl-C or SIGTERM"
            )
        runs, studies = (sorted(self.path.glob(f"*/{file.name}")) for file in (self.config, self.study))
        if runs or studies:
            found = [counted(len(runs), "run")] * bool(runs) + [counted(len(studies), "study", "studies")] * bool(
                studies
            )
            raise ConfigError(
                f"{self.path} is a folder above {' and '.join(found)}; name one of them, such as "
                f"{(runs or studies)[-1].parent}"
            )
        raise ConfigError(f"{self.path} holds no run: there is no {self.config}")

    def _format(self) -> int:
        """The format in config.yaml; the present format if its comments were removed."""
        with opened(self.config) as file:
            line = _FORMAT_LINE.search(file.read(_HEADER_BYTES)) if file is not None else None
        return int(line[1]) if line else FORMAT

    # ---- who may write

    def hold(self) -> AbstractContextManager[None]:
        """Marks the run, or the study, as live. Raises RunError if it is live already."""
        return hold(self.study_lock if self.is_study else self.config)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Context in which no other process can start a run in this folder, which is created if it is missing.

        Raises RunError if another process starts or has started a run in it. If the run does not begin and the folder
        is empty, it is removed.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with FileLock(self.start_lock, timeout=0, mode=PRIVATE):
                if self.is_run:
                    raise RunError(f"another process has started a run in {self.path}; choose another folder")
                try:
                    yield
                finally:
                    if self.path.is_dir() and not self.is_run and [*self.path.iterdir()] == [self.start_lock]:
                        self.start_lock.unlink()
                        self.path.rmdir()
        except Timeout:
            raise RunError(f"another process starts a run in {self.path}; choose another folder") from None

    @property
    def is_live(self) -> bool:
        """Whether a process runs the run or the study."""
        file = self.study_lock if self.is_study else self.config
        return file.is_file() and is_held(file)

    # ---- files that grow with the rounds of a method

    @property
    def records(self) -> tuple[Path, ...]:
        """The files of a method that grow with its rounds."""
        return self.metrics, self.reassignments, self.client_metrics, self.diagnostics

    def sync_records(self) -> None:
        """Flushes the files that grow with the rounds to the disk.

        The driver appends to them without waiting for the disk. A checkpoint of round r holds the report of round r and
        requires the records of all earlier rounds, so these files are flushed before it is written. A power failure can
        lose only records of round r or later, which are written again when the run continues.
        """
        for file in self.records:
            if file.exists():
                sync(file)
        if self.path.exists():
            sync(self.path)  # files may be new

    # ---- a study

    def run_of(self, setting: str, method: str, seed: int) -> Path:
        """The directory of a run of a study."""
        return self.path / setting / method / f"{_SEED}{seed}"

    @staticmethod
    def seed_of(run: Path) -> int:
        """The seed in the name of a run directory; -1 without a seed."""
        number = run.name.removeprefix(_SEED)
        return int(number) if number.isdigit() else -1

    def run_folders(self, containing: File | None = None) -> Iterator[Path]:
        """The directories of a study's runs, or only those that contain a file; in no particular order."""
        name = (containing or RunDirectory.config).name
        return (file.parent for file in self.path.glob(f"{RUNS_OF_STUDY}/{name}"))
