"""FedAvg of cfl_ray on Ray, one host per core. The start is that of its own seed, so there is no model to compare.

`tests/engine` compares every engine with the plain loop.
"""

import tempfile

from benchmarks.peers.common import Trained, run
from benchmarks.workloads import Workload, samples_of
from cfl_ray import federation_from_arrays
from jobs.benchmarks.rounds import OnRay, experiment_of


def train(work: Workload, rounds: int) -> Trained:
    x, y, clients = samples_of(work)
    federation = federation_from_arrays(x, y, clients, num_classes=work.classes, holdout=0.001)
    with tempfile.TemporaryDirectory() as output:
        measured = OnRay(experiment_of(work, output, rounds + 1, data=federation))
        seconds = [measured.round() for _ in range(rounds)]
        measured.close()
    return Trained(seconds, [])


if __name__ == "__main__":
    run("ours", train, ["torch", "numpy", "ray", "cfl-ray"])
