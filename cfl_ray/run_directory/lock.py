"""Whether a run is live: its driver holds a lock on a file, which the system releases when the process ends."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cfl_ray.errors import RunError, command
from cfl_ray.system.files import open_private

_LOCK_SECONDS = 2  # `is_held` holds the lock for an instant


@contextlib.contextmanager
def hold(file: Path) -> Iterator[None]:
    """Marks the run or the study of this file as live. Raises RunError if it is live already."""
    with open_private(file, "r+b") as held:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _locked(held, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise RunError(f"{file.parent} is live already; see it with: {command('status', file.parent)}")
            time.sleep(0.05)
        yield


def is_held(file: Path) -> bool:
    """Whether a process holds the run or the study of this file."""
    with open_private(file, "rb") as held:
        return not _locked(held, fcntl.LOCK_SH)


def _locked(file: BinaryIO, how: int) -> bool:
    """Takes the lock if it is free, and returns whether it was; closing the file releases it."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
