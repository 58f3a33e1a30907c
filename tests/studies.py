"""Small studies, and a pool that runs their runs in this process."""

from pathlib import Path

from cfl_ray.config.study import Study
from cfl_ray.results.comparison import read_study
from cfl_ray.study import worker_pool

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
    "evaluation": {"verify": False},  # a sixth of the time of so small a run; see tests/results/test_verification.py
    "runtime": {"engine": "manual"},
    "tracking": {"enabled": False},
}
TIMES = ("round_seconds", "seconds")


def small_study(output: Path, **changes) -> Study:
    """A study of four runs; keys of `experiment` are merged into these defaults."""
    experiment = EXPERIMENT | {"output": str(output)} | changes.pop("experiment", {})
    return Study(**{"name": "small", "seeds": [0, 1], "experiment": experiment} | changes)


class InlinePool:
    """Runs the runs one after another in this process."""

    done: list[str] = []  # names of the runs that were run

    def __init__(self, root, extend=None, code=None):
        self.root, self.extend, self.code, self.workers = root, extend, code, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, runs, resources, tick, until=None):
        for run in runs:
            self.done.append(run.name)
            extended = self.extend and run.folder(self.extend)
            outcome = worker_pool._run(run, self.root, resources.hosts, extended, self.code, until)
            yield worker_pool.RunOutcome(run, *outcome)


def figures_of(root: Path) -> dict:
    """All metrics of the finished runs of a study, without times."""
    return {
        (setting, method, seed): {name: value for name, value in values.items() if name not in TIMES}
        for (setting, method), of_seeds in read_study(root).items()
        for seed, values in of_seeds.items()
    }


def files_of(root: Path) -> dict[Path, int]:
    """When every file of the runs was written."""
    return {file: file.stat().st_mtime_ns for file in root.glob("*/*/seed-*/**/*") if file.is_file()}
