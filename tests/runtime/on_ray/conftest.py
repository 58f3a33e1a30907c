"""Experiments that are trained as by the workers that tests of this folder make in this process."""

import pytest


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
