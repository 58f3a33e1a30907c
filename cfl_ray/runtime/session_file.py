"""The address of a live run's server, for the command line: session.json in the run directory.

It is signed with the Ray token of the user who runs it, for the folder it is in: Ray's replies are pickles, so neither
a folder written by another user nor a copy of a session file must lead a command to a cluster.
"""

import hashlib
import hmac
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from cfl_ray.errors import ConfigError, DataError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import read_json

NAMESPACE = "cfl_ray"


@dataclass(frozen=True)
class ServerAddress:
    """The address of the server of a live run."""

    address: str  # of the Ray cluster
    actor: str  # name of the server actor in NAMESPACE
    auth_mode: str  # RAY_AUTH_MODE of the driver, "" where it was not set
    loopback: bool  # the cluster was started for this run and listens on loopback only
    host: str
    pid: int  # of the driver

    @classmethod
    def here(cls, address: str, actor: str, loopback: bool = False) -> "ServerAddress":
        """The address of a server whose driver is this process."""
        return cls(address, actor, os.environ.get("RAY_AUTH_MODE", ""), loopback, socket.gethostname(), os.getpid())


def cluster_address(configured: str | None) -> str | None:
    """The Ray cluster to join; None: one is to be started on this machine for the run."""
    address = configured or os.environ.get("RAY_ADDRESS") or ("auto" if "RAY_JOB_ID" in os.environ else None)
    return None if address == "local" else address


def token() -> bytes | None:
    """This user's Ray token, looked up as Ray does it; None where there is none."""
    if value := os.environ.get("RAY_AUTH_TOKEN"):
        return value.strip().encode()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_bytes().strip() or None
    except OSError:
        return None


def publish_server(run_dir: Path, session: ServerAddress) -> None:
    """Writes session.json, readable by its owner only. Without a token there is none, and no live commands."""
    if key := token():
        values = asdict(session)
        file = RunDirectory(run_dir).session
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(values | {"signature": _signature(run_dir, values, key)}, indent=1))
        draft.replace(file)


def withdraw_server(run_dir: Path) -> None:
    """Removes session.json."""
    RunDirectory(run_dir).session.unlink(missing_ok=True)


def read_server_address(run_dir: Path) -> ServerAddress | None:
    """The address in session.json, None where there is none.

    Raises ConfigError where another user wrote it, or where it was written for another folder.
    """
    file = RunDirectory(run_dir).session
    try:
        values = read_json(file)
    except DataError:
        values = {}  # what cannot be read is not signed
    if values is None:
        return None
    key = token()
    if key is None:
        raise ConfigError(
            f"{file} cannot be checked: you have no Ray token here "
            "(RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)"
        )
    signature = values.pop("signature", "")
    if not hmac.compare_digest(str(signature).encode(), _signature(run_dir, values, key).encode()):
        raise ConfigError(
            f"{file} was not written with your Ray token for this folder, so its cluster is not "
            "contacted; use the token of the user who started the run and the folder in which it runs, or remove the "
            "file if no run is live there"
        )
    return ServerAddress(**values)


def _signature(run_dir: Path, values: object, key: bytes) -> str:
    signed = json.dumps([str(run_dir.resolve()), values], sort_keys=True)
    return hmac.new(key, b"cfl_ray session\n" + signed.encode(), hashlib.sha256).hexdigest()
