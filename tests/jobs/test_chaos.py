"""Short runs of the jobs that disturb a run: the same outcome, and resources are reported; and their parts."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.chaos import soak
from jobs.chaos.__main__ import main
from jobs.chaos.churn import churn_schedule
from jobs.chaos.soak import grown
from jobs.chaos.virtual_network import Link, Network, missing

ROOT = Path(__file__).parents[2]
RECEIVER = """
import socket
server = socket.create_server(("0.0.0.0", 9999))
while True:
    connection, _ = server.accept()
    while connection.recv(1 << 20): pass
    connection.send(b"."); connection.close()
"""
SENDER = """
import socket, sys, time
began = time.monotonic()
try:
    connection = socket.create_connection((sys.argv[1], 9999), timeout=1)
    connection.sendall(bytes(int(sys.argv[2]))); connection.shutdown(1); connection.recv(1)
    print(time.monotonic() - began)
except TimeoutError:
    print("nan")
"""
needs_network = pytest.mark.skipif(missing() is not None, reason=f"no network of namespaces here: {missing()}")


def run_job(folder, name: str, *options: str) -> subprocess.CompletedProcess:
    """Runs `python -m jobs.NAME` with these options, which keeps its runs in the folder."""
    command = [sys.executable, "-m", f"jobs.{name}", *options, "--keep", str(folder)]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, printed",
    [
        (["--kills", "2", "--rounds", "3", "--targets", "host", "server"], ["2 kills"]),
        (
            ["--hang", "3", "--rounds", "12", "--limit", "10"],
            ["3 hangs", "1 host", "1 server", "1 data", "MLflow; every hang named and ended in time"],
        ),
        pytest.param(
            ["--rounds", "4", "--network", "node-vanishes-quick", "disk-full"],
            ["node-vanishes-quick: equal after", "disk-full: equal after"],
            marks=needs_network,
        ),
    ],
    ids=["kills", "hangs", "network"],
)
def test_a_disturbed_run_has_the_same_outcome(tmp_path, options, printed):
    done = run_job(tmp_path, "chaos", *options, "--seed", "0", "--methods", "ditto")
    logs = tmp_path.rglob("disturbed.log")
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *(log.read_text() for log in logs)])
    for text in ("identical: metrics, moves, models, client states; every round once", *printed):
        assert text in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hang", "2", "--targets", "node"], "--targets node: expected host, server, data"),
        (["--hang", "2", "--targets", "host", "driver"], "--targets driver: expected host, server, data"),
        (
            ["--kills", "8", "--rounds", "4", "--methods", "ditto", "ifca_cam"],
            "--kills must be below 8, the rounds of all methods, got 8",
        ),
    ],
)
def test_disturbances_that_no_run_can_have(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["chaos.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


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


# ---- machines in network namespaces


def test_a_link_paces_delays_and_drops():
    link = Link(0, latency=0.5, bytes_per_second=100)
    assert link.passes_at("out", 10.0, 50) == 10 + 50 / 100 + 0.5
    assert link.passes_at("out", 10.0, 50) == 10 + 2 * 50 / 100 + 0.5, "after the one before"
    assert link.passes_at("in", 10.0, 50) == 10 + 50 / 100 + 0.5, "directions do not wait for each other"
    link.passes_at("out", 10.0, 50)
    assert link.passes_at("out", 10.0, 50) is None, "more than a second of packets waits"
    link.up = False
    assert link.passes_at("in", 99.0, 50) is None


@needs_network
@pytest.mark.slow
def test_machines_reach_each_other_as_their_links_allow(tmp_path):
    with Network(tmp_path) as network:
        one, two = network.add("one"), network.add("two")
        two.start([sys.executable, "-c", RECEIVER], os.environ, tmp_path / "log")

        def seconds(size: int) -> float:
            command = ["ip", "netns", "exec", one.namespace, sys.executable, "-c", SENDER, two.address, str(size)]
            done = subprocess.run(command, capture_output=True, text=True)
            return float(done.stdout or "inf")

        deadline = time.monotonic() + 60
        while seconds(1) == float("inf"):  # the receiver has not started
            assert time.monotonic() < deadline
        two.link.latency = 0.1
        assert seconds(1) >= 4 * 0.1, "one round trip to connect, one for the answer"
        two.link.latency, two.link.bytes_per_second = 0, 1e6
        assert seconds(1_000_000) > 0.5
        two.link.up = False
        assert seconds(1) != seconds(1), "nan"
        two.link.up = True
        assert seconds(1) < 60
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert one.namespace not in left


def test_without_root_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--network", "partition"])
    assert main() == 1
    assert "missing: root" in capsys.readouterr().out


def test_an_unknown_scenario_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--network", "earthquake"])
    assert main() == 2
    assert "unknown scenario 'earthquake'" in capsys.readouterr().out


# ---- clients that join and leave


def test_before_every_round_offline_clients_join_and_online_clients_leave():
    events = churn_schedule(clients=200, rounds=30, share=0.01)
    assert [event["round"] for event in events] == list(range(2, 31))
    first_join = {}  # clients that join before they leave were offline at the start
    for event in events:
        assert len(event["join"]) == len(event["leave"]) == 2 and not {*event["join"]} & {*event["leave"]}
        for client in event["join"]:
            first_join.setdefault(client, True)
        for client in event["leave"]:
            first_join.setdefault(client, False)
    offline = {client for client, joins in first_join.items() if joins}
    assert len(offline) <= 20
    for event in events:
        assert offline >= {*event["join"]} and not offline & {*event["leave"]}
        offline = (offline - {*event["join"]}) | {*event["leave"]}
