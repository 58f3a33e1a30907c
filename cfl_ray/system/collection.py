"""Python's cyclic garbage collection, which imports and the end of a process do without."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Context, also a decorator, without searches for garbage: those take a third of the time of 100,000 small objects.

    Its block makes no cycles of objects worth a search.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def uncollected() -> Iterator[None]:
    """Context of imports during which nothing is collected, a tenth of the time; later collections skip the modules.

    The collector finds next to nothing in modules.
    """
    with paused_collection():
        try:
            yield
        finally:
            gc.freeze()


def skip_last_collections() -> None:
    """Lets Python end without looking for cycles among all objects, which takes a second."""
    if "triton" not in sys.modules:  # which prints what is left
        gc.freeze()
