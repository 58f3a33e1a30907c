"""The memory of a host does not follow the cohort, for methods with client state and those that defer averaging."""

import pytest
from private_memory import peaks

pytestmark = pytest.mark.slow

METHODS = ["ditto", "local", "fedper", "lg_fedavg", "cgpfl", "fedac", "fesem", "cfl", "fedgroup", "autocfl"]


def experiment(cohort: int):
    """A model of 2 MB, and one host."""
    return {
        "methods": METHODS,
        "rounds": 2,
        "data": {"source": "synthetic", "synthetic_samples": 10, "partition": {"clients": 220}},
        "model": {"name": "mlp", "options": {"hidden": 640}},
        "local": {"epochs": 1},
        "cohort": {"clients": cohort},
        "evaluation": {"every": 2, "clients": 4, "local": False},
        "runtime": {"engine": "sequential", "hosts": 1},
    }


@pytest.mark.timeout(1100)
def test_a_host_holds_the_states_of_a_few_clients(tmp_path):
    small, large = peaks(experiment(20), tmp_path / "small"), peaks(experiment(220), tmp_path / "large")
    found = f"MB of private memory with a cohort of 20 {small}, of 220 {large}"
    print(found)
    assert large["host"] < small["host"] + 60, found
