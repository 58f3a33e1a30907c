"""Import of code that a run has kept, beside the user's present files of the same names.

Kept files are below a folder with an index. Each of their modules has a name of its own in `sys.modules`, so that
several versions of a file can be in one process. An `import` in a kept file, also inside a function, finds the kept
files of its folder first.
"""

import builtins
import hashlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from cfl_ray.plugins.source_loader import FromSource

INDEX = "kept_code.json"  # marks the folder of kept files
KEPT = "cfl_ray_kept_"  # begins the names of their modules


def kept_root(file: Path) -> Path | None:
    """The folder of kept files that a file is in; None for a present file."""
    return next((folder for folder in file.parents if (folder / INDEX).is_file()), None)


def import_kept(file: Path) -> ModuleType:
    """The module of a kept file, imported anew if a kept file of its folder has changed."""
    folder = file.parent
    content = hashlib.sha256(str(folder).encode())
    for source in sorted(folder.rglob("*.py")):
        content.update(f"\0{source}\0".encode() + source.read_bytes())
    package = f"{KEPT}{content.hexdigest()[:16]}"
    if package not in sys.modules:
        module = ModuleType(package)
        module.__path__ = [str(folder)]
        sys.modules[package] = module
    return importlib.import_module(f"{package}.{file.stem}")


class _Loader(FromSource):
    """Gives a kept module an `import` that finds the kept files of its folder first."""

    def exec_module(self, module: ModuleType) -> None:
        package = module.__name__.partition(".")[0]
        folder = Path(sys.modules[package].__path__[0])

        def kept_import(
            name: str,
            globals: Mapping[str, object] | None = None,
            locals: Mapping[str, object] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> Any:
            top = name.partition(".")[0]
            if level or not ((folder / f"{top}.py").is_file() or (folder / top).is_dir()):
                return builtins.__import__(name, globals, locals, fromlist or (), level)
            if fromlist:
                return builtins.__import__(f"{package}.{name}", globals, locals, fromlist, 0)
            importlib.import_module(f"{package}.{name}")
            return sys.modules[f"{package}.{top}"]

        vars(module)["__builtins__"] = {**vars(builtins), "__import__": kept_import}
        super().exec_module(module)


class _Finder:
    """Finds modules of kept files, in the folder of their package."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(KEPT):
            return None
        details = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_Loader, SOURCE_SUFFIXES)
        specs = (FileFinder(folder, *details).find_spec(name) for folder in path or ())
        return next((spec for spec in specs if spec is not None), None)


sys.meta_path.insert(0, _Finder)
