"""The command line of a peer: trains workloads, and prints one JSON line for each.

    python -m benchmarks.peers.NAME W1 W2 W3 --rounds 3

A peer is a function (workload, rounds) -> `Trained`. It trains all clients in every round, on one process of one thread
per core, without evaluation. Needs NumPy alone, and Linux.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from benchmarks.memory import PeakMemory
from benchmarks.workloads import WORKLOADS, Workload

CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Trained:
    """Seconds of every round, the first one being the warm-up, and the global model after the last."""

    seconds: list[float]
    model: list[np.ndarray]  # in the order and layout of PyTorch


Peer = Callable[[Workload, int], Trained]


def run(name: str, train: Peer, packages: Sequence[str]) -> None:
    """The main function of a peer. packages: distributions whose versions are printed."""
    parser = argparse.ArgumentParser(
        description=f"Seconds per round and memory of {name}, as one JSON line a workload."
    )
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=f"some of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds after one warm-up (default: 3)")
    parser.add_argument("--clients", type=int, help="at most this number of clients")
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="one round of a few clients; writes the model as npz"
    )
    arguments = parser.parse_args()
    for workload in arguments.workloads:
        work = WORKLOADS[workload].with_clients(arguments.clients)
        if arguments.check:
            np.savez(arguments.check, *train(work.for_check(), 1).model)
            continue
        with PeakMemory() as memory:
            trained = train(work, 1 + arguments.rounds)
        line = {
            "peer": name,
            "workload": workload,
            "clients": work.clients,
            "seconds": [round(value, 4) for value in trained.seconds[1:]],
            "warm_up": round(trained.seconds[0], 4),
            "peak_mb": round(memory.peak / 1e6),
            "versions": {"python": platform.python_version()} | versions(packages),
        }
        print(json.dumps(line), flush=True)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the installed ones among these distributions."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def timed_rounds(one_round: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each of `rounds` calls."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        one_round()
        seconds.append(time.perf_counter() - began)
    return seconds
