"""Memory follows K, P and the size of a chunk, not the cohort and not N. Peak resident sets of real processes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

RUN = """
import resource, sys
import cfl_ray
clients, cohort = int(sys.argv[1]), int(sys.argv[2])
cfl_ray.simulate(cfl_ray.Experiment(
    rounds=2, methods=[sys.argv[3]], cohort={"clients": cohort}, local={"epochs": 1},
    data={"source": "synthetic", "synthetic_samples": 2, "partition": {"clients": clients}},
    model={"name": "mlp", "options": {"hidden": 1024}},
    evaluation={"every": 2, "clients": 4, "local": False}, runtime={"engine": "sequential"}, output=sys.argv[4]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)
"""
ROW_MB = (784 * 1024 + 1024 + 1024 * 10 + 10) * 4 / 1e6


def peak_mb(clients: int, cohort: int, method: str, folder) -> float:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(clients), str(cohort), method, str(folder)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


@pytest.mark.parametrize("method", ["fedavg", "ifca"])
def test_peak_memory_does_not_follow_the_cohort(method, tmp_path):
    small, large = peak_mb(400, 20, method, tmp_path), peak_mb(400, 400, method, tmp_path)
    found = f"{small:.0f} MB with 20 clients, {large:.0f} MB with 400; a row has {ROW_MB:.1f} MB"
    assert large - small < 25 * ROW_MB, found


def test_peak_memory_grows_by_a_few_bytes_per_client(tmp_path):
    small, large = peak_mb(1_000, 20, "fedavg", tmp_path), peak_mb(1_000_000, 20, "fedavg", tmp_path)
    assert large - small < 100, f"{small:.0f} MB with 1,000 clients, {large:.0f} MB with 1,000,000"
