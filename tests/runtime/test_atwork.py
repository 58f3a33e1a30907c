"""Runs that are not live on Ray: what their files say, and what is refused. None of these needs Ray."""

import json
import subprocess
import sys

import pytest

from cfl_ray import simulate
from cfl_ray.core.errors import ConfigError, DataError, RunError
from cfl_ray.core.ids import parse_ids, spans
from cfl_ray.runtime import live
from cfl_ray.runtime.atwork import Session, announce, at_work, held, read_session
from cfl_ray.runtime.journal import Event, Journal

HERE = Session.here("127.0.0.1:6379", "server")


@pytest.fixture
def run_dir(experiment, tmp_path):
    """A finished run of one method."""
    simulate(experiment(rounds=2), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)


def test_ids_are_written_as_ranges():
    assert parse_ids(["7", "0-2", "7"]) == [7, 0, 1, 2, 7] and spans([7, 0, 2, 1, 9, 8]) == "0-2, 7-9"
    assert spans(range(0, 40, 2), limit=3) == "0, 2, 4 and 17 more"
    for word in ("a", "3-", "-3", "5-2", "1.5", "0-99999999999", ""):
        with pytest.raises(ConfigError, match=f"'{word}' is not a client: write an id or a range of ids"):
            parse_ids([word])


def test_a_finished_run(run_dir):
    status = live.status(run_dir)
    assert (status.state, status.methods, status.waiting, status.round, status.next) == ("finished", {"ditto": "finished"}, 0, 2, None)
    assert status.evaluated == 2 and set(status.metrics) == {"accuracy", "accuracy_local", "num_clusters"} and status.hosts is None
    for verb in ("join", "leave", "stop"):
        with pytest.raises(RunError, match=f"is not at work, so nobody can {verb}; see `cfl-ray status"):
            live.ask(run_dir, verb)
    with pytest.raises(ConfigError, match="nothing holds no run: there is no .*config.yaml"):
        live.status(run_dir.parent / "nothing")


def test_a_run_whose_driver_died(run_dir):
    (run_dir / "end.json").unlink()
    (run_dir / "ditto/end.json").unlink()
    status = live.status(run_dir)
    assert (status.state, status.methods, status.next) == ("died", {"ditto": "begun"}, f"cfl-ray resume {run_dir}")


def test_a_run_in_one_process_says_that_it_takes_no_requests(run_dir):
    with held(run_dir / "config.yaml"):
        assert live.status(run_dir).state == "live" and live.status(run_dir).phase == "starting, or in one process"
        with pytest.raises(RunError, match="takes no requests now: it is only starting, runs in one process, or its cluster has no token"):
            live.ask(run_dir, "stop")


def test_a_config_that_names_code_is_not_loaded_to_tell_the_status(run_dir):
    evil = run_dir.parent / "evil.py"
    evil.write_text(f"open({str(run_dir.parent / 'was_here')!r}, 'w')\n")
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config.replace("methods:\n- ditto\n", f"methods:\n- ditto\n- {evil}:Method\n").replace("name: mlp", f"name: {evil}:Model"))
    assert live.status(run_dir).waiting == 1 and not (run_dir.parent / "was_here").exists()


class TestLock:
    def test_is_held_until_the_process_ends(self, run_dir):
        """Also by SIGKILL, when nobody is left to clear anything away."""
        file = run_dir / "config.yaml"
        code = f"import time; from pathlib import Path; from cfl_ray.runtime.atwork import held\nwith held(Path({str(file)!r})): print('held', flush=True); time.sleep(600)"
        holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert holder.stdout.readline() == "held\n" and at_work(file)
        with pytest.raises(RunError, match="run is at work already; see it with: cfl-ray status"), held(file):
            pass
        holder.kill()
        holder.wait()
        assert not at_work(file)

    def test_looking_does_not_hold_it(self, run_dir):
        file = run_dir / "config.yaml"
        assert not at_work(file)
        with held(file):
            assert at_work(file) and at_work(file)
        assert not at_work(file)


class TestSession:
    def test_is_read_as_written_and_says_no_token(self, run_dir):
        announce(run_dir, HERE)
        assert read_session(run_dir) == HERE and "a" * 8 not in (run_dir / "session.json").read_text()
        assert (run_dir / "session.json").stat().st_mode & 0o777 == 0o600

    def test_of_somebody_else_is_refused(self, run_dir, monkeypatch):
        announce(run_dir, HERE)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 64)
        with pytest.raises(ConfigError, match="was not written with your Ray token, so it is not followed"):
            read_session(run_dir)

    @pytest.mark.parametrize("change", [{"address": "6.6.6.6:1"}, {"actor": "x"}, {"auth_mode": ""}, {"pid": 1}, {"more": 1}, {"signature": None}])
    def test_that_was_changed_is_refused(self, run_dir, change):
        announce(run_dir, HERE)
        values = json.loads((run_dir / "session.json").read_text())
        (run_dir / "session.json").write_text(json.dumps(values | change | ({"auth_mode": "other"} if "auth_mode" in change else {})))
        with pytest.raises(ConfigError, match="was not written with your Ray token"):
            live.status(run_dir)

    def test_without_a_token_there_is_none(self, run_dir, monkeypatch, tmp_path):
        announce(run_dir, HERE)
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="cannot be checked: you have no Ray token here"):
            read_session(run_dir)
        (run_dir / "session.json").unlink()
        announce(run_dir, HERE)
        assert read_session(run_dir) is None and not (run_dir / "session.json").exists()


class TestReplay:
    def test_of_another_config_is_refused(self, experiment, run_dir, tmp_path):
        other = experiment(rounds=2, seed=1)
        with pytest.raises(ConfigError, match=f"replay: .*run belongs to another config .hash {experiment(rounds=2).config_hash}, this one has {other.config_hash}"):
            simulate(other, tmp_path / "other", replay=run_dir)
        with pytest.raises(ConfigError, match="replay: .*nothing holds no run"):
            simulate(other, tmp_path / "other", replay=tmp_path / "nothing")
        with pytest.raises(ConfigError, match="replay: name a run_dir"):
            simulate(experiment(rounds=2), replay=run_dir)
        assert not (tmp_path / "other").exists()

    def test_takes_what_happened_and_not_the_stop(self, experiment, run_dir, tmp_path, figures):
        Journal(run_dir / "ditto").add(Event(2, leave=(3,)), Event(1, stop="session"))
        again = simulate(experiment(rounds=2), tmp_path / "again", replay=run_dir)
        assert Journal(tmp_path / "again/ditto").events == [Event(2, leave=(3,))]
        scheduled = simulate(experiment(rounds=2, schedule=[{"round": 2, "leave": [3]}]))
        assert figures(again) == figures(scheduled)

    def test_a_damaged_journal_ends_the_run_before_it_starts(self, experiment, run_dir, tmp_path):
        (run_dir / "ditto/events.jsonl").write_text("nonsense\n")
        with pytest.raises(DataError, match=r"events.jsonl is damaged"):
            simulate(experiment(rounds=2), tmp_path / "again", replay=run_dir)
        assert not (tmp_path / "again/config.yaml").exists()
