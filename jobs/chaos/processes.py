"""`cfl-ray run` as a process on a Ray cluster of two nodes, whose processes can be killed, stopped and watched."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported

from jobs.chaos.same_outcome import rounds_done
from jobs.services.ray_cluster import LocalCluster

TITLES = {"host": "ray::ClientHost", "server": "ray::ServerActor"}
# A machine is declared dead after five checks that fail, 1 s each and 1 s apart; by default 10 s each and 3 s apart.
# With less, machines that are only slow, beside much other work, are declared dead as well.
QUICK_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}
PROGRESS_SECONDS = 180  # without a new round: the run is stuck


class Run:
    """`cfl-ray run` as a process, on a cluster of two nodes: a head with the driver and the server, and a second."""

    def __init__(self, file: Path, directory: Path) -> None:
        self.directory = directory
        self.log = directory.with_suffix(".log")
        self.cluster = LocalCluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": False, "_system_config": QUICK_HEALTH_CHECKS},
        )
        self.second = self.cluster.add_node(num_cpus=2)
        self.environment = os.environ | {"RAY_ADDRESS": self.cluster.address, "OMP_NUM_THREADS": "1"}
        self.driver = self._start("run", str(file), "--run-dir", str(directory))

    def _start(self, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "cfl_ray", *arguments]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def rounds_done(self) -> int:
        return rounds_done(self.directory)

    def processes(self, target: str) -> list[psutil.Process]:
        """The processes of this kind, without those that are stopped."""
        return sorted(_titled(TITLES[target]), key=lambda process: process.pid)

    def kill(self, target: str, draw: random.Random) -> bool:
        """Kills one process of this kind. Returns False if there is none at the moment."""
        if target == "driver":
            self.driver.kill()
            self.driver.wait()
            self.driver = self._start("resume", str(self.directory))
        elif target == "node":
            raylet = psutil.Process(self.second.all_processes["raylet"][0].process.pid)
            for process in (*raylet.children(recursive=True), raylet):
                _kill(process)
            self.cluster.remove_node(self.second, allow_graceful=False)
            self.second = self.cluster.add_node(num_cpus=2, wait=False)
        else:
            found = self.processes(target)
            if not found:
                return False
            _kill(draw.choice(found))
        return True

    def wait_for_rounds(self, rounds: int) -> None:
        self.wait_until(lambda: self.rounds_done() >= rounds)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Waits for the condition or the end of the run. Exits if neither happens within PROGRESS_SECONDS."""
        deadline = time.monotonic() + PROGRESS_SECONDS
        while not condition():
            if self.driver.poll() is not None and not condition():
                break
            if time.monotonic() > deadline:
                raise SystemExit(f"no progress for {PROGRESS_SECONDS} s; see {self.log}")
            time.sleep(0.02)

    def wait_for_end(self) -> None:
        """Waits for the end of the run. Exits if it fails."""
        self.wait_until(lambda: self.driver.poll() is not None)
        if self.driver.returncode != 0:
            raise SystemExit(f"the run ended with status {self.driver.returncode}; see {self.log}")

    def close(self) -> None:
        if self.driver.poll() is None:
            self.driver.send_signal(signal.SIGTERM)
            self.driver.wait(60)
        self.cluster.shutdown()


def _titled(title: str) -> Iterator[psutil.Process]:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            stopped = process.status() == psutil.STATUS_STOPPED
            if (process.cmdline() or [""])[0].startswith(title) and not stopped:
                yield process


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
