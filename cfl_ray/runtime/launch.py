"""Running an experiment from start to end: `run` on Ray, `simulate` in this process, `resume` where a run stopped."""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cfl_ray import config
from cfl_ray.config import Experiment
from cfl_ray.core.errors import ConfigError, DataError, Interrupted, RunError, Stopped
from cfl_ray.report.figures import write_figures
from cfl_ray.runtime.atwork import held
from cfl_ray.runtime.journal import Journal, copy_events, grown_by
from cfl_ray.runtime.results import MethodResult, Moves, Results
from cfl_ray.runtime.server import Report
from cfl_ray.runtime.session import InProcessSession, Session
from cfl_ray.runtime.setup import Setup, cluster_address, prepare
from cfl_ray.tracking import (
    ARTIFACTS,
    ROUND_METRICS,
    RUN_METRICS,
    MlflowTracker,
    RoundRecord,
    RunInfo,
    Spool,
    Tracker,
    flatten,
    read_end,
    read_records,
    redact,
    resolve_uri,
    summarise,
)
from cfl_ray.tracking.files import write_text
from cfl_ray.tracking.record import Status

CONFIG = "config.yaml"
_HASH = "# config hash "


@dataclass
class Watcher:
    """Told what happens while a run goes on; the default says nothing."""

    def preparing(self, what: str, done: int = 0, total: int = 0) -> None: ...
    def started(self, setup: Setup, run_dir: Path | None, facts: dict[str, str]) -> None: ...
    def method(self, label: str, report: Report) -> None: ...
    def round(self, label: str, report: Report) -> None: ...
    def warn(self, text: str) -> None: ...


def run(
    experiment: Experiment | None = None, run_dir: str | Path | None = None, watcher: Watcher | None = None, replay: str | Path | None = None
) -> Results:
    """Runs every method of the experiment (None: the built-in example) on Ray and returns what they came to.

    run_dir: where files go; None: a new folder below `experiment.output`. replay: another run of this experiment; what was asked of
    it while it was live happens here in the same rounds. Raises ConfigError for bad input and for a folder that belongs to another
    config, RunError when the run cannot go on (everything saved stays), Stopped when it was asked to end early.
    """
    return _launch(experiment or config.load(), run_dir, watcher or Watcher(), on_ray=True, keep=True, replay=replay)


def simulate(
    experiment: Experiment | None = None, run_dir: str | Path | None = None, watcher: Watcher | None = None, replay: str | Path | None = None
) -> Results:
    """The same in this process, without Ray and with the same numbers. Keeps files only where `run_dir` is given, as `replay` needs it."""
    return _launch(experiment or config.load(), run_dir, watcher or Watcher(), on_ray=False, keep=run_dir is not None, replay=replay)


def resume(run_dir: str | Path, watcher: Watcher | None = None, on_ray: bool = True, experiment: Experiment | None = None) -> Results:
    """Goes on with a run that stopped, from its last checkpoints. Raises ConfigError where `run_dir` holds no run.

    experiment: the one that was run, where it has objects made in Python (a Federation, a model, a method) that no file can hold.
    """
    file = Path(run_dir) / CONFIG
    if not file.is_file():
        raise ConfigError(f"{run_dir} holds no run: there is no {file}")
    if experiment is not None and (there := _hash_of(file)) != experiment.config_hash:
        raise ConfigError(f"{run_dir} belongs to another config (hash {there}, this one has {experiment.config_hash})")
    return _launch(experiment or config.load(file), run_dir, watcher or Watcher(), on_ray, keep=True, resumed=True)


def _launch(
    experiment: Experiment, run_dir: str | Path | None, watcher: Watcher, on_ray: bool, keep: bool, resumed: bool = False, replay: str | Path | None = None
) -> Results:
    if replay is not None:
        _check_replay(Path(replay), experiment, keep)
    with contextlib.ExitStack() as at_work:
        directory = _directory(experiment, run_dir, resumed) if keep else None
        if resumed:
            at_work.enter_context(held(directory / CONFIG))
        watcher.preparing("federation")
        setup = prepare(experiment, watcher.preparing)
        watcher.preparing("Ray and the client hosts" if on_ray else "the engine")
        session = _session(setup, directory, on_ray)
        try:
            facts = session.facts()
            if directory is not None and not resumed:
                for label in setup.methods if replay is not None else ():
                    copy_events(Path(replay) / label, directory / label)
                _write_config(directory, experiment)
                at_work.enter_context(held(directory / CONFIG))
            watcher.started(setup, directory, facts)
            return _Driver(setup, session, directory, watcher, facts).all_methods()
        except KeyboardInterrupt:
            raise Interrupted(f"stopped. {_how_to_go_on(directory)}") from None
        except (RunError, Stopped) as error:
            raise type(error)(f"{error}. {_how_to_go_on(directory)}") from error
        except OSError as error:  # a full disk, or a folder that is gone
            raise RunError(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}. {_how_to_go_on(directory)}") from error
        finally:
            session.close()


def _check_replay(replay: Path, experiment: Experiment, keep: bool) -> None:
    """Raises ConfigError where `replay` is no run of this experiment."""
    if not (replay / CONFIG).is_file():
        raise ConfigError(f"replay: {replay} holds no run: there is no {replay / CONFIG}")
    if (there := _hash_of(replay / CONFIG)) != experiment.config_hash:
        raise ConfigError(f"replay: {replay} belongs to another config (hash {there}, this one has {experiment.config_hash}); run {replay / CONFIG}")
    if not keep:
        raise ConfigError("replay: name a run_dir; what happens in a run is kept there")


def _how_to_go_on(directory: Path | None) -> str:
    if directory is None or not (directory / CONFIG).exists():
        return "Nothing was kept"
    return f"Every saved round is kept; go on with: cfl-ray resume {directory}"


def _write_config(directory: Path, experiment: Experiment) -> None:
    """config.yaml, readable by its owner alone: a tracking URI may hold a password. Its first line says the hash."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / CONFIG, f"{_HASH}{experiment.config_hash}\n{experiment.to_yaml()}", mode=0o600)


def _hash_of(file: Path) -> str:
    """The hash of the config that a run directory belongs to; objects made in Python have no other trace."""
    first = file.read_text().partition("\n")[0]
    return first.removeprefix(_HASH) if first.startswith(_HASH) else config.load(file).config_hash


def _session(setup: Setup, directory: Path | None, on_ray: bool) -> Session:
    if not on_ray:
        return InProcessSession(setup, directory)
    if cluster_address(setup.experiment.runtime.address) is None and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported: a cluster of our own is never open to others
    from cfl_ray.runtime.cluster import RaySession  # imports ray, which `simulate` does without

    return RaySession(setup, directory)


def new_run_dir(experiment: Experiment) -> Path:
    """A folder below `output` that does not exist yet."""
    first = Path(experiment.output) / f"{experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([first], others) if not path.exists())


def _directory(experiment: Experiment, run_dir: str | Path | None, resumed: bool) -> Path:
    """The run directory, not yet made. Raises ConfigError where it holds a run that is not to be resumed."""
    directory = Path(run_dir or new_run_dir(experiment)).absolute()
    file = directory / CONFIG
    if file.is_file() and not resumed:
        if (there := _hash_of(file)) != experiment.config_hash:
            raise ConfigError(f"{directory} belongs to another config (hash {there}, this one has {experiment.config_hash}); choose another folder")
        raise ConfigError(f"{directory} holds a run of this config already; go on with it by `cfl-ray resume {directory}` or choose another folder")
    return directory


class _Driver:
    """Drives a session through the methods and keeps what it reports."""

    def __init__(self, setup: Setup, session: Session, directory: Path | None, watcher: Watcher, facts: dict[str, str]):
        self.setup, self.session, self.directory, self.watcher, self.facts = setup, session, directory, watcher, facts
        self.experiment = setup.experiment
        self.stopped = False  # on request
        self.uri = resolve_uri(self.experiment.tracking, self.experiment.output) if self.experiment.tracking.enabled and directory else None

    def all_methods(self) -> Results:
        parent = self._tracker(None)
        status = "FAILED"
        try:
            results = {}
            for label in self.setup.methods:
                if self.stopped:
                    raise Stopped(f"stopped before {label}, as asked")
                results[label] = self._method(label)
            if parent is not None:
                write_figures(self.directory / ARTIFACTS, {label: result.records for label, result in results.items()})
            status = "FINISHED"
        except (KeyboardInterrupt, Stopped):
            status = "KILLED"
            raise
        finally:
            if parent is not None:
                self._finish(parent, status, {})
        return Results(results, self.directory, redact(self.uri) if self.uri else None, self.facts)

    def _method(self, label: str) -> MethodResult:
        directory = self.directory / label if self.directory else None
        records = list(read_records(directory)) if directory else []
        if directory is not None and (end := read_end(directory)) is not None and end.status == "FINISHED":
            return MethodResult(label, records, dict(end.summary.metrics))
        tracker, moves = self._tracker(label), Moves(directory)
        status, summary = "FAILED", {}
        try:
            report = self.session.begin(label)
            self._take(report, records, moves, tracker)  # a round that was saved just before a crash, and not yet kept here
            self.watcher.method(label, report)
            while not (report.finished or report.stop):
                report = self.session.advance()
                self._take(report, records, moves, tracker)
                self.watcher.round(label, report)
            self.stopped = report.stop
            if not report.finished:
                raise Stopped(f"stopped after round {report.round} of {label}, as asked")
            summary = self._summary(records, moves, report)
            if tracker is not None:
                federation = grown_by(self.setup.federation, Journal(directory).until(self.experiment.rounds))
                moves.write(directory / ARTIFACTS / "assignments.parquet", federation)
                write_figures(directory / ARTIFACTS, {label: records})
                write_text(directory / ARTIFACTS / CONFIG, redact(self.experiment.to_yaml()))
            status = "FINISHED"
        except (KeyboardInterrupt, Stopped):
            status = "KILLED"
            raise
        finally:
            if tracker is not None:
                self._finish(tracker, status, summary)
        return MethodResult(label, records, summary)

    def _finish(self, tracker: Tracker, status: Status, summary: dict[str, float]) -> None:
        """Records the end. That it cannot be recorded hides no other failure: the run is resumed from its checkpoints, not from its end."""
        try:
            tracker.finish(status, summary)
        except (OSError, DataError) as error:
            if status == "FINISHED":
                raise
            self.watcher.warn(f"the end of {tracker.run_dir} was not recorded: {error}")

    def _take(self, report: Report, records: list[RoundRecord], moves: Moves, tracker: Tracker | None) -> None:
        """Keeps a round; one that was replayed after a fault is there already."""
        if not report.metrics or (records and report.round <= records[-1].round):
            return
        record = RoundRecord(report.round, {name: value for name, value in report.metrics.items() if name in ROUND_METRICS}, report.time_ms)
        records.append(record)
        moves.add(report)
        if tracker is not None:
            tracker.log(record)

    def _summary(self, records: list[RoundRecord], moves: Moves, report: Report) -> dict[str, float]:
        clustered = any("num_clusters" in record.metrics for record in records)
        summary = summarise(records, self.experiment.evaluation.target, moves.rounds if clustered else None)
        return summary | {name: value for name, value in report.metrics.items() if name in RUN_METRICS}

    def _tracker(self, label: str | None) -> Tracker | None:
        """The tracker of one method, or of the comparison of all (None), started; None where nothing is kept."""
        if self.directory is None:
            return None
        directory = self.directory / label if label else self.directory
        if self.uri is None:
            tracker: Tracker = Spool(directory)
        else:
            parent = self.directory if label else None
            tracker = MlflowTracker(directory, self.uri, self.experiment.tracking.experiment, parent, warn=self.watcher.warn)
        data = self.experiment.data
        tags = {
            "dataset": data.source,
            "partition": data.partition.kind if data.shift.kind == "none" else f"{data.shift.kind}/{data.partition.kind}",
            "seed": self.experiment.seed,
            "config_hash": self.experiment.config_hash,
            "git_commit": _git_commit(),
        }
        name = f"{self.experiment.name}/{label}" if label else self.experiment.name
        method = self.setup.methods[label].name if label else ""
        facts = {f"session.{key}": value for key, value in self.facts.items()}
        options = {f"method.{key}": str(value) for key, value in vars(self.setup.methods[label]).items()} if label else {}
        tracker.start(RunInfo(name, method, tags | ({"method": method} if method else {}), flatten(self.experiment.to_dict()) | facts | options))
        return tracker


def _git_commit() -> str:
    """The commit of the code at work, or "unknown" outside a checkout."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"
