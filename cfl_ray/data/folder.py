"""Folders of files, on this machine or on any filesystem that pyarrow supports, with checks for damaged files."""

import functools
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from filelock import FileLock
from pyarrow import fs

from cfl_ray.errors import DataError
from cfl_ray.errors.redaction import redact
from cfl_ray.security.credentials import hides
from cfl_ray.system import files

PREPARE_AGAIN = "delete the folder and run `cfl-ray prepare` again"
_Read = TypeVar("_Read")
_CACHE_GB = 50.0  # limit of the cache without CFL_RAY_CACHE_GB
_IN_USE_SECONDS = 3600  # files that were read within this time are not removed
_PAUSES = (0.5, 1.0, 2.0)  # seconds before each further attempt to read a remote file
_FILESYSTEM_ERRORS = (pa.ArrowException, OSError, ValueError, ImportError)


@dataclass(frozen=True)
class Folder:
    """A folder, given by its path or URI."""

    uri: str

    @property
    def local(self) -> Path | None:
        """The folder's path on this machine; None if files have to be fetched."""
        if not re.match(r"[a-z][a-z0-9+.-]+://", self.uri):
            return Path(self.uri).expanduser().absolute()
        filesystem, path = self._remote()
        return Path(path) if isinstance(filesystem, fs.LocalFileSystem) else None

    def child(self, name: str) -> "Folder":
        """A subfolder. A URI's query, such as S3 regions and endpoints, is kept."""
        if (local := self.local) is not None:
            return Folder(str(local / name))
        path, mark, query = self.uri.partition("?")
        return Folder(f"{path.rstrip('/')}/{name}{mark}{query}")

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it does not exist."""
        if (local := self.local) is not None:
            return (local / name).read_bytes() if (local / name).is_file() else None
        filesystem, path = self._remote()

        def content() -> bytes:
            with filesystem.open_input_stream(f"{path}/{name}") as stream:
                return stream.read()

        try:
            return _read_again(content)
        except FileNotFoundError:
            return None
        except _FILESYSTEM_ERRORS as error:
            raise DataError(f"{self.uri}/{name} cannot be read: {self._reason(error)}") from None

    def get(self, name: str, size: int, sha256: str, verify: bool) -> Path:
        """The path of a file on this machine; a remote file is fetched if necessary.

        Its size is always checked. Its sha256 is checked when it is fetched, or if `verify` is true. Raises DataError
        for a missing or damaged file.
        """
        local = self.local
        if local is not None:
            path = local / name
            if not path.is_file():
                raise DataError(f"{path} is missing; {PREPARE_AGAIN}")
            check(path, size, sha256 if verify else None)
            return path
        cached = files.cache_folder() / f"{sha256}.arrow"

        def is_there() -> bool:
            if not cached.is_file() or cached.stat().st_size != size:
                return False
            with suppress(OSError):  # another user's file
                os.utime(cached, ns=(time.time_ns(), cached.stat().st_mtime_ns))  # marks it as used now
            return True

        if not is_there():
            locks = files.cache_folder() / "locks"
            locks.mkdir(parents=True, exist_ok=True)
            with FileLock(locks / sha256):  # other processes of this machine wait while this process fetches
                if not is_there():
                    make_room(size)
                    self._fetch(name, cached, size, sha256)
        elif verify:
            check(cached, size, sha256)
        return cached

    def put(self, source: Path, names: Iterable[str]) -> None:
        """Copies these files of the local folder `source` into this folder, in this order."""
        filesystem, path = self._remote()
        try:
            filesystem.create_dir(path, recursive=True)
            for name in names:
                with open(source / name, "rb") as file, filesystem.open_output_stream(f"{path}/{name}") as stream:
                    shutil.copyfileobj(file, stream, 1 << 22)
        except _FILESYSTEM_ERRORS as error:
            raise DataError(f"{self.uri} cannot be written: {self._reason(error)}") from None

    def _fetch(self, name: str, target: Path, size: int, sha256: str) -> None:
        filesystem, path = self._remote()
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
        target.parent.mkdir(parents=True, exist_ok=True)

        def copy() -> None:
            with filesystem.open_input_stream(f"{path}/{name}") as stream, open(partial, "wb") as file:
                shutil.copyfileobj(stream, file, 1 << 22)
            check(partial, size, sha256, f"{self.uri}/{name}")

        try:
            _read_again(copy)
            os.replace(partial, target)
        except FileNotFoundError as error:
            raise DataError(f"{self.uri}/{name} is missing; {PREPARE_AGAIN}") from error
        except _FILESYSTEM_ERRORS as error:
            raise DataError(f"{self.uri}/{name} cannot be fetched: {self._reason(error)}") from None
        finally:
            partial.unlink(missing_ok=True)

    def _remote(self) -> tuple[fs.FileSystem, str]:
        if hides(self.uri):
            raise DataError(f"the credentials of {self.uri} are not known here; name it with them, as data.shards")
        try:
            return _open_uri(self.uri)
        except _FILESYSTEM_ERRORS as error:
            raise DataError(
                f"{self.uri!r} is not a folder or URI that pyarrow can open: {self._reason(error)}"
            ) from None

    def _reason(self, error: Exception) -> str:
        """The text of an error without the credentials of this URI."""
        return redact(str(error), self.uri)


def _read_again(read: Callable[[], _Read]) -> _Read:
    """The result of `read`, which is called again after a pause if it fails, unless the file is missing."""
    for pause in _PAUSES:
        try:
            return read()
        except FileNotFoundError:
            raise
        except (OSError, DataError):  # the request failed, or the file arrived damaged
            time.sleep(pause)
    return read()


def _in_one_request(uri: str) -> str:
    """The URI with which pyarrow writes a file of less than 10 MB to S3 by one request instead of three.

    The end of an upload in parts is also what servers of S3's protocol answer differently. pyarrow knows the option
    in a URI since 21.
    """
    address, mark, options = uri.partition("?")
    known = address.startswith("s3:") and int(pa.__version__.partition(".")[0]) >= 21
    if not known or "allow_delayed_open" in options:
        return uri
    return f"{address}?{options}{'&' if mark else ''}allow_delayed_open=true"


@functools.lru_cache
def _open_uri(uri: str) -> tuple[fs.FileSystem, str]:
    filesystem, path = fs.FileSystem.from_uri(_in_one_request(uri))
    return filesystem, path.rstrip("/")


def check(path: Path, size: int, sha256: str | None, name: str | None = None) -> None:
    """Raises DataError if the size or sha256 of a file differs. sha256 None: checks only the size."""
    actual: object = path.stat().st_size
    expected: object = size
    what = "bytes"
    if actual == expected and sha256 is not None:
        actual, expected, what = files.sha256(path), sha256, "sha256"
    if actual != expected:
        raise DataError(f"{name or path} is damaged: expected {what} {expected}, got {actual}; {PREPARE_AGAIN}")


def make_room(size: int) -> None:
    """Removes the least recently used files of the cache until `size` more bytes are within its limit.

    Files that were used in the last hour are kept, since a run may need them again. A process that has mapped a file
    can read it after its removal.
    """
    limit, kept = _cache_limit(), []
    for file in files.cache_folder().glob("*.arrow"):
        with suppress(FileNotFoundError):  # another process has just removed it
            kept.append((file.stat(), file))
    total = size + sum(status.st_size for status, _ in kept)
    for status, file in sorted(kept, key=lambda pair: pair[0].st_atime):
        if total <= limit or status.st_atime > time.time() - _IN_USE_SECONDS:
            return
        file.unlink(missing_ok=True)
        total -= status.st_size


def _cache_limit() -> float:
    """Bytes of the cache at most: CFL_RAY_CACHE_GB times 1e9. Raises DataError for a text that is no number."""
    text = os.environ.get("CFL_RAY_CACHE_GB", str(_CACHE_GB))
    try:
        return float(text) * 1e9
    except ValueError:
        raise DataError(f"the environment variable CFL_RAY_CACHE_GB is {text!r}, expected a number of GB") from None
