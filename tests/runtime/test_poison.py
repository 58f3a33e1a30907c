"""Clients whose data or updates are poison: left out, counted and named, and of no effect on the others."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cfl_ray import run, simulate
from cfl_ray.core.plugin import load_plugin
from cfl_ray.runtime.checkpoint import CheckpointStore

POISONED = 6  # of 12
SETTINGS = {"methods": ["fedavg", {"ifca": {"num_clusters": 2}}, "stocfl"], "cohort": {"fraction": 1.0}, "rounds": 2, "local": {"epochs": 2, "batch_size": 8, "lr": 0.3}}

SAID = [
    r"clients 0, 1: its data have values that are not finite",
    r"client 2: its data have values up to 1\.\d+e\+06, beyond 2\^16",
    r"client 3: its data have shape \(5,\), expected \(8,\)",
    r"client 4: its data have labels 9 \.\. 18, expected 0 \.\. 9",
    r"client 5: its update has values up to \S+, beyond 2\^14",
]


@pytest.fixture
def federation():
    return load_plugin(f"{Path(__file__).parent / 'logged.py'}:PoisonedFederation", "federation")()


def model(experiment, directory):
    return CheckpointStore(directory / "fedavg", experiment.config_hash).load().tensors["models_KP"]


def test_of_every_kind(experiment, federation, cluster, notes, tmp_path, figures):
    poisoned, watcher = experiment(data=federation, **SETTINGS), notes()
    results = run(poisoned, tmp_path / "poisoned", watcher)
    for name, method in results.methods.items():
        assert [record.metrics["clients_rejected"] for record in method.records] == [POISONED] * 2, name
        assert all(np.isfinite(list(record.metrics.values())).all() for record in method.records), name
    found = [line for line in watcher.lines if line.startswith("client")]
    assert len(found) == 6 * len(SAID) and all(re.fullmatch(f"{said}; left out of this round", line) for said, line in zip(SAID * 6, found)), found

    without = experiment(data=federation, schedule=[{"round": 1, "leave": list(range(POISONED))}], **SETTINGS)
    simulate(without, tmp_path / "without")
    assert torch.allclose(model(poisoned, tmp_path / "poisoned"), model(without, tmp_path / "without"), rtol=0, atol=1e-6)
    assert figures(simulate(poisoned)) == figures(results)
