"""Reading and writing files. A file keeps its whole old content or its whole new content when a process crashes."""

import errno
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from filelock import FileLock
from pydantic import TypeAdapter, ValidationError

from cfl_ray.errors import ConfigError, DataError

Record = TypeVar("Record")
PRIVATE, SHARED = 0o600, 0o666  # permission bits; the umask takes bits away from SHARED
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_REPAIR = "restore it, or remove it to start its part afresh"


def cache_folder() -> Path:
    """The folder of what can be fetched or made again: CFL_RAY_CACHE, or cfl_ray in the user's cache."""
    if named := os.environ.get("CFL_RAY_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cfl_ray"


# ---- files that only the user can read


def private_folder(path: Path) -> None:
    """Makes a folder and its missing parents, which only the user can enter. Existing folders are not changed."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def lock_in_folder(file: Path, seconds: float) -> FileLock:
    """A lock of processes by a file. Raises FileNotFoundError without its folder, which FileLock would make."""
    if not file.parent.is_dir():  # a run that was moved: a folder with nothing but a lock would be taken for it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    return FileLock(file, timeout=seconds, mode=PRIVATE)


def open_private(path: Path, mode: str) -> BinaryIO:
    """Opens an unbuffered binary file, readable by the user only if it is new. Raises DataError for a link."""
    return cast("BinaryIO", open(path, mode, buffering=0, opener=no_link))


def no_link(name: str, flags: int) -> int:
    """An `opener` for files of the user alone. Raises DataError for a link."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW, PRIVATE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(f"{name} is a link: put the file in its place") from error
        raise


class _Umask:
    """The umask of the process, and the number of threads that need it to be private."""

    def __init__(self) -> None:
        self.lock, self.threads, self.before = threading.Lock(), 0, 0

    def want(self, more: int) -> None:
        with self.lock:
            if more > 0 and self.threads == 0:
                self.before = os.umask(0o077)
            self.threads += more
            if self.threads == 0:
                os.umask(self.before)


_umask = _Umask()


@contextmanager
def private_umask() -> Iterator[None]:
    """Context in which only the user can read new files, also those that other packages and other threads write."""
    _umask.want(1)
    try:
        yield
    finally:
        _umask.want(-1)


def user_folder() -> Path:
    """The folder of the user's credentials: CFL_RAY_HOME, or cfl_ray in the user's configuration folder."""
    if named := os.environ.get("CFL_RAY_HOME"):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "cfl_ray"


# ---- whole files

_DEVICES = Path("/dev")  # /dev/stdout is a link; if a shell redirects it, to a file


@contextmanager
def drafted(path: Path, mode: int = PRIVATE) -> Iterator[Path]:
    """Context with the path of a draft file, which replaces `path` atomically at the end. An error removes the draft.

    mode: PRIVATE for files of a run, SHARED for files that the user shares, such as exports. Raises ConfigError if
        `path` is a folder, a device or a pipe: replacing a device would remove it for all users of the machine.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    if path.parent.resolve() == _DEVICES or (path.exists() and not path.is_file()):
        raise ConfigError(f"{path} is a device or a pipe; name a file, which is written in one step")
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        draft.unlink(missing_ok=True)  # left by a process that died, or a link that another user created
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield draft
        draft.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and (
            error.filename in (draft, str(draft)) or (error.filename is None and error.errno in _FULL)
        ):
            error.filename = str(path)  # the user does not know the draft; errors of a full disk have no name
        with suppress(OSError):  # for example in a folder that is read-only
            draft.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Replaces `path` by a text atomically, after the text is on the disk. mode: see `drafted`."""
    write_bytes(path, text.encode(), mode)


def write_bytes(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """The same for bytes."""
    with drafted(path, mode) as draft, open(draft, "wb", opener=no_link) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces `path` by a JSON object, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def opened(path: Path, follow: bool = False) -> Iterator[BinaryIO | None]:
    """Context with the file open for reading, or None if it does not exist.

    follow: whether the path may be a link: true for paths that the user names; files of a run are not links.
    Raises DataError if it cannot be read, or is a link, a folder, a device or a pipe: reading these may never end.
    """
    try:
        links = 0 if follow else os.O_NOFOLLOW
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | links)  # a pipe without a writer would block
    except FileNotFoundError:
        descriptor = -1
    except (OSError, ValueError) as error:
        reason = (
            "it is a link; put the file in its place"
            if path.is_symlink() and not follow
            else getattr(error, "strerror", None) or error
        )
        raise DataError(f"{path} cannot be read: {reason}") from error
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


def read_file(path: Path, follow: bool = False) -> bytes | None:
    """The content of `path`; None if there is no such file. Raises DataError as `opened` does."""
    with opened(path, follow) as file:
        return None if file is None else file.read()


def read_text(path: Path, follow: bool = False) -> str | None:
    """The UTF-8 text in `path`; None if there is no such file. Raises DataError if it cannot be read or decoded."""
    content = read_file(path, follow)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8: {error}") from error


def read_json(path: Path, follow: bool = False) -> dict[str, Any] | None:
    """The JSON object in `path`; None if there is no such file. Raises DataError if it is damaged."""
    content = read_file(path, follow)
    if content is None:
        return None
    try:
        return parse_json(content)
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); {_REPAIR}") from error


def parse_json(content: str | bytes) -> dict[str, Any]:
    """The JSON object in a text, as a dict. Raises ValueError if the text is not a JSON object."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, {{...}}, got {type(value).__name__}")
    return value


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """The JSON object in `path` as an instance of the dataclass `kind`; None if there is no such file.

    Unknown keys are ignored. Raises DataError if a field is missing or has another type than the class declares.
    """
    content = read_file(path)
    if content is None:
        return None
    try:
        return cast(Record, _validator_of(cast(Any, kind)).validate_json(content, strict=True))
    except ValidationError as error:
        raise DataError(f"{path} is damaged ({first_problem(error)}); {_REPAIR}") from error


@cache
def _validator_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def first_problem(error: ValidationError) -> str:
    """The first field of a record that is not valid, and why, as text."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}"


# ---- files that grow line by line


def append_line(file: BinaryIO, line: bytes | memoryview) -> None:
    """Appends a line to an unbuffered file. On a full disk it appends nothing and raises OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    except OSError as error:
        error.filename = error.filename or file.name
        os.ftruncate(file.fileno(), size)
        raise


def cut_torn_line(path: Path) -> None:
    """Removes an incomplete last line, which a crash left. The resumed run repeats the round and writes it again."""
    content = read_file(path)
    if content is not None and (whole := content.rfind(b"\n") + 1) < len(content):
        with open_private(path, "r+b") as file:
            file.truncate(whole)


# ---- any file


def sync(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    """SHA-256 of the file's content, in hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_once(file: Path) -> str:
    """The same, for files of any size: read again only if the file has changed since this process read it."""
    now = os.stat(file)
    return _sha256_of_version(file, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


@lru_cache(maxsize=1024)
def _sha256_of_version(file: Path, *version: int) -> str:
    return sha256(file)
