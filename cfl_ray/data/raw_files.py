"""The raw files from which shards are made, known by their content.

Digests are taken as the files are read, and kept in an index beside the shards. As in git's index, a file is read
again only if its size, times or inode changed; one that changed shortly before its digest was taken is not in the
index, since it may have changed once more without a new time.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from cfl_ray.errors import ConfigError, DataError
from cfl_ray.system.files import SHARED, read_file, write_text

_FORMAT = "cfl_ray raw files 1"
_COARSEST_NS = 2_000_000_000  # of the times that a file system keeps, those of FAT


class FileState(NamedTuple):
    """Values of which one differs if a file has changed."""

    size: int
    modified: int  # ns
    changed: int  # ns, of its content, name, owner or mode; no user can set it
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        """The state that `os.stat` found."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class DigestIndex:
    """Digests of the files below the folder `root` as of earlier runs.

    It is a cache: without the file, or if it is damaged or cannot be written, digests are taken again. The file has two
    lines, of which the second is read only if a file has changed.
    """

    def __init__(self, folder: Path, root: str) -> None:
        self.root = root
        name = hashlib.sha256(root.encode(errors="surrogateescape")).hexdigest()[:16]
        self.file = folder / f"raw-{name}.json"
        self.listing: list[str] = []  # digests of the states of all files of a data set, and of their contents
        self.shards: dict[str, list[str]] = {}  # digests of the contents, by name of shards that recorded none
        self._second_line: bytes | None = b"{}"
        self._files: dict[str, list[int | str]] = {}
        try:
            first, _, second = (read_file(self.file) or b"").partition(b"\n")
            header = json.loads(first)
            is_ours = header["format"] == _FORMAT and header["root"] == root
            listing, shards = header["listing"], header["shards"]
            if is_ours and isinstance(listing, list) and all(isinstance(known, list) for known in shards.values()):
                self.listing, self.shards, self._second_line = listing, shards, second
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError, DataError):
            pass  # damaged, or not there

    @property
    def files(self) -> dict[str, list[int | str]]:
        """The numbers of `FileState` and the sha256 of each file, by its path below `root`."""
        if self._second_line is not None:
            with suppress(ValueError, AttributeError, RecursionError):  # damaged
                entries = json.loads(self._second_line)
                if all(isinstance(entry, list) and len(entry) == 5 for entry in entries.values()):
                    self._files = entries
            self._second_line = None
        return self._files

    @files.setter
    def files(self, entries: dict[str, list[int | str]]) -> None:
        self._files, self._second_line = entries, None

    def save(self) -> bool:
        """Replaces the file. Returns False without permission or room."""
        header = {"format": _FORMAT, "root": self.root, "listing": self.listing, "shards": self.shards}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, f"{json.dumps(header)}\n{json.dumps(self.files, separators=(',', ':'))}\n", SHARED)
        except (OSError, ConfigError, UnicodeError):
            return False
        return True


class RawFiles:
    """The files of a data set, with their states and digests.

    paths: of the files. names: their paths below the folder `root`, which belong to the content, since they may name
    classes. states: as `FileState.of` found them.
    """

    def __init__(self, root: str, paths: Sequence[str], names: Sequence[str], states: Sequence[FileState]) -> None:
        self.root, self.paths = root, tuple(paths)
        self._names, self._states = list(names), list(states)
        self._digests: list[str | None] = [None] * len(self.paths)
        self._taken: dict[int, int] = {}  # time before its digest was taken here, ns, by place
        self._of_listing: str | None = None  # the digest of all contents, if an index has it for these states

    @classmethod
    def of(cls, files: Sequence[Path]) -> "RawFiles":
        """These files; `root` is the deepest folder that has them all. Raises DataError for a file that is missing."""
        paths = [os.path.abspath(file) for file in files]
        root = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [os.path.relpath(path, root) for path in paths]
        return cls(root, [os.fspath(file) for file in files], names, [_state(os.fspath(file)) for file in files])

    @cached_property
    def _place(self) -> dict[str, int]:
        return {path: place for place, path in enumerate(self.paths)}

    @property
    def sizes(self) -> list[list[str | int]]:
        """[name without folders, bytes] of each file."""
        return [[name.rpartition("/")[2], state.size] for name, state in zip(self._names, self._states, strict=True)]

    def recall(self, index: DigestIndex) -> None:
        """Takes over the digests of files that have not changed since."""
        if index.listing[:1] == [self._listing()]:
            self._of_listing = index.listing[-1]
            return
        for place, (name, state) in enumerate(zip(self._names, self._states, strict=True)):
            if (entry := index.files.get(name)) is not None and entry[:4] == [*state]:
                self._digests[place] = str(entry[4])

    def other(self, index: DigestIndex) -> list[str]:
        """Names of the files that had another content when their digests were put into the index."""
        digests = zip(self._names, self._digests, strict=True)
        return [name for name, digest in digests if digest and index.files.get(name, [digest])[-1] != digest]

    def keep(self, index: DigestIndex) -> bool:
        """Puts the digests that were taken here into the index. Returns whether it has changed."""
        if not self._taken:
            return False
        names, entries = set(self._names), index.files
        kept = {
            name: entry for name, entry in entries.items() if name in names or os.path.exists(f"{self.root}/{name}")
        }
        is_whole = True
        for place, digest in enumerate(self._digests):
            state = self._states[place]
            if digest is not None and state.changed + _COARSEST_NS < self._taken.get(place, state.changed + 10**18):
                kept[self._names[place]] = [*state, digest]
            else:
                is_whole = False
                kept.pop(self._names[place], None)
        index.files, index.listing = kept, [self._listing(), self.digest()] if is_whole else []
        return True

    def _listing(self) -> str:
        """A digest of the names and states of all files."""
        states = zip(self._names, self._states, strict=True)
        # as `tuple` is printed, in less time
        lines = [f"{name}\0({size}, {made}, {changed}, {inode})\n" for name, (size, made, changed, inode) in states]
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    def read(self, file: str | Path) -> bytes:
        """The content of one of the files, whose digest is taken. Raises DataError if it is missing or changes."""
        path, taken = os.fspath(file), time.time_ns()
        try:
            with open(path, "rb") as stream:
                before = FileState.of(os.fstat(stream.fileno()))
                content = stream.read()
                after = FileState.of(os.fstat(stream.fileno()))
        except OSError as error:
            raise _unreadable(path, error) from error
        self._record(self._place[path], taken, before, after, hashlib.sha256(content).hexdigest())
        return content

    def digest(self) -> str:
        """The sha256 of the contents and of their paths below `root`; files whose digest is not known are read."""
        if self._of_listing is not None:
            return self._of_listing
        for place, path in enumerate(self.paths):
            if self._digests[place] is None:
                self._take(place, path)
        lines = (f"{name}\0{digest}\n" for name, digest in zip(self._names, self._digests, strict=True))
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    def check_unchanged(self) -> None:
        """Raises DataError if a file has changed since its digest was taken."""
        for path, state in zip(self.paths, self._states, strict=True):
            if _state(path) != state:
                raise _changed(path)

    def _take(self, place: int, path: str) -> None:
        taken = time.time_ns()
        try:
            with open(path, "rb") as stream:
                before = FileState.of(os.fstat(stream.fileno()))
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                after = FileState.of(os.fstat(stream.fileno()))
        except OSError as error:
            raise _unreadable(path, error) from error
        self._record(place, taken, before, after, digest)

    def _record(self, place: int, taken: int, before: FileState, after: FileState, digest: str) -> None:
        if before != after or (place in self._taken and digest != self._digests[place]):
            raise _changed(self.paths[place])
        self._states[place], self._digests[place], self._of_listing = before, digest, None
        self._taken.setdefault(place, taken)


def _state(path: str) -> FileState:
    try:
        return FileState.of(os.stat(path))
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}")


def _changed(path: str) -> DataError:
    return DataError(f"{path} has changed while the data set was read; run again when all its files are written")
