"""A user's own method or model, named by its file."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from cfl_ray.core.errors import ConfigError, nearest

PREFIX = "cfl_ray_plugin_"


def load_plugin(reference: str, kind: str) -> Any:
    """The object that `path/to/file.py:Name` names. Raises ConfigError when the file or the name is missing."""
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{kind} {reference!r}: there is no file {file.absolute()}")
    module = _module(file)
    if not hasattr(module, name):
        found = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(f"{kind} {reference!r}: {file} has no {name!r}{nearest(name, found)}")
    return getattr(module, name)


def _module(file: Path) -> Any:
    name = PREFIX + file.stem
    if name in sys.modules and sys.modules[name].__file__ == str(file.resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module
