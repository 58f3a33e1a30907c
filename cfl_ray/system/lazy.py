"""Names of a package that are imported from its modules on first use."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    modules: by dotted name of a module, the names that the package takes from it.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def getattr_(name: str) -> Any:
        if name in module_of:
            return getattr(importlib.import_module(module_of[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def dir_() -> list[str]:
        return sorted({*module_of, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return getattr_, dir_
