"""Methods that keep state between rounds, on clients or on the server, whose processes are killed in their middle."""

import os
import re
import signal
import subprocess
import sys

import pytest
from small_runs import figures

from cfl_ray import resume, simulate
from cfl_ray.lifecycle.driver import Watcher
from jobs.chaos.same_outcome import outcome

pytestmark = pytest.mark.slow

METHODS = [  # with options that bring every phase into the first rounds
    {"clove": {"num_clusters": 2, "first": "losses", "stable_rounds": 2}},
    "fedamp",
    "fedbabu",
    {"fedbn": {"newcomers": "mean"}},
    {"fedavg": {"norm": "local", "label": "norm_local"}},
    "fedproto",
    "fedpac",
    {"flux": {"cluster_round": 2}},
    {"feroma": {"warmup_rounds": 1}},
    {"scaffold": {"newcomer": "c", "leavers": "restart"}},
    "fedala",
    "moon",
    {"fedrod": {"start": "copy"}},
]
ROUNDS, KILLED_AFTER, DRIVER_KILLED_IN = 5, 3, "feroma"
SCHEDULE = [  # clients 10 and 11 are absent at first; 0 and 3 leave, and come back as newcomers
    {"round": 2, "join": [10], "leave": [0]},
    {"round": 3, "join": [11], "leave": [3]},
    {"round": 4, "join": [0], "change": [{"clients": [4], "relabel": 1}]},
    {"round": 5, "join": [3], "leave": [10]},
]
MODEL = """
from torch import nn

def with_norm(input_shape, num_classes):
    return nn.Sequential(nn.Linear(input_shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))
"""
DRIVER = """
import sys
from cfl_ray import config, run
from cfl_ray.lifecycle.driver import Watcher

class Saying(Watcher):
    def round(self, label, report):
        print(label, report.round, report.notes, flush=True)

run(config.load(sys.argv[1]), sys.argv[2], Saying())
"""


class Killing(Watcher):
    """Kills the server once in every method, after a round, and collects the methods in which another went on."""

    def __init__(self, servers):
        self.servers, self.killed, self.replaced = servers, set(), set()

    def round(self, label, report):
        self.hear(label, report.round, str(report.notes))

    def hear(self, label: str, round: int, notes: str):
        if "the server died and was started again" in notes:
            self.replaced.add(label)
        if round == KILLED_AFTER and label not in self.killed:
            self.killed.add(label)
            for server in self.servers():
                os.kill(server, signal.SIGKILL)


def test_every_method_goes_on_from_its_checkpoint(experiment, cluster, actors, tmp_path):
    """The server is killed in every method, and in one of them the driver, too, whose run is resumed.

    A checkpoint is written in every second round, so that the round after it is played again.
    """
    (tmp_path / "model.py").write_text(MODEL)
    small = experiment(
        methods=METHODS,
        rounds=ROUNDS,
        local={"epochs": 1},
        model={"name": f"{tmp_path / 'model.py'}:with_norm", "options": {}},
        schedule=SCHEDULE,
        cohort={"fraction": 0.75, "availability": 0.9, "dropout": 0.1},
        runtime={"engine": "sequential", "checkpoint_every": 2, "address": cluster, "retries": 20},
    )
    whole, file = simulate(small, tmp_path / "whole"), tmp_path / "small.yaml"
    file.write_text(small.to_yaml())
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(file), str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    killing = Killing(lambda: actors("ServerActor"))
    for line in driver.stdout:
        if (said := re.fullmatch(r"(\w+) (\d) (.*)\n", line)) is None:  # Ray's line on a dead process
            continue
        label, round, notes = said[1], int(said[2]), said[3]
        killing.hear(label, round, notes)
        if (label, round) == (DRIVER_KILLED_IN, KILLED_AFTER):
            driver.kill()
    assert driver.wait() == -signal.SIGKILL
    resumed = resume(tmp_path / "run", killing)
    assert killing.replaced | {DRIVER_KILLED_IN} == {*whole.methods} == {*resumed.methods}
    for label in whole.methods:
        assert figures(resumed[label]) == figures(whole[label]), label
        expected, found = (outcome(tmp_path / folder, label, small) for folder in ("whole", "run"))
        assert found == expected, label
