"""A server that Ray's memory monitor kills is started again, with the same figures."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
ALLOWED = 6e9  # bytes that the machine may use beside what it uses when the test begins

METHOD = """
import time
from dataclasses import dataclass
from pathlib import Path

from cfl_ray.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Greedy(FedAvg, name="greedy"):
    def round(self, state, clients, draws):
        first = Path(__file__).with_name("first")
        if clients.round == 2 and first.exists():
            first.unlink()
            kept = []
            for _ in range(50):
                kept.append(bytes(200_000_000).replace(b"\\0", b"x"))
                time.sleep(0.1)
            raise AssertionError("the memory monitor has not acted")
        return super().round(state, clients, draws)
"""

PROGRAM = """
import sys
from pathlib import Path

import ray

from cfl_ray import run, simulate
from small_runs import Notes, small_experiment

folder, notes = Path(sys.argv[1]), Notes()
ray.init(address="local", num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
greedy = small_experiment(folder, methods=[f"{folder / 'greedy.py'}:Greedy"], runtime={"hosts": 2, "retries": 1000})
disturbed = run(greedy, folder / "run", notes)["greedy"]
assert not (folder / "first").exists()
undisturbed = simulate(greedy)["greedy"]
kept = [
    [{name: value for name, value in record.metrics.items() if not name.endswith("seconds")} for record in run.records]
    for run in (disturbed, undisturbed)
]
assert kept[0] == kept[1] and len(kept[0]) == 4
print(*notes.lines, sep="\\n")
"""


@pytest.mark.slow
def test_a_server_without_memory_is_started_again(tmp_path):
    memory = psutil.virtual_memory()
    if memory.available < 1.5 * ALLOWED:
        pytest.skip(f"{memory.available / 1e9:.0f} GB of memory are free, {1.5 * ALLOWED / 1e9:.0f} are needed")
    (tmp_path / "greedy.py").write_text(METHOD)
    (tmp_path / "first").touch()
    threshold = (memory.total - memory.available + ALLOWED) / memory.total
    monitor = {"RAY_memory_usage_threshold": str(threshold), "RAY_memory_monitor_refresh_ms": "100"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | monitor | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the server died and was started again" in done.stdout and "running low on memory" in done.stdout
