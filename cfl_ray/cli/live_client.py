"""The status of a run for the command line: of a live run from its server, of any other run from its files."""

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cfl_ray import config
from cfl_ray.errors import RunError, UserError, command
from cfl_ray.results.run_record import how_to_resume
from cfl_ray.results.study_folder import begun_methods, is_finished, methods_in
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.session_file import ServerAddress, read_server_address
from cfl_ray.tracking import RoundRecord, read_end, read_records
from cfl_ray.tracking.record import (
    BEST_ROUND,
    is_evaluated,
    primary_of,
    rejected_updates,
    validation_metric,
    why_diverged,
    why_early,
)


@dataclass(frozen=True)
class RunStatus:
    """The status of a run. None: not known."""

    experiment: str
    state: str  # live, finished, stopped, failed or died
    rounds: int  # of each method
    methods: dict[str, str]  # methods that have begun, by label: finished, at work or begun
    waiting: int = 0  # number of methods that have not begun
    method: str | None = None  # the current method, or the last method
    step: str | None = None  # of the current round: running, evaluating, saving ...
    phase: str | None = None  # phase of the method in its next round
    last_event: str | None = None  # of its clusters
    round: int = 0  # the current round of a live run, else the last recorded round
    score: str = "accuracy"  # the first metric of the task
    metrics: dict[str, float] = field(default_factory=dict)  # last score, its P-local, num_clusters, epsilon
    evaluated: int | None = None  # round of the last evaluation
    best_round: int | None = None  # so far, with `keep: best`
    hosts: int | None = None
    hosts_starting: int | None = None
    nodes: int | None = None
    clients_online: int | None = None
    clients: int | None = None
    seconds_per_round: float | None = None
    seconds_left: float | None = None  # of the current method
    last_fault: str | None = None
    fault_age: float | None = None  # seconds
    rejected: dict[str, int] = field(default_factory=dict)  # number of rejected updates, for methods with any
    updates: dict[str, int] = field(default_factory=dict)  # number of all updates of these methods, if known
    diverged: dict[str, str] = field(default_factory=dict)  # methods that ended without a usable model, and why
    early: dict[str, str] = field(default_factory=dict)  # methods that ended before their last round, and why
    pending: list[str] = field(default_factory=list)  # granted requests that have not taken effect
    next: str | None = None  # how to continue the run
    driver: str | None = None  # host and process id


def status(run_dir: Path) -> RunStatus:
    """The status of a run, live or not.

    Raises ConfigError without a run, and for a live run whose session file this user did not sign for this folder.
    """
    directory = _run(run_dir)
    experiment, live = config.load(directory.config), directory.is_live
    server = read_server_address(run_dir) if live else None
    methods = _begun(run_dir)
    answer = _server_status(run_dir, server) if server else {}
    label = answer.get("method") or next(reversed(methods), None)
    if live and label and methods.get(label) != "finished":
        methods[label] = "at work"
    waiting = max(0, len(methods_in(experiment.methods)) - len(methods))
    all_finished = not waiting and set(methods.values()) <= {"finished"}
    # a run may be killed between the end of its last method and its own
    state = "live" if live else "finished" if all_finished and is_finished(run_dir) else _ended(run_dir)
    records_of = {label: list(read_records(directory.method(label).path)) for label in methods}
    records = records_of.get(label, []) if label else []
    return RunStatus(
        experiment.name,
        state,
        experiment.rounds,
        methods,
        waiting,
        label,
        step=_step(answer, all_finished) if live else None,
        round=answer.get("round") or _last_round(records),
        **_of_last_round(records),
        **_of_last_evaluation(records),
        **_of_time(records, experiment.rounds if live else None),
        **_of_server(answer),
        **_of_updates(records_of),
        **_of_ends(records_of, methods, _reasons(directory, methods), experiment.rounds, state),
        next=None if state in ("live", "finished") else how_to_resume(directory),
        driver=f"{server.host}, process {server.pid}" if server else None,
    )


def ask(run_dir: Path, verb: str, *arguments: Any) -> str:
    """Sends a request to a live run and returns its effect as text.

    Raises RunError if the run is not live, ConfigError if the request is refused.
    """
    if not _run(run_dir).is_live:
        refusal = f"{run_dir} is not live, so it takes no request to {verb.partition('_')[0]}; "
        if (to_resume := status(run_dir).next) is None:
            raise RunError(f"{refusal}it is finished, see `{command('status', run_dir)}`")
        raise RunError(f"{refusal}see `{command('status', run_dir)}`, go on with `{to_resume}`")
    server = read_server_address(run_dir)
    if server is None:
        raise RunError(
            f"{run_dir} takes no requests now: it is only starting, runs in one process, or its cluster has no token; "
            "start Ray with RAY_AUTH_MODE=token, or ask again in a moment"
        )
    return _ask_server(server, verb, *arguments)


def own_step(run_dir: Path) -> str | None:
    """The step of the current round in the run on Ray that this process drives; None if it is not known."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():  # the step is not worth joining a cluster
        return None
    try:
        server = read_server_address(run_dir)
        return None if server is None else _ask_server(server, "status").get("state")
    except UserError:
        return None


def _ask_server(server: ServerAddress, verb: str, *arguments: Any) -> Any:
    if server.auth_mode:
        os.environ["RAY_AUTH_MODE"] = server.auth_mode  # read when ray is imported
    from cfl_ray.runtime.on_ray.ask import ask_server

    return ask_server(server, verb, *arguments)


def _server_status(run_dir: Path, server: ServerAddress) -> dict[str, Any]:
    """The server's status; only `unreachable`, the reason, if it does not answer; empty if the run has ended since."""
    try:
        return _ask_server(server, "status")
    except RunError as error:
        return {"unreachable": str(error)} if RunDirectory(run_dir).is_live else {}


# ---- parts of a status, each some fields of RunStatus


def _step(answer: dict[str, Any], all_finished: bool) -> str:
    """The step of the round of a live run. all_finished: all its methods have ended."""
    if state := answer.get("state"):
        return str(state)
    return "ending" if all_finished else str(answer.get("unreachable", "starting, or in one process"))


def _of_server(answer: dict[str, Any]) -> dict[str, Any]:
    """Fields that only the server of a live run knows."""
    when, fault = answer.get("last_fault") or (None, None)
    return {name: answer.get(name) for name in ("hosts", "hosts_starting", "nodes", "clients_online", "clients")} | {
        "last_fault": fault,
        "fault_age": when and max(0.0, time.time() - when),
        "pending": answer.get("pending", []),
    }


def _last_round(records: list[RoundRecord]) -> int:
    return records[-1].round if records else 0


def _of_last_round(records: list[RoundRecord]) -> dict[str, Any]:
    events = [event for record in records for event in record.events if event.event != "phase"]
    return {
        "phase": (records[-1].next_phase or None) if records else None,
        "last_event": f"round {events[-1].round}: {events[-1].text}" if events else None,
    }


def _of_last_evaluation(records: list[RoundRecord]) -> dict[str, Any]:
    last = next((record for record in reversed(records) if is_evaluated(record.metrics)), None)
    if last is None:
        return {}
    score = primary_of(last.metrics)
    shown = (score, f"{score}_local", validation_metric(score), "num_clusters", "epsilon")
    metrics = {name: last.metrics[name] for name in shown if name in last.metrics}
    best = {"best_round": int(last.metrics[BEST_ROUND])} if BEST_ROUND in last.metrics else {}
    return {"score": score, "metrics": metrics, "evaluated": last.round, **best}


def _of_time(records: list[RoundRecord], rounds: int | None) -> dict[str, Any]:
    """rounds: of the method in a live run; None: the run is not live."""
    seconds = _seconds_per_round(records)
    left = seconds * (rounds - _last_round(records)) if seconds and rounds else None
    return {"seconds_per_round": seconds, "seconds_left": left or None}


def _of_updates(records_of: dict[str, list[RoundRecord]]) -> dict[str, Any]:
    updates_of = {label: rejected_updates(records) for label, records in records_of.items()}
    rejected = {label: updates for label, updates in updates_of.items() if updates.count}
    return {
        "rejected": {label: updates.count for label, updates in rejected.items()},
        "updates": {label: updates.total for label, updates in rejected.items() if updates.total is not None},
    }


def _of_ends(
    records_of: dict[str, list[RoundRecord]], methods: dict[str, str], reasons: dict[str, str], rounds: int, state: str
) -> dict[str, Any]:
    """methods: their progress. reasons: why `stopping` ended them. rounds: of each method. state: of the run."""
    diverged: dict[str, str] = {}
    early: dict[str, str] = {}
    for label, progress in methods.items():
        finished = progress == "finished"
        if finished and (why := why_diverged(records_of[label])):
            diverged[label] = why
        reason = reasons.get(label, "")
        if (finished or state == "stopped") and (why := why_early(records_of[label], rounds, finished, reason)):
            early[label] = why
    return {"diverged": diverged, "early": early}


# ---- read from files


def _reasons(run: RunDirectory, labels: Iterable[str]) -> dict[str, str]:
    """Why methods ended by `stopping`, for those that did."""
    ends = {label: read_end(run.method(label).path) for label in labels}
    return {label: end.reason for label, end in ends.items() if end is not None and end.reason}


def _run(run_dir: Path) -> RunDirectory:
    directory = RunDirectory(run_dir)
    directory.require_run()
    directory.require_signed([])
    return directory


def _begun(run_dir: Path) -> dict[str, str]:
    """The methods that have begun, latest last: label -> finished or begun."""
    return {folder.name: "finished" if is_finished(folder) else "begun" for folder in begun_methods(run_dir)}


def _ended(run_dir: Path) -> str:
    """The state of a run that is neither live nor finished."""
    end = read_end(run_dir)
    return "died" if end is None else {"KILLED": "stopped", "FAILED": "failed"}.get(end.status, "stopped")


def _seconds_per_round(records: list[RoundRecord]) -> float | None:
    """The median time between the last rounds, evaluation and checkpoint included; a single pause does not change it.

    If the clock was set back, only rounds after that count.
    """
    between = [(after.time_ms - before.time_ms) / 1000 for before, after in pairwise(records[-6:])]
    between = [seconds for seconds in between if seconds >= 0]
    return median(between) if between else next((record.metrics.get("round_seconds") for record in records[-1:]), None)
