"""Errors of pydantic in words: the key, what is wrong with its value, and what to write instead."""

import typing
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import yaml
from pydantic import ValidationError

from cfl_ray.config.part import Kinds, kinds_of
from cfl_ray.config.section import ConfigSection, as_yaml
from cfl_ray.errors import ConfigError, did_you_mean, what_is_wrong


def explain(error: ValidationError, config: type[ConfigSection]) -> str:
    """Returns a line per problem: the key, what is wrong, and the valid range or the nearest valid key."""
    is_experiment = "methods" in config.model_fields  # not a study, or a section alone
    lines = []
    for problem in error.errors():
        path, section, kinds, kind = _place(config, problem["loc"])
        where = ".".join(map(str, path)) or "config"
        if problem["type"] == "extra_forbidden":
            keys = [name for name, info in section.model_fields.items() if not info.exclude]
            if kinds is not None and (others := kinds.with_key(str(path[-1]))):
                own = ", ".join(name for name in keys if name != kinds.key) or "none"
                lines.append(
                    f"{where} is a key of {kinds.key} {' | '.join(others)}, and {kinds.key} is {kind}; "
                    f"its keys are: {own}"
                )
                continue
            if kinds is not None:
                keys += [
                    name for other in kinds.all.values() for name in other.section.model_fields if name not in keys
                ]
            advice = did_you_mean(str(path[-1]), keys)
            if is_experiment and len(path) == 1 and isinstance(problem["input"], dict):
                advice += f"; options of a method are set as methods.{where}.OPTION=VALUE"
            lines.append(f"unknown key {where!r}{advice}")
        elif problem["type"] == "list_type" and path[-1] not in section.model_fields:  # a list of sections
            item = _example(section, kinds, problem["input"])
            lines.append(f"{where}: expected a list, e.g. [{item}], got {problem['input']!r}")
        elif problem["type"] == "model_type":
            given, more = problem["input"], f"; its keys: cfl-ray config {where}" if is_experiment else ""
            lines.append(
                f"{where}: expected a section of keys, e.g. {_example(section, kinds, given)}, "
                f"got {'null' if given is None else repr(given)}{more}"
            )
        else:
            lines.append(f"{where}: {what_is_wrong(problem)}"[:500])
    return "\n".join(lines)


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
    """Returns the path of a problem, the section of its last key and, if this section is a part, its kinds and kind.

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
