"""The fork server: a process that imports PyTorch once, and forks the Ray workers of a run's own cluster.

An import of PyTorch takes two seconds of CPU and 0.3 GB, which a forked process shares. Ray starts each worker as a
new program, and lets its cluster choose this program: `fork_worker.py`, which asks the fork server for a fork.
The fork server itself is forked by the program of the run after its imports (`forkable_imports`). If it was not, or if
the environment has changed since, it is started as a new program.
"""

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, NoReturn

from cfl_ray.runtime.on_ray import ray_internals
from cfl_ray.system.collection import uncollected
from cfl_ray.system.variables import ONE_THREAD, environment

SOCKET_VARIABLE = "CFL_RAY_FORK_SERVER"  # the environment variable with the path of the socket; also in fork_worker
WORKER_PROGRAM = str(Path(__file__).with_name("fork_worker.py"))
_KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET  # a message arrives whole, with its files
_LARGEST_MESSAGE = 1 << 20  # bytes: the arguments and the environment of a worker
_STDIN = 0
_MESSAGE_SECONDS = 10.0  # limit for a message, also for that of the fork server's end
_MODULES = "cfl_ray.engine.worker", "cfl_ray.methods", "cfl_ray.runtime.round_loop"
_MODULES_OF_SOME_METHODS = ("sklearn.decomposition",)  # of the server, which imports them in a round; takes a second
_FILES = 65536  # most files that a process may have open, as Ray sets it for its own processes
_GC_THRESHOLD = gc.get_threshold()  # before a program has changed it
_ANY_JOB = {"RAY_JOB_ID": "ffffffff"}  # of workers that Ray starts before there is a job
# beginnings of the environment variables that may have changed since the fork server was forked, because PyTorch and
# NumPy do not read them in their import; scikit-learn sets the two of KMP_ in its import, also in the fork server
_READ_LATER = "RAY_", "CFL_RAY_", "MLFLOW_", "GIT_", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"
# imported in the environment of the first worker, since Ray reads it in its import
_RAY_MODULES = (
    "cfl_ray.runtime.on_ray.host_process",
    "cfl_ray.runtime.on_ray.server_process",
    ray_internals.WORKER_MODULE,
)


class _ForkServer(NamedTuple):
    """A fork server that this process has started."""

    control: socket.socket  # our end of a pair; the other end is the stdin of the fork server
    pid: int
    environment: dict[str, str]

    def end(self) -> None:
        """Asks it to end its forks and itself, and waits until it has."""
        self.control.settimeout(_MESSAGE_SECONDS)
        with self.control, suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)
            self.control.recv(1)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


_forked: list[_ForkServer] = []  # by `forkable_imports`, and not in use yet


@contextmanager
def forkable_imports() -> Iterator[None]:
    """Context of the imports with which a program begins. At its end, forks the fork server that a run will use.

    A program that has imported PyTorch before is not forked, because it may have threads, which a fork would not have.
    Nor is one that has imported Ray, because Ray reads the environment of a cluster when it is imported.
    """
    begins = sys.platform == "linux" and not {"torch", "ray"} & sys.modules.keys() and threading.active_count() == 1
    if not begins or "RAY_ADDRESS" in os.environ:
        with uncollected():
            yield
        return
    with environment(ONE_THREAD):  # as in hosts
        with uncollected():
            yield
        _import(_MODULES)
        imported_in = dict(os.environ)
    ours, theirs = socket.socketpair(*_KIND)
    with theirs:
        pid = _fork()
        if pid == 0:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for place, file in enumerate([theirs.fileno(), nowhere, nowhere]):
                os.dup2(file, place)
            for opened in (ours.fileno(), theirs.fileno(), nowhere):
                os.close(opened)
            _serve(sys.path[not sys.flags.safe_path :])
    if pid:
        _forked.append(_ForkServer(ours, pid, imported_in))
    else:
        ours.close()


def _new_program() -> _ForkServer:
    """A fork server that is started as a new program."""
    ours, theirs = socket.socketpair(*_KIND)
    with theirs:
        files = [
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
            *((os.POSIX_SPAWN_OPEN, place, os.devnull, os.O_WRONLY, 0) for place in (1, 2)),
        ]
        command = [sys.executable, __file__, json.dumps([str(entry) for entry in sys.path])]
        pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=files, setsid=True)
    return _ForkServer(ours, pid, dict(os.environ))


def _forked_or_new() -> _ForkServer:
    """The fork server of `forkable_imports`; a new program if there is none, or if its environment was another one."""
    while _forked:
        server = _forked.pop()
        if all(name.startswith(_READ_LATER) for name in _differences(server.environment, os.environ)):
            return server
        server.end()
    return _new_program()


def end_unused() -> None:
    """Ends the fork server of `forkable_imports`, which this program will not use."""
    while _forked:
        _forked.pop().end()


@contextmanager
def fork_server(folder: Path) -> Iterator[dict[str, str]]:
    """Context with a fork server. Yields the environment variables of a cluster that uses it.

    The fork server and its forks end at the end of the context, or when this process dies.

    folder: of the socket; only this user can enter it, and its path is short.
    """
    if sys.platform != "linux":  # elsewhere libraries that are loaded do not survive a fork
        yield {}
        return
    server = _forked_or_new()
    try:
        with TemporaryDirectory(prefix="fork-", dir=folder) as own_folder:
            path = str(Path(own_folder, "socket"))
            with socket.socket(*_KIND) as listening:
                listening.bind(path)
                listening.listen()
                with suppress(OSError):  # it has died: workers start as usual
                    socket.send_fds(server.control, [b"listen"], [listening.fileno()])
            yield {SOCKET_VARIABLE: path}
    finally:
        server.end()


class _Worker(NamedTuple):
    """A worker that Ray wants: its program with arguments, its environment, and its stdin, stdout and stderr."""

    program: list[str]
    environment: dict[str, str]
    files: list[int]


class _Forks:
    """The forks of the fork server. All have the environment of the first worker, which Ray read when it was imported.

    Ray knows only the program that it has started, `fork_worker.py`: this ends when its fork does, and the fork is
    ended when this does.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] | None = None
        self.pids: dict[int, int] = {}  # of the forks, by the end of a pipe whose other end Ray's program has

    def serve(self, listening: socket.socket) -> _Worker | None:
        """Forks for each connection. Returns in each fork, with its worker, and in the fork server, with None, when its
        stdin has ended.
        """
        while True:
            ready, _, _ = select.select([listening.fileno(), _STDIN, *self.pids], [], [])
            for pipe in list(self.pids):
                if pipe in ready or _STDIN in ready:
                    self._end(pipe)
            if _STDIN in ready:
                return None
            if listening.fileno() not in ready:
                continue
            with suppress(OSError), listening.accept()[0] as connection:  # otherwise Ray's worker starts as usual
                connection.settimeout(_MESSAGE_SECONDS)
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
            _change_environment(_differences(os.environ, self.environment))
            _import(_RAY_MODULES)
        program = ray_internals.program_of_worker(arguments)
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


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """The variables with another value than before; None: not set any more."""
    return {name: now.get(name) for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def _change_environment(changes: Mapping[str, str | None]) -> None:
    """Sets these variables, and deletes those whose value is None."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _serve(worker_path: list[str]) -> NoReturn:
    """Runs the fork server until its end, and in each fork the fork until its end.

    stdin is a socket; the first message on it brings the socket on which workers ask for forks.

    worker_path: `sys.path` of a new program, without the folder of the program.
    """
    try:
        with environment(ONE_THREAD):
            _import(_MODULES_OF_SOME_METHODS)
        gc.set_threshold(*_GC_THRESHOLD)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _FILES)), hard))
        control = socket.socket(*_KIND, fileno=_STDIN)
        message, files, _, _ = socket.recv_fds(control, 16, 1)
        control.detach()
        if not message:  # the driver has ended
            os._exit(0)
        listening = socket.socket(*_KIND, fileno=files[0])
        worker = _Forks().serve(listening)
        if worker is None:
            shutil.rmtree(Path(listening.getsockname()).parent, ignore_errors=True)
            os._exit(0)
        os._exit(_become(worker, worker_path))
    finally:
        os._exit(1)  # the program that was forked does not go on here


def _become(worker: _Worker, import_path: list[str]) -> int:
    """Runs the worker's program as a new process would. Returns its exit status."""
    os.setsid()
    for place, file in enumerate(worker.files):
        os.dup2(file, place)
        os.close(file)
    # sets only what differs: Ray's setproctitle finds the memory for the title by the original environment after it
    _change_environment(_differences(os.environ, worker.environment))
    sys.argv, sys.path[:] = worker.program, [os.path.dirname(worker.program[0]), *import_path]
    status = 0
    try:
        runpy.run_path(worker.program[0], run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: was closed
        stream.flush()
    return status


def _main() -> NoReturn:
    worker_path = sys.path[1:]
    sys.path[:] = json.loads(sys.argv[1])
    _import(_MODULES)
    _serve(worker_path)


if __name__ == "__main__":
    _main()
