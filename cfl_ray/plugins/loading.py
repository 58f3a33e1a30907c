"""Methods, models and data from a user's own files, and from installed packages."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from cfl_ray.errors import ConfigError, did_you_mean

PREFIX = "cfl_ray_plugin_"
_NEIGHBOURS: dict[str, Path] = {}  # modules that users' files imported from their own folders, by name: the folder
_FOLDERS: dict[Path, Path] = {}  # files that a config names by relative paths: the config's folder, for messages


def note_folder(file: Path, folder: Path) -> None:
    """Keeps the folder in which a config's relative path was looked for first, for the message of a missing file."""
    _FOLDERS[file] = folder


def sent_by_value() -> list[ModuleType]:
    """The modules of users' files and of the neighbours that these import: no other machine has them."""
    return [module for name, module in sys.modules.items() if name.startswith(PREFIX) or name in _NEIGHBOURS]


def load_plugin(reference: str, kind: str) -> Any:
    """The object that `path/to/file.py:Name` refers to.

    kind: what the object is, for messages. Raises ConfigError if the file or the name is missing, or the import fails.
    """
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not file.is_file():
        looked = [_FOLDERS.get(file, Path()) / file, file]  # as a config's paths are looked for
        places = " or ".join(dict.fromkeys(str(one.absolute()) for one in looked))
        raise ConfigError(f"{kind} {reference!r}: there is no file {places}")
    module = _module(file)
    if not hasattr(module, name):
        found = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(f"{kind} {reference!r}: {file} has no {name!r}{did_you_mean(name, found)}")
    return getattr(module, name)


def entry_points_of(group: str) -> dict[str, Callable[[str], Any]]:
    """The entry points of installed packages in a group, by name. Calling one with its kind returns the object.

    Raises ConfigError, naming the package, where the import fails.
    """

    def loader(point: importlib.metadata.EntryPoint) -> Callable[[str], Any]:
        def load(kind: str) -> Any:
            try:
                return point.load()
            except Exception as error:
                package = point.dist.name if point.dist is not None else "?"
                raise ConfigError(
                    f"{kind} {point.name!r} of package {package} ({point.value}) cannot be imported: "
                    f"{type(error).__name__}: {error}"
                ) from error

        return load

    return {point.name: loader(point) for point in importlib.metadata.entry_points(group=group)}


def _module(file: Path) -> ModuleType:
    name = PREFIX + file.stem
    if name in sys.modules and sys.modules[name].__file__ == str(file.resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be imported: it is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _neighbours_of(file.resolve().parent):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__
        ]
        where = f" (line {lines[-1]})" if lines else ""
        raise ConfigError(f"{file} cannot be imported: {type(error).__name__}: {error}{where}") from error
    return module


@contextlib.contextmanager
def _neighbours_of(folder: Path) -> Iterator[None]:
    """Lets a file import the other files of its folder, and keeps the names of those that it imports.

    A neighbour of the same name in another folder is imported anew.
    """
    for name in [one for one, place in _NEIGHBOURS.items() if place != folder]:
        top = folder / name.partition(".")[0]
        if top.with_suffix(".py").is_file() or top.is_dir():
            del _NEIGHBOURS[name]
            sys.modules.pop(name, None)
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    except Exception:
        for name in _imported_from(folder, before):
            del sys.modules[name]
        raise
    else:
        _NEIGHBOURS.update(dict.fromkeys(_imported_from(folder, before), folder))
    finally:
        sys.path.remove(str(folder))


def _imported_from(folder: Path, before: set[str]) -> list[str]:
    """Names of the modules in a folder that were imported since `before`; not of this package and installed ones."""
    found = []
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or name.startswith(PREFIX) or name.partition(".")[0] == __name__.partition(".")[0]:
            continue
        path = Path(file).resolve()
        if path.is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(path.parts):
            found.append(name)
    return found
