"""The base of all sections of an experiment."""

from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from cfl_ray.plugins.calling import reference_of

_LARGEST = 2**63 - 1  # largest integer that arrays hold
FILE = "file"  # marks a key, in `Annotated`, as a path that is relative to the folder of the config


class ConfigSection(BaseModel):
    """A section of the YAML file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _paths_as_texts(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"a whole number is at most {_LARGEST}")
        return value


def as_yaml(value: Any) -> str:
    """Returns a value on one line, as it is written in YAML."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("...\n").strip()


def unused_keys(section: ConfigSection, where: str, names: Iterable[str], reason: str) -> dict[str, str]:
    """The keys `names` of a section, dotted, each with the reason why it has no effect."""
    names = set(names)
    return {f"{where}.{name}": reason for name in type(section).model_fields if name in names}


def unused_warnings(root: ConfigSection, unused: Mapping[str, str]) -> list[str]:
    """Warnings of unused keys whose value is not the default."""
    return [
        f"{key} ({reference_of(value) if key.endswith('.kind') else value}) has no effect: {unused[key]}"
        for key, value in not_default(root, unused).items()
    ]


def not_default(root: ConfigSection, keys: Iterable[str]) -> dict[str, Any]:
    """The dotted keys whose value is not the default, with their values."""
    values = {}
    for key in keys:
        *sections, name = key.split(".")
        section: Any = reduce(getattr, sections, root)
        if (value := getattr(section, name)) != type(section).model_fields[name].default:
            values[key] = value
    return values
