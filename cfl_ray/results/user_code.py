"""Digests of the user's files whose code a run uses, to see later whether they were edited."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cfl_ray.config import Experiment
from cfl_ray.plugins.calling import is_user_file
from cfl_ray.plugins.loading import sent_by_value
from cfl_ray.system.files import sha256_once
from cfl_ray.system.nested import texts_of


def code_of(experiment: Experiment) -> dict[str, str]:
    """The sha256 of each user's file that defines a part of the experiment, or that such a file has imported.

    By the file's name with that of its folder, which stay if both are moved. The experiment's parts are loaded.
    Functions that were typed into a console or a notebook have no file.
    """
    texts = (Path(text.rpartition(":")[0]) for text in texts_of(experiment.to_dict()) if ".py:" in text)
    named = {file.resolve() for file in texts if file.is_file()}  # a job's working directory may be gone
    folders = {file.parent for file in named}
    modules = (Path(module.__file__).resolve() for module in sent_by_value() if module.__file__)
    imported = {file for file in modules if any(file.is_relative_to(folder) for folder in folders)}
    objects = {file for part in _objects_in(experiment.model_dump()) if is_user_file(file := _file_of(part))}
    files = sorted(file for file in named | imported | objects if file is not None and file.is_file())
    return {"/".join(file.parts[-2:]): sha256_once(file) for file in files}


def edited_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The files with other content than before, by name; a file that only one of the two has does not count."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def _objects_in(value: Any) -> Iterator[Any]:
    """Yields the objects in nested values that are no data: functions, classes, instances of classes."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _objects_in(inner)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _objects_in(inner)
    elif isinstance(value, partial):
        yield from _objects_in([value.func, *value.args, value.keywords])
    elif value is not None and not isinstance(value, str | bytes | int | float):
        yield value
        if is_dataclass(value) and not isinstance(value, type):
            yield from _objects_in([getattr(value, item.name, None) for item in fields(value)])


def _file_of(part: Any) -> Path | None:
    source = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    try:
        file = inspect.getsourcefile(inspect.unwrap(source))
    except (TypeError, OSError):
        return None
    return Path(file).resolve() if file else None
