"""The lease on the checkpoints of a method: only the last process that took it may write, not a replaced server.

    writer.json    {"epoch": 3, "token": "..."}: number of times that the lease was taken, and a random token of the
                   last process that took it: a host that reads the same token has the same directory

A server that cannot be reached is replaced, but may still run. Its epoch is then lower than that of writer.json, so it
writes nothing more. A lock, which the system releases when a process ends, prevents taking the lease during a write.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from filelock import Timeout

from cfl_ray.checkpoint.segments import writing
from cfl_ray.errors import DataError, RunError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import lock_in_folder, private_folder, read_json, write_json

_LOCK_SECONDS = 60.0  # a manifest is written in far less


@dataclass(frozen=True)
class SharedDirectory:
    """A directory, and the token of the process that has its lease."""

    directory: Path
    token: str

    def is_here(self) -> bool:
        """Whether this process, maybe on another machine, has the same directory."""
        return (read_json(RunDirectory(self.directory).writer) or {}).get("token") == self.token


class Lease:
    """The right of this process to write the checkpoints in a directory, once it has taken it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.epoch = 0  # 0: not taken
        self.shared = SharedDirectory(directory, uuid4().hex)

    def take(self) -> None:
        """Takes the lease from the process that has it. Raises RunError if writer.json cannot be written."""
        with writing(self.directory):
            private_folder(self.directory)
            with self._lock():
                self.epoch = self._latest() + 1
                write_json(RunDirectory(self.directory).writer, {"epoch": self.epoch, "token": self.shared.token})

    def check(self) -> None:
        """Raises RunError if another process has taken the lease after this one, or if the directory is gone."""
        if not (latest := self._latest()):
            raise RunError(f"{RunDirectory(self.directory).writer} is gone, so nothing more can be saved")
        if latest != self.epoch:
            raise RunError(
                f"another server has taken over {self.directory} (epoch {latest}; this server has {self.epoch}), so "
                "this server must not write checkpoints any more; end it"
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which no other process can take the lease. Raises RunError if another process has it already."""
        with self._lock():
            self.check()
            yield

    def _latest(self) -> int:
        epoch = (read_json(RunDirectory(self.directory).writer) or {}).get("epoch", 0)
        if type(epoch) is not int or epoch < 0:
            raise DataError(f"{RunDirectory(self.directory).writer} is damaged: epoch {epoch!r:.80}; remove it")
        return epoch

    @contextmanager
    def _lock(self) -> Iterator[None]:
        file = RunDirectory(self.directory).writer_lock
        with writing(file):
            lock = lock_in_folder(file, _LOCK_SECONDS)
            try:
                lock.acquire()
            except Timeout:
                raise RunError(
                    f"{file} has been held by another server for {_LOCK_SECONDS:g} s; end that process"
                ) from None
        try:
            yield
        finally:
            lock.release()
