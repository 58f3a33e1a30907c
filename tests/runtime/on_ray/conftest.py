"""Experiments that are trained as by the workers that tests of this folder make in this process."""

from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from cfl_ray import Experiment, run


def _sequential(make):
    return lambda **changes: make(**changes | {"runtime": {"engine": "sequential"} | changes.get("runtime", {})})


@pytest.fixture
def experiment(experiment):
    """Makes a small experiment with the sequential engine."""
    return _sequential(experiment)


@pytest.fixture(scope="module")
def module_experiment(module_experiment):
    """The same with one output folder for a module."""
    return _sequential(module_experiment)


@pytest.fixture
def no_fork_server(monkeypatch):
    """Clusters that do not start need no fork server, which imports PyTorch; that of the shared cluster stays."""
    from cfl_ray.runtime.on_ray import connect, fork_server

    monkeypatch.setattr(connect, "_fork_server", ExitStack())
    monkeypatch.setattr(connect, "fork_server", lambda folder: nullcontext({fork_server.SOCKET_VARIABLE: "nowhere"}))


@pytest.fixture
def peaks(cluster, memory):
    """Returns a function that runs an experiment in folder/run -> peaks of private memory in MB, by kind of process."""

    def of(experiment: dict, folder: Path) -> dict[str, float]:
        values = experiment | {"tracking": {"enabled": False}, "output": str(folder)}
        with memory("ServerActor") as server, memory("ClientHost") as host:
            run(Experiment(**values), folder / "run")
        return {"server": server[0] / 1e6, "host": host[0] / 1e6}

    return of
