"""The base of all sections of an experiment."""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from cfl_ray.plugins.calling import reference_of

_LARGEST = 2**63 - 1  # of the whole numbers that arrays hold
FILE = "file"  # marks a key, in `Annotated`, as a path that is relative to the folder of the config


class ConfigSection(BaseModel):
    """One section of the YAML file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"a whole number is at most {_LARGEST}")
        return value


def unused_keys(section: ConfigSection, where: str, names: Iterable[str], reason: str) -> dict[str, str]:
    """Those keys of a section that have no effect, dotted, each with the reason."""
    names = set(names)
    return {f"{where}.{name}": reason for name in type(section).model_fields if name in names}


def set_in_vain(root: ConfigSection, unused: Mapping[str, str]) -> list[str]:
    """Warnings of unused keys that have a value of their own."""
    found = []
    for key, reason in unused.items():
        *sections, name = key.split(".")
        section: Any = reduce(getattr, sections, root)
        value = getattr(section, name)
        if value != type(section).model_fields[name].default:
            found.append(f"{key} ({reference_of(value) if name == 'kind' else value}) has no effect: {reason}")
    return found
