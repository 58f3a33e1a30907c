"""A real Ray cluster with TLS, and one without: a process that disagrees is told so within seconds."""

import shutil
import subprocess
import sys
import time

import pytest
import ray
from certificates import certificates, mixed
from other_clusters import OtherCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl"),
]
EXPERIMENT = """
rounds: 2
methods: [fedavg]
data: {source: synthetic, synthetic_shape: [8], synthetic_samples: 20, partition: {clients: 4}}
model: {name: mlp, options: {hidden: 8}}
tracking: {enabled: false}
"""
SECONDS = 45.0  # Ray alone tries for 45 s; most of ours goes to the imports of a process on a busy machine
SAYS = {
    ("with", "none"): "uses TLS, and this process does not: set RAY_USE_TLS=1",
    ("without", "ours"): "does not use TLS: unset RAY_USE_TLS here",
    ("with", "theirs"): "is not valid here",
    ("with", "mixed"): "does not take this process's certificate",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    address = ray.util.get_node_ip_address()
    ours, theirs = (certificates(tmp_path_factory.mktemp(name), address) for name in ("ours", "theirs"))
    return {"ours": ours, "theirs": theirs, "mixed": mixed(theirs, ours), "none": {}}


@pytest.fixture(scope="module")
def clusters(made):
    clusters = {"with": OtherCluster(**made["ours"]), "without": OtherCluster()}
    yield clusters
    for cluster in clusters.values():
        cluster.kill()


def run(cluster, variables, folder, **more):
    (folder / "mine.yaml").write_text(EXPERIMENT)
    environment = {name: value for name, value in cluster.environment.items() if "TLS" not in name} | variables | more
    command = [sys.executable, "-m", "cfl_ray", "run", "mine.yaml", "--run-dir", "run"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


@pytest.mark.parametrize("cluster, driver", SAYS)
def test_a_driver_that_disagrees(cluster, driver, made, clusters, tmp_path):
    status, text, seconds = run(clusters[cluster], made[driver], tmp_path)
    assert status == 2 and SAYS[cluster, driver] in text and "token" not in text, text
    assert seconds < SECONDS


def test_the_newest_cluster_of_this_machine(made, clusters, tmp_path):
    """The address `auto`, which Ray resolves."""
    folder = tmp_path / "ray"
    folder.mkdir()
    (folder / "ray_current_cluster").write_text(clusters["with"].address)
    status, text, _ = run(clusters["with"], {}, tmp_path, RAY_ADDRESS="auto", RAY_TMPDIR=str(tmp_path))
    assert status == 2 and SAYS["with", "none"] in text, text


def test_sides_that_agree(made, clusters, tmp_path):
    status, text, _ = run(clusters["with"], made["ours"], tmp_path)
    assert status == 0, text
