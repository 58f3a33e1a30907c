"""An MLflow server that a test can kill, an SQLite store that the tests share, and a function that reads a store."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from cfl_ray.tracking import RoundRecord, RunInfo
from cfl_ray.tracking.mlflow import DEFAULTS, connect

METRICS_OF_A_ROUND = ("accuracy", "ari", "mbit_up")


class Server:
    """`mlflow server` on a free port of this machine, with its whole process group."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        options = {
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--workers": "1",
            "--backend-store-uri": f"sqlite:///{folder}/server.db",
            "--artifacts-destination": str(folder / "artifacts"),
        }
        self._command = [sys.executable, "-m", "mlflow", "server", *(word for pair in options.items() for word in pair)]
        self._log = folder / "server.log"

    def start(self):
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            try:
                return urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
            except OSError:
                assert self._process.poll() is None, self._log.read_text()
                time.sleep(0.1)
        raise TimeoutError(self._log.read_text())

    def kill(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in DEFAULTS:  # set and deleted, so that the values set by `connect` are undone after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def sqlite(tmp_path_factory):
    """URI of an SQLite store whose tables exist."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('sqlite') / 'mlflow.db'}"
    connect(uri, "warm-up")
    return uri


@pytest.fixture
def record():
    """Returns a function: round -> its record, whose values no other round or metric has."""
    return lambda round: RoundRecord(
        round, {name: round + place / 10 for place, name in enumerate(METRICS_OF_A_ROUND)}, 1_700_000_000_000 + round
    )


@pytest.fixture
def expected(record):
    """Returns a function: rounds -> the histories that MLflow must hold, every round once."""

    def histories(rounds):
        return {
            name: [(round, record(round).metrics[name], record(round).time_ms) for round in rounds]
            for name in METRICS_OF_A_ROUND
        }

    return histories


@pytest.fixture
def info():
    return RunInfo("ifca", "ifca", tags={"seed": "0", "dataset": "digits"}, params={"local.lr": "0.1"})


@pytest.fixture
def runs():
    """Returns a function: (URI, experiment) -> its runs, with the history of every metric."""

    def read(uri, experiment):
        client, experiment_id = connect(uri, experiment)
        found = client.search_runs([experiment_id])
        for run in found:
            run.histories = {
                name: sorted(
                    (entry.step, entry.value, entry.timestamp)
                    for entry in client.get_metric_history(run.info.run_id, name)
                )
                for name in run.data.metrics
            }
            run.files = {file.path for file in client.list_artifacts(run.info.run_id)}
        return found

    return read
