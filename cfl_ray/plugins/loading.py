"""Methods, models and data from a user's own files, and from installed packages."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourcelessFileLoader,
)
from pathlib import Path
from types import ModuleType
from typing import Any

from cfl_ray.errors import ConfigError, class_and_text, did_you_mean
from cfl_ray.plugins.calling import is_installed
from cfl_ray.plugins.kept import KEPT, import_kept, kept_root
from cfl_ray.plugins.source_loader import FromSource

PREFIX = "cfl_ray_plugin_"
_NEIGHBOURS: dict[str, Path] = {}  # module -> folder, for modules that a user's file imported from its own folder
_READ: dict[str, tuple[int, int]] = {}  # module -> state of its file when it was imported, for all modules of users
_FOLDERS: dict[Path, Path] = {}  # relative path in a config -> folder of the config, for messages


def note_folder(file: Path, folder: Path) -> None:
    """Keeps the folder of the config that names a relative path, for the message if the file is missing."""
    _FOLDERS[file] = folder


def sent_by_value() -> list[ModuleType]:
    """The modules of users' files, and the modules that these import from their own folders.

    Other machines do not have these files, so the modules are sent to them.
    """
    loaded = list(sys.modules.items())
    return [module for name, module in loaded if name.startswith((PREFIX, KEPT)) or name in _NEIGHBOURS]


def load_plugin(reference: str, kind: str) -> Any:
    """The object that `path/to/file.py:Name` refers to.

    kind: what the object is, for messages. Raises ConfigError if the file or the name is missing, or the import fails.
    """
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not file.is_file():
        candidates = [_FOLDERS.get(file, Path()) / file, file]  # in the order in which a config's paths are tried
        places = " or ".join(dict.fromkeys(str(candidate.absolute()) for candidate in candidates))
        raise ConfigError(f"{kind} {reference!r}: there is no file {places}")
    module = _module(file)
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(f"{kind} {reference!r}: {file} has no {name!r}{did_you_mean(name, names)}")
    return getattr(module, name)


def entry_points_of(group: str) -> dict[str, Callable[[str], Any]]:
    """A function for each entry point of installed packages in a group, by name.

    Called with the kind of the object, for messages, it returns the object. It raises ConfigError, naming the package,
    if the import fails.
    """
    return {point.name: partial(_load, point) for point in importlib.metadata.entry_points(group=group)}


def _load(point: importlib.metadata.EntryPoint, kind: str) -> Any:
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist is not None else "?"
        raise ConfigError(
            f"{kind} {point.name!r} of package {package} ({point.value}) cannot be imported: {class_and_text(error)}"
        ) from error


def _module(file: Path) -> ModuleType:
    """The module of a user's file, imported anew if the file or one of its folder's modules was edited since."""
    if kept_root(file.resolve()) is not None:
        try:
            return import_kept(file.resolve())
        except Exception as error:
            raise _as_user_error(file, error) from error
    name, folder = PREFIX + file.stem, file.resolve().parent
    of_folder = [name for name, path in _files().items() if path.is_relative_to(folder)]
    of_folder += [name for name, of in _NEIGHBOURS.items() if of == folder and name not in of_folder]  # without a file
    if any(_state(name) != _READ.get(name) for name in of_folder):
        for stale in of_folder:  # all of them: they import each other
            del sys.modules[stale]
            _NEIGHBOURS.pop(stale, None)
    if name in sys.modules and sys.modules[name].__file__ == str(file.resolve()):
        return sys.modules[name]
    loader = FromSource(name, str(file.resolve())) if file.suffix in SOURCE_SUFFIXES else None
    spec = importlib.util.spec_from_file_location(name, file.resolve(), loader=loader)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be imported: it is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _READ[name] = _state(name)
    try:
        with _neighbours_of(folder):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _as_user_error(file, error) from error
    return module


def _as_user_error(file: Path, error: Exception) -> ConfigError:
    """The error for a file whose import fails, with its line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file.resolve())]
    line = f" (line {lines[-1]})" if lines else ""
    return ConfigError(f"{file} cannot be imported: {class_and_text(error)}{line}")


def _files() -> dict[str, Path]:
    """The file of each module of users, by its name."""
    return {
        module.__name__: Path(module.__file__)
        for module in sent_by_value()
        if not module.__name__.startswith(KEPT) and module.__file__
    }


def _state(name: str) -> tuple[int, int]:
    """Time of the last change and size of a module's file; zeros if the file is gone."""
    file = sys.modules[name].__file__
    try:
        stat = Path(file).stat() if file else None
    except FileNotFoundError:
        stat = None
    if stat is None:  # deleted, or a package without __init__.py
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


@contextlib.contextmanager
def _neighbours_of(folder: Path) -> Iterator[None]:
    """Context in which a user's file can import the other files of its folder; keeps the names of the imported modules.

    A module of the same name from another folder is removed first, so that this folder's module is imported.
    """
    for name in [name for name, other in _NEIGHBOURS.items() if other != folder]:
        top = folder / name.partition(".")[0]
        if top.with_suffix(".py").is_file() or top.is_dir():
            del _NEIGHBOURS[name]
            sys.modules.pop(name, None)
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        with _compiled_anew(folder):
            yield
    except Exception:
        for name in _imported_from(folder, before):
            del sys.modules[name]
        raise
    else:
        for name in _imported_from(folder, before):
            _NEIGHBOURS[name], _READ[name] = folder, _state(name)
    finally:
        sys.path.remove(str(folder))


@contextlib.contextmanager
def _compiled_anew(folder: Path) -> Iterator[None]:
    """Context in which files below a folder, without installed packages, are imported without cached bytecode."""
    finder_of = FileFinder.path_hook(
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (FromSource, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )

    def hook(path: str) -> Any:
        if not Path(path).resolve().is_relative_to(folder) or is_installed(Path(path)):
            raise ImportError(f"{path} is not below {folder}")
        return finder_of(path)

    # All finders are forgotten, as resolving the paths of those of the folder takes longer than making them anew.
    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()
    try:
        yield
    finally:
        sys.path_hooks.remove(hook)
        sys.path_importer_cache.clear()


def _imported_from(folder: Path, before: set[str]) -> list[str]:
    """Names of the modules in a folder that were imported since `before`, without this and installed packages."""
    names = []
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
        if file is None or name.startswith(PREFIX) or name.partition(".")[0] == __name__.partition(".")[0]:
            continue
        path = Path(file).resolve()
        if path.is_relative_to(folder) and not is_installed(path):
            names.append(name)
    return names
