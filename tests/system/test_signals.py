"""SIGTERM ends a run as Ctrl-C does, and no Ctrl-C is lost."""

import os
import signal
import sys
import threading

import pytest

from cfl_ray.system.signals import interrupt_held, interrupts_noted, raise_interrupt, sigterm_interrupts


def test_sigterm_is_an_interrupt_only_within():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 5)  # the handler runs by now
    assert signal.getsignal(signal.SIGTERM) is before


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
