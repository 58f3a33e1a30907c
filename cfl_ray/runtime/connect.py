"""Reaching a Ray cluster, and what its errors mean to a person. Light: the command line asks live runs with no more than this."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import ray
from ray._private import ray_constants
from ray.exceptions import RayError, RayTaskError

from cfl_ray.core.errors import ConfigError, RunError, UserError
from cfl_ray.engine.failure import ClientFailure
from cfl_ray.runtime.atwork import cluster_address

_QUIET = {"log_to_driver": False, "logging_level": "error"}
_CONNECT_SECONDS = 10
_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # how often Ray tries to reach a cluster; default 20, each up to 40 s


def connect(address: str | None, hosts: int | None = None) -> bool:
    """Joins the cluster at `address` (or RAY_ADDRESS), or starts one for this run on loopback. Returns whether it was started here."""
    if ray.is_initialized():
        return False
    address = cluster_address(address)
    if address is None:
        cpus = max(hosts or 0, len(os.sched_getaffinity(0)))
        with _loopback_only():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **_QUIET)
        return True
    try:
        join_cluster(address)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"no Ray cluster at {address} that takes this driver ({first_line(error)}); start one with `ray start --head` (RAY_AUTH_MODE and the token "
            "must be the same here and there), or leave out runtime.address and RAY_ADDRESS to run on this machine"
        ) from error
    return False


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Ray takes 127.0.0.1 for the address that other machines reach this one by, and listens there, unless it is told that there are none."""
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def join_cluster(address: str, loopback: bool = False) -> None:
    """Raises soon where there is no Ray, or one that refuses the token: Ray itself would try for minutes, which this bounds."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    before = os.environ.get(_ATTEMPTS)
    os.environ.setdefault(_ATTEMPTS, "1")
    try:
        with _loopback_only() if loopback else nullcontext():
            ray.init(address=address, **_QUIET)
    finally:
        if before is None:
            del os.environ[_ATTEMPTS]  # it would also bound the start of a cluster of our own


def told(error: RayTaskError) -> UserError:
    """What a person can use of an error that happened in an actor."""
    cause = error.cause
    if isinstance(cause, UserError):
        return cause
    if isinstance(cause, ClientFailure):
        return RunError(str(cause))
    return RunError(f"{type(cause).__name__}: {cause}")


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
