"""Clients with invalid data or updates of every kind: excluded, counted and named, and without effect on the others.

A host on which reads fail is replaced; a client whose code fails ends the run and is named.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from closeness import close

from cfl_ray import run, simulate
from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.errors import RunError
from cfl_ray.plugins.loading import load_plugin

LOGGED = Path(__file__).parents[1] / "logged.py"
INVALID = 6  # of 12
SETTINGS = {
    "methods": ["fedavg", {"ifca": {"num_clusters": 2}}, "stocfl"],
    "cohort": {"fraction": 1.0},
    "rounds": 2,
    "local": {"epochs": 2, "batch_size": 8, "lr": 0.3},
}

NOTES = [
    r"clients 0-1: its data have values that are not finite",
    r"client 2: its data have values up to 1\.\d+e\+06, beyond 2\^16",
    r"client 3: its data have shape \(5,\), expected \(8,\)",
    r"client 4: its data have labels 9 \.\. 18, expected 0 \.\. 9",
    r"client 5: its update has values up to \S+, beyond 2\^14",
]


@pytest.fixture
def federation(tmp_path):
    return load_plugin(f"{LOGGED}:PoisonedFederation", "federation")(str(tmp_path / "read.log"))


def model(experiment, directory):
    return CheckpointStore(directory / "fedavg", experiment.config_hash).load().tensors["models_KP"]


def test_of_every_kind_and_a_host_on_which_reads_fail(experiment, federation, cluster, notes, tmp_path, figures):
    invalid, watcher = experiment(data=federation, **SETTINGS), notes()
    results = run(invalid, tmp_path / "invalid", watcher)
    for name, method in results.methods.items():
        assert [record.metrics["clients_rejected"] for record in method.records] == [INVALID] * 2, name
        assert all(np.isfinite(list(record.metrics.values())).all() for record in method.records), name
    found = [line for line in watcher.lines if line.startswith("client")]
    expected = [f"{note}; left out of this round" for note in NOTES * 6]  # two rounds of three methods
    assert len(found) == len(expected) and all(map(re.fullmatch, expected, found)), found
    failed = [line for line in watcher.lines if "failed (client" in line]
    assert failed and all("the mount is missing" in line and "its work is done again" in line for line in failed)

    without = experiment(data=federation, schedule=[{"round": 1, "leave": list(range(INVALID))}], **SETTINGS)
    simulate(without, tmp_path / "without")
    assert close(model(invalid, tmp_path / "invalid"), model(without, tmp_path / "without"), 1e-6)
    assert figures(simulate(invalid)) == figures(results)


@pytest.mark.slow
def test_a_client_whose_code_fails(experiment, logged, cluster, tmp_path):
    changes = {
        "methods": ["fedavg"],
        "cohort": {"fraction": 1.0},
        "model": {"name": f"{LOGGED}:choking", "options": {}},
    }
    with pytest.raises(RunError) as error:
        run(experiment(data=logged(6, odd=3), **changes), tmp_path / "run")
    text = str(error.value)
    assert text.startswith("client 3 failed while training: ValueError: input over 500 (forward, ") and "\n" not in text
    assert error.value.exit_status == 1
    assert json.loads((tmp_path / "run/fedavg/end.json").read_text())["status"] == "FAILED"
