"""Signals that end a run or a study."""

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# not a threading.Event, see `Flag`
_interrupted = False
_held = False
_IMPORTS = "<frozen importlib._bootstrap>"  # the file of the code with the locks of imports


@contextmanager
def interrupts_noted() -> Iterator[None]:
    """Context in which Ctrl-C raises KeyboardInterrupt as usual, and is noted for `raise_interrupt`."""
    global _interrupted
    _interrupted = False
    in_main = threading.current_thread() is threading.main_thread()  # only the main thread may set handlers
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # an application's own
        yield
        return
    report = sys.unraisablehook

    def report_others(ignored: "sys.UnraisableHookArgs") -> None:
        if not (_interrupted and ignored.exc_type is KeyboardInterrupt):  # `raise_interrupt` raises it later
            report(ignored)

    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = report_others
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = report
        _interrupted = False


@contextmanager
def interrupt_held() -> Iterator[None]:
    """Context within `interrupts_noted` whose end raises the KeyboardInterrupt of a Ctrl-C; a second one is not held.

    For code that starts processes: Python ignores a KeyboardInterrupt in a callback of a fork, and then a lock of
    `logging` stays taken, on which other threads wait for ever.
    """
    global _held
    _held = True
    try:
        yield
    finally:
        _held = False
    raise_interrupt()


def raise_interrupt() -> None:
    """Raises KeyboardInterrupt if there was a Ctrl-C since `interrupts_noted` began.

    For places that no KeyboardInterrupt leads to, unless code of others has ignored it: some modules ignore all errors
    of an import, and Python ignores those of finalizers.
    """
    if _interrupted:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    if repeats_later(number, frame):
        return
    again, _interrupted = _interrupted, True
    if again or not _held:
        signal.default_int_handler(number, frame)


def repeats_later(number: int, frame: FrameType | None) -> bool:
    """For a handler that raises KeyboardInterrupt: whether it must not do so now, and is called again in 10 ms.

    Python is about to acquire or release a lock of an import, which an exception would leave held: from then on all
    other threads would wait in their imports for ever.
    """
    if frame is None or frame.f_code.co_filename != _IMPORTS:
        return False
    _thread.start_new_thread(_repeat, (number,))
    return True


def _repeat(number: int) -> None:
    time.sleep(0.01)
    # a signal, unlike `_thread.interrupt_main`, also wakes a main thread that sleeps or waits by then
    main = threading.main_thread().ident
    assert main is not None, "it runs"
    signal.pthread_kill(main, number)


def _terminate(number: int, frame: FrameType | None) -> None:
    if not repeats_later(number, frame):
        signal.default_int_handler(number, frame)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Context in which SIGTERM, which stops a submitted job, raises KeyboardInterrupt as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Context at whose end SIGTERM has its handler of before, for code of others that replaces it, such as `ray.init`.

    Python's own is set anew even if it seems unchanged: Ray replaces it below Python, too. The default is not restored.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class Flag:
    """As threading.Event, for a main thread that a signal may interrupt within `set`.

    An Event has a lock, which stays held if KeyboardInterrupt arises between the lock and its `with` block: everything
    that uses the Event afterwards waits for ever. Here, a thread that waits is woken by a lock that any `set` releases.
    """

    def __init__(self) -> None:
        self._is_set, self._asleep = False, threading.Lock()
        self._asleep.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with suppress(RuntimeError):  # it is released already
            self._asleep.release()

    def clear(self) -> None:
        """For a flag with one waiting thread, which calls it."""
        self._is_set = False
        self._asleep.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the flag is set, at most `timeout` seconds. Returns whether it is set."""
        if not self._is_set and self._asleep.acquire(timeout=-1 if timeout is None else timeout):
            with suppress(RuntimeError):  # `set` again meanwhile
                self._asleep.release()  # for a later wait
        return self._is_set
