"""Seconds per round of cfl_ray and of a bare PyTorch loop, interleaved in one run; peak memory; many hosts and nodes.

    python -m jobs.benchmarks                   speed: the ratio on W1, W2 and W3 (about five minutes on two cores)
    python -m jobs.benchmarks speed W2 --rounds 5
    python -m jobs.benchmarks memory            peak memory of server and hosts as the cohort and N grow
    python -m jobs.benchmarks states            rounds of 5,000 clients that keep 1 MB each, and the resumed run
    python -m jobs.benchmarks states --clients 20000 --cohort 1000
    python -m jobs.benchmarks scale             server time and traffic of a round at up to 1,000 hosts, simulated
    python -m jobs.benchmarks nodes W2          one node against two, and the speedup of up to eight, simulated
    python -m jobs.benchmarks modules           CPU seconds of own modules, by engine and beside other systems
    python -m jobs.benchmarks engines           the engine that `auto` chooses beside measured times, by network
    python -m jobs.benchmarks mixtures          CPU seconds of FedEM with three models against FedAvg
    python -m jobs.benchmarks methods           CPU seconds of every method beside the passes that it makes
    python -m jobs.benchmarks clustering        time and memory of clustering thousands of clients on the server

The workloads are in benchmarks/workloads.py, the bare loop in benchmarks/peers/bare.py; benchmarks/compare.py measures
other systems as well. The time of cfl_ray is that of a FedAvg round on Ray, without its evaluation.
"""

import argparse
from importlib import import_module
from pathlib import Path

from benchmarks.workloads import WORKLOADS
from cfl_ray.methods import REGISTRY

# The module and the options of each. Modules are imported when they run: processes whose memory is measured import this
# file too.
BENCHMARKS = {
    "speed": ("rounds", ["workloads", "rounds"]),
    "memory": ("rounds", ["rounds"]),
    "states": ("rounds", ["rounds", "clients", "cohort"]),
    "scale": ("scale", []),
    "nodes": ("nodes", ["workloads", "rounds"]),
    "modules": ("modules", ["rounds", "venvs", "output"]),
    "engines": ("engines", []),
    "mixtures": ("mixtures", ["rounds"]),
    "methods": ("methods", ["rounds", "output", "methods"]),
    "clustering": ("clustering", []),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=BENCHMARKS, default="speed")
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=f"some of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, of states in units of 20 (default: 3)")
    parser.add_argument("--clients", type=int, default=5_000, help="of states (default: 5000)")
    parser.add_argument("--cohort", type=int, default=200, help="of states (default: 200)")
    parser.add_argument("--venvs", type=Path, help="of modules: folder of the virtual environments of other systems")
    parser.add_argument("--output", type=Path, help="of modules and methods: the page whose tables are written")
    parser.add_argument("--methods", nargs="+", choices=REGISTRY, metavar="METHOD", help="of methods: these alone")
    given = parser.parse_args()
    given.venvs = given.venvs and given.venvs.expanduser().absolute()
    if unknown := set(given.workloads) - set(WORKLOADS):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; valid: {', '.join(WORKLOADS)}")
    module, options = BENCHMARKS[given.what]
    benchmark = getattr(import_module(f"jobs.benchmarks.{module}"), given.what)
    benchmark(*(getattr(given, option) for option in options))


if __name__ == "__main__":
    main()
