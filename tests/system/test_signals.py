"""SIGTERM ends a run as Ctrl-C does."""

import os
import signal
import threading

import pytest

from cfl_ray.system.signals import sigterm_interrupts


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
