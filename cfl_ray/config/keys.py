"""Documentation of the keys of an experiment: meaning, values and default of each, read from the sections."""

import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import annotated_types
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from cfl_ray.config.nearest import nearest_key
from cfl_ray.config.part import Kinds, kinds_of
from cfl_ray.config.section import FILE, ConfigSection, as_yaml
from cfl_ray.errors import ConfigError, command

_TYPES = {int: "whole number", float: "number", str: "text", Any: "value", dict: "mapping"}
_LIMITS = {
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("<=", "le"),
    annotated_types.Lt: ("<", "lt"),
}


@dataclass(frozen=True)
class Key:
    """A key of an experiment."""

    name: str  # dotted, `[]` after a list of sections: schedule[].join
    meaning: str  # with the unit, if any
    values: str  # type and range, or the choices
    default: str | None  # as it is written in YAML; None: the key is required


@dataclass(frozen=True)
class KeySection:
    """A section of an experiment, with its own keys."""

    name: str  # dotted; empty: the top level
    meaning: str
    keys: tuple[Key, ...]


def sections(
    section: type[ConfigSection], name: str = "", meaning: str = "", kinds: Kinds[Any] | None = None
) -> Iterator[KeySection]:
    """Yields this section and all sections in it, each before those that it contains.

    kinds: the kinds of the part that the section belongs to; the keys of all kinds are returned. None: no part.
    """
    keys, inner = [], []
    for field, info, of_kinds in _fields(section, kinds):
        field = info.alias or field
        full = f"{name}.{field}" if name else field
        nested, is_list = _section_of(info.annotation)
        if kinds is not None and field == kinds.key:
            keys.append(_key_of_kind(full, info, kinds))
        elif nested is None or is_list or _is_optional(info):
            default = None if info.is_required() else as_yaml(info.get_default(call_default_factory=True))
            keys.append(Key(full, f"{info.description or ''}{of_kinds}", _values(info, nested), default))
        if nested is not None:
            description = None if is_list else info.description
            inner.append(
                (nested, full + "[]" * is_list, f"{description or _first_line(nested)}{of_kinds}", kinds_of(info))
            )
    yield KeySection(name, meaning or _first_line(section), tuple(keys))
    for arguments in inner:
        yield from sections(*arguments)


def _fields(section: type[ConfigSection], kinds: Kinds[Any] | None) -> Iterator[tuple[str, FieldInfo, str]]:
    """The keys of a section, or of all kinds of a part, each with the kinds that have it (empty if all have it)."""
    alternatives = [section] if kinds is None else [kind.section for kind in kinds.all.values()]
    fields = dict(section.model_fields)
    for alternative in alternatives:
        fields = fields | {name: info for name, info in alternative.model_fields.items() if name not in fields}
    for name, info in fields.items():
        with_it = [] if kinds is None else kinds.with_key(name)
        if not info.exclude:
            yield name, info, f" ({', '.join(with_it)})" if len(with_it) < len(alternatives) and with_it else ""


def _key_of_kind(name: str, info: FieldInfo, kinds: Kinds[Any]) -> Key:
    """The key that chooses among the kinds of a part."""
    meanings = (f"{name} ({kind.meaning})" for name, kind in kinds.all.items())
    return Key(name, f"{info.description}: {' | '.join(meanings)}", " | ".join(kinds.all), kinds.default)


def find(config: type[ConfigSection], name: str) -> list[KeySection]:
    """The section `name` of a config with all sections in it, or the section of the key `name` with that key alone.

    Items of lists may be written `schedule[].join`, `schedule.join` or `schedule.0.join`. Raises ConfigError.
    """
    wanted, everything = _plain(name), list(sections(config))
    inside = [section for section in everything if f"{_plain(section.name)}.".startswith(f"{wanted}.")]
    for section in everything:
        if matching := [key for key in section.keys if _plain(key.name) == wanted]:
            return [KeySection(section.name, section.meaning, tuple(matching)), *inside]
    if inside:
        return inside
    if wanted.startswith("methods."):  # as in an override
        values = command("methods", wanted.split(".")[1])
        raise ConfigError(f"unknown key {name!r}: it is an option of a method; its values: {values}")
    from cfl_ray.core.method import SHARED_OPTIONS  # imports torch, which takes seconds

    if wanted in SHARED_OPTIONS:
        raise ConfigError(
            f"unknown key {name!r}: it is an option of every method that averages, "
            f"methods: [{{fedavg: {{{name}: ...}}}}]; its values: cfl-ray methods fedavg"
        )
    raise ConfigError(f"unknown key {name!r}{_nearest(wanted, everything)}")


def _nearest(wanted: str, everything: list[KeySection]) -> str:
    """The text ` (did you mean 'x'?)`, or the keys of the section of `wanted`, or else those of the top level."""
    written = [name for section in everything for name in (section.name, *(key.name for key in section.keys)) if name]
    names = {_plain(name): name for name in written}  # as written, by plain name
    siblings = _siblings(wanted.rpartition(".")[0], names)
    if near := nearest_key(wanted, (name.rpartition(".")[2] for name in siblings), names):
        return f" (did you mean {names[near]!r}?)"
    return f"; valid: {', '.join(sorted(names[name] for name in siblings or _siblings('', names)))}"


def _siblings(parent: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.rpartition(".")[0] == parent]


def _plain(name: str) -> str:
    return re.sub(r"\[\]|\.\d+(?=\.|$)", "", name)


def _first_line(section: type[ConfigSection]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def _section_of(annotation: Any) -> tuple[type[ConfigSection] | None, bool]:
    """The section that a key holds, None if it holds none, and whether it holds a list of sections."""
    is_list = typing.get_origin(annotation) is list
    inner = typing.get_args(annotation)[0] if is_list else annotation
    if typing.get_origin(inner) is types.UnionType:  # an optional section
        inner = next((member for member in typing.get_args(inner) if member is not type(None)), inner)
    is_section = isinstance(inner, type) and issubclass(inner, ConfigSection)
    return (inner, is_list) if is_section else (None, False)


def _is_optional(info: FieldInfo) -> bool:
    """Whether the key holds null unless it is given."""
    return not info.is_required() and info.default is None


def _values(info: FieldInfo, nested: type[ConfigSection] | None) -> str:
    if nested is not None and not _is_optional(info):
        return f"list of {{{', '.join(nested.model_fields)}}}"
    return _type(info.annotation, list(info.metadata))


def _plain_number(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else f"{limit:g}"


def _type(annotation: Any, metadata: list[Any]) -> str:
    """A type as text, with the limits in `metadata`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if part is type(None) else _type(part, metadata) for part in arguments)
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if any(isinstance(constraint, BeforeValidator) for constraint in metadata):
        return "list of client ids and ranges"
    if annotation is bool:
        return "true | false"
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return f"{{{', '.join(info.alias or name for name, info in annotation.model_fields.items())}}}"
    if origin is dict and (inner := typing.get_args(annotation)[1]) is not Any:
        return f"mapping of texts to {_type(inner, [])}"
    if origin is typing.Annotated:
        own = [limit for part in arguments[1:] for limit in getattr(part, "metadata", [part])]
        return _type(arguments[0], [*own, *metadata])
    if origin in (list, tuple):
        count = f"{len(arguments)} " if origin is tuple else ""
        return f"list of {count}" + re.sub(r"\b(list|number|value)\b", r"\1s", _type(arguments[0], []))
    limits = [
        f"{sign} {_plain_number(getattr(limit, name))}"
        for limit in metadata
        for kind, (sign, name) in _LIMITS.items()
        if isinstance(limit, kind)
    ]
    name = "path" if FILE in metadata else _TYPES[origin or annotation]
    return " ".join([name, " and ".join(limits)]).strip()
