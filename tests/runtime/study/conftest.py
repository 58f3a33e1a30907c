"""Small studies, run in this process or in processes of their own."""

import functools
import sys
from pathlib import Path

import pytest

from cfl_ray.config.study import Study
from cfl_ray.runtime.comparison import read_study
from cfl_ray.runtime.study import run, workers

EXPERIMENT = {
    "rounds": 2,
    "methods": ["fedavg", {"ifca": {"num_clusters": 2, "label": "two", "local": {"momentum": 0.5}}}],
    "model": {"options": {"hidden": 8}},
    "data": {
        "source": "synthetic",
        "synthetic_shape": [8],
        "synthetic_samples": 20,
        "partition": {"clients": 6},
    },
    "local": {"epochs": 1, "batch_size": 10},
    "runtime": {"engine": "sequential"},
    "tracking": {"enabled": False},
}
TIMES = ("round_seconds", "seconds")


def small_study(output: Path, **changes) -> Study:
    """A study of four runs; keys of `experiment` are merged into these defaults."""
    experiment = EXPERIMENT | {"output": str(output)} | changes.pop("experiment", {})
    return Study(**{"name": "small", "seeds": [0, 1], "experiment": experiment} | changes)


@pytest.fixture
def study(tmp_path):
    """Makes a small study."""
    return functools.partial(small_study, tmp_path)


class InlineCrew:
    """Runs the cells one after another in this process."""

    done: list[str] = []  # names of the cells that were run

    def __init__(self, root):
        self.root = root

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, cells, packing, tick):
        for cell in cells:
            self.done.append(cell.name)
            yield workers.Outcome(cell, *workers._run(cell, self.root, packing.hosts))


@pytest.fixture
def inline(monkeypatch):
    """Lets studies run in this process, without figures; the list of the cells that were run."""
    monkeypatch.setattr("cfl_ray.runtime.driver.write_figures", lambda *_: None)
    monkeypatch.setattr(run, "Crew", InlineCrew)
    monkeypatch.setattr(InlineCrew, "done", [])
    return InlineCrew.done


def figures_of(root: Path) -> dict:
    """All metrics of the finished runs of a study, without times."""
    return {
        (setting, method, seed): {name: value for name, value in values.items() if name not in TIMES}
        for (setting, method), of_seeds in read_study(root).found.items()
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
