"""A client that sends nonsense is left out and named; one whose code fails ends the run and is named."""

import json
from pathlib import Path

import pytest
import torch

from cfl_ray import run, simulate
from cfl_ray.core.errors import RunError
from cfl_ray.runtime.checkpoint import CheckpointStore

CHOKING = f"{Path(__file__).parent / 'logged.py'}:choking"


def model(experiment, directory):
    return CheckpointStore(directory / "fedavg", experiment.config_hash).load().tensors["models_KP"]


def test_data_that_are_too_large(experiment, logged, cluster, notes, tmp_path, figures):
    settings = {"methods": ["fedavg"], "cohort": {"fraction": 1.0}, "rounds": 3}
    spoilt, watcher = experiment(data=logged(6, huge=5), **settings), notes()
    results = run(spoilt, tmp_path / "spoilt", watcher)
    rounds = [record.metrics for record in results["fedavg"].records]
    assert [metrics["clients_rejected"] for metrics in rounds] == [1, 1, 1]
    assert len([line for line in watcher.lines if line.startswith("client 5: its data have values up to ") and line.endswith(", beyond 2^16; left out of this round")]) == 3

    without = experiment(data=logged(6), schedule=[{"round": 1, "leave": [5]}], **settings)  # the same federation, client 5 gone
    simulate(without, tmp_path / "without")
    everyone = experiment(data=logged(6), **settings)
    simulate(everyone, tmp_path / "everyone")
    found = model(spoilt, tmp_path / "spoilt")
    assert torch.allclose(found, model(without, tmp_path / "without"), rtol=0, atol=1e-6)
    assert not torch.allclose(found, model(everyone, tmp_path / "everyone"), rtol=0, atol=1e-3)
    assert figures(simulate(spoilt)) == figures(results)


@pytest.mark.parametrize(
    "fault, changes, says",
    [
        ({"missing": 3}, {}, "client 3 failed while reading its data: the sensor is offline"),
        ({"odd": 3}, {"model": {"name": CHOKING, "options": {}}}, "client 3 failed while training: input over 500"),
    ],
)
def test_client_whose_code_fails(experiment, logged, cluster, tmp_path, fault, changes, says):
    broken = experiment(data=logged(6, **fault), methods=["fedavg"], cohort={"fraction": 1.0}, **changes)
    with pytest.raises(RunError) as error:
        run(broken, tmp_path / "run")
    assert str(error.value).startswith(says) and "Traceback" not in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_status == 1
    assert json.loads((tmp_path / "run/fedavg/end.json").read_text())["status"] == "FAILED"
