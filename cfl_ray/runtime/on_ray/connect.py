"""Joining or starting a Ray cluster, with errors that a user can act on. Fast to import."""

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from cfl_ray.engine.failure import may_be_machine
from cfl_ray.errors import ConfigError, RunError, UserError, class_and_text, notes_of, text_of
from cfl_ray.run_directory.session_file import cluster_address
from cfl_ray.runtime.on_ray import ray_internals
from cfl_ray.runtime.on_ray.fork_server import WORKER_PROGRAM, end_unused, fork_server
from cfl_ray.runtime.on_ray.host_actor import host_environment
from cfl_ray.runtime.on_ray.tls import SWITCH, check_tls, own_context, uses_tls
from cfl_ray.system.machine import usable_cpus
from cfl_ray.system.signals import interrupt_held, sigterm_kept
from cfl_ray.system.variables import environment

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 10  # limit for a cluster to accept a connection
_TRIES = 2  # Ray gives up a start after half a minute, which a busy machine may take
_fork_server = ExitStack()  # of the cluster that this process has started
_LONGEST_SOCKET = "session_2026-11-30_23-59-59_999999_{pid}/sockets/plasma_store"  # of Ray, below its folder
_SOCKET_BYTES = 107  # longest path of a socket on Linux
_ROOM_BYTES = 20e6  # a run of a minute writes one or two MB
# how often Ray tries to reach a cluster: 20 times by default, each up to 40 s
_WAIT_VARIABLE = "RAY_gcs_server_port_wait_time_s"


def connect(
    address: str | None,
    hosts: int | None = None,
    instructions: str | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> bool:
    """Joins the cluster at `address` (or RAY_ADDRESS), or starts a cluster for this run on loopback.

    instructions: those of a cluster that is started (runtime.cpu_capability).
    warn: shows a line to the user, if a cluster is started in another way than usual.
    Returns whether a cluster was started. Raises ConfigError if the cluster cannot be joined, RunError if none starts.
    """
    if ray.is_initialized():
        return False
    address = cluster_address(address)
    if address is None:
        try:
            own_context()  # else Ray's processes fail one after the other, without a word on the certificate
            with ray_internals.loopback_only():
                start_cluster(max(hosts or 0, usable_cpus()), instructions, warn=warn)
        except UserError:
            raise
        except Exception as error:
            advice = "if it is busy, try again later"
            if isinstance(error, OSError) and Path(str(error.filename)).is_relative_to(os.path.expanduser("~")):
                advice = "it keeps its token below HOME: set HOME to a folder in which you can write"
            elif uses_tls():
                advice += f"; {SWITCH} is set, so the certificate must name {_LOOPBACK}: unset it for one machine"
            raise RunError(f"Ray does not start on this machine ({short_reason(error)}); {advice}") from error
        if not listens_on_loopback():
            mode = os.environ.get("RAY_AUTH_MODE", "not set")
            warn(
                f"Ray {ray.__version__} listens on all addresses of this machine, not on loopback only; only "
                f"RAY_AUTH_MODE=token keeps others out (it is {mode})"
            )
        return True
    try:
        join_cluster(address)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"no Ray cluster at {address} that takes this driver ({short_reason(error)}); "
            "start one with `ray start --head` (RAY_AUTH_MODE and the token must be the same here and there), "
            "or leave out runtime.address and RAY_ADDRESS to run on this machine"
        ) from error
    return False


def start_cluster(
    cpus: int,
    instructions: str | None = None,
    gpus: int | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> None:
    """Starts a cluster and joins it; `end_cluster` ends it. Of one that does not start nothing is left.

    Raises ConfigError if others can enter its folder, RunError if the folder does not do (`_check_room`).

    gpus: None: those of this machine.
    warn: as in `connect`.
    """
    folder = session_folder()
    _check_room(folder)
    if why := ray_internals.why_not():
        end_unused()
        warn(why)
    before = set(psutil.Process().children())
    for left in reversed(range(_TRIES)):
        try:
            return _start(folder, cpus, gpus, instructions, forked=not why)
        except BaseException as error:
            end_cluster()
            _end_processes(folder, before)
            busy = type(error) is Exception and not uses_tls()  # else a certificate may be why
            if not left or not busy:
                raise
            warn(f"Ray has not started ({short_reason(error)}); it is tried again")


def _start(folder: Path, cpus: int, gpus: int | None, instructions: str | None, forked: bool) -> None:
    """Starts a cluster with its sessions in a folder. forked: its workers are forks."""
    workers = _forked_workers(folder.parent) if forked else nullcontext()
    with interrupt_held(), sigterm_kept(), host_environment(instructions), workers:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            _node_ip_address=_LOOPBACK,
            _temp_dir=str(folder),
            **_QUIET,
        )


def end_cluster() -> None:
    """Ends the cluster that this process has started."""
    ray.shutdown()
    _fork_server.close()


def _end_processes(folder: Path, before: set[psutil.Process]) -> None:
    """Ends the processes of a cluster that did not start, which Ray forgets. before: children that are not of it."""
    left = []
    for child in set(psutil.Process().children()) - before:
        with suppress(psutil.NoSuchProcess):
            if str(folder) in " ".join(child.cmdline()):
                child.kill()
                left.append(child)
    psutil.wait_procs(left)


def session_folder() -> Path:
    """The session folder of this user's clusters, which Ray opens to all, in a folder that only the user can enter.

    The path is short, because a socket path in it has at most 107 bytes. Raises ConfigError if others can enter it.
    """
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / f"cfl_ray-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a folder that only you can enter; remove it, or set TMPDIR to a folder of yours"
        )
    return folder / "ray"


def _check_room(folder: Path) -> None:
    """Raises RunError if the paths of sockets in a session folder are too long, or its disk is full.

    Without room for their logs, Ray's processes die one after the other, and no error names the disk.
    """
    excess = len(os.fsencode(folder / _LONGEST_SOCKET.format(pid=os.getpid()))) - _SOCKET_BYTES
    if excess > 0:
        given, most = folder.parent.parent, len(os.fsencode(folder.parent.parent)) - excess
        raise RunError(
            f"{given} is too long for the paths of Ray's sockets: {most + excess} bytes, at most {most}; set "
            "RAY_TMPDIR to a shorter folder, such as /tmp"
        )
    if (free := shutil.disk_usage(folder.parent).free) < _ROOM_BYTES:
        raise RunError(
            f"{folder.parent} has room for {free / 1e6:.0f} MB, and the logs of Ray need {_ROOM_BYTES / 1e6:.0f} MB; "
            "make room, or set RAY_TMPDIR to a folder with more"
        )


@contextmanager
def _forked_workers(folder: Path) -> Iterator[None]:
    """Context in which Ray starts a small head whose workers are forks of a fork server with a socket in a folder."""
    variables = _fork_server.enter_context(fork_server(folder))
    with environment(variables), ray_internals.small_head(WORKER_PROGRAM if variables else None):
        yield


def listens_on_loopback() -> bool:
    """Whether the cluster that this process has started listens on loopback only."""
    return all(node["NodeManagerAddress"] == _LOOPBACK for node in ray.nodes())


def join_cluster(address: str, loopback: bool = False) -> None:
    """Joins a cluster.

    Raises within seconds (Ray tries for minutes) if there is none, or if it refuses the token; ConfigError if its TLS
    is not that of this process.
    """
    wait = {_WAIT_VARIABLE: os.environ.get(_WAIT_VARIABLE, "1")}  # it would also limit the start of this run's cluster
    with environment(wait), ray_internals.loopback_only() if loopback else nullcontext():
        is_client = address.startswith("ray://")
        target = address.removeprefix("ray://") if is_client else ray_internals.resolved(address) or address
        host, colon, port = target.rpartition(":")
        if colon and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
            check_tls(address, host.strip("[]"), int(port))
        with sigterm_kept():  # a study's process stops its runs
            ray.init(address=address, **_QUIET)


def as_user_error(error: RayTaskError) -> UserError:
    """An actor's error as an error that a user can act on."""
    cause = error.cause
    if isinstance(cause, UserError):
        return cause
    return RunError(f"{class_and_text(cause)}{notes_of(cause)}")


def may_be_host(error: RayTaskError) -> bool:
    """Whether an error in a host may be due to its machine or its place in the cluster, not to the user's code."""
    return isinstance(error.cause, RayError) or may_be_machine(error.cause)


def short_reason(error: BaseException) -> str:
    """The beginning of an error's text."""
    return (text_of(error) or type(error).__name__)[:160]
