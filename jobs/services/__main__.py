"""Tries the delivery of results to real MLflow servers: what arrived, and what it cost.

    python -m jobs.services                          # all servers that can be started here
    python -m jobs.services --servers sqlite --rounds 20
    python -m jobs.services --raise                  # no server: every call of a tracker, figure and report raises
    python -m jobs.services --study                  # 20 runs on a server behind a login, 0.4 s a request

Each server is started on this machine and is reached through a proxy with the faults of a line (`jobs.services.line`).
Entries are those of 22 metrics; `files` are those that arrived as they were; `delay` is the part of the time of the
rounds (0.02 s each) that they spent in the tracker; `end` is how long the run waited at its end.
"""

import argparse
import datetime
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import Mlflow, RoundRecord, RunInfo, RunLog, deliver_pending
from cfl_ray.tracking.delivery import lacks
from cfl_ray.tracking.mlflow import connect
from jobs.chaos.mlflow_server import MlflowServer
from jobs.services import raising, study
from jobs.services.line import Line
from jobs.services.mlflow_servers import KINDS, mlflow_server, version, why_not

METRICS = 22
_ROUND_SECONDS = 0.02
_PATIENCE_SECONDS = 180.0
_FAULTS: dict[str, Callable[[Line], None]] = {}  # by name; each prepares a line
_COLUMNS = ("server", "line", "entries", "lost", "twice", "files", "requests", "delay, %", "end, s")
_FILES = {"methods.md": b"| method |", "deep/er/figure.png": bytes(range(256)) * 2000}


def _fault(name: str) -> Callable[[Callable[[Line], None]], Callable[[Line], None]]:
    def register(prepare: Callable[[Line], None]) -> Callable[[Line], None]:
        _FAULTS[name] = prepare
        return prepare

    return register


@_fault("good")
def _good(line: Line) -> None:
    """Nothing is added."""


@_fault("0.3 s a request")
def _slow(line: Line) -> None:
    line.delay = 0.3


@_fault("3 requests a second, Retry-After 1 s")
def _limited(line: Line) -> None:
    line.per_second = 3


@_fault("503 for 20 s")
def _unavailable(line: Line) -> None:
    line.unavailable = time.monotonic() + 20


@_fault("every 5th answer lost")
def _lossy(line: Line) -> None:
    line.cut = lambda line, path: sum(line.requests.values()) % 5 == 0


def _delivered(server: MlflowServer, experiment: str) -> list[tuple[str, int]]:
    """The entries (metric, round) that the server has of an experiment's runs."""
    client, experiment_id = connect(server.uri, experiment)
    return [
        (name, entry.step)
        for run in client.search_runs([experiment_id])
        for name in run.data.metrics
        for entry in client.get_metric_history(run.info.run_id, name)
    ]


def _whole_files(server: MlflowServer, experiment: str) -> int:
    """The number of files that the server has as they were."""
    client, experiment_id = connect(server.uri, experiment)
    (run,) = client.search_runs([experiment_id])
    with tempfile.TemporaryDirectory() as name:
        found = Path(client.download_artifacts(run.info.run_id, "", name))
        return sum((found / name).is_file() and (found / name).read_bytes() == _FILES[name] for name in _FILES)


def tried(server: MlflowServer, kind: str, fault: str, rounds: int, folder: Path) -> Mapping[str, Any]:
    """Records a run through a line with a fault, and compares what arrived with what was recorded."""
    experiment = f"{kind}, {fault}"
    with Line(server.uri) as line:
        _FAULTS[fault](line)
        log = RunLog(folder, {"mlflow": Mlflow(line.uri, experiment)}, warn=lambda text: None)
        log.start(RunInfo("fedavg", "fedavg", params={"data.source": "digits"}))
        for name, content in _FILES.items():
            file = RunDirectory(folder).artifacts / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        delay, started = 0.0, time.monotonic()
        for round in range(1, rounds + 1):
            metrics = {f"m{i}": round + i / METRICS for i in range(METRICS)}
            began = time.monotonic()
            log.log(RoundRecord(round, metrics, 1_700_000_000_000 + round))
            delay += time.monotonic() - began
            time.sleep(_ROUND_SECONDS)
        began = time.monotonic()
        delay /= began - started
        log.finish("FINISHED", {})
        end = time.monotonic() - began
        line.cut = lambda line, path: False
        time.sleep(max(line.unavailable - time.monotonic(), 0))
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while lacks(folder, "mlflow") and time.monotonic() < deadline:  # as later commands do
            deliver_pending(folder.parent, line.uri, seconds=60)
            time.sleep(1)
    found = _delivered(server, experiment)
    wanted = {(f"m{i}", round) for i in range(METRICS) for round in range(1, rounds + 1)}
    files = f"{_whole_files(server, experiment)} of {len(_FILES)}"
    values = (kind, fault, len(found), len(wanted - set(found)), len(found) - len(set(found)), files)
    costs = (sum(line.requests.values()), f"{100 * delay:.1f}", f"{end:.1f}")
    return dict(zip(_COLUMNS, (*values, *costs), strict=True))


def main() -> int:
    kinds = [kind for kind in KINDS if not why_not(kind)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--faults", nargs="+", choices=list(_FAULTS), default=list(_FAULTS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--raise",
        dest="raising",
        nargs="*",
        metavar="PLACE",
        help="only runs in which each call raises; of these places",
    )
    parser.add_argument("--study", action="store_true", help="only a study on a slow server")
    parser.add_argument("--runs", type=int, default=20, help="of the study")
    given = parser.parse_args()
    if given.raising is not None:
        return raising.main(given.raising)
    if given.study:
        return study.main(given.runs, given.rounds)
    table, is_whole = Table(*_COLUMNS, box=box.MARKDOWN), True
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(given.servers):
            root = Path(folder) / str(number)
            root.mkdir()
            with mlflow_server(kind, root) as server:
                for place, fault in enumerate(given.faults):
                    row = tried(server, kind, fault, given.rounds, root / "runs" / str(place))
                    table.add_row(*map(str, row.values()))
                    is_whole &= row["lost"] == row["twice"] == 0
    Console(width=160).print(table)
    print(f"{', '.join(map(version, dict.fromkeys(('mlflow', *given.servers))))}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {datetime.date.today()}")
    return 0 if is_whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
