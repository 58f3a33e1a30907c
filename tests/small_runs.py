"""Small experiments, the figures of their runs, and runs that are interrupted."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cfl_ray import Experiment, simulate
from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.errors import Interrupted
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.results.results import MethodResult
from cfl_ray.runtime.round_loop import RoundLoop
from cfl_ray.tracking import RoundRecord

PLANTED = {  # eight clients, of which the even and the odd ones disagree about every label
    "data": {
        "source": "synthetic",
        "synthetic_shape": [1, 4, 4],
        "synthetic_classes": 4,
        "synthetic_groups": 2,
        "synthetic_samples": 60,
        "partition": {"clients": 8},
    },
    "model": {"name": "mlp", "options": {"hidden": 16}},
    "local": {"epochs": 1, "batch_size": 20, "lr": 0.3},
    "cohort": {"fraction": 1.0},
    "evaluation": {"local_samples": 100},
    "runtime": {"engine": "manual"},
    "tracking": {"enabled": False},
}


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The keys of an experiment with changes; of a section, the keys that are named."""
    result = dict(values)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(values.get(key), dict)
        if key == "data" and both:
            result["data"] = dict(values["data"])
            SOURCE_KINDS.drop_others(result["data"], value.get("source", "synthetic"))
        result[key] = result[key] | value if both else value
    return result


def small_experiment(output: Path, **changes) -> Experiment:
    """A small experiment; sections are merged into these defaults."""
    values = {
        "name": "small",
        "rounds": 4,
        "methods": ["ditto"],
        "model": {"options": {"hidden": 16}},
        "output": str(output),
        "data": {
            "source": "synthetic",
            "synthetic_shape": [8],
            "synthetic_samples": 20,
            "partition": {"clients": 12},
        },
        "local": {"epochs": 2, "batch_size": 8, "momentum": 0.9},
        "cohort": {"fraction": 0.75},
        "runtime": {"engine": "manual", "hosts": 2, "checkpoint_every": 1},
        "tracking": {"enabled": False},
    }
    return Experiment(**merged(values, changes))


def metrics_of(result: MethodResult) -> list[dict[str, float]]:
    """The metrics of every round of a method, without the seconds."""
    return [
        {name: value for name, value in record.metrics.items() if name != "round_seconds"} for record in result.records
    ]


def figures(result: MethodResult) -> list[tuple[int, dict[str, float]]]:
    """The same with the numbers of the rounds."""
    return list(zip((record.round for record in result.records), metrics_of(result), strict=True))


class Reports(Watcher):
    """Collects the report of every round, also by method."""

    def __init__(self):
        self.reports, self.of = [], defaultdict(list)

    def round(self, label, report):
        self.reports.append(report)
        self.of[label].append(report)


class Notes(Watcher):
    """Keeps the notes and warnings of a run, and calls a function after each round."""

    def __init__(self, after_round=lambda number: None):
        self.lines, self.warnings, self.rounds, self.run_info, self.after_round = [], [], [], {}, after_round

    def started(self, setup, run_dir, run_info):
        self.run_info = run_info

    def method(self, label, report):
        self.lines += report.notes

    def round(self, label, report):
        self.lines += report.notes
        self.rounds.append(report.round)
        self.after_round(report.round)

    def warn(self, text):
        self.warnings.append(text)


def simulate_until(round: int, experiment: Experiment, run_dir: Path, **options: Any) -> list[RoundRecord]:
    """Simulates a run that is interrupted after this round, before the next one. Returns the reports of its rounds."""

    class Stopping(Reports):
        def round(self, label, report):
            super().round(label, report)
            if report.round == round:
                raise KeyboardInterrupt

    watcher = Stopping()
    with pytest.raises(Interrupted):
        simulate(experiment, run_dir, watcher, **options)
    return watcher.reports


def interrupt_once(monkeypatch, in_round: int) -> list[Tensor]:
    """Interrupts the next run before it saves this round. Returns the models after each attempt at the round."""
    real, models = RoundLoop._save_and_close, []

    def save_and_close(self, stats):
        if stats.round == in_round:
            models.append(self.state.models_KP)
            if len(models) == 1:
                raise KeyboardInterrupt
        real(self, stats)

    monkeypatch.setattr(RoundLoop, "_save_and_close", save_and_close)
    return models
