"""FedAvg of pfl-research for turns: `SimulatedBackend` in one process, as in `benchmarks.peers.pfl_research`."""

import os

os.environ["PFL_PYTORCH_DEVICE"] = "cpu"

from benchmarks.peers.pfl_research import federated_averaging
from benchmarks.peers.turns import Model, NextRound, run
from benchmarks.workloads import Workload


def train(work: Workload, first: Model, next_round: NextRound) -> Model:
    return dict(zip(first, federated_averaging(work, list(first.values()), next_round), strict=True))


if __name__ == "__main__":
    run({"pfl_research": train}, ["pfl", "torch", "numpy"])
