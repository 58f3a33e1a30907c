"""A study of many runs on an MLflow server behind a login and a slow line: what has arrived, and by how many requests.

    python -m jobs.services --study [--runs 20] [--rounds 100]

Logging batches are the requests that carry metrics, and files. The target: all is delivered within 60 s after the end
of the study, by at most 3 other requests a run: its creation, its data and its end.
"""

import tempfile
import time
from pathlib import Path

from cfl_ray.config.study import Study
from cfl_ray.results.study_folder import run_folders
from cfl_ray.study.run import run_study
from cfl_ray.tracking import deliver_pending
from cfl_ray.tracking.delivery import lacks
from cfl_ray.tracking.mlflow import connect
from jobs.services.line import Line
from jobs.services.mlflow_servers import mlflow_server

DELAY_SECONDS = 0.4
LATER_SECONDS = 60.0
OTHERS_OF_A_RUN = 3
OTHERS_OF_STUDY = 10  # its experiment, its own run with the description, and one request of each process
METHOD = "fedavg"
_OF_LOGGING = ("runs/log-batch", "artifacts/")


def main(runs: int, rounds: int) -> int:
    """Runs the study, and prints what the server has of it."""
    with tempfile.TemporaryDirectory() as name, mlflow_server("sqlite, login", Path(name)) as server:
        folder = Path(name) / "runs" / "study"
        connect(server.uri, "first")  # the first request to a new server takes seconds
        with Line(server.uri, delay=DELAY_SECONDS) as line:
            began = time.monotonic()
            run_study(_study(line.uri, folder.parent, runs, rounds), folder)
            ended = time.monotonic()
            at_end = sum(map(_is_delivered, _methods(folder)))
            while not all(map(_is_delivered, [*_methods(folder), folder])) and time.monotonic() < ended + LATER_SECONDS:
                deliver_pending(folder.parent, line.uri, seconds=LATER_SECONDS)
            later = time.monotonic() - ended
            delivered = sum(map(_is_delivered, _methods(folder)))
        others = {path: count for path, count in line.requests.items() if not any(of in path for of in _OF_LOGGING)}
    print(f"{runs} runs of {rounds} rounds, {DELAY_SECONDS} s a request, login: {ended - began:.0f} s")
    print(f"delivered: {at_end} runs at the end of the study, {delivered} of {runs} after {later:.0f} s more")
    print(f"requests: {line.requests['runs/log-batch']} logging batches, {_files(line)} of files, others {others}")
    most = OTHERS_OF_A_RUN * runs + OTHERS_OF_STUDY
    print(f"others: {sum(others.values())}, at most {most} = {OTHERS_OF_A_RUN} a run + {OTHERS_OF_STUDY} of the study")
    is_good = delivered == runs and later <= LATER_SECONDS and sum(others.values()) <= most
    return 0 if is_good else 1


def _study(uri: str, output: Path, runs: int, rounds: int) -> Study:
    experiment = {
        "rounds": rounds,
        "methods": [METHOD],
        "data": {
            "source": "synthetic",
            "synthetic_shape": [8],
            "synthetic_samples": 20,
            "partition": {"clients": 4},
        },
        "model": {"options": {"hidden": 8}},
        "local": {"epochs": 1},
        "runtime": {"engine": "manual"},
        "output": str(output),
        "tracking": {"uri": uri, "experiment": "study", "report": False},
    }
    return Study(name="slow", seeds=list(range(runs)), experiment=experiment)


def _methods(folder: Path) -> list[Path]:
    return [run / METHOD for _, _, run in run_folders(folder)]


def _is_delivered(run_dir: Path) -> bool:
    return not lacks(run_dir, "mlflow")


def _files(line: Line) -> int:
    return sum(count for path, count in line.requests.items() if "artifacts/" in path)
