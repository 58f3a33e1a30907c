"""Memory and files of the processes of a long run, while a host, the server and the MLflow server are killed.

    python -m jobs.chaos.soak                              2,000 rounds; each of the three is killed every two minutes
    python -m jobs.chaos.soak --rounds 300 --every 60
    python -m jobs.chaos.soak --every 0                    undisturbed: memory of processes that live long

Samples are taken every few seconds, of processes that are older than SETTLED. The verdict compares the medians of the
rounds from 20 % to 40 % and of the last tenth. The run must have the outcome of an undisturbed one, bit for bit, with
every round once in metrics.jsonl and in MLflow. Exit status 1 if anything grew by more than GROWTH, or differs.
"""

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from cfl_ray.config import Experiment
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking.mlflow_tracker import deliver_pending
from jobs.chaos.hang import trap, trapped_data
from jobs.chaos.mlflow_server import MlflowServer
from jobs.chaos.processes import Run
from jobs.chaos.same_outcome import IDENTICAL, concluded, differences, saved, undisturbed

TARGETS = ["host", "server", "mlflow"]
GROWTH = 0.02  # share, up to which a quantity is said not to grow; medians of a busy machine differ by 1 %
SETTLED = 20.0  # seconds of life, after which a process counts
QUIET = 0.1  # share of the rounds, at the end, in which nothing is killed: MLflow catches up
_SAMPLE_SECONDS = 5.0
_DOWN_SECONDS = 5.0  # of the MLflow server
_LEAST = {"files": 3, "MB": 2.0}  # growth that says nothing, by unit
# MB of Ray's own processes, whose head keeps a record of every actor that was killed (the last 100,000)
_LEAST_OF_RAY = 5.0


def soak_experiment(method: str, rounds: int, output: Path, uri: str) -> Experiment:
    """A small federation."""
    return Experiment(
        name="soak",
        rounds=rounds,
        methods=[method],
        data=trapped_data(trap(output)),  # whose reads take long enough for rounds of part of a second
        model={"options": {"hidden": 16}},
        local={"epochs": 1, "batch_size": 8},
        cohort={"fraction": 0.25, "availability": 0.9, "dropout": 0.05},
        runtime={"engine": "sequential", "hosts": 2, "retries": rounds},
        tracking={"uri": uri, "report": False},
        output=str(output),
    )


def quantities(run: Run) -> Iterator[tuple[str, float]]:
    """(What, how much) of the processes of the run that are older than SETTLED, and of its files."""
    processes = {name: run.processes(name) for name in ("server", "host")}
    processes["driver"] = [psutil.Process(run.driver.pid)]
    for name, title in (("raylet", "raylet"), ("gcs", "gcs_server")):
        processes[name] = [child for child in psutil.Process().children(recursive=True) if _name(child) == title]
    for name, of_kind in processes.items():
        for process in of_kind:
            with suppress(psutil.Error):
                if time.time() - process.create_time() > SETTLED:
                    memory = process.memory_info()
                    yield f"{name} MB", (memory.rss - memory.shared) / 1e6
                    yield f"{name} files", process.num_fds()
    yield "run directory files", sum(1 for _ in run.directory.rglob("*"))
    files = (path for path in run.directory.rglob(f"{RunDirectory.checkpoints.name}*") if path.is_file())
    yield "checkpoints MB", sum(path.stat().st_size for path in files) / 1e6


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def soaked(run: Run, mlflow: MlflowServer, rounds: int, every: float) -> tuple[dict[str, list], Counter]:
    """Waits for the run while it kills each target every `every` seconds, one after the other.

    Each kill is followed by a round: on a busy machine a server may take longer to start than the next kill is away.

    Returns (round, how much) of each quantity, and the number of kills by target.
    """
    draw, samples, kills = random.Random(0), defaultdict(list), Counter()
    targets, began = itertools.cycle(TARGETS), time.monotonic()
    next_kill, restart, next_sample = began + every / len(TARGETS), float("inf"), began
    done, advanced, at_kill = 0, began, 0
    while run.driver.poll() is None:
        now = time.monotonic()
        if every and now > next_kill and at_kill < done < rounds * (1 - QUIET):
            target, next_kill, at_kill = next(targets), now + every / len(TARGETS), done
            if target == "mlflow":
                mlflow.kill()
                restart = now + _DOWN_SECONDS
            kills[target] += target == "mlflow" or run.kill(target, draw)
        if now > restart:
            mlflow.launch()
            restart = float("inf")
        if now > next_sample:
            next_sample = now + _SAMPLE_SECONDS
            if (round := run.rounds_done()) > done:
                done, advanced = round, now
            if now > advanced + 180:
                raise SystemExit(f"no round for 180 s after round {done}; see {run.log}")
            for name, value in quantities(run) if done < rounds else ():  # then figures and the report are made
                samples[name].append((done, value))
                with run.directory.with_suffix(".samples").open("a") as log:
                    log.write(f"{done} {name} {value:.3f}\n")
        time.sleep(0.5)
    if restart < float("inf"):
        mlflow.launch()
    run.wait_for_end()
    return samples, kills


def grown(samples: dict[str, list], rounds: int) -> tuple[Table, list[str]]:
    """A row for each quantity, and the names of those that grew."""
    table, wrong = Table("", "20 % to 40 %", "last tenth", "growth", "largest"), []
    for name, values in sorted(samples.items()):
        early = [value for round, value in values if rounds * 0.2 <= round < rounds * 0.4]
        late = [value for round, value in values if round >= rounds * 0.9]
        if not early or not late:
            wrong.append(f"{name}: too few samples")
            continue
        before, after = statistics.median(early), statistics.median(late)
        growth = after / before - 1 if before else float(after > 0)
        table.add_row(name, f"{before:.1f}", f"{after:.1f}", f"{growth:+.1%}", f"{max(v for _, v in values):.1f}")
        least = _LEAST_OF_RAY if name in ("gcs MB", "raylet MB") else _LEAST[name.rpartition(" ")[2]]
        if growth > GROWTH and after - before > least:
            wrong.append(f"{name} grew by {growth:.1%}")
    return table, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--every", type=float, default=120, help="seconds between two kills of a target; 0: no kills")
    parser.add_argument("--method", default="stocfl")
    parser.add_argument("--keep", type=Path, help="folder of both runs; default: a temporary one")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="cfl-ray-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    mlflow, began = MlflowServer(folder / "mlflow.db"), time.monotonic()
    file, experiment = saved(soak_experiment(options.method, options.rounds, folder, mlflow.uri))
    whole = ThreadPoolExecutor(1).submit(undisturbed, experiment, folder / "undisturbed")
    try:
        mlflow.start()
        run = Run(file, folder / "disturbed")
        try:
            samples, kills = soaked(run, mlflow, options.rounds, options.every)
        finally:
            run.close()
        deliver_pending(folder, mlflow.uri, seconds=300)  # as the next command does: the run waits 20 s at its end
    finally:
        mlflow.kill()
    whole.result()
    table, wrong = grown(samples, options.rounds)
    wrong += differences(experiment, [options.method], folder / "undisturbed", folder / "disturbed")
    console = Console(highlight=False)
    console.print(table)
    counts = ", ".join(f"{number} {target}" for target, number in kills.items()) or "none"
    seconds = time.monotonic() - began
    console.print(f"{options.rounds} rounds of {options.method}; kills: {counts}; {seconds / 60:.0f} minutes")
    return concluded(wrong, f"{IDENTICAL}; nothing grew", folder, options.keep)


if __name__ == "__main__":
    sys.exit(main())
