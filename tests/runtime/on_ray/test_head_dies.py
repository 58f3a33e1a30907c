"""The head of a cluster dies with everything on it: the run is resumed on another cluster, from the shared output."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from pyarrow.fs import S3FileSystem, copy_files

from cfl_ray import load_run, simulate

pytestmark = pytest.mark.slow
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")

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
    engine = json.loads((run_dir / "environment.json").read_text())["engine"]
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


@contextmanager
def served(*command):
    """The port of a server on this machine; the command ends with the port's number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def redis(tmp_path):
    """The address of a Redis server."""
    with served("redis-server", "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path), "--port") as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def bucket(monkeypatch):
    """Returns a function: a local folder -> the URI of its copy in a bucket of an S3 server."""
    for name in KEYS:
        monkeypatch.setenv(name, "test")
    with served("moto_server", "-H", "127.0.0.1", "-p") as port:
        place = {"endpoint_override": f"127.0.0.1:{port}", "scheme": "http", "region": "us-east-1"}
        # the server does not complete uploads of several parts as Arrow expects it
        files = S3FileSystem(**place, allow_bucket_creation=True, allow_delayed_open=True)
        files.create_dir("bucket")

        def upload(folder):
            copy_files(str(folder), "bucket/shards", destination_filesystem=files)
            return "s3://bucket/shards?" + "&".join(f"{name}={value}" for name, value in place.items())

        yield upload


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


@pytest.mark.skipif(shutil.which("moto_server") is None, reason="there is no moto_server (package moto[server]) here")
def test_shards_in_s3_are_found_by_the_next_cluster(cluster, bucket, experiment, figures, tmp_path):
    expected = simulate(experiment(data={"source": "digits"}, local={"epochs": 30}, rounds=8))
    uri, log = bucket(tmp_path / "shards"), (tmp_path / "log").open("a+")
    shutil.rmtree(tmp_path / "shards")
    made = experiment(data={"source": "digits", "shards": uri}, local={"epochs": 30}, rounds=8)
    (tmp_path / "mine.yaml").write_text(made.to_yaml())
    first, records = cluster(), tmp_path / "run/ditto/metrics.jsonl"
    run = cfl_ray(first, log, "run", "mine.yaml", "--run-dir", "run", folder=tmp_path)
    wait_for_rounds(3, records, run, tmp_path / "log")
    end(psutil.Process(run.pid))
    first.kill()
    run.wait()
    resumed = cfl_ray(cluster(), log, "resume", str(tmp_path / "run"), folder="/")
    assert resumed.wait(300) == 0, (tmp_path / "log").read_text()
    assert figures(load_run(tmp_path / "run")) == figures(expected)
