"""Signatures of this user, each for a folder: an HMAC with a key that only the user can read.

The key is CFL_RAY_KEY, or the content of the file that CFL_RAY_KEY_FILE names (a mounted secret), or a file in the
user's folder, which is created on first use. With the first two, a process with another home folder, such as a pod that
takes over a run, can verify the signatures.
"""

import hashlib
import hmac
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from cfl_ray.errors import ConfigError
from cfl_ray.system.files import PRIVATE, private_folder, user_folder

_BYTES = 32
_LEAST = 16  # characters of a key that the user gives


def sign(purpose: str, folder: Path, values: Any) -> str | None:
    """The signature of JSON values for a purpose, in a folder; None if the user has no key and none can be made."""
    with suppress(OSError):
        return " ".join(_signatures(purpose, folder, values, _key() or _new_key()))
    return None


def is_signed(purpose: str, folder: Path, values: Any, signature: object) -> bool:
    """Whether this user signed these values for this purpose in this folder, which may have been moved."""
    try:
        key = _key()
        pairs = zip(_signatures(purpose, folder, values, key), str(signature).split(" "), strict=True) if key else ()
        return any(hmac.compare_digest(own.encode(), given.encode()) for own, given in pairs)
    except (OSError, ValueError):
        return False


def _signatures(purpose: str, folder: Path, values: Any, key: bytes) -> list[str]:
    """The signatures for the folder's path and for its inode; a copy of the folder matches neither.

    The path is the same if another pod takes over a run, the inode is the same if the folder is moved.
    """
    signed = (["cfl_ray", purpose, place, values] for place in (str(folder.resolve()), folder.stat().st_ino))
    return [hmac.new(key, json.dumps(each, sort_keys=True).encode(), hashlib.sha256).hexdigest() for each in signed]


def _given_key() -> bytes | None:
    """The key of the environment; None if none is given. Raises ConfigError if it is unreadable or too short."""
    name = "CFL_RAY_KEY" if os.environ.get("CFL_RAY_KEY") else "CFL_RAY_KEY_FILE"
    value = os.environ.get(name)
    if not value:
        return None
    try:
        key = value.encode() if name == "CFL_RAY_KEY" else Path(value).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{name}: {value} cannot be read: {error.strerror}") from error
    if len(key) < _LEAST:
        raise ConfigError(
            f"{name}: a key has at least {_LEAST} characters, got {len(key)}; openssl rand -hex 32 makes one"
        )
    return key


def _key() -> bytes | None:
    if (given := _given_key()) is not None:
        return given
    try:
        key = (user_folder() / "key").read_bytes()
    except FileNotFoundError:
        return None
    return key if len(key) == _BYTES else None


def _new_key() -> bytes:
    """A new key, written atomically; if another process has written a key meanwhile, that key."""
    private_folder(user_folder())
    file = user_folder() / "key"
    draft = file.with_name(f".key.{secrets.token_hex(8)}")
    key = secrets.token_bytes(_BYTES)
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as out:
            out.write(key)
        if file.exists() and _key() is None:
            draft.replace(file)  # replaces an incomplete key
        else:
            with suppress(FileExistsError):
                os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    return _key() or key
