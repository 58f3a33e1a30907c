"""The head of a cluster dies with everything on it: the run is resumed on another cluster, from the shared output."""

import json
import shutil
import time
from pathlib import Path

import psutil
import pytest
from other_clusters import OtherCluster, cfl_ray, end, rounds_in, served, wait_for_rounds

from cfl_ray import load_run, simulate
from cfl_ray.data.folder import Folder
from jobs.services import servers

pytestmark = pytest.mark.slow


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


@pytest.fixture
def redis(tmp_path):
    """The address of a Redis server."""
    with served("redis-server", "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path), "--port") as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def bucket(monkeypatch):
    """Returns a function: a local folder -> the URI of its copy in a bucket of an S3 server."""
    for name in servers.KEYS:
        monkeypatch.setenv(name, "parts")
    with servers.s3() as address:
        options = f"endpoint_override={address}&scheme=http&region={servers.REGION}"

        def upload(folder):
            for one in folder.iterdir():
                uri = f"s3://{servers.BUCKET}/shards/{one.name}?{options}"
                Folder(uri).put(one, (path.name for path in one.iterdir()))
            return f"s3://{servers.BUCKET}/shards?{options}"

        yield upload


def test_resumed_on_another_cluster_after_the_head_died(cluster, bucket, experiment, figures, tmp_path):
    """From another folder, with other measurements of engines there: same engine, shards and figures.

    And a run whose shards are in S3.
    """
    for folder in ("here", "there", "stored"):
        (tmp_path / folder).mkdir()
    gate = tmp_path / "gate"

    def gated(rounds_that_pass, **changes):
        gate.write_text(str(rounds_that_pass))
        methods = [{f"{Path(__file__).parents[1] / 'gated.py'}:Gated": {"gate": str(gate)}}]
        return experiment(**{"methods": methods, "data": {"source": "digits"}, "local": {"epochs": 1}} | changes)

    expected, uri = figures(simulate(gated(4))), bucket(tmp_path / "shards")
    shutil.rmtree(tmp_path / "shards")
    first, log, mine = cluster(), (tmp_path / "log").open("a+"), tmp_path / "here/mine.yaml"
    runtime = {"engine": "auto", "hosts": 1, "address": first.address}
    made = gated(3, runtime=runtime, tracking={"enabled": True}).model_copy(update={"output": "out"})
    mine.write_text(made.to_yaml())
    run_dir, stored, runs = tmp_path / "here/out/run", tmp_path / "stored/run", []
    runs.append(cfl_ray(first, log, "run", mine.name, "--run-dir", "out/run", folder=mine.parent))
    records = [run_dir / "gated/metrics.jsonl"]
    elsewhere = gated(3, data={"source": "digits", "shards": uri}, runtime={"hosts": 1})
    (tmp_path / "stored/mine.yaml").write_text(elsewhere.to_yaml())
    runs.append(cfl_ray(first, log, "run", mine.name, "--run-dir", "run", folder=tmp_path / "stored"))
    records.append(stored / "gated/metrics.jsonl")
    for run, file in zip(runs, records):
        wait_for_rounds(3, file, run, tmp_path / "log")
    for run in runs:
        end(psutil.Process(run.pid))
    first.kill()
    for run in runs:
        run.wait()
    assert [rounds_in(file) for file in records] == [3] * len(records)
    engine = json.loads((run_dir / "environment.json").read_text())["engine"]

    gate.write_text("4")
    second = cluster()
    runs = [cfl_ray(second, log, "resume", str(run_dir), folder=tmp_path / "there")]
    runs.append(cfl_ray(second, log, "resume", str(stored), folder="/"))
    assert [run.wait(300) for run in runs] == [0] * len(runs), (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    assert f"engine {engine}: as at the start of the run" in text and "goes on after round" in text
    assert f"resumed on the cluster at {second.address}" in text
    assert list((tmp_path / "there").iterdir()) == [], "nothing is made where it was resumed"
    same_engine = figures(simulate(gated(4, runtime={"engine": engine})))
    assert figures(load_run(run_dir)) == same_engine and [round for round, _ in same_engine["gated"]] == [1, 2, 3, 4]
    assert figures(load_run(stored)) == expected


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


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server here")
def test_resumed_on_the_head_that_comes_back(cluster, redis, experiment, figures, tmp_path):
    """The head's node dies with the driver and all hosts; Redis has the state of the head, also of their actors."""
    log = (tmp_path / "log").open("a+")
    gate = tmp_path / "gate"
    gate.write_text("3")
    methods = [{f"{Path(__file__).parents[1] / 'gated.py'}:Gated": {"gate": str(gate)}}]
    made = experiment(methods=methods, data={"source": "digits"}, local={"epochs": 1})
    (tmp_path / "mine.yaml").write_text(made.to_yaml())
    run_dir, first = tmp_path / "run", cluster(RAY_REDIS_ADDRESS=redis)
    run = cfl_ray(first, log, "run", "mine.yaml", "--run-dir", "run", folder=tmp_path)
    wait_for_rounds(3, run_dir / "gated/metrics.jsonl", run, tmp_path / "log")
    end(psutil.Process(run.pid))
    first.kill()
    run.wait()
    gate.write_text("4")
    again = cfl_ray(cluster(RAY_REDIS_ADDRESS=redis), log, "resume", "run", folder=tmp_path)
    assert again.wait(300) == 0, (tmp_path / "log").read_text()
    assert figures(load_run(run_dir)) == figures(simulate(made))
