"""Parts of an experiment whose kind decides which keys they have: each kind is a section with exactly its keys."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Generic, TypeVar, cast

from pydantic import Discriminator, Field, GetCoreSchemaHandler, Tag, TypeAdapter, field_serializer
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from cfl_ray.config.section import ConfigSection
from cfl_ray.errors import did_you_mean
from cfl_ray.plugins.calling import is_made_in_python, reference_of, without_name
from cfl_ray.plugins.loading import entry_points_of
from cfl_ray.plugins.registry import Registry

PLUGIN = "file.py:Name"  # stands for all kinds that are not of this package


@dataclass(frozen=True)
class BuiltinKind:
    """The declaration of a part of this package: its only one, which a config can read without importing its code."""

    meaning: str = ""  # empty: the first line of its code's docstring
    section: Any = None  # the type of its section; None: it has none
    # "module:name" below cfl_ray of its function, class or object, imported on first use; empty: it needs none
    code: str = ""
    keys: tuple[str, ...] = ()  # that it uses if it has no section

    def load(self) -> Any:
        """Its code, imported now."""
        return resolve_name(f"cfl_ray.{self.code}")


def check_name(value: Any, part: str, builtin: Iterable[str], group: str) -> None:
    """Raises ValueError for an unknown name, or a value that cannot be a part.

    Names of objects made in Python are accepted, since records of runs have them (`reference_of`).
    """
    if isinstance(value, str) and value not in builtin and ":" not in value and not is_made_in_python(value):
        names = [*builtin, *entry_points_of(group)]
        if value not in names:
            raise ValueError(f"unknown {part} {value!r}{_instead_of_file(value, part) or did_you_mean(value, names)}")
    check_part(value, part)


_KINDS_OF_FILES = {".csv": "csv", ".tsv": "csv", ".parquet": "csv", ".npz": "arrays"}


def _instead_of_file(value: str, part: str) -> str:
    """Advice that ends the message about the name of a file or folder; empty for any other name."""
    suffix = Path(value).suffix.lower()
    if part != "data set" or suffix == ".py" or not (suffix or "/" in value):
        return without_name(value)
    kind = _KINDS_OF_FILES.get(suffix)
    cure = f"write source: {kind}, root: {value}" if kind else "a function in a file of yours, my.py:load, reads others"
    return (
        ": data.source is a kind of data (csv, arrays, image_folder ...: cfl-ray list datasets), data.root its file "
        f"or folder; {cure}"
    )


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
    plugin_code: str = ""  # as `BuiltinKind.code`, of all plugins
    key: str = "kind"

    @property
    def default(self) -> str:
        """The kind if none is given."""
        return next(iter(self.builtin))

    @property
    def all(self) -> dict[str, BuiltinKind]:
        """All kinds, plugins last."""
        meaning = (self.plugin.__doc__ or "").rstrip(".")
        return {**self.builtin, PLUGIN: BuiltinKind(meaning, self.plugin, self.plugin_code)}

    def code_of(self, section: Section) -> Any:
        """The code of a section's kind, imported now, which makes of the section what a run uses."""
        return self.all[self._tag(section)].load()

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


@cache
def keys_of(section: type[ConfigSection]) -> Sequence[tuple[tuple[str, ...], FieldInfo]]:
    """Every key of a section and of the sections in it, those of all kinds of a part, each with its path."""
    keys = list[tuple[tuple[str, ...], FieldInfo]]()
    for name, info in section.model_fields.items():
        keys.append(((name,), info))
        kinds = kinds_of(info)
        inner: Iterable[Any] = (
            [info.annotation] if kinds is None else dict.fromkeys(kind.section for kind in kinds.all.values())
        )
        for nested in inner:
            if isinstance(nested, type) and issubclass(nested, ConfigSection):
                keys += [((name, *path), inside) for path, inside in keys_of(nested)]
    return keys


@cache
def present_names(section: type[ConfigSection]) -> Mapping[str, str]:
    """The dotted keys by the names that they had before (`section.former`)."""
    known = [(path, info.serialization_alias) for path, info in keys_of(section)]
    return {".".join([*path[:-1], alias]): ".".join(path) for path, alias in known if alias not in (None, path[-1])}


def with_present_names(values: dict[str, Any], section: type[ConfigSection]) -> dict[str, Any]:
    """The values of a record, in which keys have their present names: its user did not write the former ones."""
    for former, present in present_names(section).items():
        *path, old = former.split(".")
        inner: Any = values
        for key in path:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and old in inner:
            inner[present.rpartition(".")[2]] = inner.pop(old)
    return values


def kinds_of(info: FieldInfo) -> Kinds[Any] | None:
    """The kinds of a part; None for a key that is not a part."""
    return next((mark for mark in info.metadata if isinstance(mark, Kinds)), None)
