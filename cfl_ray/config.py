"""What an experiment is: strict YAML in, the same YAML out.

Every key has one place, one default and one description; an unknown key is an error that names the nearest valid one.
"""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator

from cfl_ray.attacks import Attack
from cfl_ray.core.errors import ConfigError, nearest
from cfl_ray.sections import Availability, Cohort, Columns, Cut, Data, DataChange, Evaluation, Event, Local, Model, Partition, Runtime, Section, Shift, Test, Tracking

__all__ = ["Attack", "Availability", "Cohort", "Columns", "Cut", "Data", "DataChange", "Evaluation", "Event", "Experiment", "Local", "Model", "Partition", "Runtime", "Section", "Shift", "Test",
           "Tracking", "check_cohort", "load"]  # fmt: skip

NOT_HASHED = {"runtime", "tracking", "output", "name"}  # cannot change a result: two configs that differ in these alone are the same experiment
QUICKSTART = Path(__file__).with_name("quickstart.yaml")


class Experiment(Section):
    """One federation, one or more methods, one seed: everything a run depends on.

    In Python, `methods` also takes `Method` objects, `model` a callable that returns a module, and `data` a `Federation`.
    Raises ConfigError for anything that is not valid.
    """

    name: str = Field("rotated-digits", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="names the run directory and the MLflow run")
    seed: int = Field(0, ge=0, lt=2**31, description="every draw depends on it")
    rounds: int = Field(30, ge=1, description="T, communication rounds")
    methods: list[Any] = Field(["fedavg", "ifca", "stocfl"], min_length=1, description="names, {name: {option: value}}, path/to/file.py:Class")
    data: Data = Data()
    model: Model = Model()
    local: Local = Local()
    cohort: Cohort = Cohort()
    attack: Attack = Attack()
    schedule: list[Event] = Field([], description="joins and leaves; what lies beyond the last round does not happen")
    evaluation: Evaluation = Evaluation()
    runtime: Runtime = Runtime()
    tracking: Tracking = Tracking()
    output: str = Field("runs", description="folder of run directories, shards and the embedded MLflow store")

    def __init__(self, **values):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None
        if self.cohort.clients and self.data.partition.clients and self.data.federation is None:
            check_cohort(self.cohort.clients, self.data.partition.clients)

    @field_validator("model", mode="before")
    @classmethod
    def _factory(cls, value):
        return {"name": value} if callable(value) or isinstance(value, str) else value

    @field_validator("data", mode="before")
    @classmethod
    def _federation(cls, value):
        return {"source": "arrays", "federation": value} if hasattr(value, "recipe") else value

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as YAML can hold it; objects made in Python by their names."""
        return json.loads(json.dumps(self.model_dump() | {"methods": self.methods}, default=_name_of))

    def to_yaml(self) -> str:
        """The resolved config: loading it gives an equal experiment."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, width=120)

    @property
    def config_hash(self) -> str:
        """12 hex digits of everything that can change a result."""
        values = {key: value for key, value in self.to_dict().items() if key not in NOT_HASHED}
        if self.data.federation is not None:
            values["federation"] = self.data.federation.recipe
        for key in ("root", "shards", "download"):
            values["data"].pop(key)
        trace = self.cohort.availability.file
        if trace is not None and Path(trace).expanduser().is_file():
            values["trace"] = hashlib.sha256(Path(trace).expanduser().read_bytes()).hexdigest()
        if self.attack.kind == "none":  # as an experiment that never heard of attacks
            values.pop("attack")
        values["methods"] = [_without_default(entry) for entry in values["methods"]]
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=_name_of).encode()).hexdigest()[:12]


def load(file: str | Path | None = None, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a YAML file (None: the built-in example) with `section.key=value` overrides. Raises ConfigError."""
    values = _read(QUICKSTART if file is None else Path(file))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {override!r} must look like section.key=value, e.g. local.lr=0.05")
        _set(values, key.split("."), _parse(text, override), override)
    return Experiment(**values)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"there is no config file {file}; `cfl-ray run` without a file runs the built-in example")
    values = _parse(file.read_text(), str(file)) or {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file} must hold keys and values, e.g. `rounds: 30`, got {type(values).__name__}")
    return values


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None


def _set(values: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {override!r}: {key} is a value, not a section")
    values[path[-1]] = value


def check_cohort(wanted: int, available: int) -> None:
    """Raises ConfigError where more clients are wanted in a round than there are."""
    if wanted > available:
        raise ConfigError(f"cohort.clients: {wanted} clients per round, but the federation has {available}; at most {available}")


def _name_of(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if dataclasses.is_dataclass(value):  # a method or its class: as `methods` takes them
        name = getattr(value, "name", type(value).__name__)
        return name if isinstance(value, type) else {name: dataclasses.asdict(value)}
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _without_default(entry: Any) -> Any:
    """An entry of `methods` without an aggregation that says what none says."""
    if not isinstance(entry, dict):
        return entry
    return {name: {key: value for key, value in (options or {}).items() if (key, value) != ("aggregation", "mean")} for name, options in entry.items()}


def _explain(error: ValidationError) -> str:
    """One line per problem: where, what is wrong, the range or the nearest valid key."""
    lines = []
    for problem in error.errors():
        where = ".".join(map(str, problem["loc"])) or "config"
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {where!r}{nearest(str(problem['loc'][-1]), _keys_at(problem['loc'][:-1]))}")
        else:
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}, got {problem['input']!r}"[:500])
    return "\n".join(lines)


def _keys_at(path: tuple) -> list[str]:
    section: Any = Experiment
    for key in path:
        if isinstance(key, int):
            continue
        section = section.model_fields[key].annotation
        section = next((a for a in typing.get_args(section) if isinstance(a, type) and issubclass(a, Section)), section)
    return list(section.model_fields)
