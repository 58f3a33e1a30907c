"""The memory of a host does not follow the cohort, for methods with client state and those that defer averaging.

And for FedEM, whose clients train several models in an exchange.
"""

import shutil

import pytest

pytestmark = pytest.mark.slow

# What clients leave on a host until a call ends; each stands for the methods that leave the same:
METHODS = [
    "apfl",  # state as large as the model: also ditto, fedsoft, local, pfedme
    "lg_fedavg",  # state of private columns: also fedper, fedrep
    "fesem",  # results that are averaged later, and features: also autocfl, cfl, cflgp, fedgroup, fesem_cam
    "fedac",  # state and results that are averaged later: also cgpfl, fedas
    "fedem",  # several models
]
# Each client has a model of its own on the server. fedcac uploads all of it, as pfedgraph does; fedccfa has state. A
# call is as large as it may be from 50 clients on.
OWN_MODELS = ["fedcac", "fedccfa"]


def experiment(cohort: int, methods: list):
    """A model of 2 MB, one host, and as many clients as train."""
    return {
        "methods": methods,
        "rounds": 2,
        "data": {"source": "synthetic", "synthetic_samples": 10, "partition": {"clients": cohort}},
        "model": {"name": "mlp", "options": {"hidden": 640}},
        "local": {"epochs": 1},
        "cohort": {"fraction": 1.0},
        "evaluation": {"every": 2, "clients": 4, "local": False},
        "runtime": {"engine": "sequential", "hosts": 1},
    }


@pytest.mark.timeout(1100)
@pytest.mark.parametrize(
    "methods, least, most", [(METHODS, 20, 150), (OWN_MODELS, 60, 140)], ids=["states", "own models"]
)
def test_a_host_holds_what_a_few_clients_leave(peaks, tmp_path, methods, least, most):
    """Without a limit, a call would have a third of the cohort: 100 MB more were left."""
    small = peaks(experiment(least, methods), tmp_path / "small")["host"]
    shutil.rmtree(tmp_path / "small")  # files of gigabytes
    large = peaks(experiment(most, methods), tmp_path / "large")["host"]
    found = f"MB of private memory with a cohort of {least} {small}, of {most} {large}"
    print(found)
    assert large < small + 60, found
