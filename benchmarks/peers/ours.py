"""FedAvg of cfl_ray on Ray, one host per core. The start is that of its own seed, so there is no model to compare.

`tests/engine` compares every engine with the plain loop.
"""

import tempfile

from benchmarks.peers.common import Trained, run
from benchmarks.workloads import Workload
from jobs.benchmarks.rounds import OnRay, experiment_of


def train(work: Workload, rounds: int) -> Trained:
    with tempfile.TemporaryDirectory() as output:
        measured = OnRay(experiment_of(work, output, rounds + 1))
        seconds = [measured.round() for _ in range(rounds)]
        measured.close()
    return Trained(seconds, [])


if __name__ == "__main__":
    run("ours", train, ["torch", "numpy", "ray", "cfl-ray"])
