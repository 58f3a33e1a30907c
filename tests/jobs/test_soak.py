"""A short soak: the same outcome, and growing resources are named."""

from types import SimpleNamespace

import pytest
from chaos_runs import run_job

from jobs.chaos import soak
from jobs.chaos.soak import grown


@pytest.mark.slow
def test_a_short_soak_has_the_same_outcome(tmp_path):
    """It is too short to judge memory: that is the only thing wrong."""
    done = run_job(tmp_path, "chaos.soak", "--rounds", "8", "--every", "0")
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
