"""The disk of a tracker is full, that of the run is not: the run ends with its results, and a line says so."""

import os
import shutil
import subprocess
from importlib.util import find_spec

import pytest

from cfl_ray.tracking import read_end, read_records
from jobs.services import raising

BYTES = 16384  # of the disk
ROUNDS = 120
FOLDERS = {"csv": "full", "tensorboard": "tensorboard", "wandb": "wandb"}
OPTIONS = {"csv": {"file": "full/metrics.csv"}, "tensorboard": {}, "wandb": {"mode": "offline"}}


@pytest.fixture
def full(tmp_path):
    """Returns a function: a folder is a disk of `BYTES` bytes until the test ends."""
    mounted = []

    def mount(folder):
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={BYTES}", "parts", str(folder)]
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("a disk of its own needs root")
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this container mounts no disks")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("tracker", FOLDERS)
def test_the_run_is_whole(tracker, full, tmp_path, capfd):
    package = {"wandb": "wandb", "tensorboard": "tensorboard"}.get(tracker)
    if package and find_spec(package) is None:
        pytest.skip(f"needs {package}")
    run_dir = tmp_path / "run"
    full(run_dir / "fedavg" / FOLDERS[tracker])
    tracking = {"report": False, "trackers": [{tracker: OPTIONS[tracker]}]}
    made = raising.experiment(tmp_path, "", rounds=ROUNDS, tracking=tracking)
    nothing = raising.Calls(raising.Target("cfl_ray.results.reporting:_page"))
    outcome = raising.outcome(made, run_dir, nothing)
    assert outcome.ended == "" and read_end(run_dir / "fedavg").status == "FINISHED"
    assert [record.round for record in read_records(run_dir / "fedavg")] == list(range(1, ROUNDS + 1))
    assert "Traceback" not in capfd.readouterr().err, "as of a thread of TensorBoard"
    failed, lacks = outcome.warnings
    assert failed.startswith(f"tracker {tracker} (") and "No space left on device" in failed
    assert lacks.startswith(f"tracker {tracker} (") and "lacks" in lacks and "metrics.jsonl keeps" in lacks
