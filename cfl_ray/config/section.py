"""The base of all sections of an experiment, and parts, whose kind decides which keys they have.

Each kind of a part is a section with exactly its keys.
"""

import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import numpy as np
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    TypeAdapter,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from cfl_ray.errors import ConfigError, did_you_mean, shown, what_is_wrong
from cfl_ray.plugins.calling import is_made_in_python, reference_of
from cfl_ray.plugins.loading import entry_points_of
from cfl_ray.plugins.registry import Registry

_LARGEST = 2**63 - 1  # largest integer that arrays hold
FILE = "file"  # marks a key, in `Annotated`, as a path that is relative to the folder of the config


class ConfigSection(BaseModel):
    """A section of the YAML file: immutable, its numbers finite, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _prepared(cls, values: Any) -> Any:
        """Paths as texts. Refuses true and false for a number, which pydantic takes for 1 and 0."""
        if not isinstance(values, Mapping):
            return values
        for key, field in cls.model_fields.items():
            if _has_boolean(value := values.get(key), field.annotation):
                kind = "numbers" if isinstance(value, list | tuple) else "a number"
                raise ValueError(f"{key} takes {kind}, got {str(value).lower()}")
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"a whole number is at most {_LARGEST}")
        return value


def _kinds_of(annotation: Any) -> set[Any]:
    """The kinds that an annotation allows for the value itself: the members of a union."""
    if get_origin(annotation) is Annotated:
        return _kinds_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_kinds_of, get_args(annotation)))
    return {annotation}


def _has_boolean(value: Any, *annotations: Any) -> bool:
    """Whether true or false is given for a number, or for an element of a list of numbers.

    annotations: the alternatives for the value.
    """
    if not isinstance(value, bool | np.bool_ | list | tuple):
        return False
    kinds = set().union(*map(_kinds_of, annotations))
    if isinstance(value, bool | np.bool_):
        return bool(kinds & {int, float}) and not kinds & {bool, Any}
    elements = [element for kind in kinds if get_origin(kind) in (list, tuple) for element in get_args(kind)]
    return any(_has_boolean(element, *elements) for element in value)


def as_yaml(value: Any) -> str:
    """A value on one line, as it is written in YAML."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("...\n").strip()


PLUGIN = "file.py:Name"  # stands for all kinds that are not of this package


class BuiltinKind(NamedTuple):
    """A part of this package: its meaning, and its section, or the keys that it uses if it has no section."""

    meaning: str
    section: Any = None  # a type of section
    keys: tuple[str, ...] = ()


def check_name(value: Any, part: str, builtin: Iterable[str], group: str) -> None:
    """Raises ValueError for an unknown name, or a value that cannot be a part.

    Names of objects made in Python are accepted, since records of runs have them (`reference_of`).
    """
    if isinstance(value, str) and value not in builtin and ":" not in value and not is_made_in_python(value):
        names = [*builtin, *entry_points_of(group)]
        if value not in names:
            raise ValueError(f"unknown {part} {value!r}{did_you_mean(value, names)}")
    check_part(value, part)


def check_part(value: Any, part: str) -> None:
    """Raises ValueError for a value of YAML that cannot be a part."""
    if value is None or isinstance(value, (bool, int, float, dict, list)):
        raise ValueError(f"a {part} is a name, file.py:Name or, in Python, a function, class or object")


class PluginConfig(ConfigSection):
    """A part of a user's file (file.py:Name), of an installed package, or made in Python."""

    kind: Any = Field(description="path/to/file.py:Name, or the name of a part of an installed package")
    options: dict[str, Any] = Field({}, description="keyword arguments of the function or class")

    @field_serializer("kind")
    def _reference(self, value: Any) -> Any:
        return reference_of(value)


Section = TypeVar("Section", bound=ConfigSection)


@dataclass(frozen=True)
class Kinds(Registry[Any], Generic[Section]):
    """The kinds of a part. As an annotation, it makes pydantic choose the section by `key`; the first is the default.

    `builtin` has the `BuiltinKind` of each name.
    """

    plugin: type[Section]
    key: str = "kind"

    @property
    def default(self) -> str:
        """The kind if none is given."""
        return next(iter(self.builtin))

    @property
    def all(self) -> dict[str, BuiltinKind]:
        """All kinds, plugins last."""
        return {**self.builtin, PLUGIN: BuiltinKind((self.plugin.__doc__ or "").rstrip("."), self.plugin)}

    def of(self, **values: Any) -> Section:
        """The section of these values. Raises pydantic's ValidationError."""
        return cast(Section, TypeAdapter(Annotated[ConfigSection, self]).validate_python(values))

    def with_key(self, key: str) -> list[str]:
        """The kinds that have this key."""
        return [name for name, kind in self.all.items() if key in kind.section.model_fields]

    def drop_others(self, values: dict[str, Any], kind: Any) -> None:
        """Drops the values whose keys only other kinds have."""
        keys = self.all[self._tag({self.key: kind})].section.model_fields
        for key in [key for key in values if key not in keys and self.with_key(key)]:
            del values[key]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices: list[Any] = [Annotated[kind.section, Tag(name)] for name, kind in self.all.items()]
        union = handler.generate_schema(Annotated[reduce(or_, choices), Discriminator(self._tag)])
        return core_schema.no_info_before_validator_function(self._with_kind, union)

    def _with_kind(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        kind = value.get(self.key, self.default)
        check_name(kind, self.kind, self.builtin, self.group)
        return {**value, self.key: kind}

    def _tag(self, value: Any) -> str:
        kind = value.get(self.key) if isinstance(value, Mapping) else getattr(value, self.key, None)
        return kind if isinstance(kind, str) and kind in self.builtin else PLUGIN


def keys_of(section: type[ConfigSection]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every key of a section and of the sections in it, those of all kinds of a part, each with its path."""
    for name, info in section.model_fields.items():
        yield (name,), info
        kinds = kinds_of(info)
        inner: Iterable[Any] = (
            [info.annotation] if kinds is None else dict.fromkeys(kind.section for kind in kinds.all.values())
        )
        for nested in inner:
            if isinstance(nested, type) and issubclass(nested, ConfigSection):
                yield from (((name, *path), inside) for path, inside in keys_of(nested))


def kinds_of(info: FieldInfo) -> Kinds[Any] | None:
    """The kinds of a part; None for a key that is not a part."""
    return next((mark for mark in info.metadata if isinstance(mark, Kinds)), None)


# ---- errors in words


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
        return _unknown_key(where, str(path[-1]), section, kinds, kind) + options
    if problem["type"] == "list_type" and path[-1] not in section.model_fields:  # a list of sections
        return f"{where}: expected a list, e.g. [{_example(section, kinds, given)}], got {shown(given)}"
    if problem["type"] == "model_type":
        more = f"; its keys: cfl-ray config {where}" if is_experiment else ""
        return (
            f"{where}: expected a section of keys, e.g. {_example(section, kinds, given)}, "
            f"got {'null' if given is None else shown(given)}{more}"
        )
    return f"{where}: {what_is_wrong(problem)}"[:500]


def _unknown_key(where: str, key: str, section: type[ConfigSection], kinds: Kinds[Any] | None, kind: str) -> str:
    """The line for a key that a section does not have. kinds, kind: of the part that the section belongs to."""
    keys = [name for name, info in section.model_fields.items() if not info.exclude]
    if kinds is not None and (others := kinds.with_key(key)):
        own = ", ".join(name for name in keys if name != kinds.key) or "none"
        return f"{where} is a key of {kinds.key} {' | '.join(others)}, and {kinds.key} is {kind}; its keys are: {own}"
    if kinds is not None:
        keys += [name for other in kinds.all.values() for name in other.section.model_fields if name not in keys]
    return f"unknown key {where!r}{did_you_mean(key, keys)}"


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
