"""Processes that work on the runs of a study, each on one run at a time, and the resources for them."""

import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Literal

from cfl_ray.config import RuntimeConfig
from cfl_ray.config.runtime import hosts_on_gpu
from cfl_ray.errors import ConfigError, Interrupted, RunError, RunStopped, UserError, class_and_text
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.lifecycle.launch import StudyPlace, run_of_study
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.session_file import cluster_address
from cfl_ray.setup.setup import Setup
from cfl_ray.study.study_plan import StudyRun
from cfl_ray.system.files import write_text
from cfl_ray.system.machine import available_memory, usable_cpus
from cfl_ray.system.signals import repeats_later
from cfl_ray.tracking import RoundRecord

_MOST_AT_ONCE = 64
_RUN_BYTES = 1e9  # available memory per process; torch alone takes 0.5 GB


@dataclass(frozen=True)
class Resources:
    """How many runs run at the same time, with how many hosts and which GPUs."""

    at_once: int
    hosts: int | None  # of each run on a Ray cluster; None: each run in a process of this machine, without Ray
    gpus: tuple[str, ...] = ()  # of this machine, as in CUDA_VISIBLE_DEVICES, assigned to the processes in turn

    def __str__(self) -> str:
        if self.hosts is None:
            return f"{self.at_once} at a time, each in a process of its own"
        return f"{self.at_once} at a time, each with {self.hosts} client host{'s' * (self.hosts > 1)}"

    def gpu_of(self, process: int) -> str | None:
        """The GPU of a process (numbered from 0); None: Ray decides, or the machine has no GPU."""
        return self.gpus[process % len(self.gpus)] if self.gpus and self.hosts is None else None


def resources_for(runtime: RuntimeConfig, runs: int, at_once: int | None = None, processes: int = 0) -> Resources:
    """The resources for this number of runs: this machine, or the cluster of `runtime.address` or RAY_ADDRESS.

    A run with a single host is most efficient, since no data pass between processes. So as many runs are parallel as
    hosts fit; if more hosts than runs fit, the runs share them. The processes of the runs are always on this machine,
    whose available memory limits their number.

    at_once: largest number of parallel runs; None: as many as fit. processes: of earlier runs, which wait for further
        runs and hold their memory already.
    """
    address = cluster_address(runtime.address) if runtime.backend == "ray" else None
    memory = processes + int(available_memory() / _RUN_BYTES)
    limit = max(1, min(at_once or _MOST_AT_ONCE, runs, memory))
    if address is None:
        gpus = _gpus() if runtime.device != "cpu" else ()
        room = _room_here(runtime, len(gpus))
        return Resources(max(1, min(room, limit)), None, gpus)
    room = max(1, _room_of_cluster(runtime, address))
    if runtime.clients_per_host:
        return Resources(1, room)  # the number of hosts follows from the number of clients
    if runtime.hosts is not None:
        return Resources(max(1, min(room // runtime.hosts, limit)), runtime.hosts)
    together = min(room, limit)
    return Resources(together, room // together)


def _room_here(runtime: RuntimeConfig, gpus: int) -> int:
    """Number of runs that the CPUs and GPUs of this machine allow; 1 per GPU if `gpus_per_host` is 0."""
    by_cpus = usable_cpus() / runtime.cpus_per_host
    by_gpus = gpus * hosts_on_gpu(runtime.gpus_per_host or 1.0) if gpus else float("inf")
    return int(min(by_cpus + 1e-9, by_gpus))


def _gpus() -> tuple[str, ...]:
    """The GPUs that are visible to this process."""
    import torch

    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return tuple(visible[:count] if len(visible) >= count else map(str, range(count)))


def _room_of_cluster(runtime: RuntimeConfig, address: str) -> int:
    from cfl_ray.runtime.on_ray.connect import connect  # imports ray
    from cfl_ray.runtime.on_ray.placement import room_of_cluster

    connect(address)
    return room_of_cluster(runtime)


_ATTEMPTS = 3  # at a run whose process dies
_LOOK_SECONDS = 1.0  # between two looks at the processes
_IDLE_SECONDS = 10.0  # in which an idle process ends
KILL_SECONDS = 90.0  # after which an interrupted process that hangs is killed: it may be delivering what it has
END_SECONDS = 30.0  # in which a run whose parent was killed writes what it has
_context = get_context("spawn")
Status = Literal["finished", "failed", "stopped", "paused"]  # paused: after the round that was asked for


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    run: StudyRun
    status: Status
    seconds: float
    reason: str = ""
    warnings: tuple[str, ...] = ()


@dataclass
class _Notes(Watcher):
    """Keeps the warnings of a run, without those of its config, which `cfl-ray check` shows; may pause the run."""

    warnings: list[str] = field(default_factory=list)
    until: int | None = None  # the round after which the run pauses; None: at its end
    paused: bool = False

    def started(self, setup: Setup, run_dir: Path | None, run_info: dict[str, str]) -> None:
        pass

    def round(self, label: str, record: RoundRecord) -> None:
        if self.until is not None and record.round >= self.until and not record.finished:
            self.paused = True
            raise KeyboardInterrupt  # as Ctrl-C: every saved round is kept, and the next start goes on from there

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class _Worker:
    """A process of the pool, as its parent sees it; numbered from 0."""

    def __init__(self, number: int, resources: Resources):
        self.number, self.ready = number, False
        self.run: StudyRun | None = None  # at work
        self.began = time.monotonic()
        self.connection, other = _context.Pipe()
        self.process = _context.Process(
            target=_work, args=(other, os.getpid(), resources.gpu_of(number)), name=f"study-{number}"
        )
        # Ctrl-C on the terminal is for the parent: SIGINT is blocked until the new process has its own handler
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.close()

    def begin(
        self, run: StudyRun, root: Path, hosts: int | None, extend: Path | None, code: str | None, until: int | None
    ) -> None:
        """Sends it a run, which begins with the rounds in `extend`, if any, and pauses after round `until`, if any.

        code: as in `load_run`.
        """
        self.run, self.began = run, time.monotonic()
        with suppress(OSError):  # it has died; the next `hear` raises EOFError
            self.connection.send((run, root, hosts, extend, code, until))

    def hear(self) -> RunOutcome | None:
        """The outcome of its run; None: the process has become ready. Raises EOFError if it has died."""
        try:
            message = self.connection.recv()
        except OSError as error:
            raise EOFError from error
        if message is None:
            self.ready = True
            return None
        run, self.run = self.run, None
        assert run is not None  # it reports on the run that it was sent
        return RunOutcome(run, *message)

    def end(self, deadline: float) -> None:
        """Ends the process; a run at work keeps what it has saved. A process that hangs is killed at the deadline."""
        self.connection.close()
        if not self.ready:
            self.process.terminate()
        elif self.run is None:
            self.process.join(_IDLE_SECONDS)
            self.process.kill()
        while self.process.is_alive():
            self.interrupt()  # again: it may have been between two runs
            self.process.join(_LOOK_SECONDS)
            if time.monotonic() > deadline:
                self.process.kill()

    def interrupt(self) -> None:
        """Stops the run at work."""
        if self.run is not None and self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)


class WorkerPool:
    """The processes of a study. Closing it ends them; a context manager.

    extend: folder of the same study with fewer rounds, which its runs begin with. code: as in `load_run`.
    """

    def __init__(self, root: Path, extend: Path | None = None, code: str | None = None):
        self.root, self.extend, self.code, self.workers = root, extend, code, list[_Worker]()
        self.deaths = Counter[str]()  # of processes, by the name of the run that they had

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:  # all are interrupted before the first is waited for
            worker.interrupt()
            worker.connection.close()
        deadline = time.monotonic() + KILL_SECONDS
        for worker in self.workers:
            worker.end(deadline)

    def run(
        self,
        runs: Sequence[StudyRun],
        resources: Resources,
        tick: Callable[[list[StudyRun]], None] = lambda live: None,
        until: int | None = None,
    ) -> Iterator[RunOutcome]:
        """Runs the runs, `resources.at_once` at a time, and yields the outcome of each as it ends.

        A run whose process dies continues from its last checkpoint in another process; the others go on. If the pool
        is closed before the end, the runs at work keep what they have saved, and no others are started.

        tick: called about once a second with the runs at work. until: the round after which runs pause; None: the last.
        """
        waiting, looked = list(runs), 0.0
        for number in range(len(self.workers), min(resources.at_once, len(runs))):
            self.workers.append(_Worker(number, resources))
        workers = self.workers[: resources.at_once]
        while waiting or any(worker.run for worker in workers):
            for worker in workers:
                if waiting and worker.ready and worker.run is None:
                    run = waiting.pop(0)
                    extended = self.extend and run.folder(self.extend)
                    worker.begin(run, self.root, resources.hosts, extended, self.code, until)
            heard = wait([worker.connection for worker in workers], _LOOK_SECONDS)
            for place, worker in enumerate(workers):
                if worker.connection not in heard:
                    continue
                try:
                    outcome = worker.hear()
                except EOFError:
                    outcome = self._after_death(worker, waiting)
                    worker.end(time.monotonic())
                    workers[place] = self.workers[place] = _Worker(worker.number, resources)
                if outcome is not None:
                    yield outcome
            if time.monotonic() - looked >= _LOOK_SECONDS:
                looked = time.monotonic()
                tick([worker.run for worker in workers if worker.run is not None])

    def _after_death(self, worker: _Worker, waiting: list[StudyRun]) -> RunOutcome | None:
        """Puts the run of a process that has died first in the queue; after the last attempt returns its outcome."""
        if not worker.ready:
            worker.process.join(_IDLE_SECONDS)
            raise RunError(
                f"a process of the study ended before its first run (exit status {worker.process.exitcode}); "
                "see its output above"
            )
        if (run := worker.run) is None:
            return None
        worker.run = None
        self.deaths[run.name] += 1
        if self.deaths[run.name] < _ATTEMPTS:
            waiting.insert(0, run)
            return None
        reason = f"its process died {_ATTEMPTS} times; is the memory too small?"
        write_failure(run.folder(self.root), reason)
        return RunOutcome(run, "failed", time.monotonic() - worker.began, reason)


def check_main() -> None:
    """Raises ConfigError in a process that only imports the script of its parent."""
    if getattr(current_process(), "_inheriting", False):
        raise ConfigError(
            "a study starts processes, which import the script that runs it: put what the script does below "
            '`if __name__ == "__main__":`'
        )


# ---- in a process of the study


class _AtWork:
    """Whether this process has a run that may be interrupted. No lock: the signal's handler would wait for itself."""

    now = False


def _work(connection: Connection, parent: int, gpu: str | None) -> None:
    """Carries out runs until the parent closes the connection."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before the first use of a GPU
    _become_worker(parent)
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the last: as a run was ending
        connection.send(None)
        while True:
            connection.send(_run(*connection.recv()))


def _run(
    run: StudyRun,
    root: Path,
    hosts: int | None,
    extend: Path | None = None,
    code: str | None = None,
    until: int | None = None,
) -> tuple[Status, float, str, tuple[str, ...]]:
    """Begins a run or goes on with it, and returns its status, seconds, reason and warnings."""
    began, folder, notes = time.monotonic(), run.folder(root), _Notes(until=until)
    status: Status = "finished"
    reason = details = ""
    try:
        _AtWork.now = True
        RunDirectory(folder).failure.unlink(missing_ok=True)
        earlier = extend if extend is not None and RunDirectory(extend).is_run else None
        run_of_study(run.experiment, folder, StudyPlace(root, run.setting, run.method), hosts, notes, earlier, code)
    except (Interrupted, RunStopped, KeyboardInterrupt) as error:
        status, reason = ("paused", f"after round {until}") if notes.paused else ("stopped", str(error))
    except UserError as error:
        status, reason = "failed", str(error)
    except Exception as error:
        status, reason, details = "failed", class_and_text(error), traceback.format_exc()
    finally:
        _AtWork.now = False
    if status == "failed":
        write_failure(folder, reason, details)
    return status, time.monotonic() - began, reason, tuple(notes.warnings)


def write_failure(folder: Path, reason: str, details: str = "") -> None:
    """Writes why a run failed into its folder."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(RunDirectory(folder).failure, f"{reason}\n{details}")


def _become_worker(parent: int) -> None:
    """Makes this process end with its parent, and interrupts the run at work when the parent says so."""
    os.setpgrp()  # Ctrl-C on the terminal reaches the parent, which tells its workers
    signal.signal(signal.SIGINT, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)  # the run at work keeps what it has saved
        time.sleep(END_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _AtWork.now and not repeats_later(number, frame):
        _AtWork.now = False  # once: the end of the run is not interrupted
        raise KeyboardInterrupt
