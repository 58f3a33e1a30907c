"""A frozen Transformer of 100 million parameters with adapters of half a million."""

import json
from pathlib import Path

import pytest

from cfl_ray.run_directory import RunDirectory

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "examples" / "adapters.py"


def experiment(**options):
    return {
        "methods": [{"ifca": {"num_clusters": 2}}, "ditto"],
        "rounds": 2,
        "data": {"source": f"{EXAMPLE}:sentences", "options": {"clients": 16, "samples": 6}},
        "model": {"name": f"{EXAMPLE}:AdaptedTransformer", "options": options},
        "local": {"epochs": 1, "batch_size": 4},
        "cohort": {"fraction": 0.25},
        "evaluation": {"every": 2, "clients": 4, "local": False},
        "runtime": {"engine": "sequential", "hosts": 2, "checkpoint_every": 1},
    }


@pytest.mark.timeout(1100)
def test_processes_hold_what_is_trained(peaks, tmp_path):
    small = peaks(experiment(), tmp_path / "small")
    large = peaks(experiment(width=1024, depth=8, heads=16, rank=6), tmp_path / "large")
    found = f"MB of private memory with a small model {small}, with 100 million frozen parameters {large}"
    print(found)
    assert large["host"] < small["host"] + 300 and large["server"] < 1000, found
    ditto = RunDirectory(tmp_path / "large" / "run").method("ditto").checkpoints
    newest = json.loads(max(ditto.glob("*.json")).read_text())
    assert 1.9e6 < newest["largest_client_state"] < 2.1e6, "the adapters and the head"
    assert sum(file.stat().st_size for file in ditto.glob("*.safetensors")) < 100e6
