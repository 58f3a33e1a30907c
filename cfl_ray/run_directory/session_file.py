"""The address of a live run's server, for the command line: session.json in the run directory.

It is signed by the user of the run, for its folder: Ray's replies are pickles, so a command must not connect to a
cluster that is named by another user's folder or by a copy of a session file.
"""

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from cfl_ray.errors import ConfigError, DataError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.security.signing import is_signed, sign
from cfl_ray.system.files import read_json, write_json

NAMESPACE = "cfl_ray"
_PURPOSE = "address of a live run's server"


@dataclass(frozen=True)
class ServerAddress:
    """The address of the server of a live run."""

    address: str  # of the Ray cluster
    actor: str  # name of the server actor in NAMESPACE
    auth_mode: str  # RAY_AUTH_MODE of the driver, "" if it was not set
    loopback: bool  # the cluster was started for this run and listens on loopback only
    host: str
    pid: int  # of the driver

    @classmethod
    def here(cls, address: str, actor: str, loopback: bool = False) -> "ServerAddress":
        """The address of a server whose driver is this process."""
        return cls(address, actor, os.environ.get("RAY_AUTH_MODE", ""), loopback, socket.gethostname(), os.getpid())


def cluster_address(configured: str | None) -> str | None:
    """The Ray cluster to join; None: a cluster is started on this machine for the run."""
    address = configured or os.environ.get("RAY_ADDRESS") or ("auto" if "RAY_JOB_ID" in os.environ else None)
    return None if address == "local" else address


def publish_server(run_dir: Path, server: ServerAddress) -> None:
    """Writes session.json, readable by its owner only. Without a key it is not written, and live commands fail."""
    values = asdict(server)
    if signature := sign(_PURPOSE, run_dir, values):
        write_json(RunDirectory(run_dir).session, values | {"signature": signature})


def withdraw_server(run_dir: Path) -> None:
    """Removes session.json."""
    RunDirectory(run_dir).session.unlink(missing_ok=True)


def read_server_address(run_dir: Path) -> ServerAddress | None:
    """The address in session.json; None if the file does not exist.

    Raises ConfigError if another user wrote it, or if it was written for another folder.
    """
    file = RunDirectory(run_dir).session
    try:
        values = read_json(file)
    except DataError:
        values = {}  # an unreadable file is not signed
    if values is None:
        return None
    signature = values.pop("signature", "")
    if not is_signed(_PURPOSE, run_dir, values, signature):
        raise ConfigError(
            f"{file} was not written by you in this folder, so its cluster is not contacted; give the key of the user "
            "who started the run (CFL_RAY_KEY or CFL_RAY_KEY_FILE), or remove the file if no run is live there"
        )
    return ServerAddress(**values)
