"""The jobs as modules."""

import importlib.util
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.fixture(scope="session")
def load_job():
    """Returns a function: the name of a file in `jobs` -> its module."""

    def load(name: str):
        if str(JOBS) not in sys.path:
            sys.path.append(str(JOBS))  # jobs import their neighbours
        spec = importlib.util.spec_from_file_location(name, JOBS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look up their annotations there
        spec.loader.exec_module(module)
        return module

    return load
