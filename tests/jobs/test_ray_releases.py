"""Releases of Ray that are tried: which they are, and what is wrong with one that does not pass."""

import os
import sys
from types import SimpleNamespace

import pytest
import ray
from packaging.version import Version

from cfl_ray.runtime.on_ray import ray_internals
from jobs import ray_releases
from jobs.ray_releases import METHODS, ROOT, Killer, ReleaseTrial, from_lower_bound

INDEX = """ray (2.60.0)
Available versions: 2.60.0, 2.59.1, 2.52.0, 2.51.2, 2.9.3
  INSTALLED: 2.60.0
"""
PROJECT = 'dependencies = [\n    "ray[default]>=2.52",\n]'


def test_the_releases_from_the_lower_bound_on():
    assert from_lower_bound(INDEX, PROJECT) == ["2.52.0", "2.59.1", "2.60.0"]


def test_tried_releases_begin_with_the_lower_bound_and_are_in_order():
    listed = ", ".join(reversed(ray_internals.TRIED))
    project = (ROOT / "pyproject.toml").read_text()
    assert from_lower_bound(f"Available versions: {listed}", project) == list(ray_internals.TRIED)
    assert sorted(ray_internals.TRIED, key=Version) == list(ray_internals.TRIED)


@pytest.mark.parametrize("failures, status", [(["", ""], 0), (["", "2 of 3 processes are forks"], 1)])
def test_a_failure_is_in_the_table_and_the_status(failures, status, monkeypatch, capsys):
    trials = iter(failures)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(ray_releases, "try_release", lambda release: ReleaseTrial(release, 60.0, next(trials)))
    assert ray_releases.main(["2.60.0", "9.9.9"]) == status
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[1]: line for line in lines if line[:1] == ["│"]}
    assert rows["9.9.9"][-2] == "no" and failures[1].split() == [word for word in rows["9.9.9"] if word in failures[1]]


@pytest.mark.parametrize("parent, wrong", [("fork server", False), ("raylet", True)])
def test_a_worker_that_is_no_fork_fails_the_release(parent, wrong, monkeypatch):
    parents = {"fork server": [ray_releases.fork_server.__file__], "raylet": ["raylet"]}
    host = SimpleNamespace(
        pid=7, cmdline=lambda: ["ray::ClientHost"], parent=lambda: SimpleNamespace(cmdline=lambda: parents[parent])
    )
    killed, killer = [], Killer()
    monkeypatch.setattr(ray_releases.psutil, "Process", lambda: SimpleNamespace(children=lambda recursive: [host]))
    monkeypatch.setattr(ray_releases.os, "kill", lambda pid, signal: killed.append(pid))
    if wrong:
        with pytest.raises(SystemExit, match="0 of 1 processes of ClientHost are forks"):
            killer.round(METHODS[0], SimpleNamespace(round=2))
        return
    for _ in range(2):  # the report of a round may come twice
        killer.round(METHODS[0], SimpleNamespace(round=2))
    assert killed == [7]


def test_another_release_than_the_one_to_try_is_refused():
    with pytest.raises(SystemExit, match=f"Ray {ray.__version__} is imported"):
        ray_releases.try_here("9.9.9")


@pytest.mark.slow
def test_the_installed_release_passes(capsys, monkeypatch):
    monkeypatch.setattr(ray_internals, "TRIED", ray_internals.TRIED)  # restored afterwards
    assert ray_releases.try_here(ray.__version__) == 0, capsys.readouterr().out


def test_a_release_without_workers_ends_in_time(monkeypatch):
    monkeypatch.setattr(ray_releases, "RELEASE_SECONDS", 0.5)
    done = ray_releases._ended([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))
    assert done.returncode == 1 and done.stderr == "not done within 0.5 s"
