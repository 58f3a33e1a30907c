"""An MLflow server that a test can kill, an SQLite store that the tests share, and a function that reads a store."""

import pytest

from cfl_ray.tracking import RoundRecord, RunInfo
from cfl_ray.tracking.mlflow import DEFAULTS, connect
from jobs.chaos.mlflow_server import MlflowServer

METRICS_OF_A_ROUND = ("accuracy", "ari", "mbit_up")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in DEFAULTS:  # set and deleted, so that the values set by `connect` are undone after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = MlflowServer(tmp_path_factory.mktemp("server") / "server.db")
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
