"""A real MLflow server behind a login, a slow line, a rate limit, and a gateway that fails: every record, once."""

import importlib.util
import threading
import time

import pytest

from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import Mlflow, RoundRecord, RunInfo, RunLog, deliver_pending
from cfl_ray.tracking import mlflow as adapter
from jobs.chaos.mlflow_server import USER, MlflowServer
from jobs.parts.line import Line

pytestmark = pytest.mark.slow
ROUNDS, METRICS = 100, 22
OF_LOGGING = ("runs/log-batch", "artifacts/")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", *adapter.DEFAULTS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER[0])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", USER[1])


@pytest.fixture(scope="module", params=[False, True], ids=["open", "login"])
def server(request, tmp_path_factory):
    if request.param and importlib.util.find_spec("flask_wtf") is None:
        pytest.skip("a login needs mlflow[auth]")
    server = MlflowServer(tmp_path_factory.mktemp("server") / "server.db", login=request.param)
    server.start()
    yield server
    server.kill()


def record(round):
    return RoundRecord(round, {f"m{i}": round + i / 100 for i in range(METRICS)}, 1_700_000_000_000 + round)


def log_of(folder, uri, experiment, **options):
    log = RunLog(folder, {"mlflow": Mlflow(uri, experiment)}, **options)
    log.start(RunInfo("ifca", "ifca", tags={"dataset": "digits"}, params={"data.source": "digits", "local.lr": "0.1"}))
    return log


def delivered(server, experiment):
    """The runs of an experiment: (status, rounds of each metric)."""
    client, experiment_id = adapter.connect(server.uri, experiment)
    found = []
    for run in client.search_runs([experiment_id]):
        steps = {name: [e.step for e in client.get_metric_history(run.info.run_id, name)] for name in ("m0", "m21")}
        found.append((run.info.status, steps))
    return found


def whole(rounds=ROUNDS):
    return [("FINISHED", {"m0": list(range(rounds)), "m21": list(range(rounds))})]


def test_a_new_run_asks_nothing_and_sends_in_large_batches(server, tmp_path):
    """Beside the batches and artifacts: creation, data set, place of the artifacts, end; no history of a metric."""
    with Line(server.uri, delay=0.4) as line:
        log_of(tmp_path / "first", line.uri, "new").close()  # the experiment is made
        before = line.requests.copy()
        log = log_of(tmp_path / "run", line.uri, "new")
        for round in range(ROUNDS):
            log.log(record(round))
        log.finish("FINISHED", {"end": 1.0})
        asked = line.requests - before
    beside = sum(count for path, count in asked.items() if not any(part in path for part in OF_LOGGING))
    assert beside <= 3 and asked["metrics/get-history"] == 0 and asked["runs/log-batch"] <= ROUNDS * METRICS / 500 + 3
    assert whole()[0] in delivered(server, "new")


def test_a_continued_run_asks_only_for_what_may_have_arrived(server, tmp_path):
    """The first answer to a batch is lost: the metrics have arrived, but the run does not know."""
    lost = []

    def cut(line, path):
        is_first = "log-batch" in path and line.requests["runs/log-batch"] == 2 and not lost
        lost.extend([path] * is_first)
        return is_first

    with Line(server.uri) as line:
        line.cut = cut
        log = log_of(tmp_path, line.uri, "lost", warn=lambda text: None)
        for round in range(ROUNDS):
            log.log(record(round))
            time.sleep(0.02)
        log.finish("FINISHED", {})
        assert lost and line.requests["metrics/get-history"] <= METRICS and line.requests["runs/search"] <= 1
    assert delivered(server, "lost") == whole()


@pytest.mark.parametrize("seconds", [1, 3])
def test_a_rate_limit_is_heeded(server, tmp_path, seconds):
    warnings = []
    with Line(server.uri, retry_after=seconds) as line:
        line.refuse_every = 3
        log = log_of(tmp_path, line.uri, f"limited {seconds}", warn=warnings.append)
        for round in range(ROUNDS):
            log.log(record(round))
        log.finish("FINISHED", {})
        assert line.refused[429] > 2 and line.too_early <= 3, "after the first refusal the header is read"
    assert delivered(server, f"limited {seconds}") == whole()
    assert not any("failed" in text or "lacks" in text for text in warnings)


def test_later_commands_make_progress_behind_a_rate_limit(server, tmp_path):
    with Line(server.uri) as line:
        line.refuse_every = 2
        for name in ("one", "two"):
            log = log_of(tmp_path / name, line.uri, "later", warn=lambda text: None, finish_seconds=0)
            for round in range(ROUNDS):
                log.log(record(round))
            log.finish("FINISHED", {})
        for _ in range(6):
            deliver_pending(tmp_path, seconds=20)
        while any(thread.name.startswith("mlflow-") for thread in threading.enumerate()):
            time.sleep(0.1)
        deliver_pending(tmp_path, seconds=60)
    assert delivered(server, "later") == 2 * whole()


def test_a_lost_answer_to_a_creation_behind_a_rate_limit_leaves_one_run(server, tmp_path):
    """MLflow's client repeats requests from the first refusal on, so the run is made twice."""
    with Line(server.uri) as line:
        log_of(tmp_path / "first", line.uri, "twice").close()
        adapter.heed_rate_limit()
        line.cut = lambda line, path: path.endswith("runs/create") and line.requests["runs/create"] == 2
        log = log_of(tmp_path / "run", line.uri, "twice")
        log.log(record(0))
        log.finish("FINISHED", {})
        assert line.requests["runs/create"] == 3
    assert [run for run in delivered(server, "twice") if run[1]["m0"]] == whole(1)
    assert len(delivered(server, "twice")) == 2


def test_an_unavailable_server_receives_the_rounds_afterwards(server, tmp_path):
    with Line(server.uri) as line:
        log = log_of(tmp_path, line.uri, "unavailable", warn=lambda text: None)
        log.log(record(0))
        line.unavailable = time.monotonic() + 20
        for round in range(1, ROUNDS):
            log.log(record(round))
        time.sleep(21)
        log.finish("FINISHED", {})
    assert delivered(server, "unavailable") == whole()


def test_patience_limits_the_wait_for_a_slow_server(server, tmp_path):
    warnings = []
    with Line(server.uri) as line:
        log_of(tmp_path / "first", line.uri, "patience").close()
        line.delay = 1.0
        log = log_of(tmp_path / "run", line.uri, "patience", warn=warnings.append, patience=3.0)
        for round in range(ROUNDS):
            log.log(record(round))
        began = time.monotonic()
        log.finish("FINISHED", {})
        assert time.monotonic() - began < 8 and any("lacks" in text for text in warnings)
        line.delay = 0.0
        while any(thread.name.startswith("mlflow-") for thread in threading.enumerate()):
            time.sleep(0.1)
        deliver_pending(tmp_path, line.uri, seconds=60)
    assert whole()[0] in delivered(server, "patience")
    assert not RunDirectory(tmp_path).end.exists()
