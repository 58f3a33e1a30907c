"""A study on a Ray cluster of its own, which needs RAY_AUTH_MODE=token: two runs at once with a host each."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from cfl_ray.study.run import run_study

pytestmark = pytest.mark.slow
RAY = Path(sys.executable).with_name("ray")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def head(tmp_path):
    """Environment and address of a head node with two CPUs."""
    excluded = ("RAY_ADDRESS", "RAY_JOB_ID", "MLFLOW_TRACKING_URI")
    environment = {name: value for name, value in os.environ.items() if name not in excluded}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    (tmp_path / "token").write_text(os.urandom(32).hex())
    session = tempfile.mkdtemp(prefix="cfl-", dir="/tmp")  # short, since the paths of its sockets are limited
    address = f"127.0.0.1:{free_port()}"
    options = ["--head", "--num-cpus=2", "--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}"]
    options += [f"--temp-dir={session}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
    options += [f"--dashboard-agent-listen-port={free_port()}"]
    with (tmp_path / "head.log").open("w") as log:
        process = subprocess.Popen(
            [RAY, "start", "--block", *options], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + 240
    status = [RAY, "status", "--address", address]
    while "/2.0 CPU" not in subprocess.run(status, env=environment, capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "head.log").read_text()
        time.sleep(0.5)
    yield environment, address
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    shutil.rmtree(session, ignore_errors=True)


def test_two_runs_at_once_with_a_host_each(head, study, tmp_path, command, inline, figures_of):
    environment, address = head
    made = study()
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json")))
    done = subprocess.run(
        [*command, "compare", str(tmp_path / "small.yaml"), f"runtime.address={address}"],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 runs, 2 at a time, each with 1 client host; folder" in done.stdout
    run_study(made, tmp_path / "here")
    assert figures_of(tmp_path / "small") == figures_of(tmp_path / "here") and len(figures_of(tmp_path / "small")) == 4
