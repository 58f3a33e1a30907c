"""Files that a crash or a full disk leaves whole: the old content or the new one, never a part."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from cfl_ray.core.errors import DataError


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces `path` in one step; what was there stays until the new content is on disk."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """The same for any text. mode: who may read and write the file, less what the umask forbids."""
    with drafted(path) as draft, open(draft, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """A file to write, which replaces `path` at the end, or is gone where writing it failed."""
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in `path`, None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); restore it, or remove it to start its part afresh") from error


def append_line(file: BinaryIO, line: bytes) -> None:
    """Appends the whole line to an unbuffered file or, on a full disk, none of it."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    except OSError:
        os.ftruncate(file.fileno(), size)
        raise


def cut_torn_line(path: Path) -> None:
    """Removes what follows the last line end: a crash in mid-write left it, and the replayed round writes it again."""
    if not path.exists():
        return
    whole = path.read_bytes().rfind(b"\n") + 1
    if whole < path.stat().st_size:
        os.truncate(path, whole)
