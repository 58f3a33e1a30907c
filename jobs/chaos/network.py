"""Faults of networks, machines and disks, each in its own run, whose outcome must be that of an undisturbed run.

    python -m jobs.chaos --network                       every scenario
    python -m jobs.chaos --network partition disk-full --methods ditto --rounds 6

Three machines, which are network namespaces of this one (`virtual_network.py`, needs root): a head with the driver and
the server, and two workers with a client host each. Exit status 1 if an outcome differs or something is missing here.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jobs.chaos.processes import QUICK_HEALTH_CHECKS
from jobs.chaos.same_outcome import IDENTICAL, chaos_experiment, concluded, differences, rounds_done, saved, undisturbed
from jobs.chaos.virtual_network import Machine, Network, missing

_WAIT_SECONDS = 400  # for a round, on a busy machine
_TRIES = 3
_STARTED = "Ray runtime started"
_RAY = Path(sys.executable).with_name("ray")
_QUICK = {f"RAY_{name}": str(value) for name, value in QUICK_HEALTH_CHECKS.items()}
_LATENCY_SECONDS, _BYTES_PER_SECOND = 0.05, 10e6 / 8
_PARTITION_SECONDS = 20.0
_PULSE_SECONDS, _STOPPED_SHARE = 0.5, 0.8
_DISK_MEGABYTES = 24


class NetworkRun:
    """A Ray cluster of a head and two workers, and `cfl-ray run` on the head."""

    def __init__(self, network: Network, file: Path, directory: Path, quick: bool):
        self.directory = directory
        self.log = directory.with_suffix(".log")
        self.head, *self.workers = [network.add(name) for name in ("head", "one", "two")]
        self.at_end = ExitStack()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        # Ray's folder is in that of temporary files: each machine has a /tmp/ray of its own, and nothing else
        self.environment |= {"RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp"}
        self.on_head = self.environment | (_QUICK if quick else {})
        self.file = file

    def start(self) -> None:
        gcs = f"{self.head.address}:6379"
        self._ray(self.head, self.on_head, "--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false")
        for worker in self.workers:
            self._ray(worker, self.environment, f"--address={gcs}", "--num-cpus=1")
        self.environment["RAY_ADDRESS"] = gcs
        self.cfl_ray("run", str(self.file), "--run-dir", str(self.directory))

    def _ray(self, machine: Machine, environment: dict[str, str], *options: str) -> None:
        """Starts Ray on a machine; again where Ray gives up, as it does after half a minute on a busy machine."""
        command = [str(_RAY), "start", *options, f"--node-ip-address={machine.address}", "--block"]
        settings = ["--object-store-memory=100000000", "--disable-usage-stats"]
        for number in range(_TRIES):
            log = self.log.with_suffix(f".{machine.name}.{number}.log")
            process = machine.start([*command, *settings], environment, log)
            _until(
                lambda p=process, f=log: p.poll() is not None or _STARTED in f.read_text(),
                f"Ray has started on {machine.name}",
                self,
            )
            if process.poll() is None:
                return
        raise SystemExit(f"Ray does not start on {machine.name}; see {log}")

    def cfl_ray(self, *arguments: str) -> None:
        """Starts a command of cfl-ray on the head."""
        self.driver = self.head.start([sys.executable, "-m", "cfl_ray", *arguments], self.environment, self.log)

    def wait_for_round(self, number: int) -> None:
        _until(lambda: rounds_done(self.directory) >= number, f"round {number} ends", self)

    def wait_for_end(self) -> int:
        """The exit status of the driver."""
        _until(lambda: self.driver.poll() is not None, "the driver ends", self, may_end=True)
        return self.driver.returncode

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something after so many seconds, or at the end of the run."""
        timer = threading.Timer(seconds, action)
        timer.start()
        self.at_end.callback(timer.cancel)


def _until(condition: Callable[[], bool], what: str, run: NetworkRun, may_end: bool = False) -> None:
    deadline, driver = time.monotonic() + _WAIT_SECONDS, None
    while not condition():
        driver = getattr(run, "driver", None)
        if not may_end and driver is not None and driver.poll() is not None and not condition():
            raise SystemExit(f"the run ended with status {driver.returncode} before {what}; see {run.log}")
        if time.monotonic() > deadline:
            raise SystemExit(f"after {_WAIT_SECONDS} s not yet: {what}; see {run.log}")
        time.sleep(0.05)


# ---- scenarios: each disturbs a run that has done two rounds


def slow_network(run: NetworkRun) -> None:
    for machine in (run.head, *run.workers):
        machine.link.latency, machine.link.bytes_per_second = _LATENCY_SECONDS / 2, _BYTES_PER_SECOND


def partition(run: NetworkRun) -> None:
    link = run.workers[1].link
    link.up = False
    run.later(_PARTITION_SECONDS, lambda: setattr(link, "up", True))


def node_vanishes(run: NetworkRun) -> None:
    run.workers[1].link.up = False


def slow_node(run: NetworkRun) -> None:
    """Stops every process of a machine for most of the time."""
    machine, ended = run.workers[1], threading.Event()

    def pulse() -> None:
        while not ended.wait(_PULSE_SECONDS * (1 - _STOPPED_SHARE)):
            machine.signal(signal.SIGSTOP)
            ended.wait(_PULSE_SECONDS * _STOPPED_SHARE)
            machine.signal(signal.SIGCONT)

    thread = threading.Thread(target=pulse)
    thread.start()
    run.at_end.callback(thread.join)
    run.at_end.callback(ended.set)


def disk_full(run: NetworkRun) -> None:
    """Fills the disk with Ray's folder (logs, spilled objects) of a worker."""
    _fill(run.workers[1].temporary)


def output_full(run: NetworkRun) -> None:
    """Fills the disk with the run directory, and makes room again once the run has ended; then it is resumed."""
    filled = _fill(run.directory)
    if (status := run.wait_for_end()) != 1:
        raise SystemExit(f"the run on a full disk ended with status {status}, expected 1; see {run.log}")
    filled.unlink()
    run.cfl_ray("resume", str(run.directory))


def _fill(folder: Path) -> Path:
    """A file that takes all room of the disk that a folder is on."""
    file = folder / "filled"
    with suppress(OSError), file.open("wb", buffering=0) as growing:
        while True:
            growing.write(bytes(1 << 14))
    return file


@dataclass(frozen=True)
class Scenario:
    """A disturbance of a run, and the settings of its cluster."""

    disturb: Callable[[NetworkRun], None]
    text: str
    quick: bool = False  # whether the head's health checks are quick
    small_disk: str = ""  # the folder that is a disk of a few megabytes: worker, output


SCENARIOS = {
    "slow-network": Scenario(slow_network, "50 ms latency and 10 Mbit/s on every machine until the end"),
    "partition": Scenario(partition, f"a worker unreachable for {_PARTITION_SECONDS:g} s"),
    "partition-quick": Scenario(partition, "the same with quick health checks: declared dead meanwhile", quick=True),
    "node-vanishes": Scenario(node_vanishes, "a worker unreachable for ever"),
    "node-vanishes-quick": Scenario(node_vanishes, "the same with quick health checks", quick=True),
    "slow-node": Scenario(slow_node, f"a worker stopped for {_STOPPED_SHARE:.0%} of the time until the end"),
    "disk-full": Scenario(disk_full, "no room for Ray's logs and spilled objects on a worker", small_disk="worker"),
    "output-full": Scenario(output_full, "no room for the run directory; resumed when there is", small_disk="output"),
}


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MEGABYTES}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        kept = folder.with_name(f"{folder.name}.kept")
        shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("filled", "sockets", "session_latest"))
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()
        kept.rename(folder)


@dataclass(frozen=True)
class Disturbed:
    """How a disturbed run went."""

    seconds: float  # from the disturbance to the end of the round that it interrupted
    notes: list[str]  # of the run about faults
    ended: int  # exit status


def disturbed(scenario: Scenario, file: Path, directory: Path) -> Disturbed:
    """Runs the experiment and disturbs it after its second round."""
    machines = directory.with_name(f"{directory.name}.machines")
    disk = {"worker": machines / "two" / "ray", "output": directory}.get(scenario.small_disk)
    with ExitStack() as stack:
        if disk is not None:
            stack.enter_context(_small_disk(disk))
        network = stack.enter_context(Network(machines))
        run = NetworkRun(network, file, directory, scenario.quick)
        run.start()
        stack.callback(run.at_end.close)
        run.wait_for_round(2)
        before, began = rounds_done(directory), time.monotonic()
        scenario.disturb(run)
        run.wait_for_round(before + 1)
        seconds = time.monotonic() - began
        return Disturbed(seconds, _notes(run.log), run.wait_for_end())


def _notes(log: Path) -> list[str]:
    words = ("died", "failed", "added", "lost", "waited", "started again", "could not", "No space")
    return [line.strip() for line in log.read_text().splitlines() if any(word in line for word in words)]


def disturb_network(
    names: Sequence[str], methods: Sequence[str], rounds: int, epochs: int | None, keep: Path | None
) -> int:
    """Runs these scenarios (none: all) and prints a table. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=False)
    if unknown := [name for name in names if name not in SCENARIOS]:
        console.print(f"unknown scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
        return 2
    if lacking := missing():
        console.print(f"machines on a network cannot be made here; missing: {lacking}")
        return 1
    folder = (keep or Path(tempfile.mkdtemp(prefix="cfl-ray-network-"))).absolute()
    table = Table("scenario", "what happened", "went on after s", "faults that the run reports", "outcome")
    wrong: list[str] = []  # over all scenarios
    for number, name in enumerate(names or SCENARIOS):
        scenario, own = SCENARIOS[name], folder / name
        own.mkdir(parents=True)
        file, experiment = saved(chaos_experiment(methods, rounds, own, epochs, hosts=2, wait_for_hosts=300))
        if not number:  # the same for all scenarios
            undisturbed(experiment, folder / "undisturbed")
        found = disturbed(scenario, file, own / "disturbed")
        different = differences(experiment, methods, folder / "undisturbed", own / "disturbed")
        different += [f"exit status {found.ended}"] if found.ended else []
        wrong += [f"{name}: {what}" for what in different]
        notes = "; ".join(dict.fromkeys(found.notes)) or "none"
        table.add_row(name, scenario.text, f"{found.seconds:.1f}", notes, ", ".join(different) or "equal")
        console.print(f"{name}: {'DIFFERENT' if different else 'equal'} after {found.seconds:.1f} s")
    console.print(table)
    return concluded(wrong, IDENTICAL, folder, keep)
