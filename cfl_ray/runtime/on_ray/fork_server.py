"""A process that imports PyTorch once, and from which the Ray workers of a run's own cluster are forked.

An import of PyTorch takes two seconds of CPU and 0.3 GB, which a forked process shares. Ray starts each worker as a
new program, and lets its cluster choose this program: `fork_worker.py`, which asks this process for a fork.
"""

import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

SOCKET_VARIABLE = "CFL_RAY_FORK_SERVER"  # the environment variable with the path of the socket; also in fork_worker
WORKER_PROGRAM = str(Path(__file__).with_name("fork_worker.py"))
_KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET  # a message arrives whole, with its files
_LARGEST_MESSAGE = 1 << 20  # bytes: the arguments and the environment of a worker
_SECONDS = 10.0  # for a message, and for the end of the process
_MODULES = "cfl_ray.engine.worker", "cfl_ray.methods", "cfl_ray.runtime.round_loop"
_ANY_JOB = {"RAY_JOB_ID": "ffffffff"}  # of workers that Ray starts before there is a job
# imported in the environment of the first worker, since Ray reads it in its import
_RAY_MODULES = (
    "cfl_ray.runtime.on_ray.host_process",
    "cfl_ray.runtime.on_ray.server_process",
    "ray._private.workers.default_worker",
)


@contextmanager
def fork_server(folder: Path) -> Iterator[dict[str, str]]:
    """Context with such a process. Returns the environment variables of a cluster that uses it.

    The process and its forks end at the end of the context, or when this process dies.

    folder: of the socket; only this user can enter it, and its path is short.
    """
    if sys.platform != "linux":  # elsewhere libraries that are loaded do not survive a fork
        yield {}
        return
    with TemporaryDirectory(prefix="fork-", dir=folder) as own_folder, socket.socket(*_KIND) as listening:
        path = str(Path(own_folder, "socket"))
        listening.bind(path)
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno()), json.dumps([str(entry) for entry in sys.path])],
            stdin=subprocess.PIPE,  # ends with this process
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
        listening.close()
        try:
            yield {SOCKET_VARIABLE: path}
        finally:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_SECONDS)  # closes its stdin
            process.kill()
            process.wait()


class _Worker(NamedTuple):
    """A worker that Ray wants: its program with arguments, its environment, and its stdin, stdout and stderr."""

    program: list[str]
    environment: dict[str, str]
    files: list[int]


class _Forks:
    """The forks of this process; all have the environment of the first worker, which Ray has read in its import.

    Ray knows only the program that it has started, which lives as long as its fork: each ends when the other does.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] | None = None
        self.pids: dict[int, int] = {}  # of the forks, by the end of a pipe whose other end Ray's program has

    def serve(self, listening: socket.socket) -> _Worker | None:
        """Forks for each connection. Returns the worker in a process that was forked, None when stdin has ended."""
        while True:
            ready, _, _ = select.select([listening, sys.stdin, *self.pids], [], [])
            for pipe in list(self.pids):
                if pipe in ready or sys.stdin in ready:
                    self._end(pipe)
            if sys.stdin in ready:
                return None
            if listening not in ready:
                continue
            with suppress(OSError), listening.accept()[0] as connection:  # otherwise Ray's worker starts as usual
                connection.settimeout(_SECONDS)
                message, files, _, _ = socket.recv_fds(connection, _LARGEST_MESSAGE, 4)
                worker = self._wanted(message, files[1:])
                child = None if worker is None else _fork()
                if child == 0:
                    listening.close()
                    connection.detach()  # stays open until this process ends
                    return worker
                for file in files[1:] if child else files:
                    os.close(file)
                if child:
                    self.pids[files[0]] = child
                    connection.send(b"forked")

    def _end(self, pipe: int) -> None:
        """Ends a fork, and what it has started, after Ray's program."""
        pid = self.pids.pop(pipe)
        for kill in os.killpg, os.kill:  # it may not have its process group yet
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)

    def _wanted(self, message: bytes, files: list[int]) -> _Worker | None:
        """The worker that a message asks for; None if it cannot be a fork of this process."""
        if not message:
            return None
        arguments, environment = json.loads(message)
        if self.environment is None:
            self.environment = environment | _ANY_JOB
            _change_environment(self.environment)
            _import(_RAY_MODULES)
        program = _program(arguments)
        if program is None or environment | _ANY_JOB != self.environment:
            return None
        return _Worker(program, environment, files)


def _import(modules: Sequence[str]) -> None:
    """Imports modules in such a way that forks share their memory: the garbage collector does not write to it."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _fork() -> int | None:
    """As os.fork; None if the system has no room for another process."""
    with warnings.catch_warnings(), suppress(OSError):
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: libraries end and restart theirs
        return os.fork()
    return None


def _change_environment(wanted: Mapping[str, str]) -> None:
    """Gives this process an environment. What stays is not written: Ray finds the title of the process beside it."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})


def _program(arguments: list[str]) -> list[str] | None:
    """The Python program of a worker, with its arguments; None if Ray has to prepare more than that."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers.setup_worker import parser

    options, program = parser.parse_known_args(arguments)
    context = RuntimeEnvContext.deserialize(options.serialized_runtime_env_context or "{}")
    return program if options.language == "PYTHON" and vars(context) == vars(RuntimeEnvContext()) else None


def _become(worker: _Worker, import_path: list[str]) -> None:
    """Runs the worker's program as a new process would."""
    os.setsid()
    for place, file in enumerate(worker.files):
        os.dup2(file, place)
        os.close(file)
    _change_environment(worker.environment)
    sys.argv, sys.path[:] = worker.program, [os.path.dirname(worker.program[0]), *import_path]
    runpy.run_path(worker.program[0], run_name="__main__")


def _main() -> None:
    listening, worker_path = socket.socket(*_KIND, fileno=int(sys.argv[1])), sys.path[1:]
    sys.path[:] = json.loads(sys.argv[2])
    _import(_MODULES)
    worker = _Forks().serve(listening)
    if worker is None:
        shutil.rmtree(Path(listening.getsockname()).parent, ignore_errors=True)
        os._exit(0)
    _become(worker, worker_path)


if __name__ == "__main__":
    _main()
