"""Runs of `jobs.chaos`, which disturb a run and compare its outcome with that of an undisturbed run."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_job(folder, name: str, *options: str) -> subprocess.CompletedProcess:
    """Runs `python -m jobs.NAME` with these options, which keeps its runs in the folder."""
    command = [sys.executable, "-m", f"jobs.{name}", *options, "--keep", str(folder)]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570)


def check_same_outcome(folder, options: list[str], *printed: str) -> None:
    """Runs `python -m jobs.chaos` with these options, and checks that the outcome is the same."""
    done = run_job(folder, "chaos", *options, "--seed", "0", "--methods", "ditto")
    logs = folder.rglob("disturbed.log")
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *(log.read_text() for log in logs)])
    for text in ("identical: metrics, reassignments, models, client states; every round once", *printed):
        assert text in done.stdout
