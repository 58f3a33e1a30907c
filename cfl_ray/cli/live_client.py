"""The status of a run for the command line: of a live run from its server, of any other run from its files."""

import os
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cfl_ray import config
from cfl_ray.errors import RunError, UserError, command
from cfl_ray.results.run_record import how_to_resume
from cfl_ray.results.study_folder import is_finished, methods_in
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.session_file import ServerAddress, read_server_address
from cfl_ray.tracking import RoundRecord, read_end, read_info, read_records
from cfl_ray.tracking.record import is_evaluated, primary_of, rejected_updates, why_diverged, why_early


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
    answer = _server_status(run_dir, server) if live and server else {}
    label = answer.get("method") or next(reversed(methods), None)
    if live and label and methods.get(label) != "finished":
        methods[label] = "at work"
    waiting = max(0, len(methods_in({"methods": experiment.methods})) - len(methods))
    finished = not waiting and all(progress == "finished" for progress in methods.values())
    records_of = {label: list(read_records(directory.method(label).path)) for label in methods}
    records = records_of.get(label, []) if label else []
    rejected = {label: updates for label, of in records_of.items() if (updates := rejected_updates(of)).count}
    last = next((record for record in reversed(records) if is_evaluated(record.metrics)), None)
    score = primary_of(last.metrics) if last else "accuracy"
    shown = (score, f"{score}_local", "num_clusters", "epsilon")
    # a run may be killed between the end of its last method and its own
    state = "live" if live else "finished" if finished and is_finished(run_dir) else _ended(run_dir)
    over = [label for label, progress in methods.items() if progress == "finished" or state == "stopped"]
    early = {label: why_early(records_of[label], experiment.rounds, methods[label] == "finished") for label in over}
    events = [event for record in records for event in record.events if event.event != "phase"]
    recorded, seconds = records[-1].round if records else 0, _seconds_per_round(records)
    when, fault = answer.get("last_fault") or (None, None)
    unknown = answer.get("unreachable", "starting, or in one process")
    return RunStatus(
        experiment.name,
        state,
        experiment.rounds,
        methods,
        waiting,
        label,
        step=answer.get("state") or (("ending" if finished else unknown) if live else None),
        phase=(records[-1].next_phase or None) if records else None,
        last_event=f"round {events[-1].round}: {events[-1].text}" if events else None,
        round=answer.get("round") or recorded,
        score=score,
        metrics={name: last.metrics[name] for name in shown if name in last.metrics} if last else {},
        evaluated=last.round if last else None,
        **{name: answer.get(name) for name in ("hosts", "hosts_starting", "nodes", "clients_online", "clients")},
        seconds_per_round=seconds,
        seconds_left=(seconds and live and seconds * (experiment.rounds - recorded)) or None,
        last_fault=fault,
        fault_age=when and max(0.0, time.time() - when),
        rejected={label: updates.count for label, updates in rejected.items()},
        updates={label: updates.total for label, updates in rejected.items() if updates.total is not None},
        diverged={
            label: why
            for label, progress in methods.items()
            if progress == "finished" and (why := why_diverged(records_of[label]))
        },
        early={label: why for label, why in early.items() if why},
        pending=answer.get("pending", []),
        next=None if state in ("live", "finished") else how_to_resume(directory),
        driver=f"{server.host}, process {server.pid}" if live and server else None,
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


# ---- read from files


def _run(run_dir: Path) -> RunDirectory:
    directory = RunDirectory(run_dir)
    directory.require_run()
    directory.require_signed([])
    return directory


def _begun(run_dir: Path) -> dict[str, str]:
    """The methods that have begun, latest last: label -> finished or begun. Runs no code that the config names."""
    infos = {file.parent: read_info(file.parent) for file in run_dir.glob(f"*/{RunDirectory.info.name}")}
    begun = sorted(infos, key=lambda directory: infos[directory].time_ms)
    return {directory.name: "finished" if is_finished(directory) else "begun" for directory in begun}


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
