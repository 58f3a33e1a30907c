"""Experiments that are trained as by the workers that tests of this folder make in this process."""

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
def peaks(cluster, memory):
    """Returns a function that runs an experiment in folder/run -> peaks of private memory in MB, by kind of process."""

    def of(experiment: dict, folder: Path) -> dict[str, float]:
        values = experiment | {"tracking": {"enabled": False}, "output": str(folder)}
        with memory("ServerActor") as server, memory("ClientHost") as host:
            run(Experiment(**values), folder / "run")
        return {"server": server[0] / 1e6, "host": host[0] / 1e6}

    return of
