"""Real MLflow servers behind a login, a slow line, a rate limit, and a gateway that fails: every record, once."""

import math
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import Mlflow, RoundRecord, RunInfo, RunLog, deliver_pending
from cfl_ray.tracking import mlflow as adapter
from jobs.chaos.mlflow_server import USER
from jobs.services.line import Line
from jobs.services.mlflow_servers import KINDS, mlflow_server, why_not

pytestmark = pytest.mark.slow
ROUNDS, METRICS = 100, 22
OF_LOGGING = ("runs/log-batch", "artifacts/")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", *adapter.DEFAULTS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # the server shares a busy machine with other tests
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER[0])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", USER[1])


@pytest.fixture(scope="module", params=KINDS)
def server(request, tmp_path_factory):
    if reason := why_not(request.param):
        pytest.skip(reason)
    with mlflow_server(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def sqlite(server, request):
    """The same; what does not depend on the database is tried with SQLite alone."""
    if request.node.callspec.params["server"] not in ("sqlite", "sqlite, login"):
        pytest.skip("tried with SQLite")
    return server


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


def test_artifacts_arrive_whole(server, tmp_path):
    """Through the server, which keeps them in its folder or in a bucket."""
    contents = {
        "table.md": b"| method |",
        "deep/er/größe 1.bin": bytes(range(256)) * 4096,
        "empty.csv": b"",
        "a=1+b,c 50%.yaml": b"x",
    }
    log = log_of(tmp_path / "run", server.uri, "artifacts")
    for name, content in contents.items():
        file = RunDirectory(tmp_path / "run").artifacts / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    log.log(record(0))
    log.finish("FINISHED", {})
    client, experiment_id = adapter.connect(server.uri, "artifacts")
    (run,) = client.search_runs([experiment_id])
    found = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert {name: (found / name).read_bytes() for name in contents} == contents


LARGEST = 1.7976931348623157e308
VALUES = {  # of a metric: what it is in MLflow; SQL stores have no infinite numbers
    math.nan: math.nan,
    math.inf: LARGEST,
    -math.inf: -LARGEST,
    LARGEST: LARGEST,
    5e-324: 5e-324,
    -0.0: 0.0,
    2.0**53: 2.0**53,
    0.1: 0.1,
}


def test_a_run_with_long_names(server, tmp_path):
    """SQLite takes all of them, the other databases do not."""
    log = RunLog(tmp_path, {"mlflow": Mlflow(server.uri, "long" * 60)}, warn=(warnings := []).append)
    tags, params = {"dataset": "d" * 600, "label": "ü" * 9000}, {"data.x": "ü" * 7000, "p" * 250: ""}
    log.start(RunInfo("größe" * 60, "ifca", tags, params))
    log.log(RoundRecord(1, {"m" * 250: 1.0}, 1_700_000_000_000))
    log.finish("FINISHED", {})
    client, experiment_id = adapter.connect(server.uri, "long" * 60)
    (run,) = client.search_runs([experiment_id])
    assert run.info.status == "FINISHED" and run.data.metrics == {"m" * 250: 1.0} and warnings == []


def test_values_rounds_times_and_texts(server, tmp_path):
    """Valid, and unusual: each value is kept as it was, or as the closest number that SQL has."""
    future, name = 4_102_444_800_000, "größe/ß metric - 1.0"  # 2100-01-01
    log = log_of(tmp_path, server.uri, "values", warn=(warnings := []).append)
    for step, value in enumerate(VALUES):
        log.log(RoundRecord(step + 1, {"value": value, name: float(step), "x" * 250: 1.0}, future + step))
    log.log(RoundRecord(2**31 + 7, {"value": 1.0}, future))
    log.finish("FINISHED", {"end": 2.0})
    client, experiment_id = adapter.connect(server.uri, "values")
    (run,) = client.search_runs([experiment_id])
    history = {entry.step: entry for entry in client.get_metric_history(run.info.run_id, "value")}
    expected = dict(enumerate(VALUES.values(), 1)) | {2**31 + 7: 1.0}
    found = {step: repr(abs(entry.value)) for step, entry in history.items()}
    assert found == {step: repr(abs(value)) for step, value in expected.items()}
    assert {entry.timestamp for entry in history.values()} == {future + step for step in range(len(VALUES))}
    assert [entry.value for entry in client.get_metric_history(run.info.run_id, name)] == [*map(float, range(8))]
    assert warnings == []


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


def test_later_commands_make_progress_behind_a_rate_limit(sqlite, tmp_path):
    with Line(sqlite.uri) as line:
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
    assert delivered(sqlite, "later") == 2 * whole()


def test_a_lost_answer_to_a_creation_behind_a_rate_limit_leaves_one_run(sqlite, tmp_path):
    """MLflow's client repeats requests from the first refusal on, so the run is made twice."""
    with Line(sqlite.uri) as line:
        log_of(tmp_path / "first", line.uri, "twice").close()
        adapter.heed_rate_limit()
        line.cut = lambda line, path: path.endswith("runs/create") and line.requests["runs/create"] == 2
        log = log_of(tmp_path / "run", line.uri, "twice")
        log.log(record(0))
        log.finish("FINISHED", {})
        assert line.requests["runs/create"] == 3
    assert [run for run in delivered(sqlite, "twice") if run[1]["m0"]] == whole(1)
    assert len(delivered(sqlite, "twice")) == 2


def test_an_unavailable_server_receives_the_rounds_afterwards(sqlite, tmp_path):
    with Line(sqlite.uri) as line:
        log = log_of(tmp_path, line.uri, "unavailable", warn=lambda text: None)
        log.log(record(0))
        line.unavailable = time.monotonic() + 20
        for round in range(1, ROUNDS):
            log.log(record(round))
        time.sleep(21)
        log.finish("FINISHED", {})
    assert delivered(sqlite, "unavailable") == whole()


@pytest.mark.parametrize("part", ["artifacts/", "runs/update", "runs/log-batch"])
def test_a_part_of_a_server_that_is_away_for_ever_is_not_waited_for(sqlite, tmp_path, part):
    """Each attempt has other requests answered, which is no progress; what has arrived is not sent again."""
    warnings = []
    with Line(sqlite.uri) as line:
        log_of(tmp_path / "first", line.uri, f"away {part}").close()
        log = log_of(tmp_path / "run", line.uri, f"away {part}", warn=warnings.append, finish_seconds=5, patience=600)
        log.log(record(0))
        artifacts = RunDirectory(tmp_path / "run").artifacts
        for number in range(3):
            (artifacts / f"{number}.txt").write_text(str(number))
        line.without = part
        began = time.monotonic()
        log.finish("FINISHED", {})
        assert time.monotonic() - began < 60 and "lacks" in warnings[-1] and "next cfl-ray command" in warnings[-1]
        line.without = ""
        while any(thread.name.startswith("mlflow-") for thread in threading.enumerate()):
            time.sleep(0.1)
        deliver_pending(tmp_path, line.uri, seconds=60)
        files = Counter({path: count for path, count in line.requests.items() if path.endswith(".txt")})
        assert sorted(files.values()) == [1, 1, 1]
    assert whole(1)[0] in delivered(sqlite, f"away {part}")


def test_patience_limits_the_wait_for_a_slow_server(sqlite, tmp_path):
    warnings = []
    with Line(sqlite.uri) as line:
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
    assert whole()[0] in delivered(sqlite, "patience")
    assert not RunDirectory(tmp_path).end.exists()
