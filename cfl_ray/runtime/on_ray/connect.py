"""Joining or starting a Ray cluster, with errors that a user can act on. Fast to import."""

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import node, ray_constants
from ray.exceptions import RayError, RayTaskError

from cfl_ray.engine.failure import may_be_machine
from cfl_ray.errors import ConfigError, RunError, UserError
from cfl_ray.run_directory.session_file import cluster_address
from cfl_ray.runtime.on_ray.fork_server import SOCKET_VARIABLE, WORKER_PROGRAM, fork_server
from cfl_ray.runtime.on_ray.host_actor import host_environment
from cfl_ray.system.machine import usable_cpus
from cfl_ray.system.signals import interrupt_held
from cfl_ray.system.variables import environment

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
_CONNECT_SECONDS = 10
_fork_server = ExitStack()  # of the cluster that this process has started
# how often Ray tries to reach a cluster: 20 times by default, each up to 40 s
_WAIT_VARIABLE = "RAY_gcs_server_port_wait_time_s"


def connect(address: str | None, hosts: int | None = None, instructions: str | None = None) -> bool:
    """Joins the cluster at `address` (or RAY_ADDRESS), or starts a cluster for this run on loopback.

    instructions: those of a cluster that is started (runtime.cpu_capability).
    Returns whether a cluster was started. Raises ConfigError if the cluster cannot be joined, RunError if none starts.
    """
    if ray.is_initialized():
        return False
    address = cluster_address(address)
    if address is None:
        try:
            with _loopback_only():
                start_cluster(max(hosts or 0, usable_cpus()), instructions)
        except (KeyboardInterrupt, UserError):
            end_cluster()
            raise
        except Exception as error:  # of no class of its own, for example after 30 s on a machine that is too busy
            end_cluster()
            advice = "if it is busy, try again later"
            if isinstance(error, OSError) and Path(str(error.filename)).is_relative_to(os.path.expanduser("~")):
                advice = "it keeps its token below HOME: set HOME to a folder in which you can write"
            raise RunError(f"Ray does not start on this machine ({short_reason(error)}); {advice}") from error
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


def start_cluster(cpus: int, instructions: str | None = None, gpus: int | None = None) -> None:
    """Starts a cluster and joins it; `end_cluster` ends it. Raises ConfigError if others can enter its folder.

    gpus: None: those of this machine.
    """
    folder = session_folder()
    with (
        _small_head(),
        interrupt_held(),
        host_environment(instructions),
        environment(_fork_server.enter_context(fork_server(folder.parent))),
    ):
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
            **_QUIET,
        )


def end_cluster() -> None:
    """Ends the cluster that this process has started."""
    ray.shutdown()
    _fork_server.close()


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


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Context in which Ray listens on 127.0.0.1 only; otherwise Ray replaces it by an address that others can reach."""
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


class _SmallHead(node.Node):
    """Ray's head without processes that no run uses: 0.2 GB, and 4 s of CPU when it starts.

    They serve the dashboard's pages, ask clouds for machines and copy the output of processes to drivers.
    """

    def __init__(self, ray_params: Any, *arguments: Any, **options: Any) -> None:
        if SOCKET_VARIABLE in os.environ:
            ray_params.setup_worker_path = WORKER_PROGRAM
        super().__init__(ray_params, *arguments, **options)

    def start_api_server(self, **options: object) -> None:
        self._webui_url = ""  # as of include_dashboard=False, which starts a process without pages

    def start_monitor(self) -> None:
        pass

    def start_log_monitor(self) -> None:
        pass


@contextmanager
def _small_head() -> Iterator[None]:
    """Context in which Ray starts a `_SmallHead`."""
    module: Any = node
    before, module.Node = module.Node, _SmallHead
    try:
        yield
    finally:
        module.Node = before


def join_cluster(address: str, loopback: bool = False) -> None:
    """Joins a cluster. Raises within seconds (Ray tries for minutes) if there is none or it refuses the token."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    wait = {_WAIT_VARIABLE: os.environ.get(_WAIT_VARIABLE, "1")}  # it would also limit the start of this run's cluster
    with environment(wait), _loopback_only() if loopback else nullcontext():
        ray.init(address=address, **_QUIET)


def as_user_error(error: RayTaskError) -> UserError:
    """An actor's error as an error that a user can act on."""
    cause = error.cause
    if isinstance(cause, UserError):
        return cause
    return RunError(f"{type(cause).__name__}: {cause}")


def may_be_host(error: RayTaskError) -> bool:
    """Whether an error in a host may be due to its machine or its place in the cluster, not to the user's code."""
    return isinstance(error.cause, RayError) or may_be_machine(error.cause)


def short_reason(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
