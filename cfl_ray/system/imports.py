"""Names that a package imports when they are first used."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
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
