"""Ctrl-C of the real command, once and twice: its output, its processes, and that the run can be resumed."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from cfl_ray import resume, simulate
from cfl_ray.run_directory import RunDirectory

CONFIG = RunDirectory.config.name

pytestmark = pytest.mark.slow

COMMAND = Path(sys.executable).with_name("cfl-ray")
STOPPED = "error: stopped. Every saved round is kept; go on with: cfl-ray resume {}"


class Run:
    """`cfl-ray run` in a process group of its own; every process that it starts has a mark in its environment."""

    def __init__(self, experiment, folder):
        (folder / "small.yaml").write_text(experiment.to_yaml())
        self.mark, self.output = f"CFL_TEST={uuid.uuid4().hex}", []
        name, _, value = self.mark.partition("=")
        users = {key: word for key, word in os.environ.items() if key != "RAY_worker_niceness"}  # set for tests
        self.process = subprocess.Popen(
            [COMMAND, "run", folder / "small.yaml", "--run-dir", folder / "run"],
            env=users | {name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, text: str) -> None:
        """Reads the output up to the line with this text."""
        for line in self.process.stdout:
            self.output.append(line)
            if text in line:
                return
        raise AssertionError("".join(self.output))

    def signal(self, number: int) -> None:
        """SIGINT goes to the whole group, as by Ctrl-C; SIGTERM to the process, as when a job is stopped."""
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)

    def end(self) -> list[str]:
        """Waits for the end. Returns the lines of the output that were not read yet."""
        return self.process.communicate(timeout=300)[0].splitlines()

    def left_behind(self) -> list[int]:
        """Processes that still have the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture
def started(experiment, tmp_path):
    """(the experiment, its run in round 2 or later)."""
    small = experiment(rounds=12, methods=["fedavg"], local={"epochs": 20, "batch_size": 8}, evaluation={"every": 3})
    run = Run(small, tmp_path)
    yield small, run
    for pid in run.left_behind():
        os.kill(pid, signal.SIGKILL)


def test_stopped_as_a_job(started, tmp_path, figures, actors, until):
    """SIGTERM, once. Its hosts have the priority of the user; Ray's default gives way to all other processes."""
    small, run = started
    run.wait_for("round 3/12")
    hosts = actors("ClientHost", of=run.process.pid)
    priorities = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (run.process.pid, *hosts)]
    run.signal(signal.SIGTERM)
    check_stopped(run, tmp_path / "run", until)
    assert hosts and len(set(priorities)) == 1
    assert (tmp_path / "run" / CONFIG).is_file()
    assert figures(resume(tmp_path / "run", on_ray=False)) == figures(simulate(small))


def test_ctrl_c_and_again_while_it_ends(started, tmp_path, until):
    _, run = started
    run.wait_for("round 3/12")
    run.signal(signal.SIGINT)
    time.sleep(0.3)  # as fast as a person is
    run.signal(signal.SIGINT)
    check_stopped(run, tmp_path / "run", until)


def test_stopped_before_the_first_round(started, tmp_path, until):
    _, run = started
    run.wait_for("preparing Ray")
    time.sleep(0.5)
    run.signal(signal.SIGINT)
    lines = run.end()
    assert run.process.returncode == 130 and lines == ["error: stopped. Nothing was kept"], lines
    assert not (tmp_path / "run").exists()
    until(lambda: not run.left_behind())


def check_stopped(run, run_dir, until):
    """One message, the exit status of an interrupt, and no process left."""
    lines = run.end()
    assert run.process.returncode == 130, lines
    assert [line for line in lines if "round" not in line or "error" in line] == [STOPPED.format(run_dir)], lines
    until(lambda: not run.left_behind())
