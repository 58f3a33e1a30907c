"""The jobs that disturb and that outlast, shortly: real processes are killed, and what a run comes to stays the same."""

import os
import subprocess
import sys
from pathlib import Path

JOBS = Path(__file__).parents[2] / "jobs"


def job(name: str, *arguments: str, seconds: int = 500) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI", "RAY_JOB_ID")}
    return subprocess.run([sys.executable, JOBS / name, *arguments], env=environment | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=seconds)


def test_a_run_whose_processes_are_killed_comes_to_the_same(tmp_path):
    done = job("chaos.py", "--kills", "2", "--rounds", "5", "--methods", "ditto", "--targets", "host", "server", "--seed", "1", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "disturbed.log").read_text()
    assert "2 kills" in done.stdout and "identical: metrics, moves, models, memory; every round once" in done.stdout


def test_more_kills_than_rounds_are_refused():
    done = job("chaos.py", "--kills", "8", "--rounds", "4", "--methods", "ditto", "ifca_cam")
    assert done.returncode == 2 and "--kills must be below 8, the rounds of all methods, got 8" in done.stderr


def test_a_short_soak_reports_what_the_processes_use(tmp_path):
    done = job("endurance.py", "soak", "--rounds", "20", "--methods", "fedavg", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{name}:" in done.stdout for name in ("server_mb", "host_mb", "files", "store_mb")) and "20 rounds of fedavg" in done.stdout
