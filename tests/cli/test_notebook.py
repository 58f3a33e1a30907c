"""Progress in a notebook: plain lines, without an option."""

import importlib
import re
import sys
from itertools import pairwise
from types import ModuleType

import pytest

import cfl_ray
from cfl_ray.cli import notebook, progress
from cfl_ray.lifecycle import launch
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.study import run as study_run
from cfl_ray.tracking import RoundRecord

EXPERIMENT = {
    "rounds": 2,
    "methods": ["fedavg"],
    "model": {"options": {"hidden": 4}},
    "data": {
        "source": "synthetic", "synthetic_shape": [4], "synthetic_samples": 10, "partition": {"clients": 3}
    },
    "runtime": {"engine": "manual"},
    "tracking": {"enabled": False},
}  # fmt: skip


def test_a_run_in_a_notebook_prints_lines(capsys):
    results = notebook.simulate(cfl_ray.Experiment(**EXPERIMENT))
    printed = capsys.readouterr().out
    assert "fedavg round 2/2  accuracy" in printed and "results after the last round" in printed
    assert "\x1b" not in printed and len(results["fedavg"].records) == 2

    class Silent(Watcher):
        pass

    notebook.simulate(cfl_ray.Experiment(**EXPERIMENT), watcher=Silent())
    assert not capsys.readouterr().out
    with pytest.raises(cfl_ray.ConfigError, match="expected an Experiment"):
        notebook.simulate(3)


def test_lines_are_limited_by_time(capsys, monkeypatch):
    """Rounds of 4 s: a line after 10 s at least, and after a tenth of the time so far; the last one always."""
    rounds = 0
    monkeypatch.setattr(progress.time, "monotonic", lambda: 4.0 * rounds)
    with progress.Display(notebook._console(), 200, notebook._LEAST) as display:
        display.method("fedavg", RoundRecord(0, {}))
        for rounds in range(1, 200):
            notes = ("client 3 is slow",) if rounds < 4 else ()
            status = "finished" if rounds == 199 else "running"
            display.round("fedavg", RoundRecord(rounds, {"accuracy": 0.5}, notes=notes, status=status))
    printed = capsys.readouterr().out
    shown = [int(number) for number in re.findall(r"fedavg round (\d+)/200", printed)]
    # 3 rounds apart up to 120 s (round 30), later a tenth of the time; the last one
    assert shown[:5] == [1, 4, 7, 10, 13] and shown[-1] == 199 and len(shown) < 32
    assert all(b - a >= max(3, b / 10) for a, b in pairwise(shown[:-1]))
    assert printed.count("client 3 is slow") == 1 and "(2 notes and events are not shown)" in printed


def test_a_study_in_a_notebook_prints_lines(monkeypatch):
    told = []
    monkeypatch.setattr(study_run, "run_study", lambda study, watcher=None: told.append(watcher) or 3)
    monkeypatch.setattr(notebook.StudyDisplay, "finish", lambda display, results: told.append(results))
    assert notebook.run_study.__wrapped__ is not None
    assert isinstance(notebook.StudyDisplay(notebook._console()), notebook.StudyDisplay)
    assert notebook.run_study("study.yaml") == 3 and isinstance(told[0], notebook.StudyDisplay) and told[1] == 3


def test_a_kernel_has_them_in_place_of_the_plain_ones(monkeypatch):
    assert cfl_ray.simulate is launch.simulate
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    try:
        names = vars(importlib.reload(cfl_ray))
        assert names["_RUNNING"] == {"cfl_ray.cli.notebook": ("resume", "run", "run_study", "simulate")}
    finally:
        monkeypatch.undo()
        importlib.reload(cfl_ray)
