"""Functions and classes of users: how a config names them with their options, and where messages say that they are."""

import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cfl_ray.core.errors import ConfigError, did_you_mean

_PACKAGE = Path(__file__).parents[1]


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
    return next(iter(value)), {name: _number(one) for name, one in options.items()}


def _number(value: Any) -> Any:
    """The value, but text such as 1e-3 as a number: YAML 1.1 reads it as text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value) else value


def check_options(key: str, function: Callable[..., Any], given: int, options: Mapping[str, Any]) -> None:
    """Raises ConfigError where a function does not take `given` positional arguments and these options.

    key: of the config, for messages.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it says nothing about its parameters
        return
    parameters = list(signature.parameters.values())[given:]
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        for name in options:
            if name not in names:
                known = did_you_mean(name, names) if names else "; it has none"
                raise ConfigError(f"{key}: {place_of(function)} has no option {name!r}{known}")
    try:
        signature.bind(*[None] * given, **options)
    except TypeError as error:
        raise ConfigError(f"{key}: {place_of(function)} cannot be called: {error}") from None


def place_of(part: Any) -> str:
    """The name of a function, a class or an object; of the user's own, with its file and line."""
    named = part if hasattr(part, "__name__") else type(part)
    file, line = _definition(named)
    installed = file is None or file.is_relative_to(_PACKAGE) or "site-packages" in file.parts
    return named.__name__ if installed else f"{named.__name__} ({file}, line {line})"


def failure_of(part: Any, error: Exception) -> str:
    """An error with the line of the author's file that led to it, after the name of the function."""
    file, _ = _definition(part if hasattr(part, "__name__") else type(part))
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if file and Path(one.filename) == file]
    return f"{place_of(part)} failed: {type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")


def _definition(named: Any) -> tuple[Path | None, int]:
    try:
        source = inspect.unwrap(named)
        return Path(inspect.getsourcefile(source) or ""), inspect.getsourcelines(source)[1]
    except (TypeError, OSError):
        return None, 0
