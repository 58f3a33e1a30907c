"""The base of all sections of an experiment."""

from collections.abc import Iterable
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


def without_effect(section: ConfigSection, where: str, names: Iterable[str], reason: str) -> list[str]:
    """Warnings of those keys of a section that have no effect and yet a value of their own."""
    fields, unused = type(section).model_fields, set(names)
    return [
        f"{where}.{name} ({reference_of(value) if name == 'kind' else value}) has no effect: {reason}"
        for name, value in section
        if name in unused and value != fields[name].default
    ]
