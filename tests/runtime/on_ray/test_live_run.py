"""The commands of the command line on a run that is live on Ray."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cfl_ray import resume, simulate
from cfl_ray.cli import live_client
from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import build
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.tracking import read_records

pytestmark = pytest.mark.slow

COMMAND = Path(sys.executable).with_name("cfl-ray")
GATED = f"{Path(__file__).parents[1] / 'gated.py'}:Gated"


def cli(*arguments) -> tuple[int, str]:
    """Exit status and output (both streams) of a `cfl-ray` command."""
    done = subprocess.run([str(COMMAND), *map(str, arguments)], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def recorded(run_dir, label):
    return [
        (record.round, {name: value for name, value in record.metrics.items() if name != "round_seconds"})
        for record in read_records(run_dir / label)
    ]


@pytest.fixture
def gate(tmp_path):
    """Returns a function that sets the last round that may pass."""
    file = tmp_path / "gate"

    def allow(number: int):
        file.with_suffix(".new").write_text(str(number))
        file.with_suffix(".new").replace(file)

    allow(10**6)
    allow.file = file
    return allow


@pytest.fixture
def gated(experiment, gate, tmp_path):
    """Makes an experiment on eight clients of rotated digits whose rounds wait at the gate; then FedAvg."""

    def make(**changes):
        data = {"source": "digits", "shift": {"kind": "rotated"}, "partition": {"clients": 8, "samples": 20}}
        methods = [{GATED: {"gate": str(gate.file)}}, "fedavg"]
        return experiment(**{"data": data, "local": {"epochs": 1}, "rounds": 6, "methods": methods} | changes)

    return make


@pytest.fixture
def newcomers(tmp_path):
    config = SOURCE_KINDS.of(source="digits", shift={"kind": "rotated"}, partition={"clients": 4, "samples": 20})
    return build(config, 1, tmp_path / "newcomers").uri


@pytest.fixture
def start(cluster, tmp_path):
    """Starts `cfl-ray run` or `resume` in the background."""
    drivers = []

    def begin(*arguments):
        file = tmp_path / f"driver-{len(drivers)}.log"
        with file.open("w") as log:
            drivers.append(subprocess.Popen([str(COMMAND), *map(str, arguments)], stdout=log, stderr=log))
        drivers[-1].output = file.read_text
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.kill()
        driver.wait()


def at_round(run_dir, number, label="gated"):
    """Returns a function: the status once that round waits at the gate, None before."""
    waiting = run_dir.parent / "gate.waiting"

    def found():
        try:
            status = live_client.status(run_dir)
        except ConfigError:
            return None
        is_there = (status.method, status.step, status.round) == (label, "running", number)
        waits = waiting.exists() and waiting.read_text() == str(number)  # its population is fixed
        return status if is_there and waits and len(recorded(run_dir, label)) == number - 1 else None

    return found


@pytest.mark.timeout(900)
def test_requests_and_a_server_killed_then_stopped_resumed_and_replayed(
    gated, gate, newcomers, start, cluster, actors, until, tmp_path
):
    experiment, run_dir = gated(), tmp_path / "run"
    (tmp_path / "small.yaml").write_text(experiment.to_yaml())
    gate(1)
    driver = start("run", tmp_path / "small.yaml", f"runtime.address={cluster}", "--run-dir", run_dir)
    status = until(at_round(run_dir, 2))
    check_status_of_round_2(run_dir, status)
    check_requests_in_round_2(run_dir, newcomers)
    with pytest.raises(RunError, match="run is live already"):
        resume(run_dir)

    # the server dies when some requests have taken effect and one has not
    gate(3)
    status = until(at_round(run_dir, 4))
    assert (status.clients_online, status.clients, status.pending, status.seconds_left > 0) == (10, 12, [], True)
    assert live_client.ask(run_dir, "leave", [9]) == "gated: client 9 leaves before round 5"
    (server,) = actors("ServerActor")
    os.kill(server, signal.SIGKILL)
    status = until(lambda: actors("ServerActor") not in ([], [server]) and at_round(run_dir, 4)())
    assert status.pending == ["client 9 leaves before round 5"] and status.clients == 12
    assert "the server died and was started again" in status.last_fault and status.fault_age >= 0

    assert cli("stop", run_dir) == (0, "gated: the run ends after round 4, which is saved\n")
    gate(10**6)
    assert driver.wait(300) == 0
    stopped = "stopped after round 4 of gated, as asked. Every saved round is kept; go on with: cfl-ray resume"
    assert f"{stopped} {run_dir}" in driver.output()
    status = live_client.status(run_dir)
    assert (status.state, status.round, status.next) == ("stopped", 4, f"cfl-ray resume {shlex.quote(str(run_dir))}")
    assert not (run_dir / "session.json").exists()
    resume(run_dir)
    status = live_client.status(run_dir)
    assert (status.state, status.methods) == ("finished", {"gated": "finished", "fedavg": "finished"})

    simulate(experiment, tmp_path / "again", replay=run_dir)
    figures = recorded(run_dir, "gated")
    assert figures == recorded(tmp_path / "again", "gated") and [round for round, _ in figures] == [1, 2, 3, 4, 5, 6]
    assert [metrics["clients_online"] for _, metrics in figures] == [8, 8, 10, 10, 9, 9]
    simulate(gated(methods=["fedavg"]), tmp_path / "plain")  # requests to one method do not affect the next
    assert recorded(run_dir, "fedavg") == recorded(tmp_path / "plain", "fedavg") != []


def check_status_of_round_2(run_dir, status):
    hosts = status.hosts + status.hosts_starting
    found = (status.state, status.rounds, hosts, status.nodes, status.clients_online, status.clients)
    assert found == ("live", 6, 2, 1, 8, 8)
    assert status.methods == {"gated": "at work"} and status.waiting == 1 and status.evaluated == 1
    shown = ("accuracy", "accuracy_local", "num_clusters")
    metrics = recorded(run_dir, "gated")[0][1]
    assert status.metrics == {name: value for name, value in metrics.items() if name in shown}
    session = run_dir / "session.json"
    assert session.stat().st_mode & 0o777 == 0o600
    code, output = cli("status", run_dir, "--json")
    varying = {"hosts": 0, "hosts_starting": 0}
    assert code == 0 and json.loads(output) | varying == dataclasses.asdict(status) | varying


def check_requests_in_round_2(run_dir, newcomers):
    """Granted for round 3, or refused: `test_requests` has all refusals."""
    granted = cli("join", run_dir, "--shards", os.path.relpath(newcomers))
    assert granted == (0, "gated: clients 8-11 join before round 3\n")
    assert live_client.ask(run_dir, "leave", [2, 0]) == "gated: clients 0, 2 leave before round 3"
    code, output = cli("leave", run_dir, "7-9")
    assert code == 2 and "leave: client 8 joins before round 3 already" in output
    for arguments, message in (
        (("leave", [99]), r"client 99 does not exist; the federation has clients 0 \.\. 11"),
        (("join_shards", newcomers), "same id twice: the clients of these shards are in the federation already"),
        (("join_shards", str(run_dir.parent / "nowhere")), "nowhere holds no shards"),
    ):
        with pytest.raises(ConfigError, match=message):
            live_client.ask(run_dir, *arguments)
    pending = ["clients 8-11 join before round 3", "clients 0, 2 leave before round 3"]
    assert live_client.status(run_dir).pending == pending


def test_a_run_on_a_ray_of_its_own_is_found_as_well_also_while_it_starts(gated, gate, start, until, tmp_path):
    """One that the driver started, and that listens on loopback alone. Its server takes seconds to start."""
    run_dir = tmp_path / "run"
    (tmp_path / "small.yaml").write_text(gated(methods=[{GATED: {"gate": str(gate.file)}}]).to_yaml())
    gate(1)
    driver = start("run", tmp_path / "small.yaml", "--run-dir", run_dir)
    until(lambda: run_dir.is_dir() and recorded(run_dir, "gated"))
    assert cli("stop", run_dir) == (0, "gated: the run ends after round 2, which is saved\n")
    gate(10**6)
    assert driver.wait(300) == 0 and "stopped after round 2 of gated, as asked" in driver.output()

    gate(3)
    driver = start("resume", run_dir)
    until(lambda: cli("stop", run_dir)[0] == 0)  # refused until it has an address
    assert driver.wait(60) == 0 and re.search("stopped.*as asked", driver.output())
    assert [round for round, _ in recorded(run_dir, "gated")][:2] == [1, 2]
    status = live_client.status(run_dir)
    assert (status.state, status.next) == ("stopped", f"cfl-ray resume {shlex.quote(str(run_dir))}")
