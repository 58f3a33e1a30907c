"""Runs in which each call of a tracker, of a figure and of the report raises, once or always: each run must be whole.

    python -m jobs.services --raise
    python -m jobs.services --raise MlflowClient figures

A `Target` is one place where code that is not ours, or that a run can do without, is called. Its calls of a run without
an error are counted; then each of them raises, in a run of its own. A run is whole if it ends, with all rounds on
record and its end; what failed is in its warnings.
"""

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from cfl_ray import Experiment, simulate
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.tracking import delivery, read_end, read_records
from cfl_ray.tracking.mlflow import client_of

ROUNDS = 2
ALWAYS = None  # instead of the number of a call
ERRORS: Mapping[str, Callable[[], BaseException]] = {
    "OSError": lambda: OSError(28, "No space left on device"),
    "RuntimeError": lambda: RuntimeError("a thread of the library ended"),
    "ImportError": lambda: ImportError("cannot import name 'x' from partially initialized module 'y'"),
    "KeyError": lambda: KeyError("metric"),
    "HTTPError": lambda: _of_library("requests", "HTTPError", "503 Server Error"),
    "MlflowException": lambda: _of_library("mlflow.exceptions", "MlflowException", "RESOURCE_EXHAUSTED"),
    "SystemExit": lambda: SystemExit(1),
    "an error without a text": lambda: _Unreadable(),
}


class _Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("the text of this error cannot be read")


def _of_library(module: str, name: str, text: str) -> BaseException:
    error: BaseException = getattr(import_module(module), name)(text)
    return error


class OwnTracker:
    """A tracker with all that is optional."""

    uri = ""
    needs_open = False

    def __init__(self) -> None:
        self.received = 0

    @property
    def progress(self) -> float:
        return self.received

    def is_busy(self, error: BaseException) -> bool:
        return False

    def open(self, run_dir: Path, info: Any, after: int) -> None:
        """Begins."""

    def log(self, record: Any) -> None:
        raise AssertionError("log_batch is called instead")

    def log_batch(self, records: list[Any]) -> None:
        self.received += len(records)

    def log_wait(self, text: str) -> None:
        """Receives a line."""

    def close(self, end: Any) -> None:
        """Ends."""


@dataclass(frozen=True)
class Target:
    """A place that raises: `MODULE:NAME` or `MODULE:CLASS.NAME`. tracker: with which it is called; "": with any."""

    place: str
    tracker: str = ""
    is_property: bool = False
    after: int = 0  # calls that never raise: a run is refused before it starts if its trackers cannot be made

    @property
    def owner(self) -> Any:
        module, _, path = self.place.partition(":")
        found: Any = import_module(module)
        for name in path.split(".")[:-1]:
            found = getattr(found, name)
        return found

    @property
    def name(self) -> str:
        return self.place.rpartition(":")[2].rpartition(".")[2]


_WRITER = "torch.utils.tensorboard:SummaryWriter"
_CLIENT = "mlflow:MlflowClient"
_FIGURES = "cfl_ray.report.figures"
TARGETS = [
    Target(f"{__name__}:OwnTracker.__init__", "own", after=1),
    *(Target(f"{__name__}:OwnTracker.{name}", "own") for name in ("open", "log_batch", "close")),
    *(Target(f"{__name__}:OwnTracker.{name}", "own", is_property=True) for name in ("progress", "needs_open", "uri")),
    Target("cfl_ray.tracking.trackers:CsvFile.__init__", "csv", after=1),
    *(Target(f"cfl_ray.tracking.trackers:CsvFile.{name}", "csv") for name in ("open", "log", "close")),
    *(Target(f"cfl_ray.tracking.trackers:{name}", "csv") for name in ("append_line", "cut_torn_line")),
    *(Target(f"{_WRITER}.{name}", "tensorboard") for name in ("__init__", "add_scalar", "flush", "close")),
    *(Target(f"{_CLIENT}.{name}", "mlflow") for name in ("__init__", "get_experiment_by_name", "create_experiment")),
    *(Target(f"{_CLIENT}.{name}", "mlflow") for name in ("create_run", "log_batch", "log_inputs", "get_run")),
    *(Target(f"{_CLIENT}.{name}", "mlflow") for name in ("set_tag", "set_terminated")),
    Target("mlflow.store.artifact.local_artifact_repo:LocalArtifactRepository.log_artifact", "mlflow"),
    *(Target(f"{_CLIENT}.{name}", "mlflow") for name in ("get_experiment", "set_experiment_tag", "search_runs")),
    *(Target(f"{_FIGURES}:{name}") for name in ("write_figures", "_draw", "Figure", "Figure.savefig")),
    Target("cfl_ray.results.reporting:_page"),
    Target("cfl_ray.results.reporting:write_text"),
]


@dataclass
class Calls:
    """The calls of a target in a run; those whose number is `raises` (ALWAYS: each) raise what `error` makes."""

    target: Target
    raises: int | None = 0
    error: Callable[[], BaseException] = ERRORS["OSError"]
    count: int = 0
    raised: int = 0
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __call__(self) -> None:
        number = next(self._numbers)  # of several threads
        self.count = max(self.count, number)
        if number > self.target.after and (self.raises is ALWAYS or self.raises == number):
            self.raised += 1
            raise self.error()


@contextmanager
def raising(calls: Calls) -> Iterator[None]:
    """Context in which a target raises as `calls` says."""
    owner, name = calls.target.owner, calls.target.name
    present = owner.__dict__.get(name, getattr(owner, name))
    original: Any = present.fget if isinstance(present, property) else present

    def call(*arguments: Any, **options: Any) -> Any:
        calls()
        return original(*arguments, **options) if callable(original) else original

    replacement: Any = property(lambda self: call(self)) if calls.target.is_property else call
    with mock.patch.object(owner, name, replacement):
        yield


@contextmanager
def short_pauses() -> Iterator[None]:
    """Context in which a delivery does not pause after failures."""
    with (
        mock.patch.object(delivery, "PAUSES_SECONDS", (0.01,)),
        mock.patch.object(delivery, "PAUSES_AT_END_SECONDS", (0.01, 0.01)),
    ):
        yield


class _Warnings(Watcher):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its error, recorded rounds, status and warnings."""

    ended: str  # empty: as it should; else the error with which it ended
    rounds: list[int]
    status: str | None
    warnings: list[str]

    @property
    def is_whole(self) -> bool:
        return not self.ended and self.rounds == list(range(1, ROUNDS + 1)) and self.status == "FINISHED"


def experiment(output: Path, tracker: str, patience: float = 60, **changes: Any) -> Experiment:
    tracking = {
        "report": not tracker,  # it takes most of the time of a run
        "trackers": [{"own": OwnTracker}.get(tracker, tracker or "csv")],
        "uri": f"sqlite:///{output / 'mlflow.db'}",
        "patience": patience,
    }
    values = {
        "rounds": ROUNDS,
        "methods": ["fedavg"],
        "data": {
            "source": "synthetic",
            "synthetic_shape": [4],
            "synthetic_samples": 10,
            "partition": {"clients": 2},
        },
        "model": {"options": {"hidden": 2}},
        "local": {"epochs": 1},
        "runtime": {"engine": "manual"},
        "output": str(output),
        "tracking": tracking,
    }
    return Experiment(**values | changes)


def outcome(made: Experiment, run_dir: Path, calls: Calls) -> Outcome:
    """Runs an experiment in this process while a target raises."""
    watcher, ended = _Warnings(), ""
    with short_pauses(), raising(calls):
        try:
            simulate(made, run_dir, watcher)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            ended = f"{type(error).__name__}: {error}"
    method = run_dir / "fedavg"
    rounds = [record.round for record in read_records(method)] if method.is_dir() else []
    end = read_end(method) if method.is_dir() else None
    return Outcome(ended, rounds, end and end.status, watcher.texts)


def tried(
    target: Target, errors: Mapping[str, Callable[[], BaseException]] = ERRORS, all_calls: bool = True
) -> Iterator[tuple[str, Outcome]]:
    """Yields what was tried of a target, in words, and what became of the run: each call once, then all calls.

    all_calls: False: of the single calls only the first and the last.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # an attempt may still write

        def run(name: str, calls: Calls) -> Outcome:
            output = Path(folder) / name  # each has its own MLflow, since a process asks a known one less
            if target.tracker == "mlflow" and target.name != "__init__":  # which is called when a store is made
                output.mkdir()
                (output / "mlflow.db").write_bytes(_empty_store())
            patience = 5 if calls.raises is ALWAYS else 60
            return outcome(experiment(output, target.tracker, patience), output / "run", calls)

        counted = Calls(target)
        yield "nothing raises", run("counted", counted)
        singles = range(target.after + 1, counted.count + 1)
        numbers = [*(singles if all_calls else sorted({*singles[:1], *singles[-1:]})), ALWAYS]
        for number, (name, error) in itertools.product(numbers, errors.items()):
            what = f"{name} in {'each call' if number is ALWAYS else f'call {number} of {counted.count}'}"
            yield what, run(f"{number}-{name.replace(' ', '-')}", Calls(target, number, error))


@cache
def _empty_store() -> bytes:
    """A database of MLflow, which takes seconds to make."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mlflow.db"
        client_of(f"sqlite:///{file}")
        return file.read_bytes()


def main(words: Sequence[str] = ()) -> int:
    """Tries the targets with one of the words in their place, all without words, and prints a line for each."""
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
    is_good = True
    for target in TARGETS:
        if words and not any(word in target.place for word in words):
            continue
        outcomes = list(tried(target))
        lost = [f"{what}: {end.ended or (end.rounds, end.status)}" for what, end in outcomes if not end.is_whole]
        most = max(len(end.warnings) for _, end in outcomes)
        print(f"{target.place}: {len(outcomes) - 1} runs, {len(lost)} not whole, at most {most} notes", flush=True)
        for line in lost:
            print(f"    {line}", flush=True)
        is_good &= not lost
    return 0 if is_good else 1
