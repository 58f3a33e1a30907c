"""The Slurm script on a real Slurm: a run that ends, its time limit, a requeue, and scancel."""

import os
import sys
from pathlib import Path

import pytest
from waiting import until

from cfl_ray.tracking import read_records
from jobs.services import slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "-"),
]
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cluster_configs" / "slurm.sh"
EXPERIMENT = """
methods: [fedavg]
data: {source: synthetic, synthetic_shape: [8], synthetic_samples: 20, partition: {clients: 4}}
model: {name: mlp, options: {hidden: 8}}
evaluation: {metrics: [FOLDER/paced.py:pause]}
runtime: {engine: sequential, checkpoint_every: 1}
tracking: {enabled: false}
"""
# A metric of each client, so that a run which waits for Slurm's minutes leaves the cores to other tests.
PACED = "import time\n\ndef pause(outputs, targets):\n    time.sleep(0.05)\n    return 0.0\n"
WAIT = 400.0  # seconds for a state of a job on a busy machine


@pytest.fixture(scope="module")
def cluster():
    with slurm.slurm() as cluster:
        yield cluster


@pytest.fixture
def submit(cluster, tmp_path):
    """Returns a function: arguments of the script -> the number of its job."""
    (tmp_path / "mine.yaml").write_text(EXPERIMENT.replace("FOLDER", str(tmp_path)))
    (tmp_path / "paced.py").write_text(PACED)
    variables = {"PATH": f"{Path(sys.executable).parent}:{cluster.environment['PATH']}", "PYTHONPATH": str(ROOT)}
    numbers = []

    def submit(*arguments, options=(), **more):
        words = ["sbatch", "--parsable", "--nodes=1", "--cpus-per-task=1", "--mem=0", "--output=%x-%j.log", *options]
        command = [*words, SCRIPT, "RUN", "mine.yaml", *arguments]
        numbers.append(cluster(*command, folder=tmp_path, **variables, **more))
        return numbers[-1]

    yield submit
    for number in numbers:
        cluster("scancel", number)


def log(folder):
    return "\n".join(file.read_text() for file in sorted(folder.glob("cfl-ray-*.log")))


def rounds(folder):
    method = folder / "RUN" / "fedavg"
    return [record.round for record in read_records(method)] if (method / "metrics.jsonl").exists() else []


def wait_for(condition, folder):
    until(condition, lambda: log(folder)[-6000:], pause=0.5, seconds=WAIT)


def test_a_run_that_ends(submit, cluster, tmp_path):
    number = submit("rounds=2")
    wait_for(lambda: cluster.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), tmp_path)
    text = log(tmp_path)
    assert cluster.job(number)["JobState"] == "COMPLETED" and rounds(tmp_path) == [1, 2], text
    assert "1 of 1 nodes joined" in text
    assert "CANCELLED" not in text and "Exited with exit code" not in text and "error" not in text.lower(), text


def test_time_limit_requeue_and_scancel(submit, cluster, tmp_path):
    """A job of one run: the time limit's signal requeues it, then `scontrol requeue`; each time the run is resumed."""
    number = submit("rounds=1000000", options=["--time=60", "--signal=B:USR1@60"], CFL_RAY_REQUEUE="1")

    def limit(minutes):
        cluster("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")

    def ran_again(restarts):
        return cluster.job(number)["Restarts"] == str(restarts) and len(rounds(tmp_path)) > len(before)

    wait_for(lambda: rounds(tmp_path), tmp_path)
    minutes = cluster.job(number)["RunTime"].split(":")[1]
    limit(int(minutes) + 2)  # the signal comes a minute before
    wait_for(lambda: cluster.job(number)["Restarts"] == "1", tmp_path)
    limit(60)
    before = rounds(tmp_path)
    assert "the run is ended: time limit" in log(tmp_path)
    wait_for(lambda: ran_again(1), tmp_path)
    cluster("scontrol", "requeue", number)
    wait_for(lambda: cluster.job(number)["Restarts"] == "2", tmp_path)
    before = rounds(tmp_path)
    wait_for(lambda: ran_again(2), tmp_path)
    cluster("scancel", number)
    wait_for(lambda: cluster.job(number)["JobState"] == "CANCELLED", tmp_path)
    found = rounds(tmp_path)
    assert found == list(range(1, len(found) + 1)) and os.path.isfile(tmp_path / "RUN/config.yaml")
    assert not (tmp_path / "RUN/fedavg/end.json").exists() or "KILLED" in (tmp_path / "RUN/fedavg/end.json").read_text()
