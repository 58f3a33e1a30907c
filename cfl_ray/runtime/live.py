"""What the command line does with a run that somebody started: asks its server where it is live, reads its files where it is not."""

import os
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cfl_ray import config
from cfl_ray.core.errors import ConfigError, RunError
from cfl_ray.runtime.atwork import CONFIG, NAMESPACE, Session, at_work, read_session
from cfl_ray.tracking import RoundRecord, read_end, read_info, read_records
from cfl_ray.tracking.tracker import INFO

_ANSWER_SECONDS = 120
_SHOWN = ("accuracy", "accuracy_local", "num_clusters")


@dataclass(frozen=True)
class Status:
    """Where a run stands. What is not known is None."""

    experiment: str
    state: str  # of the run: live, finished, stopped, failed, died
    rounds: int  # of each method
    methods: dict[str, str]  # those that have begun, by label: finished, at work, begun
    waiting: int = 0  # methods that have not begun
    method: str | None = None  # at work, or the last one that was
    phase: str | None = None  # of the method at work: running, evaluating, saving ...
    round: int = 0  # at work where the run is live, else the last one recorded
    metrics: dict[str, float] = field(default_factory=dict)  # accuracy, accuracy_local, num_clusters when last evaluated
    evaluated: int | None = None  # that round
    hosts: int | None = None
    hosts_starting: int | None = None
    nodes: int | None = None
    clients_online: int | None = None
    clients: int | None = None
    seconds_per_round: float | None = None
    seconds_left: float | None = None  # of the method at work
    last_fault: str | None = None
    fault_age: float | None = None  # seconds
    pending: list[str] = field(default_factory=list)  # granted requests to come
    next: str | None = None  # what to type to go on
    driver: str | None = None  # host and process id


def status(run_dir: Path) -> Status:
    """Where the run stands, live or not. Raises ConfigError where there is none, or one whose session.json is not this user's."""
    file = _config(run_dir)
    experiment, session, live = config.load(file), read_session(run_dir), at_work(file)
    methods = _begun(run_dir)
    told = _told(run_dir, session) if live and session else {}
    label = told.get("method") or next(reversed(methods), None)
    if live and label and methods.get(label) != "finished":
        methods[label] = "at work"
    waiting = max(0, sum(_entries(entry) for entry in experiment.methods) - len(methods))
    finished = not waiting and all(how == "finished" for how in methods.values())
    records = list(read_records(run_dir / label)) if label else []
    last = next((record for record in reversed(records) if "accuracy" in record.metrics), None)
    round, seconds = told.get("round") or (records[-1].round if records else 0), _seconds_per_round(records)
    when, fault = told.get("last_fault") or (None, None)
    return Status(
        experiment.name,
        "live" if live else "finished" if finished else _ended(run_dir),
        experiment.rounds,
        methods,
        waiting,
        label,
        phase=told.get("state") or ("starting, or in one process" if live else None),
        round=round,
        metrics={name: last.metrics[name] for name in _SHOWN if name in last.metrics} if last else {},
        evaluated=last.round if last else None,
        **{name: told.get(name) for name in ("hosts", "hosts_starting", "nodes", "clients_online", "clients")},
        seconds_per_round=seconds,
        seconds_left=seconds and live and seconds * (experiment.rounds - (records[-1].round if records else 0)) or None,
        last_fault=fault,
        fault_age=when and max(0.0, time.time() - when),
        pending=told.get("pending", []),
        next=None if live or finished else f"cfl-ray resume {run_dir}",
        driver=f"{session.host}, process {session.pid}" if live and session else None,
    )


def ask(run_dir: Path, verb: str, *arguments: Any) -> str:
    """Asks something of a live run and returns what will happen. Raises RunError where the run is not live, ConfigError where it refuses."""
    file = _config(run_dir)
    session = read_session(run_dir)
    if not at_work(file):
        raise RunError(f"{run_dir} is not at work, so nobody can {verb.partition('_')[0]}; see `cfl-ray status {run_dir}`, go on with `cfl-ray resume {run_dir}`")
    if session is None:
        raise RunError(
            f"{run_dir} takes no requests now: it is only starting, runs in one process, or its cluster has no token; "
            "start Ray with RAY_AUTH_MODE=token, or ask again in a moment"
        )
    return _asked(session, verb, *arguments)


def _told(run_dir: Path, session: Session) -> dict[str, Any]:
    """What the server says; nothing where it is just being started, or the run ended meanwhile."""
    try:
        return _asked(session, "status")
    except RunError as error:
        return {"state": str(error)} if at_work(run_dir / CONFIG) else {}


def _asked(session: Session, verb: str, *arguments: Any) -> Any:
    if session.auth_mode:
        os.environ["RAY_AUTH_MODE"] = session.auth_mode  # read when ray is imported
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

    from cfl_ray.runtime.connect import first_line, join_cluster, told

    joined = not ray.is_initialized()
    try:
        if joined:
            join_cluster(session.address, session.loopback)
        actor = ray.get_actor(session.actor, namespace=NAMESPACE)
        return ray.get(actor.ask.remote(verb, *arguments), timeout=_ANSWER_SECONDS)
    except RayTaskError as error:
        raise told(error) from error
    except GetTimeoutError:
        raise RunError(f"the server has not answered within {_ANSWER_SECONDS} s; it may still do what was asked: see `cfl-ray status`") from None
    except RayActorError as error:
        raise RunError(f"the server died when it was asked ({first_line(error)}); another one is started: see `cfl-ray status` for what it knows") from None
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise RunError(f"the server of this run cannot be reached ({first_line(error)}); ask again in a moment, on the machine that runs it") from None
    finally:
        if joined and ray.is_initialized():
            ray.shutdown()


# ---- what the files say


def _config(run_dir: Path) -> Path:
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(f"{run_dir} holds no run: there is no {run_dir / CONFIG}")
    return run_dir / CONFIG


def _begun(run_dir: Path) -> dict[str, str]:
    """The methods that have begun, by label, and how far they are; the latest last. From files alone: a config may name code."""
    infos = {file.parent: read_info(file.parent) for file in run_dir.glob(f"*/{INFO}")}
    begun = sorted(infos, key=lambda directory: infos[directory].time_ms)
    return {directory.name: "finished" if (end := read_end(directory)) and end.status == "FINISHED" else "begun" for directory in begun}


def _entries(entry: Any) -> int:
    """How many methods an entry of `methods` stands for."""
    if entry != "all":
        return 1
    from cfl_ray.methods import REGISTRY

    return len(REGISTRY)


def _ended(run_dir: Path) -> str:
    """What became of a run that is neither live nor finished."""
    end = read_end(run_dir)
    return "died" if end is None else {"KILLED": "stopped", "FAILED": "failed"}.get(end.status, "stopped")


def _seconds_per_round(records: list[RoundRecord]) -> float | None:
    """With evaluation and checkpoint: what lay between the last few rounds, pauses of a resumed run left out."""
    between = [(after.time_ms - before.time_ms) / 1000 for before, after in pairwise(records[-6:])]
    return median(between) if between else next((record.metrics.get("round_seconds") for record in records[-1:]), None)
