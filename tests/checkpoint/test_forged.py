"""Manifests with a good checksum and another content than a run writes: refused with a reason, an older one is used."""

import json
import shutil

import pytest
from small_runs import simulate_until

from cfl_ray import resume, simulate
from cfl_ray.checkpoint.manifest import _digest
from cfl_ray.config import load
from cfl_ray.errors import RunError
from cfl_ray.results.trust import sign_record

FORGED = {
    "no state": lambda manifest: manifest["values"].pop("state"),
    "no report": lambda manifest: manifest["values"].pop("report"),
    "no values": lambda manifest: manifest["values"].clear(),
    "another field of the state": lambda manifest: manifest["values"]["state"].update(secret=1),
    "a field of the state less": lambda manifest: manifest["tensors"].pop("assign_N"),
    "no scores": lambda manifest: manifest["tensors"].pop("server.local_scores_N2"),
    "scores of fewer clients": lambda manifest: manifest["tensors"]["server.local_scores_N2"].update(shape=[3, 2]),
    "traffic as text": lambda manifest: manifest["values"]["traffic"].update(down_bits="many"),
    "metrics as a list": lambda manifest: manifest["values"]["report"].update(metrics=[]),
    "a reassignment of three numbers": lambda manifest: reassigned_as_in_format_2(manifest, [[1, 2, 3]]),
    "a reassignment of text": lambda manifest: reassigned_as_in_format_2(manifest, [["1", 2]]),
    "a reassignment beyond int32": lambda manifest: reassigned_as_in_format_2(manifest, [[2**40, 2]]),
    "clients that were reassigned without clusters": lambda manifest: manifest["tensors"].pop(
        "server.reassigned.cluster_R"
    ),
    "reassigned clients of another type": lambda manifest: manifest["tensors"]["server.reassigned.client_R"].update(
        dtype="float32"
    ),
    "more clients that were reassigned than clusters": lambda manifest: manifest["tensors"].update(
        {"server.reassigned.client_R": {"dtype": "int32", "shape": [0, 7]}}
    ),
}


def reassigned_as_in_format_2(manifest, pairs):
    """Checkpoints had them in the manifest."""
    for name in ("client_R", "cluster_R"):
        del manifest["tensors"][f"server.reassigned.{name}"]
    manifest["values"]["report"].update(moved=pairs)


@pytest.fixture(scope="module")
def interrupted(module_experiment, tmp_path_factory):
    """A run that was interrupted after round 3, not to be changed."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    simulate_until(3, module_experiment(methods=["fedavg"]), folder)
    return folder


@pytest.fixture(scope="module")
def whole(module_experiment):
    """The results of a run that was not."""
    return simulate(module_experiment(methods=["fedavg"]))


@pytest.fixture
def stopped(interrupted, tmp_path):
    """The folder of checkpoints of a copy of the interrupted run, which is this user's."""
    folder = shutil.copytree(interrupted, tmp_path / "run")
    sign_record(folder, load(folder / "config.yaml"))
    return folder / "fedavg/checkpoints"


def forge(file, change):
    manifest = json.loads(file.read_text())
    del manifest["sha256"]
    change(manifest)
    file.write_text(json.dumps(manifest | {"sha256": _digest(manifest)}))


@pytest.mark.parametrize("name", FORGED)
def test_an_older_one_is_used(name, stopped, whole, figures, notes):
    forge(stopped / "000003.json", FORGED[name])
    watcher = notes()
    found = resume(stopped.parents[1], watcher, on_ray=False)
    assert figures(found) == figures(whole)
    assert any(line.startswith("checkpoint of round 3: ") for line in watcher.lines), watcher.lines
    assert "goes on after round 2" in watcher.lines


def test_without_any_good_one_the_run_ends_with_the_reasons(stopped):
    for file in stopped.glob("*.json"):
        forge(file, FORGED["no state"])
    with pytest.raises(
        RunError, match=r"no checkpoint in .* can be used: checkpoint of round 3: it is no checkpoint of"
    ):
        resume(stopped.parents[1], on_ray=False)
