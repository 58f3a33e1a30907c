"""The base of all sections of an experiment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

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
