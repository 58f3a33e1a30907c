"""Short runs of the jobs that kill processes and that run for long: same outcome, and resources are reported."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.chaos import soak
from jobs.chaos.__main__ import main
from jobs.chaos.soak import grown

ROOT = Path(__file__).parents[2]


def run_job(name: str, *arguments: str) -> subprocess.CompletedProcess:
    excluded = ("RAY_ADDRESS", "MLFLOW_TRACKING_URI", "RAY_JOB_ID")
    environment = {key: value for key, value in os.environ.items() if key not in excluded}
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=570
    )


@pytest.mark.slow
def test_killed_processes_do_not_change_the_outcome(tmp_path):
    options = ["--kills", "2", "--rounds", "3", "--seed", "0", "--methods", "ditto", "--targets", "host", "server"]
    done = run_job("jobs.chaos", *options, "--keep", str(tmp_path))
    log = tmp_path / "disturbed.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    assert "2 kills" in done.stdout
    assert "identical: metrics, moves, models, client states; every round once" in done.stdout


@pytest.mark.slow
def test_processes_that_stop_answering_are_named_and_replaced_with_the_same_outcome(tmp_path):
    options = ["--hang", "3", "--limit", "10", "--rounds", "12", "--seed", "0", "--methods", "ditto"]
    done = run_job("jobs.chaos", *options, "--keep", str(tmp_path))
    log = tmp_path / "disturbed.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    assert "3 hangs" in done.stdout and all(f"1 {target}" in done.stdout for target in ("host", "server", "data"))
    assert "every round once in metrics.jsonl and in MLflow; every hang named and ended in time" in done.stdout


@pytest.mark.parametrize("targets", [["node"], ["host", "driver"]])
def test_what_cannot_hang_is_an_error(monkeypatch, capsys, targets):
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--hang", "2", "--targets", *targets])
    with pytest.raises(SystemExit):
        main()
    assert f"--targets {targets[-1]}: expected host, server, data" in capsys.readouterr().err


def test_more_kills_than_rounds_are_an_error(monkeypatch, capsys):
    arguments = ["chaos.py", "--kills", "8", "--rounds", "4", "--methods", "ditto", "ifca_cam"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--kills must be below 8, the rounds of all methods, got 8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_soak_has_the_same_outcome(tmp_path):
    """It is too short to judge memory: that is the only thing wrong."""
    done = run_job("jobs.chaos.soak", "--rounds", "8", "--every", "0", "--keep", str(tmp_path))
    wrong = done.stdout.partition("WRONG:")[2].strip().splitlines()
    assert wrong and all(line.endswith("too few samples") for line in wrong), done.stdout + done.stderr
    assert "8 rounds of stocfl; kills: none" in done.stdout


def test_what_grows_is_named():
    rounds = range(0, 1000, 10)
    samples = {
        "host MB": [(at, 100 + at / 100) for at in rounds],
        "driver MB": [(at, 100 + at % 20) for at in rounds],
        "server files": [(at, 50.0) for at in rounds],
        "gcs MB": [(at, 20.0) for at in rounds if at < 500],
    }
    _, wrong = grown(samples, 1000)
    assert wrong == ["gcs MB: too few samples", "host MB grew by 6.3%"]


def test_each_kill_of_a_soak_is_followed_by_a_round(tmp_path, monkeypatch):
    """A server that takes 100 s to start is not killed meanwhile."""
    clock, kills = [0.0], []
    fake_time = SimpleNamespace(
        monotonic=lambda: clock[0], sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )
    monkeypatch.setattr(soak, "time", fake_time)
    monkeypatch.setattr(soak, "quantities", lambda run: ())
    run = SimpleNamespace(
        driver=SimpleNamespace(poll=lambda: None if clock[0] < 400 else 0),
        rounds_done=lambda: 1 + int(clock[0] // 100),
        kill=lambda target, draw: kills.append((target, run.rounds_done())) or True,
        directory=tmp_path / "run",
        wait_for_end=lambda: None,
    )
    mlflow = SimpleNamespace(kill=lambda: kills.append(("mlflow", run.rounds_done())), launch=lambda: None)
    soak.soaked(run, mlflow, 100, every=30)
    assert kills == [("host", 1), ("server", 2), ("mlflow", 3), ("host", 4)]
