"""Kills processes of a run at random moments and compares its outcome, bit for bit, with that of an undisturbed run.

    python -m jobs.chaos --kills 20 --seed 0
    python -m jobs.chaos --kills 3 --methods ditto stocfl --rounds 6 --targets host server
    python -m jobs.chaos --kills 12 --methods all --rounds 6
    python -m jobs.chaos --hang 20 --seed 0                     (processes that stop answering; see hang.py)
    python -m jobs.chaos --network partition node-vanishes      (no name: every scenario; see network.py)

The run is `cfl-ray run` on a Ray cluster of two nodes, both on this machine: a head with the driver and the server, and
a second node. Processes are killed by SIGKILL. After a node is killed, a new one joins; after the driver is killed,
`cfl-ray resume` continues the run. The script compares every metric of every round, every move of a client between
clusters, and the sha256 of the models and client states of the last checkpoint; metrics.jsonl and MLflow must have
every round once. Exit status 1 if anything differs.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported

from rich.console import Console
from rich.table import Table

from cfl_ray.methods import REGISTRY
from jobs.chaos.hang import LIMIT, UNDISTURBED, let_hang
from jobs.chaos.hang import TARGETS as HANG_TARGETS
from jobs.chaos.processes import Run
from jobs.chaos.same_outcome import IDENTICAL, chaos_experiment, concluded, differences, saved, undisturbed

METHODS = ["ditto", "fedclust", "stocfl", "ifca_cam"]  # client state, one-shot clustering, merging, additive models
TARGETS = ["host", "server", "node", "driver"]


@dataclass
class Kill:
    """One killed process and the time until the run completed the interrupted round."""

    target: str
    method: str
    round: int  # the interrupted one
    second: float  # of that round
    recovery: float = float("nan")  # seconds from the kill to the end of the round


def disturbed(file: Path, directory: Path, options: argparse.Namespace, seconds: float) -> list[Kill]:
    """Runs the experiment and kills processes, each in a different round, at most `seconds` after its start."""
    draw, methods, rounds = random.Random(options.seed), options.methods, options.rounds
    rounds_of_kills = sorted(draw.sample(range(1, len(methods) * rounds), options.kills))
    run, kills = Run(file, directory), []
    try:
        for round in rounds_of_kills:
            target, delay = draw.choice(options.targets), draw.uniform(0, seconds)
            run.wait_for_rounds(round)
            time.sleep(delay)
            before = run.rounds_done()
            if not run.kill(target, draw):  # for example a server that has not started: kill a process of another kind
                target = next(other for other in TARGETS if other != target and run.kill(other, draw))
            began = time.monotonic()
            method = methods[min(before // rounds, len(methods) - 1)]
            kill = Kill(target, method, before % rounds + 1, delay)
            kills.append(kill)
            run.wait_for_rounds(before + 1)
            kill.recovery = time.monotonic() - began
            with directory.with_suffix(".kills.jsonl").open("a") as log:
                log.write(json.dumps(vars(kill)) + "\n")
        run.wait_for_end()
    finally:
        run.close()
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="processes to kill (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills; the experiment has seed 0")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each method")
    parser.add_argument("--methods", nargs="+", default=METHODS, help=f"default: {' '.join(METHODS)}; all: every one")
    targets = dict.fromkeys([*TARGETS, *HANG_TARGETS])
    parser.add_argument("--targets", nargs="+", choices=targets, help="default: host server node, or host server data")
    parser.add_argument("--keep", type=Path, help="folder of both runs; default: a temporary one")
    parser.add_argument(
        "--network",
        nargs="*",
        metavar="SCENARIO",
        help="disturb a network of three machines (namespaces of this one; needs root) instead of killing processes",
    )
    parser.add_argument(
        "--epochs", type=int, help="without --hang: of local training (default: 20; 1 for many methods)"
    )
    parser.add_argument("--hang", type=int, metavar="N", help="let so many processes stop answering instead")
    parser.add_argument("--limit", type=float, default=LIMIT, help="with --hang: runtime.stall_limit (default: 25 s)")
    options = parser.parse_args()
    if options.methods == ["all"]:
        options.methods = list(REGISTRY)
    allowed = TARGETS if options.hang is None else HANG_TARGETS
    options.targets = options.targets or allowed[:3]
    if wrong := set(options.targets) - set(allowed):
        parser.error(f"--targets {' '.join(sorted(wrong))}: expected {', '.join(allowed)}")
    if options.network is not None:
        from jobs.chaos.network import disturb_network

        return disturb_network(options.network, options.methods, options.rounds, options.epochs, options.keep)
    total = len(options.methods) * options.rounds
    if options.hang is None and not 0 <= options.kills < total:
        parser.error(f"--kills must be below {total}, the rounds of all methods, got {options.kills}")
    if options.hang is not None and not 0 < options.hang < total - UNDISTURBED:
        parser.error(
            f"--hang must be from 1 to {total - UNDISTURBED - 1}, the rounds of all methods without the last "
            f"{UNDISTURBED} and the first, got {options.hang}"
        )
    folder = options.keep or Path(tempfile.mkdtemp(prefix="cfl-ray-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if options.hang is not None:
        return let_hang(options, folder)
    file, experiment = saved(chaos_experiment(options.methods, options.rounds, folder, options.epochs))
    results = undisturbed(experiment, folder / "undisturbed")
    seconds = statistics.median(
        record.metrics["round_seconds"] for method in results.methods.values() for record in method.records
    )
    kills = disturbed(file, folder / "disturbed", options, seconds)
    different = differences(experiment, options.methods, folder / "undisturbed", folder / "disturbed")
    show(kills, seconds, options.seed)
    return concluded(different, IDENTICAL, folder, options.keep)


def show(kills: list[Kill], seconds: float, seed: int) -> None:
    """Prints a row per kill."""
    console = Console(highlight=False)
    table = Table("#", "killed", "method", "round", "after s", "recovery s")
    for number, kill in enumerate(kills, 1):
        table.add_row(
            str(number), kill.target, kill.method, str(kill.round), f"{kill.second:.2f}", f"{kill.recovery:.1f}"
        )
    console.print(table)
    counts = ", ".join(f"{number} {target}" for target, number in Counter(kill.target for kill in kills).items())
    console.print(
        f"{len(kills)} kills ({counts or 'none'}), seed {seed}; an undisturbed round takes {seconds:.2f} s; "
        "recovery: from the kill to the end of the round"
    )


if __name__ == "__main__":
    sys.exit(main())
