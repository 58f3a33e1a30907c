"""Names that a package imports when they are first used, and imports and exits without Python's garbage collector."""

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` for a package that imports names lazily.

    modules: for the dotted name of each module, the names that the package offers from it.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def getattr_(name: str) -> Any:
        if name in module_of:
            return getattr(importlib.import_module(module_of[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def dir_() -> list[str]:
        return sorted({*module_of, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return getattr_, dir_


@contextmanager
def uncollected() -> Iterator[None]:
    """Context of imports during which nothing is collected, a tenth of the time; later collections skip the modules.

    The collector finds next to nothing in modules.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def skip_last_collections() -> None:
    """Lets Python end without looking for cycles among all objects, which takes a second."""
    if "triton" not in sys.modules:  # which prints what is left
        gc.freeze()
