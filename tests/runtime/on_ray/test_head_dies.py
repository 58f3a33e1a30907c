"""The head of a cluster dies with everything on it: the run is resumed on another cluster, from the shared output."""

import json
import os
import shutil
import socket
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
for line in sys.stdin:  # the name of a method of the head
    getattr(cluster.head_node, line.strip())()
    print("done", flush=True)
"""


class OtherCluster:
    """A Ray cluster whose processes are all below one of this test."""

    def __init__(self, **variables):
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {"RAY_AUTH_MODE": "token"} | variables
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self.process.stdout.readline().strip()
        self.environment = environment | {"RAY_ADDRESS": self.address}

    def head(self, verb):
        """Calls a method of the head's node."""
        self.process.stdin.write(f"{verb}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

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

    def start(**variables):
        clusters.append(OtherCluster(**variables))
        return clusters[-1]

    yield start
    for one in clusters:
        if one.process.poll() is None:
            one.kill()


def cfl_ray(on, log, *arguments, folder):
    command = [sys.executable, "-m", "cfl_ray", *arguments]
    return subprocess.Popen(command, env=on.environment, cwd=folder, stdout=log, stderr=log)


def rounds_in(records):
    return records.read_text().count("\n") if records.exists() else 0


def wait_for_rounds(number, records, run, log):
    deadline = time.monotonic() + 300
    while rounds_in(records) < number:
        assert run.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


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
    records = run_dir / "ditto/metrics.jsonl"
    wait_for_rounds(3, records, run, tmp_path / "log")
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


@pytest.fixture
def redis(tmp_path):
    """The address of a Redis server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server here")
def test_the_run_goes_on_when_the_heads_store_is_restarted(cluster, redis, experiment, figures, tmp_path):
    """With the state of Ray's head in Redis, its control store may die and come back during a run."""
    on, log = cluster(RAY_REDIS_ADDRESS=redis), (tmp_path / "log").open("a+")
    made = experiment(data={"source": "digits"}, local={"epochs": 30}, rounds=8)
    (tmp_path / "mine.yaml").write_text(made.to_yaml())
    run_dir = tmp_path / "run"
    records = run_dir / "ditto/metrics.jsonl"
    run = cfl_ray(on, log, "run", "mine.yaml", "--run-dir", "run", folder=tmp_path)
    wait_for_rounds(3, records, run, tmp_path / "log")
    on.head("kill_gcs_server")
    time.sleep(3)
    on.head("start_gcs_server")
    assert run.wait(300) == 0, (tmp_path / "log").read_text()
    assert figures(load_run(run_dir)) == figures(simulate(made))
