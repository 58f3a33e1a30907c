"""A real `mlflow server` that dies and returns, one that was never there, and a training process that is killed."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from cfl_ray.tracking import MlflowTracker, deliver_pending

SECRETS = ("bob", "hunter2", "abcd1234")
TRAINING = """
import sys, time
from cfl_ray.tracking import MlflowTracker, RoundRecord, RunInfo
run_dir, uri, rounds, pause = sys.argv[1], sys.argv[2], range(int(sys.argv[3]), int(sys.argv[4])), float(sys.argv[5])
tracker = MlflowTracker(run_dir, uri, "killed")
tracker.start(RunInfo("ifca"))
for round in rounds:
    metrics = {name: round + place / 10 for place, name in enumerate(("accuracy", "ari", "mbit_up"))}
    tracker.log(RoundRecord(round, metrics, 1_700_000_000_000 + round))
    print(round, flush=True)
    time.sleep(pause)
tracker.finish("FINISHED", {})
"""


def delivered_rounds(runs, uri, experiment):
    return [len(run.histories.get("accuracy", ())) for run in runs(uri, experiment)]


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


def test_server_killed_and_restarted_misses_nothing_and_has_nothing_twice(server, tmp_path, info, record, runs, expected):
    warnings = []
    tracker = MlflowTracker(tmp_path, server.uri, "restarted", warn=warnings.append)
    tracker.start(info)
    for round in range(300):
        tracker.log(record(round))
        time.sleep(0.01)  # deliveries go on meanwhile
        if round == 120:
            wait_until(lambda: sum(delivered_rounds(runs, server.uri, "restarted")) > 0)
            server.kill()
    wait_until(lambda: warnings)
    server.start()
    (tmp_path / "artifacts" / "note.txt").write_text("kept")
    tracker.finish("FINISHED", {"newcomer_accuracy": 0.5})

    assert len(warnings) == 1
    (run,) = runs(server.uri, "restarted")
    assert run.info.status == "FINISHED"
    assert run.histories == expected(range(300)) | {"newcomer_accuracy": [(299, 0.5, record(299).time_ms)]}
    assert run.files == {"note.txt"}


def test_training_killed_and_resumed_misses_nothing_and_has_nothing_twice(server, tmp_path, runs, expected):
    command = [sys.executable, "-c", TRAINING, tmp_path, server.uri]
    first = subprocess.Popen([*command, "0", "1000", "0.02"], stdout=subprocess.PIPE, text=True)
    wait_until(lambda: sum(delivered_rounds(runs, server.uri, "killed")) > 0)
    first.send_signal(signal.SIGKILL)
    last = int(first.communicate()[0].split()[-1])
    subprocess.run([*command, str(last - 2), str(last + 10), "0"], check=True, stdout=subprocess.DEVNULL)
    (run,) = runs(server.uri, "killed")
    assert run.info.status == "FINISHED"
    assert run.histories == expected(range(last + 10))


def test_out_of_reach_the_run_ends_soon_and_is_delivered_later_without_showing_a_credential(server, tmp_path, info, record, runs, expected, capfd):
    uri = f"http://bob:hunter2@127.0.0.1:{server.port}"
    run_dir, warnings = tmp_path / "run", []
    server.kill()
    tracker = MlflowTracker(run_dir, uri, "later", warn=warnings.append)
    tracker.start(info)
    for round in range(20):
        tracker.log(record(round))
    started = time.monotonic()
    tracker.finish("FINISHED", {})
    assert time.monotonic() - started < 3
    assert len(warnings) == 2  # that results are kept, and that they are delivered later
    assert str(run_dir / "metrics.jsonl") in warnings[0]
    assert "lacks 20 rounds" in warnings[1]

    started = time.monotonic()
    assert deliver_pending(tmp_path, uri, warn=warnings.append) == []
    assert time.monotonic() - started < 3
    server.start()
    assert deliver_pending(tmp_path, warn=warnings.append) == []
    assert "set MLFLOW_TRACKING_URI" in warnings[-1]
    assert [done.rounds for done in deliver_pending(tmp_path, uri, warn=warnings.append)] == [20]
    assert deliver_pending(tmp_path, uri) == []

    (run,) = runs(server.uri, "later")
    assert (run.info.status, run.histories) == ("FINISHED", expected(range(20)))
    shown = "".join([*warnings, *capfd.readouterr(), *(path.read_text() for path in run_dir.glob("*.json"))])
    assert not [secret for secret in SECRETS if secret in shown]


@pytest.mark.parametrize("query", ["", "?token=abcd1234"])
def test_a_server_that_hangs_costs_one_time_out_and_shows_no_credential(tmp_path, info, query, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    warnings = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and says nothing
        uri = f"http://bob:hunter2@127.0.0.1:{silent.getsockname()[1]}{query}"
        tracker = MlflowTracker(tmp_path, uri, "hangs", warn=warnings.append)
        started = time.monotonic()
        tracker.start(info)
        tracker.finish("FINISHED", {})
        assert time.monotonic() - started < 5
    assert "API request to http://***@127.0.0.1" in warnings[0]  # the text is MLflow's, which quotes the URI as it was given
    assert "timed out" in warnings[0]
    shown = "".join([*warnings, *capfd.readouterr()])
    assert not [secret for secret in SECRETS if secret in shown]


def test_an_address_that_never_answers_is_given_up_at_once(tmp_path):
    script = TRAINING.replace('"killed"', '"nowhere"')
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", script, tmp_path, "http://bob:hunter2@127.0.0.1:1", "0", "3", "0"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert time.monotonic() - started < 10
    assert done.stdout.split() == ["0", "1", "2"]
    assert len(done.stderr.splitlines()) == 2
    assert "hunter2" not in done.stderr


def test_logging_does_not_wait_for_mlflow(tmp_path, info, record):
    tracker = MlflowTracker(tmp_path, "http://127.0.0.1:1", "slow", warn=lambda line: None)
    tracker.start(info)
    started = time.monotonic()
    for round in range(1000):
        tracker.log(record(round))
    assert time.monotonic() - started < 2  # 2 ms a round, where an attempt alone takes longer
    tracker.finish("FINISHED", {})
