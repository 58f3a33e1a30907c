"""Sections whose `kind` names a part: of this package, of an installed one, or a plugin."""

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from cfl_ray.config.section import ConfigSection, without_effect
from cfl_ray.errors import did_you_mean
from cfl_ray.plugins.calling import reference_of
from cfl_ray.plugins.loading import entry_points_of


class BuiltinKind(NamedTuple):
    """A kind of this package: its meaning, and the keys of the section that it uses."""

    meaning: str
    keys: tuple[str, ...] = ()


def check_name(value: Any, part: str, builtin: Iterable[str], group: str) -> None:
    """Raises ValueError for a name that is not known, and for a value that can be no part."""
    if isinstance(value, str) and value not in builtin and ":" not in value:
        names = [*builtin, *entry_points_of(group)]
        if value not in names:
            raise ValueError(f"unknown {part} {value!r}{did_you_mean(value, names)}")
    check_part(value, part)


def check_part(value: Any, part: str) -> None:
    """Raises ValueError for a value of YAML that can be no part."""
    if value is None or isinstance(value, (bool, int, float, dict, list)):
        raise ValueError(f"a {part} is a name, file.py:Name or, in Python, a function, class or object")


def meanings_of(builtin: dict[str, BuiltinKind]) -> str:
    """The description of a key `kind`."""
    return " | ".join(f"{name} ({kind.meaning})" for name, kind in builtin.items()) + " | path/to/file.py:Name"


class PartConfig(ConfigSection):
    """A section whose `kind` names a part: of this package, of an installed one, or a user's own."""

    part: ClassVar[str] = ""  # e.g. "shift": for messages
    where: ClassVar[str] = ""  # the section's place, e.g. "data.shift": for messages
    group: ClassVar[str] = ""  # entry-point group of installed packages
    builtin: ClassVar[dict[str, BuiltinKind]] = {}
    keys_of_own: ClassVar[tuple[str, ...]] = ()  # used by kinds that are not of this package
    keys_of_all: ClassVar[tuple[str, ...]] = ()  # used by all kinds but "none"

    kind: Any = Field(None, description="name of the part, or path/to/file.py:Name")
    options: dict[str, Any] = Field(
        {}, description="keyword arguments of a function or class that is not of this package (file.py:Name)"
    )

    @property
    def is_plugin(self) -> bool:
        """Whether the kind is not of this package."""
        return self.kind not in self.builtin if isinstance(self.kind, str) else True

    @property
    def warnings(self) -> list[str]:
        """Warnings of keys that the kind does not use."""
        used = self.keys_of_own if self.is_plugin else self.builtin[self.kind].keys
        used = () if self.kind == "none" else (*used, *self.keys_of_all)
        known = {*self.keys_of_own, *self.keys_of_all, *(key for kind in self.builtin.values() for key in kind.keys)}
        reason = f"{self.where}.kind is {reference_of(self.kind)}" + (f", which uses {', '.join(used)}" if used else "")
        return without_effect(self, self.where, known - set(used), reason)

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, value: Any) -> Any:
        check_name(value, cls.part, cls.builtin, cls.group)
        return value

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.options and not self.is_plugin:
            keys = ", ".join(self.builtin[self.kind].keys) or "none"
            raise ValueError(f"options are for kinds of your own (file.py:Name); the keys of {self.kind} are: {keys}")
        return self

    @field_serializer("kind")
    def _reference(self, value: Any) -> Any:
        return reference_of(value)
