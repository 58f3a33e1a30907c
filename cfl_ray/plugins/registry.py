"""The objects that names in the config refer to: this package's models, methods and so on, and users' plugins."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.plugins.calling import is_made_in_python, without_name
from cfl_ray.plugins.loading import entry_points_of, load_plugin

Part = TypeVar("Part")


@dataclass(frozen=True)
class Registry(Generic[Part]):
    """Finds an object by the name of a built-in, by the entry point of an installed package, or by `file.py:Name`.

    The caller checks that a user's object has the expected type.
    """

    kind: str  # e.g. "model": for messages and `cfl-ray list`
    builtin: Mapping[str, Part]  # by name
    group: str  # entry-point group of installed packages, e.g. "cfl_ray.models"

    def find(self, reference: str) -> Part:
        """The object of this name. Raises ConfigError for an unknown name (with the nearest one) or a failed import."""
        if ":" in reference:
            return load_plugin(reference, self.kind)
        if reference in self.builtin:
            return self.builtin[reference]
        installed = entry_points_of(self.group)
        if reference not in installed:
            if is_made_in_python(reference):
                raise ConfigError(
                    f"{self.kind} {reference!r} is an object made in Python, which the config only names; write it as "
                    "file.py:Name, or pass the experiment from Python"
                )
            names = [*self.builtin, *installed]
            hint = without_name(reference) or did_you_mean(reference, names)
            raise ConfigError(f"unknown {self.kind} {reference!r}{hint}")
        return installed[reference](self.kind)

    def resolve(self, part: Any) -> Part:
        """The object of this name; an object that is not a name is returned unchanged."""
        return self.find(part) if isinstance(part, str) else cast(Part, part)

    def names(self) -> list[str]:
        """All names: first the built-in ones in their order, then those of entry points, sorted."""
        return [*self.builtin, *sorted(set(entry_points_of(self.group)) - set(self.builtin))]
