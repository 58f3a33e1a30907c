"""The base of all sections of an experiment."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
import yaml
from pydantic import AliasChoices, BaseModel, ConfigDict, field_validator, model_validator

_LARGEST = 2**63 - 1  # largest integer that arrays hold
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib makes one slash of two
FILE = "file"  # marks a key, in `Annotated`, as a path that is relative to the folder of the config


def former(present: str, name: str) -> dict[str, Any]:
    """Options of a `Field` whose key had another name: it is accepted, and stays the name in hashes and recipes."""
    return {"validation_alias": AliasChoices(present, name), "serialization_alias": name}


def check_path(key: str, value: Any) -> None:
    """Raises ValueError for a URI, which is no path: a folder of the name `s3:` would be made."""
    if isinstance(value, str | Path) and _URI.match(str(value)):
        raise ValueError(
            f"{key} is a path on a file system, got the URI {value}; only data.shards and tracking.uri may be URIs"
        )


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
            if field.serialization_alias in values and field.serialization_alias != field.alias:
                text = f"{field.serialization_alias} is called {key} now"
                warnings.warn(text, FutureWarning, stacklevel=3)  # of the line that makes the section
            if FILE in field.metadata:
                check_path(key, values.get(key))
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


def replaced_in(value: Any, new: Mapping[str, str]) -> Any:
    """A section, or a value in it, with its texts replaced as in `new`, in inner sections too; keys of mappings too."""
    if isinstance(value, ConfigSection):
        given = {key: getattr(value, key) for key in type(value).model_fields}
        changes = {key: replaced_in(inner, new) for key, inner in given.items()}
        changes = {key: inner for key, inner in changes.items() if inner is not given[key]}
        return value.model_copy(update=changes) if changes else value
    if isinstance(value, str):
        return new.get(value, value)
    if isinstance(value, dict):
        entries = [(replaced_in(key, new), replaced_in(inner, new)) for key, inner in value.items()]
        pairs = zip(entries, value.items(), strict=True)
        return value if all(a is c and b is d for (a, b), (c, d) in pairs) else dict(entries)
    if isinstance(value, list | tuple):
        inner = [replaced_in(entry, new) for entry in value]
        return value if all(a is b for a, b in zip(inner, value, strict=True)) else type(value)(inner)
    return value
