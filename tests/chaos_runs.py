"""Runs of `jobs.chaos`, which disturb a run and compare its outcome with that of an undisturbed run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_job(folder, name: str, *options: str) -> subprocess.CompletedProcess:
    """Runs `python -m jobs.NAME` with these options, which keeps its runs in the folder.

    After nine minutes it is interrupted, and ends what it has started: clusters, and machines on a network.
    """
    command = [sys.executable, "-m", f"jobs.{name}", *options, "--keep", str(folder)]
    environment = os.environ | {"COLUMNS": "200"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        try:
            output = process.communicate(timeout=540)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=40)
    return subprocess.CompletedProcess(command, process.returncode, *output)


def check_same_outcome(folder, options: list[str], *printed: str) -> None:
    """Runs `python -m jobs.chaos` with these options, and checks that the outcome is the same."""
    done = run_job(folder, "chaos", *options, "--seed", "0", "--methods", "ditto")
    logs = folder.rglob("disturbed.log")
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *(log.read_text() for log in logs)])
    for text in ("identical: metrics, reassignments, models, client states; every round once", *printed):
        assert text in done.stdout
