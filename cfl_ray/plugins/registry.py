"""The parts of one kind that a name in the config can mean: of this package, of installed ones, of the user's files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.plugins.loading import entry_points_of, load_plugin

Part = TypeVar("Part")


@dataclass(frozen=True)
class Registry(Generic[Part]):
    """Finds a part by `name`, by the name of an installed package's entry point, or by `file.py:Name`.

    The user's own object is used as it is; what it must be is checked by the caller.
    """

    kind: str  # e.g. "model": for messages and `cfl-ray list`
    builtin: Mapping[str, Part]  # by name
    group: str  # entry-point group in which installed packages name theirs, e.g. "cfl_ray.models"

    def find(self, reference: str) -> Part:
        """The part. Raises ConfigError, with the nearest name, where there is none, or where its import fails."""
        if ":" in reference:
            return load_plugin(reference, self.kind)
        if reference in self.builtin:
            return self.builtin[reference]
        installed = entry_points_of(self.group)
        if reference not in installed:
            names = [*self.builtin, *installed]
            raise ConfigError(f"unknown {self.kind} {reference!r}{did_you_mean(reference, names)}")
        return installed[reference](self.kind)

    def resolve(self, part: Any) -> Part:
        """The part that a name stands for; an object made in Python is the part itself."""
        return self.find(part) if isinstance(part, str) else cast(Part, part)

    def names(self) -> list[str]:
        """All names, those of this package first."""
        return [*self.builtin, *sorted(set(entry_points_of(self.group)) - set(self.builtin))]
