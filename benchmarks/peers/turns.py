"""Rounds of systems in turn: each in a process of its own and one thread, which is told when to train.

    python -m benchmarks.peers.NAME SYSTEM WORKLOAD --start first.npz --checked model.npz

The process first trains a few clients in a fixed order and writes the model, then it has one round for every line of
standard input and prints its CPU seconds, until standard input ends. Needs NumPy alone, and Linux.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from benchmarks.peers.common import versions
from benchmarks.workloads import OWN_MODULES, Workload

Model = dict[str, np.ndarray]  # by the names and in the layout of PyTorch's module
NextRound = Callable[[], bool]  # waits for the next round; False: there is none
System = Callable[[Workload, Model, NextRound], Model]  # trains rounds from a model, and returns the last model


def run(systems: Mapping[str, System], packages: Sequence[str]) -> None:
    """The main function of a script. packages: distributions whose versions are printed."""
    parser = argparse.ArgumentParser(description="CPU seconds of rounds, one for every line of standard input.")
    parser.add_argument("system", choices=systems)
    parser.add_argument("workload", choices=OWN_MODULES)
    parser.add_argument("--start", type=Path, required=True, help="the first model, as npz")
    parser.add_argument("--checked", type=Path, help="where the model after a round of a few clients is written")
    arguments = parser.parse_args()
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not read as seconds
    with np.load(arguments.start) as saved:
        first = dict(saved)
    train, work = systems[arguments.system], OWN_MODULES[arguments.workload]
    if arguments.checked:
        one_round = iter([True, False])
        np.savez(arguments.checked, **train(work.for_check(), first, lambda: next(one_round)))
    print(json.dumps({"python": platform.python_version()} | versions(packages)), file=told)
    train(work, first, Turns(told))


class Turns:
    """Waits for the next line of standard input; then prints the CPU seconds between a line and the next wait."""

    def __init__(self, told: TextIO) -> None:
        self.told, self.began = told, None

    def __call__(self) -> bool:
        if self.began is not None:
            print(time.process_time() - self.began, file=self.told)
        told = sys.stdin.readline()
        self.began = time.process_time()
        return bool(told)
