"""A submitted job on a cluster of two nodes: real `ray start`, token authentication, `ray job submit`, results in MLflow."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from cfl_ray.tracking import read_records

ROOT = Path(__file__).parents[2]
RAY, COMMAND = (Path(sys.executable).with_name(name) for name in ("ray", "cfl-ray"))
EXPERIMENT = """
name: submitted
rounds: 3
methods: [fedavg, stocfl]
data: {source: synthetic, synthetic_shape: [8], synthetic_samples: 20, partition: {clients: 12}}
model: {name: mlp, options: {hidden: 16}}
local: {epochs: 2, batch_size: 8}
runtime: {hosts: 2, engine: sequential}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def node(environment: dict[str, str], log: Path, *arguments: str):
    """A Ray node in the foreground, in a process group of its own, which is ended as a whole."""
    with log.open("w") as out:
        process = subprocess.Popen([RAY, "start", "--block", *arguments], env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Environment and dashboard address of a head and a second node, one CPU each."""
    tmp_path = tmp_path_factory.mktemp("nodes")
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_JOB_ID", "MLFLOW_TRACKING_URI")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    (tmp_path / "token").write_text(os.urandom(32).hex())
    port, dashboard = free_port(), free_port()
    session = tempfile.mkdtemp(prefix="cfl-", dir="/tmp")  # short: Ray puts sockets below it, whose paths are limited
    head = ["--head", "--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", "1", "--temp-dir", session]
    head += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard), "--dashboard-agent-listen-port", str(free_port()), "--ray-client-server-port", str(free_port())]
    second = ["--address", f"127.0.0.1:{port}", "--node-ip-address", "127.0.0.2", "--num-cpus", "1", "--dashboard-agent-listen-port", str(free_port())]
    with node(environment, tmp_path / "head.log", *head):
        until(lambda: answers(dashboard), 60, (tmp_path / "head.log").read_text())
        with node(environment, tmp_path / "second.log", *second):
            status = [RAY, "status", "--address", f"127.0.0.1:{port}"]
            until(lambda: two_nodes(status, environment), 60, (tmp_path / "second.log").read_text())
            yield environment, f"http://127.0.0.1:{dashboard}"
    shutil.rmtree(session, ignore_errors=True)


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=2)
    except urllib.error.HTTPError:
        return True  # it wants the token
    except OSError:
        return False
    return True


def two_nodes(status: list, environment: dict[str, str]) -> bool:
    said = subprocess.run(status, env=environment, capture_output=True, text=True, timeout=60).stdout
    return "0.0/2.0 CPU" in said


@pytest.fixture
def submitted(cluster, tmp_path):
    """Runs `ray job submit` with options and an entrypoint, from a folder that holds this project; returns the finished process."""
    environment, dashboard = cluster
    folder = tmp_path / "work"
    for name in ("jobs", "cfl_ray"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "small.yaml").write_text(EXPERIMENT)

    def submit(*entrypoint: str, options=(), **changes) -> subprocess.CompletedProcess:
        command = [RAY, "job", "submit", "--address", dashboard, "--working-dir", ".", *options, "--", "python", *entrypoint]
        return subprocess.run(command, cwd=folder, env=environment | changes, capture_output=True, text=True, timeout=200)

    return submit


def test_job_on_two_nodes(submitted, tmp_path):
    output = tmp_path / "out"
    done = submitted("jobs/train.py", "small.yaml", f"output={output}")
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    assert "hosts: 2 on 2 nodes" in done.stdout and "results after the last round" in done.stdout

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("cfl_ray").experiment_id], "tags.method = 'stocfl'")
    assert len(runs) == 1 and runs[0].info.status == "FINISHED" and runs[0].data.params["session.hosts"] == "2 on 2 nodes"
    assert [point.step for point in client.get_metric_history(runs[0].info.run_id, "accuracy")] == [1, 2, 3]


def test_a_job_with_another_token_is_refused(submitted, tmp_path):
    denied = submitted("jobs/train.py", "small.yaml", f"output={tmp_path}", RAY_AUTH_TOKEN_PATH=str(tmp_path / "other"), RAY_AUTH_TOKEN="0" * 64)
    assert denied.returncode != 0 and "succeeded" not in denied.stdout and not list(tmp_path.glob("submitted-*"))


def test_a_job_with_bad_input_fails_and_says_why(submitted):
    done = submitted("jobs/train.py", "local.lrr=1")
    assert done.returncode != 0 and "unknown key 'local.lrr' (did you mean 'lr'?)" in done.stdout + done.stderr and "exit code 2" in done.stdout + done.stderr


@pytest.mark.timeout(400)
def test_a_job_is_asked_stopped_and_resumed_by_the_next(submitted, cluster, tmp_path):
    """While it is live, another process of the head asks; `ray job stop` ends it as Ctrl-C would."""
    environment, dashboard = cluster
    run_dir = tmp_path / "run"

    def ask(*arguments) -> tuple[int, str]:
        done = subprocess.run([COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout + done.stderr

    def job(verb: str) -> str:
        return subprocess.run([RAY, "job", verb, "--address", dashboard, "first"], env=environment, capture_output=True, text=True, timeout=100).stdout

    def rounds() -> list[int]:
        return [record.round for record in read_records(run_dir / "fedavg")]

    started = submitted("-m", "cfl_ray", "run", "small.yaml", "rounds=100000", "methods=[fedavg]", "--run-dir", str(run_dir), options=["--no-wait", "--submission-id", "first"])
    assert started.returncode == 0, started.stdout + started.stderr
    until(lambda: run_dir.is_dir() and rounds(), 120, "no round was finished")
    code, said = ask("status", run_dir)
    assert code == 0 and "live" in said and "2 on 2 nodes" in said, said
    code, said = ask("leave", run_dir, "3")
    assert code == 0 and "client 3 leaves before round" in said, said
    job("stop")
    until(lambda: "stopped" in job("status").lower(), 60, "the job was not stopped")
    assert f"cfl-ray resume {run_dir}" in job("logs")
    last = rounds()[-1]

    resumed = submitted("-m", "cfl_ray", "resume", str(run_dir), options=["--no-wait"])
    assert resumed.returncode == 0
    until(lambda: rounds()[-1] > last and (run_dir / "session.json").exists(), 120, "it did not go on")
    code, said = ask("stop", run_dir)
    assert code == 0 and "the run ends after round" in said, said
    until(lambda: not (run_dir / "session.json").exists(), 60, "it was not stopped")
    records = list(read_records(run_dir / "fedavg"))
    assert [record.round for record in records] == list(range(1, len(records) + 1)) and records[0].metrics["clients_online"] == 12 and records[-1].metrics["clients_online"] == 11
