"""Progress of deliveries to a server, for which the end of a run waits.

An attempt that failed is repeated from the start of its operation, so that answers alone would be progress for ever:
as long as a server takes the first request of an operation and refuses the second.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_BYTES_PER_SECOND = 1e5  # of the slowest line on which the end of a run waits for its files


class ServerProgress:
    """Progress of a delivery: answers that no earlier attempt at the same operation had, and files that are sent."""

    _of_process = 0  # of all deliveries of this process, which may share a line or a rate limit

    def __init__(self) -> None:
        self._answers = self._most = 0  # in this attempt; in the longest one so far
        self._sending: tuple[float, float] | None = None  # since when, and how many seconds a file may take
        self._sent = 0.0  # largest part of its seconds that a file has taken

    @property
    def value(self) -> float:
        """Grows with the progress of this delivery, and of others of this process."""
        if (sending := self._sending) is not None:
            began, seconds = sending
            self._sent = max(self._sent, min(1.0, (time.monotonic() - began) / seconds))
        return ServerProgress._of_process + self._sent

    def begin(self) -> None:
        """An operation begins, or is repeated."""
        self._answers = 0

    def answered(self) -> None:
        """The server has answered a request of the operation."""
        self._answers += 1
        if self._answers > self._most:
            self._most = self._answers
            ServerProgress._of_process += 1

    def keep(self) -> None:
        """Something is delivered and on record, so that no attempt repeats it."""
        self._answers = self._most = 0
        self._sent = 0.0
        ServerProgress._of_process += 1

    @contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """Context in which a file of `size` bytes is sent: its seconds on a slow line are progress, once."""
        self._sending = time.monotonic(), max(size, 1) / _BYTES_PER_SECOND
        try:
            yield
        finally:
            self._sending = None


class Counted:
    """An object whose methods call `answered` of a delivery's progress when they return."""

    def __init__(self, original: Any, progress: ServerProgress) -> None:
        self._original, self._progress = original, progress

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._original, name)

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            self._progress.answered()
            return result

        return call
