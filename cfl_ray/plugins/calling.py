"""Parts that users bring: functions and classes with their options, and errors that name the author's line."""

import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cfl_ray.errors import ConfigError, RunError, UserError, did_you_mean

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages


# ---- in messages


def place_of(part: Any) -> str:
    """The name of a function, method, class or object for messages; of the user's own, with its file and line."""
    source = _source(part)
    name: str = getattr(source, "__qualname__", repr(source)).rpartition("<locals>.")[2]
    file, line = _definition(source)
    return f"{name} ({file}, line {line})" if is_user_file(file) else name


def failure_of(part: Any, error: Exception, where: str = "") -> str:
    """The error of a part after its name, with the line of the author's file that led to it.

    where: what the part was called for, in words.
    """
    return f"{place_of(part)}{where} failed: {explained(part, error)}"


def explained(part: Any, error: Exception) -> str:
    """The error, with the line of the part's file that led to it: of a part that `place_of` gives no file, with it."""
    found = raised_at(part, error)
    if found is None:
        return f"{type(error).__name__}: {error}"
    file, line = found
    return f"{type(error).__name__}: {error} ({'' if is_user_file(file) else f'{file}, '}line {line})"


def raised_at(part: Any, error: Exception) -> tuple[Path, int] | None:
    """The file that defines a part, and its last line on the way to the error; None where it was not on the way."""
    file, _ = _definition(_source(part))
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if file and Path(one.filename) == file]
    return (file, lines[-1] or 0) if file and lines else None


def described(value: Any) -> str:
    """Type and shape of a value, in words."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # an array or a tensor
        if not value.shape:
            return f"one number, {value}"
        return f"{type(value).__name__} of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r}"[:80] if value is not None else "None"


def _source(part: Any) -> Any:
    """The function or class of a part."""
    source = part.func if isinstance(part, partial) else part
    return source if inspect.isroutine(source) or inspect.isclass(source) else type(source)


def _definition(source: Any) -> tuple[Path | None, int]:
    """File and line of a function or class; no file where it is written in C, or typed in by hand."""
    try:
        source = inspect.unwrap(source)
        file = inspect.getsourcefile(source)
        return (Path(file), inspect.getsourcelines(source)[1]) if file else (None, 0)
    except (TypeError, OSError):
        return None, 0


def is_user_file(file: Path | None) -> bool:
    """Whether a file is the user's: neither of this package nor of an installed one."""
    return file is not None and not file.is_relative_to(_PACKAGE) and not _INSTALLED & set(file.parts)


# ---- in configs


def reference_of(part: Any) -> Any:
    """A name as it is; an object made in Python by its module and name, as a config records it."""
    if isinstance(part, str):
        return part
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}.{named.__qualname__}"


def parse_choice(key: str, value: Any) -> tuple[Any, dict[str, Any]]:
    """The name, or the object, and the options of a value that is a name, {name: {option: value}} or an object.

    key: of the config, for messages. Raises ConfigError for a mapping of another form.
    """
    if not isinstance(value, Mapping):
        return value, {}
    if len(value) != 1 or not isinstance(options := next(iter(value.values())) or {}, Mapping):
        raise ConfigError(
            f"{key} must be a name, or one name with its options, {{name: {{option: value}}}}, got {value}"
        )
    return next(iter(value)), {name: as_number(one) for name, one in options.items()}


def as_number(value: Any) -> Any:
    """The value, but text such as 1e-3 as a number: YAML 1.1 reads it as text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value) else value


def check_options(
    kind: str, part: Callable[..., Any], options: Mapping[str, Any], arguments: Sequence[str] = ()
) -> None:
    """Raises ConfigError where a part does not take the arguments, which it is passed by position, and the options.

    kind: of the part, or its key in the config, for messages.
    """
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):  # written in C: it says nothing about its parameters
        return
    parameters = list(signature.parameters.values())[len(arguments) :]
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        for name in options:
            if name not in names:
                known = did_you_mean(name, names) if names else "; it has none"
                raise ConfigError(f"{kind} {place_of(part)} has no option {name!r}{known}")
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        called = f" is called with {', '.join(arguments)}, and" if arguments else ""
        raise ConfigError(f"{kind} {place_of(part)}{called} has the options {dict(options)}: {error}") from None


# ---- ready for use


def with_options(part: Any, options: Mapping[str, Any], kind: str, arguments: Sequence[str] = ()) -> Any:
    """The part ready for use: a class called with the options, a function with the options as keyword arguments.

    arguments: names of the values that a function will be passed. Any other object is used as it is.
    Raises ConfigError where the part does not take these arguments or options.
    """
    if isinstance(part, type):
        check_options(kind, part, options)
        return call_plugin(kind, partial(part, **options), error=ConfigError)
    if not inspect.isroutine(part) and not isinstance(part, partial):
        if options:
            raise ConfigError(f"{kind} {place_of(part)} is an object, which takes no options; got {dict(options)}")
        return part
    check_options(kind, part, options, arguments)
    return partial(part, **options) if options else part


def call_plugin(
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
        raise error(f"{kind} {failure_of(function, found, where)}") from found
