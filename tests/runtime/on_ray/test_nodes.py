"""Nodes that join the cluster are used from the next exchange on; one that is killed with everything on it costs no
figure, and others take its place.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cfl_ray import simulate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CLUSTER = """
import json, os, signal, sys, time
from pathlib import Path
import ray
from cfl_ray import Experiment, config, run
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.plugins.loading import load_plugin
from jobs.chaos.processes import QUICK_HEALTH_CHECKS
from jobs.services.ray_cluster import LocalCluster

result, *given = json.loads(sys.argv[1])
head = {"num_cpus": 1, "include_dashboard": False, "_system_config": QUICK_HEALTH_CHECKS}
cluster = LocalCluster(initialize_head=True, connect=True, head_node_args=head)
added = []

def add():
    added.append(cluster.add_node(num_cpus=1))

def kill(node):
    raylet = node.all_processes["raylet"][0].process.pid
    below = [int(pid) for pid in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()]
    for pid in (raylet, *below):
        os.kill(pid, signal.SIGKILL)

class Following(Watcher):
    run_info, notes, steps = {}, [], []

    def started(self, setup, run_dir, run_info):
        self.run_info.update(run_info)

    def round(self, label, report):
        self.notes.extend(report.notes)
        self.step(report.round)
"""
END = """
(method,) = results.methods.values()
figures = [(r.round, {k: v for k, v in r.metrics.items() if k != "round_seconds"}) for r in method.records]
found = {"figures": figures, "run_info": watcher.run_info, "notes": watcher.notes, "steps": watcher.steps}
Path(result).write_text(json.dumps(found))
ray.shutdown()  # before the cluster goes
"""

KILLED = """
class Killing(Following):
    def step(self, round):
        if round == 2 and not self.steps:
            self.steps.append(round)
            kill(added[0])

add()
watcher = Killing()
results = run(config.load(given[0]), given[1], watcher)
"""

GROWING = """
values, logged, log = given
federation = load_plugin(logged, "federation")(12, log)

def readers():  # number of processes that have read data since the last step
    return len({line.split()[0] for line in Path(log).read_text().splitlines()[watcher.read:]})

class Growing(Following):
    read = 0
    added = lambda self: [line for line in self.notes if "was added" in line]
    lost = lambda self: [line for line in self.notes if "died after 0 restarts" in line]

    def __init__(self):
        self.plan = [  # (condition, step), one after another
            (lambda: True, add),
            (lambda: len(self.added()) == 1 and readers() == 2, lambda: None),
            (lambda: readers() == 2, lambda: kill(added[-1])),
            (lambda: self.lost(), add),
            (lambda: len(self.added()) == 2 and readers() == 2, add),
            (lambda: readers() == 3, lambda: None),
        ]

    def step(self, round):
        if self.plan:
            time.sleep(0.5)
            condition, step = self.plan[0]
            if condition():
                self.steps.append(round)
                self.plan.pop(0)
                step()
                self.read = len(Path(log).read_text().splitlines())

watcher = Growing()
results = run(Experiment(**values, data=federation), watcher=watcher)
"""


@pytest.fixture
def driven(tmp_path):
    """Returns a function: driver, what it is given -> what it found on a cluster of its own."""

    def drive(driver, *given):
        result = tmp_path / "found.json"
        command = [sys.executable, "-c", CLUSTER + driver + END, json.dumps([str(result), *given])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(result.read_text())
        return found | {"figures": [(number, metrics) for number, metrics in found["figures"]]}

    return drive


def test_node_killed_with_client_states(experiment, figures, driven, tmp_path):
    """Personal models of 300 kB are in the object store of a node: rounds after the checkpoint are done again."""
    large = experiment(
        model={"options": {"hidden": 4096}},
        local={"epochs": 1},
        cohort={"fraction": 1.0},
        rounds=5,
        runtime={"checkpoint_every": 4},
    )
    (tmp_path / "large.yaml").write_text(large.to_yaml())
    found = driven(KILLED, str(tmp_path / "large.yaml"), str(tmp_path / "run"))
    assert found["run_info"]["hosts"] == "2 on 2 nodes" and found["steps"] == [2]
    assert any("client states were lost with a node" in line for line in found["notes"]), found["notes"]
    assert found["figures"] == figures(simulate(large))["ditto"]
    lines = (tmp_path / "run/ditto/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4, 5]


def test_nodes_that_come_and_go(experiment, logged, figures, driven):
    """A node joins, is killed, and others join: as many hosts as there is room for: one, two, one, two and three."""
    growing = experiment(
        data=logged(),
        methods=["fedavg"],
        rounds=300,
        evaluation={"every": 100},
        local={"epochs": 1},
        runtime={"hosts": None, "retries": 0, "engine": "sequential", "checkpoint_every": 300},
    )
    values = {key: value for key, value in growing.to_dict().items() if key != "data"}
    found = driven(GROWING, values, f"{Path(__file__).parents[1] / 'logged.py'}:LoggedFederation", logged.log)
    assert len(found["steps"]) == 6, found
    added = [line for line in found["notes"] if "was added" in line]
    assert added == ["host 1 was added: 2 on 2 nodes"] * 2 + ["host 2 was added: 3 on 3 nodes"], added
    assert found["run_info"]["hosts"] == "1 on 1 node"
    assert found["figures"] == figures(simulate(growing))["fedavg"]
