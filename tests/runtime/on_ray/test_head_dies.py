"""The head of a cluster dies with everything on it: the run is resumed on another cluster, from the shared output."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from cfl_ray import load_run, simulate

pytestmark = pytest.mark.slow

CLUSTER = """
import sys, time
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
"""


class OtherCluster:
    """A Ray cluster whose processes are all below one of this test."""

    def __init__(self):
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {"RAY_AUTH_MODE": "token"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self.process.stdout.readline().strip()
        self.environment = environment | {"RAY_ADDRESS": self.address}

    def kill(self):
        """Ends head, hosts and server at once, as a power failure does."""
        end(psutil.Process(self.process.pid))
        self.process.wait()


def end(process):
    for one in (process, *process.children(recursive=True)):
        one.kill()


@pytest.fixture
def cluster():
    clusters = []

    def start():
        clusters.append(OtherCluster())
        return clusters[-1]

    yield start
    for one in clusters:
        if one.process.poll() is None:
            one.kill()


def cfl_ray(on, log, *arguments, folder):
    command = [sys.executable, "-m", "cfl_ray", *arguments]
    return subprocess.Popen(command, env=on.environment, cwd=folder, stdout=log, stderr=log)


def test_resumed_on_another_cluster_after_the_head_died(cluster, experiment, figures, tmp_path):
    """From another folder, with other measurements of engines there: same engine, shards and figures."""
    first = cluster()
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    changes = {"data": {"source": "digits"}, "local": {"epochs": 30}, "rounds": 8, "tracking": {"enabled": True}}
    made = experiment(runtime={"engine": "auto", "address": first.address}, **changes)
    (tmp_path / "here/mine.yaml").write_text(made.model_copy(update={"output": "out"}).to_yaml())
    run_dir, log = tmp_path / "here/out/run", (tmp_path / "log").open("a+")
    run = cfl_ray(first, log, "run", "mine.yaml", "--run-dir", "out/run", folder=tmp_path / "here")
    records, deadline = run_dir / "ditto/metrics.jsonl", time.monotonic() + 300
    while not records.exists() or records.read_text().count("\n") < 3:
        assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    end(psutil.Process(run.pid))
    first.kill()
    run.wait()
    assert records.read_text().count("\n") < 8, "it is over"
    engine = json.loads((run_dir / "numerics.json").read_text())["engine"]
    choices = tmp_path / "here/out/engine-choices.json"
    (key,) = json.loads(choices.read_text())
    other = "sequential" if engine != "sequential" else "manual"
    choices.write_text(json.dumps({key: [other, f"{other}: measured elsewhere"]}))

    second = cluster()
    resumed = cfl_ray(second, log, "resume", str(run_dir), folder=tmp_path / "there")
    assert resumed.wait(300) == 0, (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    assert f"engine {engine}: as at the start of the run" in text and "goes on after round" in text
    assert f"resumed on the cluster at {second.address}" in text
    assert list((tmp_path / "there").iterdir()) == [], "nothing is made where it was resumed"
    expected = simulate(experiment(runtime={"engine": engine}, **(changes | {"tracking": {"enabled": False}})))
    assert figures(load_run(run_dir)) == figures(expected)
    numbers = [json.loads(line)["round"] for line in records.read_text().splitlines()]
    assert numbers == list(range(1, 9))
