"""A node is killed with everything on it: the run continues where there is room, with the same figures."""

import json
import subprocess
import sys

import pytest

from cfl_ray import simulate

pytestmark = pytest.mark.slow

DRIVER = """
import json, os, signal, sys
from pathlib import Path
import ray
from ray.cluster_utils import Cluster  # real processes: a head, and a raylet with an object store of its own
from cfl_ray import config, run
from cfl_ray.lifecycle.driver import Watcher

soon = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
head = {"num_cpus": 1, "include_dashboard": False, "_system_config": soon}
cluster = Cluster(initialize_head=True, connect=True, head_node_args=head)
second = cluster.add_node(num_cpus=1)

class Killing(Watcher):
    facts, notes = {}, []

    def started(self, setup, run_dir, facts):
        self.facts.update(facts)

    def round(self, label, report):
        self.notes.extend(report.notes)
        if report.round == 2 and not self.facts.get("killed"):
            self.facts["killed"] = True
            raylet = second.all_processes["raylet"][0].process.pid
            below = [int(pid) for pid in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()]
            for pid in (raylet, *below):
                os.kill(pid, signal.SIGKILL)

watcher = Killing()
results = run(config.load(sys.argv[1]), sys.argv[2], watcher)
figures = [(r.round, {k: v for k, v in r.metrics.items() if k != "round_seconds"}) for r in results["ditto"].records]
Path(sys.argv[3]).write_text(json.dumps({"figures": figures, "facts": watcher.facts, "notes": watcher.notes}))
ray.shutdown()  # before the cluster goes
"""


def test_node_killed_with_client_states(experiment, figures, tmp_path):
    """Personal models of 300 kB are in the object store of a node: rounds after the checkpoint are done again."""
    large = experiment(
        model={"options": {"hidden": 4096}},
        local={"epochs": 1},
        cohort={"fraction": 1.0},
        rounds=5,
        runtime={"checkpoint_every": 4},
    )
    (tmp_path / "large.yaml").write_text(large.to_yaml())
    files = [str(tmp_path / name) for name in ("large.yaml", "run", "found.json")]
    done = subprocess.run([sys.executable, "-c", DRIVER, *files], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["facts"]["hosts"] == "2 on 2 nodes" and found["facts"]["killed"]
    assert any("client states were lost with a node" in line for line in found["notes"]), found["notes"]
    assert [(number, metrics) for number, metrics in found["figures"]] == figures(simulate(large))["ditto"]
    lines = (tmp_path / "run/ditto/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4, 5]
