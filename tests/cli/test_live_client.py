"""The status of runs that are not live on Ray, from their files, and which requests are refused."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from cfl_ray.cli import live_client, run_commands
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.methods import REGISTRY
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.session_file import ServerAddress, publish_server


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)


def test_a_finished_run(run_dir, capsys):
    status = live_client.status(run_dir)
    assert (status.state, status.methods, status.waiting) == ("finished", {"ditto": "finished"}, 0)
    assert (status.round, status.evaluated, status.next, status.hosts) == (2, 2, None, None)
    assert set(status.metrics) == {"accuracy", "accuracy_local", "num_clusters"}
    records = run_dir / "ditto/metrics.jsonl"
    records.write_text(re.sub(r'"accuracy": [0-9.]+', '"accuracy": NaN', records.read_text()))
    run_commands.status(run_dir, as_json=True)
    assert '"accuracy": null,' in capsys.readouterr().out  # JSON has no NaN
    for verb in ("join", "leave", "stop"):
        with pytest.raises(RunError, match=f"is not live, so it takes no request to {verb}; it is finished"):
            live_client.ask(run_dir, verb)


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ConfigError, match="nothing holds no run: there is no .*config.yaml"):
        live_client.status(tmp_path / "nothing")


def test_a_run_whose_driver_died(run_dir):
    (run_dir / "end.json").unlink()
    status = live_client.status(run_dir)  # after the end of its last method
    assert (status.state, status.methods, status.next) == (
        "died",
        {"ditto": "finished"},
        f"cfl-ray resume {shlex.quote(str(run_dir))}",
    )
    (run_dir / "ditto/end.json").unlink()
    status = live_client.status(run_dir)
    assert (status.state, status.methods, status.next) == (
        "died",
        {"ditto": "begun"},
        f"cfl-ray resume {shlex.quote(str(run_dir))}",
    )


def test_a_run_in_one_process_takes_no_requests(run_dir):
    with RunDirectory(run_dir).hold():
        (run_dir / "ditto/end.json").unlink()
        status = live_client.status(run_dir)
        assert (status.state, status.step) == ("live", "starting, or in one process")
        with pytest.raises(
            RunError,
            match="takes no requests now: it is only starting, runs in one process, or its cluster has no token",
        ):
            live_client.ask(run_dir, "stop")


def test_a_run_whose_server_is_gone_after_the_last_round_is_ending(run_dir, monkeypatch):
    def no_answer(session, verb):
        raise RunError("the server of this run cannot be reached (connection refused)")

    monkeypatch.setattr(live_client, "_ask_server", no_answer)
    with RunDirectory(run_dir).hold():
        publish_server(run_dir, ServerAddress.here("127.0.0.1:6379", "server"))
        status = live_client.status(run_dir)
        assert (status.state, status.round, status.step) == ("live", 2, "ending")
        (run_dir / "ditto/end.json").unlink()
        assert live_client.status(run_dir).step == "the server of this run cannot be reached (connection refused)"


def test_the_status_runs_no_code_that_the_config_names(run_dir):
    evil = run_dir.parent / "evil.py"
    evil.write_text(f"open({str(run_dir.parent / 'was_here')!r}, 'w')\n")
    config = (run_dir / "config.yaml").read_text()
    evil_config = config.replace("methods:\n- ditto\n", f"methods:\n- ditto\n- {evil}:Method\n")
    evil_config = evil_config.replace("name: mlp", f"name: {evil}:Model")
    assert evil_config.count(str(evil)) == 2
    (run_dir / "config.yaml").write_text(evil_config)
    assert live_client.status(run_dir).waiting == 1 and not (run_dir.parent / "was_here").exists()


def test_a_forged_address_is_not_followed(run_dir):
    """`test_session_file` has every forgery."""
    publish_server(run_dir, ServerAddress.here("127.0.0.1:6379", "server"))
    values = json.loads((run_dir / "session.json").read_text())
    (run_dir / "session.json").write_text(json.dumps(values | {"address": "6.6.6.6:1"}))
    assert live_client.status(run_dir).state == "finished"  # a run that is not live leads nowhere
    with RunDirectory(run_dir).hold():
        for ask in (lambda: live_client.status(run_dir), lambda: live_client.ask(run_dir, "stop")):
            with pytest.raises(ConfigError, match="was not written by you"):
                ask()


STATUS = """
import sys
from pathlib import Path
from cfl_ray.cli.live_client import status
print(status(Path(sys.argv[1])).waiting, "torch" in sys.modules)
"""


def test_the_status_of_all_methods_needs_no_torch(run_dir):
    """Importing the methods, to count them, would import torch; the config of a run names `all` as it was written."""
    file = run_dir / "config.yaml"
    named = re.sub(r"(?m)^methods:\n(- .*\n)+", "methods: [all]\n", file.read_text())
    assert "methods: [all]" in named
    file.write_text(named)
    done = subprocess.run([sys.executable, "-c", STATUS, run_dir], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(REGISTRY) - 1), "False"], "ditto is finished"
