"""Files that keep either the old or the whole new content when the process crashes or the disk is full."""

import errno
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from cfl_ray.errors import ConfigError, DataError

Record = TypeVar("Record")
PRIVATE, SHARED = 0o600, 0o666  # permission bits; of shared files, less those that the umask forbids

# ---- for the user alone


def private_folder(path: Path) -> None:
    """Makes a folder, and those above it that do not exist, which only the user can enter. One that exists stays."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path, mode: str) -> BinaryIO:
    """Opens a binary file without a buffer; one that does not exist is made for the user alone."""
    return cast("BinaryIO", open(path, mode, buffering=0, opener=_opener))


def _opener(name: str, flags: int) -> int:
    return os.open(name, flags, PRIVATE)


class _Umask:
    """The umask of the process, and how many threads want it to be private."""

    def __init__(self) -> None:
        self.lock, self.wanted, self.before = threading.Lock(), 0, 0

    def want(self, more: int) -> None:
        with self.lock:
            if more > 0 and self.wanted == 0:
                self.before = os.umask(0o077)
            self.wanted += more
            if self.wanted == 0:
                os.umask(self.before)


_umask = _Umask()


@contextmanager
def private_umask() -> Iterator[None]:
    """Context in which files of other packages are made for the user alone. It holds for the whole process."""
    _umask.want(1)
    try:
        yield
    finally:
        _umask.want(-1)


def user_folder() -> Path:
    """The folder of what this package keeps for the user: CFL_RAY_HOME, or cfl_ray in the user's configuration."""
    if named := os.environ.get("CFL_RAY_HOME"):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "cfl_ray"


# ---- whole files

_DEVICES = Path("/dev")  # /dev/stdout is a link, to a file where a shell redirects it


@contextmanager
def drafted(path: Path, mode: int = PRIVATE) -> Iterator[Path]:
    """Context with a draft file to write, which replaces `path` in one step at the end, and is removed on an error.

    mode: PRIVATE for what a run writes about itself, SHARED for what is made for others. Raises ConfigError where
        `path` is a folder, a device or a pipe: a device would be gone for all users of the machine.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    if path.parent.resolve() == _DEVICES or (path.exists() and not path.is_file()):
        raise ConfigError(f"{path} is a device or a pipe; name a file, which is written in one step")
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        draft.unlink(missing_ok=True)  # of a process that died, or a link that another user put there
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Replaces `path` in one step, once the new content is on the disk. mode: as in `drafted`."""
    with drafted(path, mode) as draft, open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: dict[str, Any], mode: int = PRIVATE) -> None:
    """Replaces `path` by a JSON object, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1) + "\n", mode)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO | None]:
    """Context with the file open for reading; None if there is none.

    Raises DataError if it cannot be read, or is a folder, a device or a pipe, which may have no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
    except FileNotFoundError:
        descriptor = -1
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if descriptor < 0:
        yield None
        return
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        what = os.strerror(errno.EISDIR) if stat.S_ISDIR(kind) else "it is a device or a pipe"
        raise DataError(f"{path} cannot be read: {what}")
    with open(descriptor, "rb") as file:
        yield file


def read_file(path: Path) -> bytes | None:
    """The content of `path`; None if there is no such file. Raises DataError as `opened` does."""
    with opened(path) as file:
        return None if file is None else file.read()


def read_text(path: Path) -> str | None:
    """The text in `path`, UTF-8; None if there is no such file. Raises DataError for anything else."""
    content = read_file(path)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8: {error}") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None if there is no such file. Raises DataError if it is damaged."""
    content = read_file(path)
    if content is None:
        return None
    try:
        return parse_json(content)
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); restore it, or remove it to start its part afresh") from error


def parse_json(content: str | bytes) -> dict[str, Any]:
    """The JSON object in a text. Raises ValueError for anything else."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, {{...}}, found {type(value).__name__}")
    return value


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """The dataclass that a JSON object in `path` holds; None if there is no such file. Raises DataError if damaged.

    Fields have exactly the types that the class says; others are ignored.
    """
    content = read_file(path)
    if content is None:
        return None
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise DataError(
            f"{path} is damaged ({where}: {first['msg']}); restore it, or remove it to start its part afresh"
        ) from error


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
    content = read_file(path)
    if content is not None and (whole := content.rfind(b"\n") + 1) < len(content):
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
