"""Asynchronous rounds of a federation as large as FEMNIST's, killed with clients in flight."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from small_runs import metrics_of

from cfl_ray import load, load_run, resume
from cfl_ray.checkpoint.store import CheckpointStore

RUN = """
import os, signal, sys
from cfl_ray import Experiment, simulate
from cfl_ray.lifecycle.driver import Watcher

class Killed(Watcher):
    def round(self, label, report):
        if len(sys.argv) > 2 and report.round == 25:
            os.kill(os.getpid(), signal.SIGKILL)

simulate(Experiment(
    rounds=40,
    methods=[{"ifca": {"num_clusters": 3}}],
    model={"options": {"hidden": 8}},
    data={"source": "synthetic", "synthetic_shape": [6], "synthetic_samples": 10, "partition": {"clients": 3597}},
    cohort={"clients": 200},
    clock={"kind": "lognormal", "sigma": 1.2, "jitter": 0.2},
    asynchronous={"buffer": 20, "staleness": {"kind": "polynomial"}},
    evaluation={"every": 40, "clients": 300, "local": False},
    runtime={"engine": "sequential", "checkpoint_every": 10},
    tracking={"enabled": False},
    output=sys.argv[1],
), sys.argv[1] + "/run", Killed())
"""


def run(folder, *arguments) -> int:
    folder.mkdir()
    return subprocess.run([sys.executable, "-c", RUN, str(folder), *arguments], timeout=300).returncode


def tensors(folder):
    config_hash = load(folder / "run" / "config.yaml").config_hash
    store = CheckpointStore(folder / "run" / "ifca", config_hash)
    return {name: value.numpy() for name, value in store.load().tensors.items()}


@pytest.mark.slow
def test_a_large_federation_is_killed_and_ends_with_the_same_bits(tmp_path):
    """Models, clusters, clients in flight with their versions, and all metrics."""
    assert run(tmp_path / "whole") == 0
    assert run(tmp_path / "killed", "kill") == -signal.SIGKILL
    resume(tmp_path / "killed" / "run", on_ray=False)
    whole, killed = (metrics_of(load_run(tmp_path / name / "run")["ifca"]) for name in ("whole", "killed"))
    assert len(whole) == 40 and max(metrics["staleness"] for metrics in whole) > 2
    assert killed == whole
    found, expected = tensors(tmp_path / "killed"), tensors(tmp_path / "whole")
    assert found.keys() == expected.keys() and len(found["server.time.client_F"]) >= 150
    for name, value in found.items():
        assert np.array_equal(value, expected[name], equal_nan=value.dtype.kind == "f"), name
