"""Nodes that join the cluster are used from the next exchange on, also in the place of lost ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cfl_ray import simulate

pytestmark = pytest.mark.slow

DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster  # real processes: a head, and raylets with an object store of their own
from cfl_ray import Experiment, run
from cfl_ray.plugins.loading import load_plugin
from cfl_ray.lifecycle.driver import Watcher

values, logged, log, result = json.loads(sys.argv[1])
federation = load_plugin(logged, "federation")(12, log)
soon = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
head = {"num_cpus": 1, "include_dashboard": False, "_system_config": soon}
cluster = Cluster(initialize_head=True, connect=True, head_node_args=head)
added = []

def kill(node):
    raylet = node.all_processes["raylet"][0].process.pid
    below = [int(pid) for pid in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()]
    for pid in (raylet, *below):
        os.kill(pid, signal.SIGKILL)

def add():
    added.append(cluster.add_node(num_cpus=1))

def readers():  # number of processes that have read data since the last step
    return len({line.split()[0] for line in Path(log).read_text().splitlines()[watcher.read:]})

class Following(Watcher):
    facts, notes, steps, read = {}, [], [], 0
    added = lambda self: [line for line in self.notes if "was added" in line]
    lost = lambda self: [line for line in self.notes if "died after 0 restarts" in line]

    def started(self, setup, run_dir, facts):
        self.facts.update(facts)
        self.plan = [  # (condition, step), one after another
            (lambda: True, add),
            (lambda: len(self.added()) == 1 and readers() == 2, lambda: None),
            (lambda: readers() == 2, lambda: kill(added[-1])),
            (lambda: self.lost(), add),
            (lambda: len(self.added()) == 2 and readers() == 2, add),
            (lambda: readers() == 3, lambda: None),
        ]

    def round(self, label, report):
        self.notes.extend(report.notes)
        if self.plan:
            time.sleep(0.5)
            condition, step = self.plan[0]
            if condition():
                self.steps.append(report.round)
                self.plan.pop(0)
                step()
                self.read = len(Path(log).read_text().splitlines())

watcher = Following()
results = run(Experiment(**values, data=federation), watcher=watcher)
figures = [(r.round, {k: v for k, v in r.metrics.items() if k != "round_seconds"}) for r in results["fedavg"].records]
found = {"figures": figures, "facts": watcher.facts, "notes": watcher.notes}
Path(result).write_text(json.dumps(found | {"steps": watcher.steps, "left": len(watcher.plan)}))
ray.shutdown()  # before the cluster goes
"""


def test_nodes_that_come_and_go(experiment, logged, figures, tmp_path):
    """A node joins, is killed, and others join: as many hosts as there is room for: one, two, one, two and three."""
    growing = experiment(
        data=logged(),
        methods=["fedavg"],
        rounds=300,
        evaluation={"every": 100},
        local={"epochs": 1},
        runtime={"hosts": None, "retries": 0, "engine": "sequential", "checkpoint_every": 300},
    )
    plugin = f"{Path(__file__).parents[1] / 'logged.py'}:LoggedFederation"
    values = {key: value for key, value in growing.to_dict().items() if key != "data"}
    given = json.dumps([values, plugin, logged.log, str(tmp_path / "found.json")])
    done = subprocess.run([sys.executable, "-c", DRIVER, given], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["left"] == 0, found
    added = [line for line in found["notes"] if "was added" in line]
    assert added == ["host 1 was added: 2 on 2 nodes"] * 2 + ["host 2 was added: 3 on 3 nodes"], added
    assert found["facts"]["hosts"] == "1 on 1 node"
    assert [(number, metrics) for number, metrics in found["figures"]] == figures(simulate(growing))["fedavg"]
