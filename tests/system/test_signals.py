"""SIGTERM ends a run as Ctrl-C does, and no Ctrl-C is lost."""

import _imp
import importlib
import os
import signal
import sys
import threading
import time

import pytest

from cfl_ray.system.signals import (
    Flag,
    interrupt_held,
    interrupts_noted,
    raise_interrupt,
    sigterm_interrupts,
    sigterm_kept,
)


def test_sigterm_is_an_interrupt_only_within():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 5)  # the handler runs by now
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_is_kept_from_other_code():
    """Ray also replaces it below Python, where `getsignal` does not see it."""
    with sigterm_interrupts():
        with sigterm_kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with sigterm_kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_leaves_the_handler_alone():
    seen = []

    def enter():
        with sigterm_interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)] and seen != [signal.default_int_handler]


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    signal.sigtimedwait([], 0.1)  # the handler runs by now, and may not raise


def test_an_ignored_interrupt_is_raised_later():
    with interrupts_noted():
        raise_interrupt()  # none yet
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            raise_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    raise_interrupt()  # what comes after begins without it


class PressesCtrlC:
    def __del__(self):
        press_ctrl_c()


class Fails:
    def __del__(self):
        raise ValueError


def test_an_interrupt_that_python_ignores_is_raised_later_and_not_printed(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: printed.append(ignored.exc_type))
    hook = sys.unraisablehook
    with interrupts_noted():
        PressesCtrlC()
        Fails()
        with pytest.raises(KeyboardInterrupt):
            raise_interrupt()
    assert printed == [ValueError] and sys.unraisablehook is hook


def test_an_application_keeps_its_own_handler():
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts_noted():
            press_ctrl_c()
            raise_interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_an_interrupt_is_held_once():
    with interrupts_noted():
        with pytest.raises(KeyboardInterrupt), interrupt_held():
            press_ctrl_c()
            held = True
        assert held
    with interrupts_noted(), pytest.raises(KeyboardInterrupt), interrupt_held():
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def interrupted_at(step, function):
    """Calls a function, with a KeyboardInterrupt before its instruction `step`. Returns whether it has as many."""
    left = [step]

    def trace(frame, event, argument):
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left[0] <= 0


def survives_interrupts(kind):
    """Whether a flag can be set again, and wakes a waiting thread, after an interrupt at any instruction of `set`."""
    for step in range(1, 1000):
        flag = kind()
        if not interrupted_at(step, flag.set):
            return True
        waiting = threading.Thread(target=flag.wait, daemon=True)
        waiting.start()
        again = threading.Thread(target=flag.set, daemon=True)
        again.start()
        again.join(0.5)
        waiting.join(0.5)
        if again.is_alive() or waiting.is_alive():
            return False
    raise AssertionError("`set` has no end")


def test_a_flag_is_not_locked_by_an_interrupt():
    assert survives_interrupts(Flag)
    assert not survives_interrupts(threading.Event), "then Flag is no longer needed"


def test_a_flag_waits_and_is_cleared():
    flag = Flag()
    assert not flag.wait(0.01) and not flag.is_set()
    flag.set()
    flag.set()
    assert flag.wait() and flag.wait(0) and flag.is_set()
    flag.clear()
    flag.clear()
    assert not flag.is_set() and not flag.wait(0.01)
    threading.Timer(0.05, flag.set).start()
    assert flag.wait(10)


def test_a_flag_wakes_a_thread_as_often_as_it_is_set():
    flag, seen, said = Flag(), threading.Semaphore(0), threading.Semaphore(0)

    def count():
        for _ in range(2000):
            flag.wait()
            flag.clear()
            seen.release()
            said.acquire()

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    for _ in range(2000):
        flag.set()
        assert seen.acquire(timeout=10)
        said.release()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("context, number", [(interrupts_noted, signal.SIGINT), (sigterm_interrupts, signal.SIGTERM)])
def test_an_interrupt_leaves_no_lock_of_imports_held(context, number, tmp_path, monkeypatch):
    """Another thread holds the lock as the main thread imports a module, and meanwhile the signal comes."""
    (tmp_path / "imported_in_the_test.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    held = threading.Event()

    def hold_and_interrupt():
        _imp.acquire_lock()
        held.set()
        time.sleep(0.1)  # the main thread waits for the lock
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        _imp.release_lock()

    thread = threading.Thread(target=hold_and_interrupt)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), context():
        thread.start()
        held.wait()
        importlib.import_module("imported_in_the_test")
        time.sleep(60)
    assert time.monotonic() - begun < 30, "the signal did not end the sleep"
    thread.join()
    assert not _imp.lock_held()
    assert sys.modules.pop("imported_in_the_test")
