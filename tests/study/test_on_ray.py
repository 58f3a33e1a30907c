"""Studies on a Ray cluster of their own, which needs RAY_AUTH_MODE=token: two runs at once with a host each."""

import subprocess

import pytest
import yaml
from studies import figures_of
from waiting import until

from cfl_ray.study.run import run_study

pytestmark = pytest.mark.slow


@pytest.fixture
def address():
    """Of a Ray cluster with two CPUs."""
    import ray
    from ray.experimental.internal_kv import _initialize_internal_kv

    from jobs.services.ray_cluster import LocalCluster

    cluster = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()
    if ray.is_initialized():  # for other tests of this process, whose key-value store the line above has put away
        _initialize_internal_kv(ray._private.worker.global_worker.gcs_client)


def test_two_runs_at_once_with_a_host_each(address, study, tmp_path, command, inline):
    made = study()
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json")))
    done = subprocess.run(
        [*command, "compare", str(tmp_path / "small.yaml"), f"runtime.address={address}"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 runs, 2 at a time, each with 1 client host; folder" in done.stdout
    run_study(made, tmp_path / "here")
    assert figures_of(tmp_path / "small") == figures_of(tmp_path / "here") and len(figures_of(tmp_path / "small")) == 4


def test_a_study_is_stopped_as_a_job(address, study, tmp_path, command):
    """SIGTERM to its process, which has joined the cluster, and whose runs have processes of their own."""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(study().model_dump(mode="json")))
    process = subprocess.Popen(
        [*command, "compare", str(tmp_path / "small.yaml"), f"runtime.address={address}", "rounds=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until(lambda: list(tmp_path.glob("small/*/*/*/*/metrics.jsonl")) or process.poll() is not None)
    process.terminate()
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 130, printed
    assert f"stopped. Every saved round is kept; go on with: cfl-ray resume {tmp_path}/small" in printed
