"""Small studies, run in this process or in processes of their own."""

import functools
import sys
from pathlib import Path

import pytest
from studies import InlinePool, small_study

from cfl_ray.results.comparison import read_study
from cfl_ray.study import run

TIMES = ("round_seconds", "seconds")


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


def figures_of(root: Path) -> dict:
    """All metrics of the finished runs of a study, without times."""
    return {
        (setting, method, seed): {name: value for name, value in values.items() if name not in TIMES}
        for (setting, method), of_seeds in read_study(root).run_metrics.items()
        for seed, values in of_seeds.items()
    }


def files_of(root: Path) -> dict[Path, int]:
    """When every file of the runs was written."""
    return {file: file.stat().st_mtime_ns for file in root.glob("*/*/seed-*/**/*") if file.is_file()}


@pytest.fixture(name="figures_of")
def _figures_of():
    return figures_of


@pytest.fixture(name="files_of")
def _files_of():
    return files_of


@pytest.fixture(name="command")
def _command():
    """The command line as another process is given it."""
    return [sys.executable, "-m", "cfl_ray"]
