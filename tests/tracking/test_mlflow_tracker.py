"""Live delivery: to a server that restarts, to unreachable servers, and from a training process that is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from waiting import until

from cfl_ray.report.figures import write_figures
from cfl_ray.tracking import Mlflow, RoundRecord, RunInfo, RunLog, deliver_pending
from cfl_ray.tracking.mlflow import connect

SECRETS = ("bob", "hunter2", "abcd1234")
TRAINING = """
import sys, time
from cfl_ray.tracking import Mlflow, RoundRecord, RunInfo, RunLog
run_dir, uri, rounds, pause = sys.argv[1], sys.argv[2], range(int(sys.argv[3]), int(sys.argv[4])), float(sys.argv[5])
tracker = RunLog(run_dir, {"mlflow": Mlflow(uri, "killed")}, finish_seconds=120)
tracker.start(RunInfo("ifca"))
for round in rounds:
    metrics = {name: round + place / 10 for place, name in enumerate(("accuracy", "ari", "mbit_up"))}
    tracker.log(RoundRecord(round, metrics, 1_700_000_000_000 + round))
    print(round, flush=True)
    time.sleep(pause)
tracker.finish("FINISHED", {})
"""


def delivered_rounds(runs, uri, experiment):
    return sum(len(run.histories.get("accuracy", ())) for run in runs(uri, experiment))


def assert_no_secret(*texts):
    shown = "".join(texts)
    assert not [secret for secret in SECRETS if secret in shown], shown


@pytest.mark.slow
def test_after_a_restart_of_the_server_every_round_is_there_once(server, tmp_path, info, record, runs, expected):
    warnings = []
    tracker = RunLog(tmp_path, {"mlflow": Mlflow(server.uri, "restarted")}, warnings.append, finish_seconds=240)
    tracker.start(info)
    for round in range(300):
        tracker.log(record(round))
        time.sleep(0.01)  # deliveries continue meanwhile
        if round == 120:
            until(lambda: delivered_rounds(runs, server.uri, "restarted"))
            server.kill()
    until(lambda: warnings)
    server.start()
    (tmp_path / "artifacts" / "note.txt").write_text("kept")
    tracker.finish("FINISHED", {"newcomer_accuracy": 0.5})

    assert len(warnings) == 1
    (run,) = runs(server.uri, "restarted")
    assert run.info.status == "FINISHED"
    assert run.histories == expected(range(300)) | {"newcomer_accuracy": [(299, 0.5, record(299).time_ms)]}
    assert run.files == {"note.txt"}


@pytest.mark.slow
def test_after_a_kill_of_the_training_every_round_is_there_once(server, tmp_path, runs, expected):
    command = [sys.executable, "-c", TRAINING, tmp_path, server.uri]
    first = subprocess.Popen([*command, "0", "100000", "0.02"], stdout=subprocess.PIPE, text=True)
    until(lambda: delivered_rounds(runs, server.uri, "killed"))
    first.send_signal(signal.SIGKILL)
    last = int(first.communicate()[0].split()[-1])
    subprocess.run([*command, str(last - 2), str(last + 10), "0"], check=True, stdout=subprocess.DEVNULL)
    (run,) = runs(server.uri, "killed")
    assert run.info.status == "FINISHED"
    assert run.histories == expected(range(last + 10))


@pytest.mark.slow
def test_results_are_delivered_when_the_server_is_back(server, tmp_path, info, record, runs, expected, capfd):
    uri = f"http://bob:hunter2@127.0.0.1:{server.port}"
    run_dir, warnings = tmp_path / "run", []
    server.kill()
    tracker = RunLog(run_dir, {"mlflow": Mlflow(uri, "later")}, warnings.append)
    tracker.start(info)
    for round in range(20):
        tracker.log(record(round))
    tracker.finish("FINISHED", {})
    server.start()
    assert deliver_pending(tmp_path, seconds=120, warn=warnings.append) == {}
    assert "set MLFLOW_TRACKING_URI" in warnings[-1]
    assert deliver_pending(tmp_path, uri, seconds=120, warn=warnings.append) == {run_dir: 20}
    assert deliver_pending(tmp_path, uri) == {}

    (run,) = runs(server.uri, "later")
    assert (run.info.status, run.histories) == ("FINISHED", expected(range(20)))
    assert_no_secret(*warnings, *capfd.readouterr(), *(path.read_text() for path in run_dir.glob("*.json")))


def test_without_a_server_the_run_ends_after_one_attempt_and_shows_no_credential(tmp_path, info, record, capfd):
    uri = "http://bob:hunter2@127.0.0.1:1"
    run_dir, warnings = tmp_path / "run", []
    tracker = RunLog(run_dir, {"mlflow": Mlflow(uri, "unreachable")}, warnings.append, finish_seconds=600)
    tracker.start(info)
    for round in range(20):
        tracker.log(record(round))
    started = time.monotonic()
    tracker.finish("FINISHED", {})
    assert time.monotonic() - started < 60, "far below finish_seconds"
    assert len(warnings) == 2
    assert (
        "failed: ConnectionError: no connection; the run continues" in warnings[0]
        and str(run_dir / "metrics.jsonl") in warnings[0]
    )
    assert "lacks 20 rounds" in warnings[1]

    started = time.monotonic()
    assert deliver_pending(tmp_path, uri, seconds=600, warn=warnings.append) == {}
    assert time.monotonic() - started < 60, "far below the limit"
    assert "no connection" in warnings[-1]
    assert deliver_pending(tmp_path, seconds=600, warn=warnings.append) == {}
    assert "set MLFLOW_TRACKING_URI" in warnings[-1]
    assert_no_secret(*warnings, *capfd.readouterr(), *(path.read_text() for path in run_dir.glob("*.json")))


def test_a_server_that_does_not_answer_costs_one_timeout_and_shows_no_credential(tmp_path, info, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    warnings = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts the connection and does not respond
        uri = f"http://bob:hunter2@127.0.0.1:{silent.getsockname()[1]}?token=abcd1234"
        tracker = RunLog(tmp_path, {"mlflow": Mlflow(uri, "silent")}, warnings.append, finish_seconds=600)
        started = time.monotonic()
        tracker.start(info)
        tracker.finish("FINISHED", {})
        assert time.monotonic() - started < 60, "far below finish_seconds"
    # The text is MLflow's, which quotes the URI with its credentials.
    assert "API request to http://***@127.0.0.1" in warnings[0] and "timed out" in warnings[0]
    assert_no_secret(*warnings, *capfd.readouterr())


def test_a_process_without_a_server_ends_and_prints_two_warnings(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", TRAINING, tmp_path, "http://bob:hunter2@127.0.0.1:1", "0", "3", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=300)
    assert done.stdout.split() == ["0", "1", "2"]
    assert len(done.stderr.splitlines()) == 2
    assert_no_secret(done.stderr)


def test_logging_does_not_wait_for_a_delivery_in_progress(tmp_path, info, record, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "300")
    warnings = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(240)
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracker = RunLog(tmp_path, {"mlflow": Mlflow(uri, "slow")}, warnings.append, finish_seconds=0)
        tracker.start(info)
        silent.accept()[0].close()  # the check that the server accepts connections
        request, _ = silent.accept()
        with request:
            for round in range(1000):
                tracker.log(record(round))
            assert warnings == [], "the request is still in progress"
            tracker.finish("FINISHED", {})
    assert "lacks 1000 rounds" in warnings[0]


@pytest.mark.slow
def test_a_server_shows_the_figures_that_the_description_of_a_comparison_names(server, tmp_path):
    """Accuracy by round and by traffic, and clusters: addresses relative to the server's page, that need no log-in."""

    def of(place):
        metrics = {"accuracy_std": 0.1, "num_clusters": 2.0, "ari": 1.0, "mbit_up": 1.0}
        return [RoundRecord(r, metrics | {"accuracy": r / 10 + place, "mbit_down": float(r)}) for r in (1, 2, 3)]

    log = RunLog(tmp_path, {"mlflow": Mlflow(server.uri, "shown")}, finish_seconds=240)
    log.start(RunInfo("digits, seed 0"))
    write_figures(tmp_path / "artifacts", {"fedavg": of(0.1), "ifca": of(0.2)})
    (tmp_path / "artifacts" / "report.html").write_text("<h1>report</h1>")
    log.finish("FINISHED", {"fedavg/accuracy": 0.4, "ifca/accuracy": 0.5})

    client, experiment_id = connect(server.uri, "shown")
    (run,) = client.search_runs([experiment_id])
    for note in (
        run.data.tags["mlflow.note.content"],
        client.get_experiment(experiment_id).tags["mlflow.note.content"],
    ):
        images = re.findall(r"!\[([a-z ]+)\]\(([^)]+)\)", note)
        assert [name for name, _ in images] == ["accuracy by mbit", "accuracy by round", "clusters by round"]
        for _, address in images:
            with urllib.request.urlopen(f"{server.uri}/{address}", timeout=60) as answer:
                assert answer.read(8) == b"\x89PNG\r\n\x1a\n"
        assert (
            f"[Report](#/experiments/{experiment_id}/runs/{run.info.run_id}/artifacts/report.html?workflowType=machine_learning)"
            in note
        )
    assert set(run.data.metrics) == {"fedavg/accuracy", "ifca/accuracy"}
