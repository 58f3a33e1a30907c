"""Methods, models and data from a user's own files, and from installed packages."""

import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cfl_ray.core.errors import ConfigError, did_you_mean

PREFIX = "cfl_ray_plugin_"


def load_plugin(reference: str, kind: str) -> Any:
    """The object that `path/to/file.py:Name` refers to.

    kind: what the object is, for messages. Raises ConfigError if the file or the name is missing, or the import fails.
    """
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{kind} {reference!r}: there is no file {file.absolute()}")
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
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__
        ]
        where = f" (line {lines[-1]})" if lines else ""
        raise ConfigError(f"{file} cannot be imported: {type(error).__name__}: {error}{where}") from error
    return module
