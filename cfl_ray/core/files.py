"""Files that keep either the old or the whole new content when the process crashes or the disk is full."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from cfl_ray.core.errors import DataError

# ---- whole files


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Context with a draft file to write, which replaces `path` in one step at the end, and is removed on an error."""
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Replaces `path` in one step, once the new content is on the disk.

    mode: permission bits of the file, less those that the umask forbids.
    """
    with (
        drafted(path) as draft,
        open(draft, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file,
    ):
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces `path` by a JSON object, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None if there is no such file. Raises DataError if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); restore it, or remove it to start its part afresh") from error


# ---- files that grow line by line


def append_line(file: BinaryIO, line: bytes) -> None:
    """Appends the line to an unbuffered file; on a full disk, appends nothing and raises OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    except OSError:
        os.ftruncate(file.fileno(), size)
        raise


def cut_torn_line(path: Path) -> None:
    """Removes an incomplete last line, left by a crash; the round that is repeated writes it again."""
    if not path.exists():
        return
    whole = path.read_bytes().rfind(b"\n") + 1
    if whole < path.stat().st_size:
        os.truncate(path, whole)


# ---- any file


def sync(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    """SHA-256 of the content, in hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
