"""Small studies, run in this process or in processes of their own."""

import functools
import sys

import pytest
from studies import InlinePool, small_study

from cfl_ray.study import run


@pytest.fixture
def study(tmp_path):
    """Makes a small study."""
    return functools.partial(small_study, tmp_path)


@pytest.fixture
def inline(monkeypatch):
    """Lets studies run in this process; the list of the runs that were run."""
    monkeypatch.setattr(run, "WorkerPool", InlinePool)
    monkeypatch.setattr(InlinePool, "done", [])
    return InlinePool.done


@pytest.fixture
def command():
    """The command line as another process is given it."""
    return [sys.executable, "-m", "cfl_ray"]
