"""Processes that are killed in the middle of their work change no figure, and no round is recorded twice."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cfl_ray import resume, run, simulate
from cfl_ray.cli import live_client
from cfl_ray.errors import RunError


@pytest.fixture
def slow(experiment, logged):
    """Makes an experiment with rounds long enough to be interrupted, on a federation that logs who reads what."""

    def make(epochs=30, **changes):
        return experiment(data=logged(), local={"epochs": epochs, "batch_size": 8, "momentum": 0.9}, **changes)

    return make


@pytest.fixture(scope="module")
def undisturbed():
    """Figures of experiments of this module without faults, by name."""
    return {}


@pytest.fixture
def expected(slow, figures, logged, undisturbed):
    """The figures of the slow experiment without faults."""
    if "slow" not in undisturbed:
        undisturbed["slow"] = figures(simulate(slow()))
        open(logged.log, "w").close()
    return undisturbed["slow"]


def end_all(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def recorded(directory, label="ditto"):
    """Rounds in the log of a run, in the order in which they were written."""
    return [json.loads(line)["round"] for line in (directory / label / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_hosts_and_the_server_killed_in_mid_round(
    slow, expected, figures, cluster, actors, notes, logged, tmp_path, meanwhile, until
):
    """A host in round 2, two hosts at once in round 3, and the server in round 4."""
    before, killed = {}, []  # lines of the log after each round

    def readers(round):
        """Hosts that have read data since `round` ended."""
        return sorted({pid for pid, _ in logged.read()[before[round] :]} - {*killed}) if round in before else []

    def kill():
        for round, count in ((1, 1), (2, 2)):
            until(lambda: len(readers(round)) >= count)
            for pid in readers(round)[:count]:
                logged.end(pid)
                killed.append(pid)
        until(lambda: 3 in before and len(logged.read()) >= before[3] + 4)
        end_all(actors("ServerActor"))

    watcher = notes(lambda round: before.setdefault(round, len(logged.read())))
    meanwhile(kill)
    assert figures(run(slow(runtime={"hosts": 3}), tmp_path / "run", watcher)) == expected
    assert len(set(killed)) == 3 and len([line for line in watcher.lines if "its work is done again" in line]) == 3
    assert len([line for line in watcher.lines if "the server died and was started again" in line]) == 1
    assert before[3] - before[1] > 2 * before[1], "rounds 2 and 3 read more than twice the first: work was done again"
    assert recorded(tmp_path / "run") == [1, 2, 3, 4]


@pytest.mark.slow
def test_host_that_dies_at_every_start_is_given_up(
    slow, expected, figures, cluster, actors, notes, logged, meanwhile, until
):
    held, ended = Path(f"{logged.log}.held"), []
    held.touch()  # the run outlasts two restarts

    def kill():  # one of the two hosts, and each that replaces it as soon as it is there
        stays, first = until(lambda: len(pids := {pid for pid, _ in logged.read()}) == 2 and sorted(pids))
        ended.append(first)
        logged.end(first)
        for _ in range(2):
            ended.append(until(lambda: next((pid for pid in actors("ClientHost") if pid not in (stays, *ended)), None)))
            logged.end(ended[-1])
        held.unlink()

    watcher = notes()
    meanwhile(kill)
    assert figures(run(slow(runtime={"retries": 2}), watcher=watcher)) == expected
    given_up = [line for line in watcher.lines if "died after 2 restarts" in line]
    assert len(ended) == 3 and len(given_up) == 1 and "going on with 1 host" in given_up[0]
    assert len({pid for pid, _ in logged.read()} - set(ended)) == 1, "the other host did the rest, and none was added"


@pytest.mark.slow
def test_a_run_that_ends_with_its_last_host_or_its_server_can_be_resumed(
    experiment, figures, cluster, actors, notes, tmp_path
):
    small, run_dir = experiment(runtime={"hosts": 1, "retries": 1}, rounds=5), tmp_path / "run"
    with pytest.raises(RunError, match=r"the server died after round \d, .*go on with: cfl-ray resume .*run"):
        run(small, run_dir, notes(lambda number: end_all(actors("ServerActor"))))
    killed = []

    def kill_all(number):
        if number >= 3:
            killed.extend(actors("ClientHost"))
            end_all(actors("ClientHost"))

    with pytest.raises(RunError) as error:
        resume(run_dir, watcher=notes(kill_all))
    text = str(error.value)
    assert "last client host died after 1 restarts" in text and f"cfl-ray resume {shlex.quote(str(run_dir))}" in text
    assert len(killed) == 2 and json.loads((run_dir / "ditto/end.json").read_text())["status"] == "FAILED"
    assert figures(resume(run_dir)) == figures(simulate(small))
    assert recorded(run_dir) == [1, 2, 3, 4, 5]


DRIVER = """
import sys
from cfl_ray import config, run
from cfl_ray.lifecycle.driver import Watcher

class Saying(Watcher):
    def round(self, label, report):
        print("round", report.round, flush=True)

run(config.load(sys.argv[1]), sys.argv[2], Saying())
"""


@pytest.mark.slow
def test_driver_killed_and_resumed(experiment, figures, cluster, tmp_path):
    tracking = {"enabled": True, "uri": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    small = experiment(rounds=6, tracking=tracking, runtime={"address": cluster})
    (tmp_path / "small.yaml").write_text(small.to_yaml())
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "small.yaml"), str(tmp_path / "run")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in driver.stdout:
        if line.startswith("round 3"):
            driver.kill()
    assert driver.wait() == -signal.SIGKILL
    run_dir = tmp_path / "run"
    assert not (run_dir / "ditto/end.json").exists()
    assert (run_dir / "session.json").exists()  # the driver could not remove it
    status = live_client.status(run_dir)
    assert (status.state, status.next) == ("died", f"cfl-ray resume {shlex.quote(str(run_dir))}")
    assert status.driver is None and status.seconds_left is None and 3 <= status.round < 6
    with pytest.raises(RunError, match="run is not live, so it takes no request to stop"):
        live_client.ask(run_dir, "stop")
    assert figures(resume(run_dir)) == figures(simulate(small))
    assert live_client.status(run_dir).state == "finished" and not (run_dir / "session.json").exists()
    assert recorded(run_dir) == [1, 2, 3, 4, 5, 6]
    assert steps(f"sqlite:///{tmp_path / 'mlflow.db'}") == [1, 2, 3, 4, 5, 6]


def steps(uri):
    """Steps of every entry of the accuracy in MLflow's one run of the method."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()], "tags.method = 'ditto'")
    assert len(runs) == 1 and runs[0].info.status == "FINISHED"
    return sorted(entry.step for entry in client.get_metric_history(runs[0].info.run_id, "accuracy"))
