"""Progress in a notebook: plain lines, without an option."""

import importlib
import sys
from types import ModuleType

import pytest

import cfl_ray
from cfl_ray.cli import notebook
from cfl_ray.lifecycle import launch
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.study import run as study_run

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
