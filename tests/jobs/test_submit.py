"""Submitted jobs on one node and on two: `ray start`, token authentication, `ray job submit`, results in MLflow."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
from waiting import until

from cfl_ray.tracking import read_records

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RAY, COMMAND = (Path(sys.executable).with_name(name) for name in ("ray", "cfl-ray"))
EXPERIMENT = """
name: submitted
rounds: 3
methods: [stocfl]
data: {source: synthetic, synthetic_shape: [8], synthetic_samples: 20, partition: {clients: 12}}
model: {name: mlp, options: {hidden: 16}}
local: {epochs: 2, batch_size: 8}
runtime: {engine: sequential}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def node(environment: dict[str, str], log: Path, *arguments: str):
    """A Ray node in the foreground, in a process group of its own that is terminated as a whole."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [RAY, "start", "--block", *arguments], env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Environment, port and dashboard address of a head node with one CPU."""
    tmp_path = tmp_path_factory.mktemp("head")
    excluded = ("RAY_ADDRESS", "RAY_JOB_ID", "MLFLOW_TRACKING_URI")
    environment = {name: value for name, value in os.environ.items() if name not in excluded}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    (tmp_path / "token").write_text(os.urandom(32).hex())
    port, dashboard = free_port(), free_port()
    session = tempfile.mkdtemp(prefix="cfl-", dir="/tmp")  # short, since the paths of its sockets are limited
    options = [
        "--head",
        f"--temp-dir={session}",
        "--num-cpus=1",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={free_port()}",
        f"--ray-client-server-port={free_port()}",
    ]
    log = tmp_path / "head.log"
    with node(environment, log, *options):
        until(lambda: responds(dashboard) and has_cpus(1, port, environment), log.read_text, pause=0.3)
        yield environment, port, f"http://127.0.0.1:{dashboard}"
    shutil.rmtree(session, ignore_errors=True)


@pytest.fixture(scope="module")
def second_node(head, tmp_path_factory):
    """A second node of the cluster, with one CPU."""
    environment, port, _ = head
    log = tmp_path_factory.mktemp("second") / "second.log"
    options = [
        f"--address=127.0.0.1:{port}",
        "--num-cpus=1",
        "--node-ip-address=127.0.0.2",
        f"--dashboard-agent-listen-port={free_port()}",
    ]
    with node(environment, log, *options):
        until(lambda: has_cpus(2, port, environment), log.read_text, pause=0.3)
        yield


def responds(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=2)
    except urllib.error.HTTPError:
        return True  # it requires the token
    except OSError:
        return False
    return True


def has_cpus(count: int, port: int, environment: dict[str, str]) -> bool:
    command = [RAY, "status", "--address", f"127.0.0.1:{port}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return f"0.0/{count}.0 CPU" in done.stdout


@pytest.fixture
def submitted(head, tmp_path):
    """Returns a function that runs `ray job submit` with an entry point, from a folder that holds this project."""
    environment, _, dashboard = head
    folder = tmp_path / "work"
    for name in ("jobs", "cfl_ray"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "small.yaml").write_text(EXPERIMENT)
    # a package of its own: Ray removes that of a job that has ended, also where another begins with an equal one
    (folder / "test.txt").write_text(str(tmp_path))

    def submit(*entrypoint: str, options=(), **changes) -> subprocess.CompletedProcess:
        submission = [RAY, "job", "submit", "--address", dashboard, "--working-dir", ".", *options]
        command = [*submission, "--", "python", *entrypoint]
        return subprocess.run(
            command, cwd=folder, env=environment | changes, capture_output=True, text=True, timeout=500
        )

    return submit


def test_a_job_runs_and_its_results_are_in_mlflow(submitted, tmp_path):
    output = tmp_path / "out"
    done = submitted("jobs/train.py", "small.yaml", f"output={output}")
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    assert "hosts: 1 on 1 node" in done.stdout and "results after the last round" in done.stdout

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    experiment_id = client.get_experiment_by_name("cfl_ray").experiment_id
    (run,) = client.search_runs([experiment_id], "tags.method = 'stocfl'")
    assert run.info.status == "FINISHED" and run.data.params["session.hosts"].startswith("1 on 1 node")
    assert [point.step for point in client.get_metric_history(run.info.run_id, "accuracy")] == [1, 2, 3]


def test_a_job_with_another_token_is_refused(submitted, tmp_path):
    token = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "other"), "RAY_AUTH_TOKEN": "0" * 64}
    denied = submitted("jobs/train.py", "small.yaml", f"output={tmp_path}", **token)
    assert denied.returncode != 0 and "succeeded" not in denied.stdout and not list(tmp_path.glob("submitted-*"))


def test_a_job_with_invalid_input_fails_with_a_message(submitted):
    done = submitted("jobs/train.py", "local.lrr=1")
    printed = done.stdout + done.stderr
    assert done.returncode != 0 and "unknown key 'local.lrr' (did you mean 'lr'?)" in printed
    assert "exit code 2" in printed


def test_a_job_on_two_nodes_takes_requests_and_is_stopped_and_resumed(submitted, head, second_node, tmp_path):
    """Requests come from another process on the head; `ray job stop` ends the job as Ctrl-C does."""
    environment, _, dashboard = head
    run_dir = tmp_path / "run"

    def ask(*arguments) -> tuple[int, str]:
        done = subprocess.run([COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout + done.stderr

    def job(verb: str) -> str:
        command = [RAY, "job", verb, "--address", dashboard, "first"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240).stdout

    def rounds() -> list[int]:
        return [record.round for record in read_records(run_dir / "fedavg")]

    run = ["-m", "cfl_ray", "run", "small.yaml", "rounds=100000", "methods=[fedavg]", "--run-dir", str(run_dir)]
    started = submitted(*run, options=["--no-wait", "--submission-id", "first"])
    assert started.returncode == 0, started.stdout + started.stderr
    until(lambda: run_dir.is_dir() and rounds(), lambda: "no round was completed: " + job("logs"), pause=0.3)
    code, printed = ask("status", run_dir)
    assert code == 0 and "live" in printed and "2 on 2 nodes" in printed, printed
    code, printed = ask("leave", run_dir, "3")
    assert code == 0 and "client 3 leaves before round" in printed, printed
    job("stop")
    until(lambda: "stopped" in job("status").lower(), lambda: "the job was not stopped: " + job("logs"), pause=0.3)
    assert f"cfl-ray resume {run_dir}" in job("logs")
    last = rounds()[-1]

    resumed = submitted("-m", "cfl_ray", "resume", str(run_dir), options=["--no-wait"])
    assert resumed.returncode == 0
    until(
        lambda: rounds()[-1] > last and (run_dir / "session.json").exists(),
        lambda: "the run did not continue",
        pause=0.3,
    )
    code, printed = ask("stop", run_dir)
    assert code == 0 and "the run ends after round" in printed, printed
    until(lambda: not (run_dir / "session.json").exists(), lambda: "the run was not stopped", pause=0.3)
    records = list(read_records(run_dir / "fedavg"))
    assert [record.round for record in records] == list(range(1, len(records) + 1))
    assert records[0].metrics["clients_online"] == 12 and records[-1].metrics["clients_online"] == 11
