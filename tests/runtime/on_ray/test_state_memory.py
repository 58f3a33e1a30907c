"""The memory of a host does not follow the cohort, for methods with client state and those that defer averaging.

And for FedEM, whose clients train several models in an exchange.
"""

import shutil

import pytest
from private_memory import peaks

pytestmark = pytest.mark.slow

METHODS = [
    *("apfl", "autocfl", "cfl", "cflgp", "cgpfl", "ditto", "fedac", "fedas", "fedem", "fedgroup", "fedper"),
    *("fedrep", "fedsoft", "fesem", "fesem_cam", "fl_hc", "lg_fedavg", "local", "pfedme"),
]
# each client has a model of its own on the server and uploads all of it: a call is as large as it may be from 50 on
OWN_MODELS = ["fedcac", "fedccfa", "pfedgraph"]


def experiment(cohort: int, methods: list[str]):
    """A model of 2 MB, and one host."""
    return {
        "methods": methods,
        "rounds": 2,
        "data": {"source": "synthetic", "synthetic_samples": 10, "partition": {"clients": 220}},
        "model": {"name": "mlp", "options": {"hidden": 640}},
        "local": {"epochs": 1},
        "cohort": {"clients": cohort},
        "evaluation": {"every": 2, "clients": 4, "local": False},
        "runtime": {"engine": "sequential", "hosts": 1},
    }


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("methods, least", [(METHODS, 20), (OWN_MODELS, 60)], ids=["states", "own models"])
def test_a_host_holds_what_a_few_clients_leave(tmp_path, methods, least):
    small = peaks(experiment(least, methods), tmp_path / "small")
    shutil.rmtree(tmp_path / "small")  # files of gigabytes
    large = peaks(experiment(220, methods), tmp_path / "large")
    found = f"MB of private memory with a cohort of {least} {small}, of 220 {large}"
    print(found)
    assert large["host"] < small["host"] + 60, found
