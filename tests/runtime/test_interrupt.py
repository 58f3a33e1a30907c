"""Ctrl-C of the real command, once and twice: what it says, what it leaves behind, and that the run goes on as if nothing had been."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from cfl_ray import resume, simulate
from cfl_ray.runtime.atwork import CONFIG

COMMAND = Path(sys.executable).with_name("cfl-ray")
STOPPED = "error: stopped. Every saved round is kept; go on with: cfl-ray resume {}"


class Run:
    """`cfl-ray run` in a process group of its own; everything that it starts carries a mark in its environment."""

    def __init__(self, experiment, folder):
        (folder / "small.yaml").write_text(experiment.to_yaml())
        self.mark, self.said = f"CFL_TEST={uuid.uuid4().hex}", []
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [COMMAND, "run", folder / "small.yaml", "--run-dir", folder / "run"], env=os.environ | {name: value},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def until(self, what: str) -> None:
        for line in self.process.stdout:
            self.said.append(line)
            if what in line:
                return
        raise AssertionError("".join(self.said))

    def signal(self, number: int) -> None:
        """Ctrl-C reaches the whole group, and whoever stops a job means its process."""
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)

    def end(self) -> list[str]:
        """Waits for it. Returns the lines that it said since it was last asked for one."""
        return self.process.communicate(timeout=120)[0].splitlines()

    def left_behind(self) -> list[int]:
        """Processes that still carry the mark."""
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "ray job stop"])
def test_stopped_once(started, tmp_path, figures, until, number):
    small, run = started
    run.until("round 3/12")
    run.signal(number)
    said = run.end()
    assert run.process.returncode == 130, said
    assert [line for line in said if "round" not in line or "error" in line] == [STOPPED.format(tmp_path / "run")], said
    until(lambda: not run.left_behind())
    goes_on(small, tmp_path, figures)


def test_a_second_time_while_it_ends(started, tmp_path, figures, until):
    small, run = started
    run.until("round 3/12")
    run.signal(signal.SIGINT)
    time.sleep(0.3)  # no shorter than a person's
    run.signal(signal.SIGINT)
    said = run.end()
    assert run.process.returncode == 130, said
    assert [line for line in said if "round" not in line or "error" in line] == [STOPPED.format(tmp_path / "run")], said
    until(lambda: not run.left_behind())
    goes_on(small, tmp_path, figures)


def test_stopped_before_the_first_round(started, tmp_path, until):
    _, run = started
    run.until("preparing Ray")
    time.sleep(0.5)
    run.signal(signal.SIGINT)
    said = run.end()
    assert run.process.returncode == 130 and said == ["error: stopped. Nothing was kept"], said
    assert not (tmp_path / "run").exists()
    until(lambda: not run.left_behind())


def goes_on(small, folder, figures):
    assert (folder / "run" / CONFIG).is_file()
    assert figures(resume(folder / "run", on_ray=False)) == figures(simulate(small))
