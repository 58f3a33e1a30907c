"""Whether a run is at work, and how the command line finds its server.

The driver holds a lock on config.yaml for as long as it lives, so a run whose driver was killed is not taken for a live one. Where
its server is stands in session.json, signed with the Ray token of whoever runs it: Ray's replies are pickles, so nobody may be led
to a cluster by a folder that somebody else wrote.
"""

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cfl_ray.core.errors import ConfigError, RunError
from cfl_ray.tracking.files import read_json

CONFIG, SESSION = "config.yaml", "session.json"
NAMESPACE = "cfl_ray"
_LOCK_SECONDS = 2  # somebody who only looks holds the lock for an instant


@dataclass(frozen=True)
class Session:
    """Where the server of a live run is."""

    address: str  # of the Ray cluster
    actor: str  # name of the server actor in NAMESPACE
    auth_mode: str  # RAY_AUTH_MODE of the driver, "" where it was not set
    loopback: bool  # that cluster was started for this run, and listens on this machine's loopback alone
    host: str
    pid: int  # of the driver

    @classmethod
    def here(cls, address: str, actor: str, loopback: bool = False) -> "Session":
        return cls(address, actor, os.environ.get("RAY_AUTH_MODE", ""), loopback, socket.gethostname(), os.getpid())


def cluster_address(configured: str | None) -> str | None:
    """Address of the Ray cluster to join; None: start one on this machine for the run."""
    address = configured or os.environ.get("RAY_ADDRESS") or ("auto" if "RAY_JOB_ID" in os.environ else None)
    return None if address == "local" else address


def token() -> bytes | None:
    """This user's Ray token, from where Ray takes it; None where there is none."""
    if value := os.environ.get("RAY_AUTH_TOKEN"):
        return value.strip().encode()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_bytes().strip() or None
    except OSError:
        return None


def announce(run_dir: Path, session: Session) -> None:
    """Writes session.json, readable by its owner alone. Without a token there is none, and no live commands."""
    if key := token():
        values = asdict(session)
        draft = run_dir / f".{SESSION}.{os.getpid()}"
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(values | {"signature": _signature(values, key)}, indent=1))
        draft.replace(run_dir / SESSION)


def withdraw(run_dir: Path) -> None:
    (run_dir / SESSION).unlink(missing_ok=True)


def read_session(run_dir: Path) -> Session | None:
    """None where there is no session.json. Raises ConfigError where it was not written by this user."""
    values = read_json(run_dir / SESSION)
    if values is None:
        return None
    key = token()
    if key is None:
        raise ConfigError(f"{run_dir / SESSION} cannot be checked: you have no Ray token here (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)")
    signature = values.pop("signature", "") if isinstance(values, dict) else ""
    if not hmac.compare_digest(str(signature).encode(), _signature(values, key).encode()):
        raise ConfigError(
            f"{run_dir / SESSION} was not written with your Ray token, so it is not followed to the cluster it names; use the token of whoever started "
            "the run, or remove the file if no run is at work there"
        )
    return Session(**values)


def _signature(values: object, key: bytes) -> str:
    return hmac.new(key, b"cfl_ray session\n" + json.dumps(values, sort_keys=True).encode(), hashlib.sha256).hexdigest()


@contextlib.contextmanager
def held(config: Path) -> Iterator[None]:
    """Marks the run of this config.yaml as being at work. Raises RunError where it is already."""
    with config.open("r+") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise RunError(f"{config.parent} is at work already; see it with: cfl-ray status {config.parent}")
            time.sleep(0.05)
        yield


def at_work(config: Path) -> bool:
    """Whether a driver holds the run of this config.yaml."""
    with config.open() as file:
        return not _locked(file, fcntl.LOCK_SH)


def _locked(file, how: int) -> bool:
    """Whether the lock could be had; it goes when the file is closed, or its process ends."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
