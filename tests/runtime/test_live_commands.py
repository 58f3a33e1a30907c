"""The command line on a run that is live on Ray, and on one that is not any more."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cfl_ray import resume, simulate
from cfl_ray.config import Data
from cfl_ray.core.errors import ConfigError, RunError
from cfl_ray.data import build
from cfl_ray.data.images import Images
from cfl_ray.data.plan import make_plan
from cfl_ray.data.writing import write_shards
from cfl_ray.runtime import atwork, live
from cfl_ray.tracking import read_records

COMMAND = Path(sys.executable).with_name("cfl-ray")
GATED = f"{Path(__file__).parent / 'gated.py'}:Gated"


def cli(*arguments) -> tuple[int, str]:
    """Exit status, and what was said on both streams, of a `cfl-ray` command of its own."""
    done = subprocess.run([str(COMMAND), *map(str, arguments)], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def recorded(run_dir, label):
    return [(record.round, {name: value for name, value in record.metrics.items() if name != "round_seconds"}) for record in read_records(run_dir / label)]


@pytest.fixture
def gate(tmp_path):
    """Says which round may pass."""
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
        return experiment(**{"data": data, "local": {"epochs": 1}, "rounds": 6, "methods": [{GATED: {"gate": str(gate.file)}}, "fedavg"]} | changes)

    return make


@pytest.fixture
def newcomers(tmp_path):
    return build(Data(source="digits", shift={"kind": "rotated"}, partition={"clients": 4, "samples": 20}), 1, tmp_path / "newcomers").uri


@pytest.fixture
def larger(tmp_path):
    """Shards whose images are larger than those of the run."""
    x, y = np.zeros((80, 1, 9, 9), np.uint8), (np.arange(80) % 10).astype(np.int16)
    plan = make_plan(Images(x, y, x, y, num_classes=10), None, Data(source="digits", partition={"clients": 4}), seed=0)
    write_shards(tmp_path / "larger", plan, {"made": "here"}, None)
    return tmp_path / "larger"


@pytest.fixture
def start(cluster, tmp_path):
    """Starts `cfl-ray run` or `resume` in the background."""
    drivers = []

    def begin(*arguments):
        log = open(tmp_path / f"driver-{len(drivers)}.log", "w+")
        drivers.append(subprocess.Popen([str(COMMAND), *map(str, arguments)], stdout=log, stderr=log))
        drivers[-1].said = lambda: (tmp_path / log.name).read_text()
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.kill()
        driver.wait()


def at_round(run_dir, number, label="gated"):
    """Waits until a round is at work, and returns the status then."""

    def there():
        try:
            status = live.status(run_dir)
        except ConfigError:
            return None
        return status if (status.method, status.phase, status.round) == (label, "running", number) and len(recorded(run_dir, label)) == number - 1 else None

    return there


@pytest.mark.timeout(900)
def test_a_run_that_is_asked_things_is_killed_stopped_resumed_and_replayed(gated, gate, newcomers, larger, start, cluster, actors, until, tmp_path):
    experiment, run_dir = gated(), tmp_path / "run"
    (tmp_path / "small.yaml").write_text(experiment.to_yaml())
    gate(1)
    driver = start("run", tmp_path / "small.yaml", f"runtime.address={cluster}", "--run-dir", run_dir)
    status = until(at_round(run_dir, 2), 300)
    assert (status.state, status.rounds, status.hosts + status.hosts_starting, status.nodes, status.clients_online, status.clients) == ("live", 6, 2, 1, 8, 8)
    assert status.methods == {"gated": "at work"} and status.waiting == 1 and status.evaluated == 1 and status.metrics == {
        name: value for name, value in recorded(run_dir, "gated")[0][1].items() if name in ("accuracy", "accuracy_local", "num_clusters")
    }  # fmt: skip
    assert (run_dir / "session.json").stat().st_mode & 0o777 == 0o600 and atwork.token().decode() not in (run_dir / "session.json").read_text()

    # while round 2 is at work
    code, said = cli("status", run_dir, "--json")
    assert code == 0 and json.loads(said) | {"hosts": 0, "hosts_starting": 0} == dataclasses.asdict(status) | {"hosts": 0, "hosts_starting": 0}
    code, said = cli("join", run_dir, "--shards", os.path.relpath(newcomers))
    assert (code, said) == (0, "gated: clients 8-11 join before round 3\n")
    assert live.ask(run_dir, "leave", [2, 0]) == "gated: clients 0, 2 leave before round 3"
    code, said = cli("leave", run_dir, "7-9")
    assert code == 2 and "leave: client 8 joins before round 3 already" in said
    for arguments, says in (
        (("leave", [99]), r"client 99 does not exist; the federation has clients 0 \.\. 11"),
        (("leave", [0]), "client 0 leaves before round 3 already"),
        (("leave", [3, 3]), "client 3 is named twice"),
        (("join", [4]), "client 4 is online already"),
        (("join_shards", newcomers), "same id twice: the clients of these shards are in the federation already"),
        (("join_shards", str(larger)), r"inputs of shape: the new clients have \(1, 9, 9\), the federation has \(1, 8, 8\)"),
        (("join_shards", str(tmp_path / "nowhere")), "nowhere holds no shards"),
    ):
        with pytest.raises(ConfigError, match=says):
            live.ask(run_dir, *arguments)
    pending = ["clients 8-11 join before round 3", "clients 0, 2 leave before round 3"]
    assert live.status(run_dir).pending == pending
    with pytest.raises(RunError, match="run is at work already"):
        resume(run_dir)
    check_forgeries(run_dir)

    # the server dies when some of it has happened and some has not
    gate(3)
    status = until(at_round(run_dir, 4), 300)
    assert (status.clients_online, status.clients, status.pending, status.seconds_left > 0) == (10, 12, [], True)
    assert live.ask(run_dir, "leave", [9]) == "gated: client 9 leaves before round 5"
    (server,) = actors("ServerActor")
    os.kill(server, signal.SIGKILL)
    status = until(lambda: actors("ServerActor") not in ([], [server]) and at_round(run_dir, 4)(), 300)
    assert status.pending == ["client 9 leaves before round 5"] and status.clients == 12
    assert "the server died and was started again" in status.last_fault and status.fault_age >= 0

    code, said = cli("stop", run_dir)
    assert (code, said) == (0, "gated: the run ends after round 4, which is saved\n")
    gate(10**6)
    assert driver.wait(300) == 0 and f"stopped after round 4 of gated, as asked. Every saved round is kept; go on with: cfl-ray resume {run_dir}" in driver.said()
    status = live.status(run_dir)
    assert (status.state, status.round, status.next) == ("stopped", 4, f"cfl-ray resume {run_dir}") and not (run_dir / "session.json").exists()
    resume(run_dir)
    assert (live.status(run_dir).state, live.status(run_dir).methods) == ("finished", {"gated": "finished", "fedavg": "finished"})

    simulate(experiment, tmp_path / "again", replay=run_dir)
    plain = simulate(gated(methods=["fedavg"]), tmp_path / "plain")
    assert recorded(run_dir, "gated") == recorded(tmp_path / "again", "gated") and [number for number, _ in recorded(run_dir, "gated")] == [1, 2, 3, 4, 5, 6]
    assert [metrics["clients_online"] for _, metrics in recorded(run_dir, "gated")] == [8, 8, 10, 10, 9, 9]
    assert recorded(run_dir, "fedavg") == recorded(tmp_path / "plain", "fedavg") and plain  # what was asked of one method is not asked of the next


def check_forgeries(run_dir):
    """A session.json that this user's token did not sign leads nowhere."""
    file, genuine = run_dir / "session.json", (run_dir / "session.json").read_text()
    values = json.loads(genuine)
    for forged in (values | {"address": "127.0.0.1:1"}, values | {"signature": "0" * 64}, {name: value for name, value in values.items() if name != "signature"}, []):
        file.write_text(json.dumps(forged))
        for ask in (lambda: live.status(run_dir), lambda: live.ask(run_dir, "stop")):
            with pytest.raises(ConfigError, match="session.json was not written with your Ray token, so it is not followed to the cluster it names"):
                ask()
    file.write_text(genuine)


def test_a_driver_that_was_killed_leaves_a_run_that_is_not_live(gated, gate, start, cluster, until, figures, tmp_path):
    experiment, run_dir = gated(methods=[{GATED: {"gate": str(gate.file)}}], rounds=3), tmp_path / "run"
    (tmp_path / "small.yaml").write_text(experiment.to_yaml())
    gate(1)
    driver = start("run", tmp_path / "small.yaml", f"runtime.address={cluster}", "--run-dir", run_dir)
    until(at_round(run_dir, 2), 300)
    driver.kill()
    driver.wait()
    status = live.status(run_dir)
    assert (run_dir / "session.json").exists()  # nobody was left to remove it
    assert (status.state, status.round, status.next, status.driver, status.seconds_left) == ("died", 1, f"cfl-ray resume {run_dir}", None, None)
    with pytest.raises(RunError, match="run is not at work, so nobody can stop"):
        live.ask(run_dir, "stop")
    gate(10**6)
    assert figures(resume(run_dir)) == figures(simulate(experiment)) and not (run_dir / "session.json").exists()
    assert live.status(run_dir).state == "finished"


@pytest.mark.timeout(600)
def test_a_run_on_a_ray_of_its_own_is_found_as_well(gated, gate, start, until, tmp_path):
    """One that the driver started, and that listens on loopback alone."""
    run_dir = tmp_path / "run"
    (tmp_path / "small.yaml").write_text(gated(methods=[{GATED: {"gate": str(gate.file)}}]).to_yaml())
    gate(1)
    driver = start("run", tmp_path / "small.yaml", "--run-dir", run_dir)
    until(lambda: run_dir.is_dir() and recorded(run_dir, "gated"), 300)
    assert cli("stop", run_dir) == (0, "gated: the run ends after round 2, which is saved\n")
    gate(10**6)
    assert driver.wait(300) == 0 and "stopped after round 2 of gated, as asked" in driver.said()
