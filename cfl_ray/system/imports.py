"""Imports of many modules without Python's cyclic garbage collector, which finds next to nothing in them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Context of imports during which nothing is collected, a tenth of the time; later collections skip the modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
