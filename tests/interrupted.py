"""Runs that are interrupted."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cfl_ray import Experiment, simulate
from cfl_ray.errors import Interrupted
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.runtime.round_loop import RoundLoop
from cfl_ray.runtime.round_report import RoundReport


def simulate_until(round: int, experiment: Experiment, run_dir: Path, **options: Any) -> list[RoundReport]:
    """Simulates a run that is interrupted after this round, before the next one. Returns the reports of its rounds."""
    reports = []

    class Stopping(Watcher):
        def round(self, label, report):
            reports.append(report)
            if report.round == round:
                raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        simulate(experiment, run_dir, Stopping(), **options)
    return reports


def interrupt_once(monkeypatch, in_round: int) -> list[Tensor]:
    """Interrupts the next run before it saves this round. Returns the models after each attempt at the round."""
    real, models = RoundLoop._save_and_close, []

    def save_and_close(self, draft):
        if draft.round == in_round:
            models.append(self.state.models_KP)
            if len(models) == 1:
                raise KeyboardInterrupt
        real(self, draft)

    monkeypatch.setattr(RoundLoop, "_save_and_close", save_and_close)
    return models
