"""The user's code that a run uses: its files, with those that they import from beside them, and their digests."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from cfl_ray.config import Experiment
from cfl_ray.plugins.calling import file_of, is_user_file, source_of
from cfl_ray.plugins.imported import imported_beside
from cfl_ray.system.files import sha256_once


def code_of(experiment: Experiment) -> dict[str, str]:
    """The sha256 of each file of `files_of`, by its name with that of its folder, which stay if both are moved."""
    return {"/".join(file.parts[-2:]): sha256_once(file) for file in files_of(experiment)}


def files_of(experiment: Experiment) -> list[Path]:
    """The user's files that define parts of the experiment, and those that these import from beside them.

    Functions that were typed into a console or a notebook have no file (`typed_sources`).
    """
    named = {Path(text.rpartition(":")[0]).resolve() for text in experiment.references}
    objects = {file for part in objects_of(experiment) if is_user_file(file := _file_of(part))}
    found = {file for file in named | objects if file is not None and file.is_file()}
    return sorted(found | {beside for file in found for beside in imported_beside(file)})


def typed_sources(experiment: Experiment) -> dict[str, str]:
    """The sources of parts that were typed into a console or a notebook, by name, as far as Python has them.

    A source is the whole cell, and the cells of functions and classes of the same module that it uses.
    """
    found: dict[str, str] = {}
    waiting = [part for part in objects_of(experiment) if (file := _file_of(part)) is None or not file.is_file()]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        source = source_of(part)
        if id(source) in seen or getattr(source, "__module__", "").partition(".")[0] in ("cfl_ray", "builtins"):
            continue
        seen.add(id(source))
        functions = [source] if inspect.isfunction(source) else _functions_of(source)
        for function in functions:
            with suppress(OSError, TypeError):
                found.setdefault(source.__qualname__.replace("<", "").replace(">", ""), _text_of(function))
            names = (function.__globals__.get(name) for name in function.__code__.co_names)
            own = (used for used in names if inspect.isfunction(used) or inspect.isclass(used))
            waiting += [used for used in own if used.__module__ == function.__module__]
    return found


def _functions_of(source: Any) -> list[FunctionType]:
    members = vars(source).values() if inspect.isclass(source) else ()
    return [inspect.unwrap(member) for member in members if inspect.isfunction(member)]


def _text_of(function: FunctionType) -> str:
    """The text of the cell, or of the file, that defines a function."""
    return "".join(inspect.findsource(function)[0])


def edited_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The files with other content than before, by name; a file that only one of the two has does not count."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def objects_of(experiment: Experiment) -> Iterator[Any]:
    """Yields the objects of the experiment that are no data."""
    return _objects_in([experiment.model_dump(), experiment.methods])


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
    file = file_of(part)
    return None if file is None else file.resolve()
