"""Promise 3: processes that are killed in the middle of their work change no figure, and nothing is recorded twice."""

import json
import os
import signal
import subprocess
import sys

import pytest

from cfl_ray import resume, run, simulate
from cfl_ray.core.errors import RunError


@pytest.fixture
def slow(experiment, logged):
    """Rounds long enough to be interrupted, on a federation that says who works on what."""

    def make(epochs=30, **changes):
        return experiment(data=logged(), local={"epochs": epochs, "batch_size": 8, "momentum": 0.9}, **changes)

    return make


@pytest.fixture
def expected(slow, figures, logged):
    """What the slow experiment comes to when nothing happens."""
    found = figures(simulate(slow()))
    open(logged.log, "w").close()
    return found


def end_all(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def recorded(directory, label="ditto"):
    """Rounds in the log of a run, in the order in which they were written."""
    return [json.loads(line)["round"] for line in (directory / label / "metrics.jsonl").read_text().splitlines()]


def test_hosts_killed_in_mid_round(slow, expected, figures, cluster, notes, logged, meanwhile, until):
    """One in round 2, and two at once in round 3."""
    before, killed = {}, []

    def at_work(number, count):
        """Hosts that have read data since round `number` ended, once there are `count` of them."""
        return until(lambda: number in before and len(pids := {pid for pid, _ in logged.read()[before[number] :]}) >= count and sorted(pids)[:count])

    def kill():
        for number, count in ((1, 1), (2, 2)):
            for pid in at_work(number, count):
                logged.end(pid)
                killed.append(pid)

    watcher = notes(lambda number: before.setdefault(number, len(logged.read())))
    meanwhile(kill)
    assert figures(run(slow(runtime={"hosts": 3}), watcher=watcher)) == expected
    assert len(set(killed)) == 3 and len([line for line in watcher.lines if "its work is done again" in line]) == 3
    assert before[3] - before[1] > 2 * before[1]  # rounds 2 and 3 read more than two rounds like the first: work was done again


def test_host_that_dies_on_each_return_is_given_up(slow, figures, cluster, actors, notes, logged, meanwhile, until):
    long, ended = 200, []  # epochs: the run must outlast two returns
    expected = figures(simulate(slow(long)))
    open(logged.log, "w").close()

    def kill():  # one of the two hosts at work, and whatever comes in its place as soon as it is there
        stays, first = until(lambda: len(pids := {pid for pid, _ in logged.read()}) == 2 and sorted(pids))
        ended.append(first)
        logged.end(first)
        for _ in range(2):
            ended.append(until(lambda: next((pid for pid in actors("ClientHost") if pid not in (stays, *ended)), None)))
            logged.end(ended[-1])

    watcher = notes()
    meanwhile(kill)
    assert figures(run(slow(long, runtime={"retries": 2}), watcher=watcher)) == expected
    assert len(ended) == 3 and [line for line in watcher.lines if "died after 2 restarts" in line and "going on with 1 hosts" in line]
    assert len({pid for pid, _ in logged.read()} - set(ended)) == 1  # the other one did the rest, and no fourth came


def test_last_host_lost_ends_the_run_which_can_be_resumed(experiment, figures, cluster, actors, notes, tmp_path, meanwhile, until):
    small = experiment(runtime={"hosts": 1, "retries": 1}, rounds=5)
    killed = []

    def kill_all(number):
        if number >= 3:
            killed.extend(actors("ClientHost"))
            end_all(actors("ClientHost"))

    with pytest.raises(RunError) as error:
        run(small, tmp_path / "run", notes(kill_all))
    assert "last client host died after 1 restarts" in str(error.value) and f"cfl-ray resume {tmp_path / 'run'}" in str(error.value)
    assert len(killed) == 2 and json.loads((tmp_path / "run/ditto/end.json").read_text())["status"] == "FAILED"
    assert figures(resume(tmp_path / "run")) == figures(simulate(small))
    assert recorded(tmp_path / "run") == [1, 2, 3, 4, 5]


def test_server_killed_between_rounds_and_in_mid_round(slow, expected, figures, cluster, actors, notes, logged, tmp_path, meanwhile, until):
    before, killed = [], []

    def after(number):
        if number == 1 and not killed:  # the new server reports round 1 again
            killed.extend(actors("ServerActor"))
            end_all(killed)
        if number == 3 and not before:
            before.append(len(logged.read()))

    def kill():
        until(lambda: before and len(logged.read()) >= before[0] + 4)
        end_all(actors("ServerActor"))

    watcher = notes(after)
    meanwhile(kill)
    assert figures(run(slow(), tmp_path / "run", watcher)) == expected
    assert len([line for line in watcher.lines if "the server died and was started again" in line]) == 2
    assert recorded(tmp_path / "run") == [1, 2, 3, 4]


def test_server_that_dies_too_often_ends_the_run_which_can_be_resumed(experiment, figures, cluster, actors, notes, tmp_path):
    small = experiment(runtime={"retries": 1})
    watcher = notes(lambda number: end_all(actors("ServerActor")))
    with pytest.raises(RunError, match=r"the server died after round \d .*go on with: cfl-ray resume .*run"):
        run(small, tmp_path / "run", watcher)
    assert figures(resume(tmp_path / "run")) == figures(simulate(small))
    assert recorded(tmp_path / "run") == [1, 2, 3, 4]


DRIVER = """
import sys
from cfl_ray import config, run
from cfl_ray.runtime.driver import Watcher

class Saying(Watcher):
    def round(self, label, report):
        print("round", report.round, flush=True)

run(config.load(sys.argv[1]), sys.argv[2], Saying())
"""


def test_driver_killed_and_resumed(experiment, figures, cluster, tmp_path):
    small = experiment(rounds=6, tracking={"enabled": True, "uri": f"sqlite:///{tmp_path / 'mlflow.db'}"}, runtime={"address": cluster})
    (tmp_path / "small.yaml").write_text(small.to_yaml())
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "small.yaml"), str(tmp_path / "run")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in driver.stdout:
        if line.startswith("round 3"):
            driver.kill()
    assert driver.wait() == -signal.SIGKILL
    assert not (tmp_path / "run/ditto/end.json").exists()
    assert figures(resume(tmp_path / "run")) == figures(simulate(small))
    assert recorded(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert steps(f"sqlite:///{tmp_path / 'mlflow.db'}") == [1, 2, 3, 4, 5, 6]


def steps(uri):
    """Steps of every entry of the accuracy in MLflow's one run of the method."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()], "tags.method = 'ditto'")
    assert len(runs) == 1 and runs[0].info.status == "FINISHED"
    return sorted(entry.step for entry in client.get_metric_history(runs[0].info.run_id, "accuracy"))
