"""A client whose data are not valid is excluded and named; one whose code fails ends the run and is named."""

import json
import re
from pathlib import Path

import pytest
import torch

from cfl_ray import run, simulate
from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.errors import RunError

CHOKING = f"{Path(__file__).parents[1] / 'logged.py'}:choking"


def model(experiment, directory):
    return CheckpointStore(directory / "fedavg", experiment.config_hash).load().tensors["models_KP"]


def test_data_that_are_too_large(experiment, logged, notes, tmp_path):
    """In this process; `test_poison` has the same on Ray."""
    settings = {"methods": ["fedavg"], "cohort": {"fraction": 1.0}, "rounds": 3}
    invalid, watcher = experiment(data=logged(6, huge=5), **settings), notes()
    results = simulate(invalid, tmp_path / "invalid", watcher)
    rounds = [record.metrics for record in results["fedavg"].records]
    assert [metrics["clients_rejected"] for metrics in rounds] == [1, 1, 1]
    note = r"client 5: its data have values up to \S+, beyond 2\^16; left out of this round"
    assert len([line for line in watcher.lines if re.fullmatch(note, line)]) == 3

    without = experiment(data=logged(6), schedule=[{"round": 1, "leave": [5]}], **settings)
    simulate(without, tmp_path / "without")
    valid = experiment(data=logged(6), **settings)
    simulate(valid, tmp_path / "valid")
    found = model(invalid, tmp_path / "invalid")
    assert torch.allclose(found, model(without, tmp_path / "without"), rtol=0, atol=1e-6)
    assert not torch.allclose(found, model(valid, tmp_path / "valid"), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "fault, changes, message",
    [
        ({"missing": 3}, {}, "client 3 failed while reading its data: the sensor is offline"),
        (
            {"odd": 3},
            {"model": {"name": CHOKING, "options": {}}},
            "client 3 failed while training: input over 500",
        ),
    ],
)
@pytest.mark.slow
def test_client_whose_code_fails(experiment, logged, cluster, tmp_path, fault, changes, message):
    broken = experiment(data=logged(6, **fault), methods=["fedavg"], cohort={"fraction": 1.0}, **changes)
    with pytest.raises(RunError) as error:
        run(broken, tmp_path / "run")
    text = str(error.value)
    assert text.startswith(message) and "Traceback" not in text and "\n" not in text
    assert error.value.exit_status == 1
    assert json.loads((tmp_path / "run/fedavg/end.json").read_text())["status"] == "FAILED"
