"""Errors of pydantic in words: the key, what is wrong with its value, and what to write instead."""

import typing
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cfl_ray.config.nearest import nearest_key
from cfl_ray.config.part import Kinds, keys_of, kinds_of
from cfl_ray.config.section import ConfigSection, as_yaml
from cfl_ray.errors import ConfigError, shown, what_is_wrong


class WholeConfig(ConfigSection):
    """A config that is a whole YAML file. It raises ConfigError, with the text of `explain`, for invalid values."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self))) from None


def explain(error: ValidationError, config: type[ConfigSection]) -> str:
    """A line per problem: the key, what is wrong, and the valid range or the nearest valid key."""
    return "\n".join(_line(problem, config) for problem in error.errors())


def _line(problem: ErrorDetails, config: type[ConfigSection]) -> str:
    path, section, kinds, kind = _place(config, problem["loc"])
    where, given = ".".join(map(str, path)) or "config", problem["input"]
    is_experiment = "methods" in config.model_fields  # not a study, or a section alone
    if problem["type"] == "extra_forbidden":
        is_method = is_experiment and len(path) == 1 and isinstance(given, dict)
        options = f"; options of a method are set as methods.{where}.OPTION=VALUE" if is_method else ""
        return _unknown_key(path, section, kinds, kind, config) + options
    if problem["type"] == "list_type" and path[-1] not in section.model_fields:  # a list of sections
        return f"{where}: expected a list, e.g. [{_example(section, kinds, given)}], got {shown(given)}"
    if problem["type"] == "model_type":
        more = f"; its keys: cfl-ray config {where}" if is_experiment else ""
        return (
            f"{where}: expected a section of keys, e.g. {_example(section, kinds, given)}, "
            f"got {'null' if given is None else shown(given)}{more}"
        )
    return f"{where}: {what_is_wrong(problem)}"[:500]


def _unknown_key(
    path: list[int | str],
    section: type[ConfigSection],
    kinds: Kinds[Any] | None,
    kind: str,
    config: type[ConfigSection],
) -> str:
    """The line for a key that a section does not have. kinds, kind: of the part that the section belongs to."""
    where, key = ".".join(map(str, path)), str(path[-1])
    keys = [name for name, info in section.model_fields.items() if not info.exclude]
    if kinds is not None and (others := kinds.with_key(key)):
        own = ", ".join(name for name in keys if name != kinds.key) or "none"
        return f"{where} is a key of {kinds.key} {' | '.join(others)}, and {kinds.key} is {kind}; its keys are: {own}"
    if kinds is not None:
        keys += [name for other in kinds.all.values() for name in other.section.model_fields if name not in keys]
    near = nearest_key(where, keys, (".".join(other) for other, _ in keys_of(config)))
    if near is None:
        return f"unknown key {where!r}; valid: {', '.join(sorted(keys))}"
    section_of, _, name = near.rpartition(".")
    is_sibling = section_of == ".".join(map(str, path[:-1]))
    return f"unknown key {where!r} (did you mean {repr(name) if is_sibling else near}?)"


def _example(section: type[ConfigSection], kinds: Kinds[Any] | None, given: Any) -> str:
    """An example of a section: a key that accepts the given value, with this value, or else a key at its default."""
    if kinds is not None:
        is_kind = isinstance(given, str) and given in kinds.builtin
        return as_yaml({kinds.key: given if is_kind else kinds.default})
    fields = {name: info for name, info in section.model_fields.items() if not info.exclude}
    for name in fields if isinstance(given, int | float) else ():  # a text fits many keys
        with suppress(ValidationError, ConfigError, yaml.YAMLError):
            section.model_validate({name: given}, strict=True)
            return as_yaml({name: given})
    simple = {name: info.default for name, info in fields.items() if isinstance(info.default, str | int | float)}
    return as_yaml(dict([next(iter(simple.items()))])) if simple else f"{{{next(iter(fields))}: ...}}"


def _place(
    config: type[ConfigSection], loc: Iterable[int | str]
) -> tuple[list[int | str], Any, Kinds[Any] | None, str]:
    """The path of a problem, the section of its last key and, if this section is a part, its kinds and kind.

    loc: pydantic's location, which also has the names of kinds; they are left out of the path. Numbers and names in it
    that are not keys of a section are positions in lists and mappings.
    """
    path: list[int | str] = []
    section: Any = config
    kinds, kind = None, ""
    alternatives: list[type[ConfigSection]] = []  # of the last key; several have different literals as their `kind`
    for key in loc:
        if isinstance(section, Kinds):
            kinds, kind = section, str(key)
            section = kinds.all[kind].section
            continue
        path.append(key)
        info = section.model_fields.get(key)
        if info is not None:
            alternatives = _sections_in(info.annotation)
            if (inner := kinds_of(info) or next(iter(alternatives), None)) is not None:
                section, kinds = inner, None
        elif len(alternatives) > 1:
            section = next(
                kind_of for kind_of in alternatives if key in typing.get_args(kind_of.model_fields["kind"].annotation)
            )
            alternatives = []
    return path, section, kinds, kind


def _sections_in(annotation: Any) -> list[type[ConfigSection]]:
    """The sections in a type, such as a list of sections or an optional section."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return [annotation]
    return [section for inner in typing.get_args(annotation) for section in _sections_in(inner)]
