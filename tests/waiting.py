"""Waiting for other processes."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], message: Callable[[], str] = str, seconds: float = 300, pause: float = 0.02) -> T:
    """Waits for a true value of `condition()` and returns it. The limit only bounds a test that fails.

    message: what happened instead.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {message()}"
        time.sleep(pause)
    return found
