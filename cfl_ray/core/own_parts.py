"""Parts that users bring: functions and classes with their options, and errors that name the author's line."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cfl_ray.core.errors import ConfigError, RunError, UserError


def place_of(part: Any) -> str:
    """The name of a function, method, class or object with its file and line, for messages."""
    source = part.func if isinstance(part, partial) else part
    if not (inspect.isroutine(source) or inspect.isclass(source)):
        source = type(source)
    name = getattr(source, "__qualname__", repr(source)).rpartition("<locals>.")[2]
    try:
        source = inspect.unwrap(source)
        return f"{name} ({inspect.getsourcefile(source)}, line {inspect.getsourcelines(source)[1]})"
    except (TypeError, OSError):  # written in C, or typed in by hand
        return name


def reference_of(part: Any) -> Any:
    """A name as it is; an object made in Python by its module and name, as a config records it."""
    if isinstance(part, str):
        return part
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}.{named.__qualname__}"


def with_options(part: Any, options: Mapping[str, Any], kind: str, arguments: Sequence[str] = ()) -> Any:
    """The part ready for use: a class called with the options, a function with the options as keyword arguments.

    arguments: names of the values that a function will be passed. Any other object is used as it is.
    Raises ConfigError where the part does not take these arguments or options.
    """
    is_class = isinstance(part, type)
    if not is_class and not inspect.isroutine(part) and not isinstance(part, partial):
        if options:
            raise ConfigError(f"{kind} {place_of(part)} is an object, which takes no options; got {dict(options)}")
        return part
    try:
        inspect.signature(part).bind(*([] if is_class else arguments), **options)
    except TypeError as error:
        called = "" if is_class else f" is called with {', '.join(arguments)}, and"
        raise ConfigError(f"{kind} {place_of(part)}{called} has the options {dict(options)}: {error}") from None
    except ValueError:  # it says nothing about its parameters
        pass
    if not is_class:
        return partial(part, **options) if options else part
    try:
        return part(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{kind} {place_of(part)}: {_explained(error)}") from error


def call_own(
    kind: str, function: Callable[..., Any], *arguments: Any, error: type[UserError] = RunError, where: str = ""
) -> Any:
    """The result of a user's function. Its exceptions become an `error` that names the function and the line.

    where: what it was called for, in words.
    """
    try:
        return function(*arguments)
    except UserError:
        raise
    except Exception as found:
        raise error(f"{kind} {place_of(function)}{where} failed: {_explained(found)}") from found


def described(value: Any) -> str:
    """Type and shape of a value, in words."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # an array or a tensor
        if not value.shape:
            return f"one number, {value}"
        return f"{type(value).__name__} of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r}"[:80] if value is not None else "None"


def _explained(error: Exception) -> str:
    """The error with the file and line that raised it, where that is not a call from this module."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
