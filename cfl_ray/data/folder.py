"""Folders of files, on this machine or on any filesystem that pyarrow knows, with checks for damaged files."""

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
_CACHE_GB = 50.0
_IN_USE_SECONDS = 3600
_PAUSES = (0.5, 1.0, 2.0)  # seconds, before a file of another file system is read again
_FILESYSTEM_ERRORS = (pa.ArrowException, OSError, ValueError, ImportError)


@dataclass(frozen=True)
class Folder:
    """A folder by its path or URI; pickles as that text."""

    uri: str

    @property
    def local(self) -> Path | None:
        """Its path on this machine; None if files have to be fetched."""
        if not re.match(r"[a-z][a-z0-9+.-]+://", self.uri):
            return Path(self.uri).expanduser().absolute()
        filesystem, path = self._remote()
        return Path(path) if isinstance(filesystem, fs.LocalFileSystem) else None

    def child(self, name: str) -> "Folder":
        """Returns a folder in this folder; a URI keeps its query (S3 regions, endpoints)."""
        if (local := self.local) is not None:
            return Folder(str(local / name))
        path, mark, query = self.uri.partition("?")
        return Folder(f"{path.rstrip('/')}/{name}{mark}{query}")

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small file, None if there is none."""
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
        """Returns the path on this machine of a file of this size, fetched if necessary.

        Its sha256 is checked when it is fetched, and always with `verify`. Raises DataError for a missing or damaged
        file.
        """
        local = self.local
        if local is not None:
            path = local / name
            if not path.is_file():
                raise DataError(f"{path} is missing; {PREPARE_AGAIN}")
            check(path, size, sha256 if verify else None)
            return path
        cached = cache() / f"{sha256}.arrow"

        def is_there() -> bool:
            if not cached.is_file() or cached.stat().st_size != size:
                return False
            with suppress(OSError):  # another user's
                os.utime(cached, ns=(time.time_ns(), cached.stat().st_mtime_ns))  # used now
            return True

        if not is_there():
            locks = cache() / "locks"
            locks.mkdir(parents=True, exist_ok=True)
            with FileLock(locks / sha256):  # of the processes of a machine, one fetches and the others wait
                if not is_there():
                    make_room(size)
                    self._fetch(name, cached, size, sha256)
        elif verify:
            check(cached, size, sha256)
        return cached

    def put(self, source: Path, names: Iterable[str]) -> None:
        """Copies these files of a local folder into this one, in this order."""
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
    """The result of `read`, tried again after a pause if that fails for another reason than a missing file."""
    for pause in _PAUSES:
        try:
            return read()
        except FileNotFoundError:
            raise
        except (OSError, DataError):  # a request that failed, or a file that came damaged
            time.sleep(pause)
    return read()


@functools.lru_cache
def _open_uri(uri: str) -> tuple[fs.FileSystem, str]:
    filesystem, path = fs.FileSystem.from_uri(uri)
    return filesystem, path.rstrip("/")


def check(path: Path, size: int, sha256: str | None, name: str | None = None) -> None:
    """Raises DataError if a file differs from what was written; `sha256` None: checks only its size."""
    found: object = path.stat().st_size
    expected: object = size
    what = "bytes"
    if found == expected and sha256 is not None:
        found, expected, what = files.sha256(path), sha256, "sha256"
    if found != expected:
        raise DataError(f"{name or path} is damaged: expected {what} {expected}, found {found}; {PREPARE_AGAIN}")


def make_room(size: int) -> None:
    """Removes the files of the cache that were used least recently, so that with `size` bytes more it keeps its limit.

    Files that were used in the last hour stay: a run may need them again. Processes that have mapped a file keep it.
    """
    limit = float(os.environ.get("CFL_RAY_CACHE_GB", _CACHE_GB)) * 1e9
    kept = sorted(((file.stat(), file) for file in cache().glob("*.arrow")), key=lambda one: one[0].st_atime)
    total = size + sum(found.st_size for found, _ in kept)
    for found, file in kept:
        if total <= limit or found.st_atime > time.time() - _IN_USE_SECONDS:
            return
        file.unlink(missing_ok=True)
        total -= found.st_size


def cache() -> Path:
    """Returns the folder of fetched files, named by their content: CFL_RAY_CACHE, or cfl_ray in the user's cache."""
    if named := os.environ.get("CFL_RAY_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cfl_ray"
