"""Experiments: their keys, and the same YAML out that they are read from (`config.reading`).

Every key has a single place, default and description; the error for an unknown key names the nearest valid key.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from cfl_ray.config.asynchronous import AsynchronousConfig
from cfl_ray.config.attack import ATTACK_KINDS, AttackConfig
from cfl_ray.config.clock import CLOCK_KINDS, ClockConfig, RunningClockConfig, TraceClockConfig
from cfl_ray.config.cohort import CohortConfig, TraceConfig
from cfl_ray.config.data import NOT_IN_RECIPE, SOURCE_KINDS, ArraysConfig, DataConfig, OfficialDataConfig
from cfl_ray.config.evaluation import EvaluationConfig
from cfl_ray.config.explanation import WholeConfig, explain
from cfl_ray.config.local import LocalConfig
from cfl_ray.config.model import ModelConfig
from cfl_ray.config.paths import to_record, with_replaced
from cfl_ray.config.privacy import PrivacyConfig
from cfl_ray.config.protocol import described, with_protocol
from cfl_ray.config.runtime import RuntimeConfig
from cfl_ray.config.schedule import EventConfig
from cfl_ray.config.section import check_path, replaced_in
from cfl_ray.config.secure_aggregation import SecureAggregationConfig
from cfl_ray.config.start import StartConfig
from cfl_ray.config.stopping import KeepConfig, StoppingConfig
from cfl_ray.config.tracking import TrackingConfig
from cfl_ray.config.yaml_text import yaml_of
from cfl_ray.errors import ConfigError
from cfl_ray.security.credentials import redact_values
from cfl_ray.system.files import sha256_once
from cfl_ray.system.nested import texts_of

# Keys that do not define the experiment: configs that differ only in these describe the same experiment.
# Of `runtime`, `engine`, `device` and `clients_per_host` change the rounding, and `round_deadline` can exclude clients.
# They are not hashed: `auto` is resolved only when hosts have started, and the clients that a deadline excludes depend
# on the clock, not on its value. `results/environment.py` records these for a run. `precision` changes results on
# purpose and is hashed.
NOT_HASHED = {"runtime", "tracking", "output", "name", "protocol"}
_FORMAT = 2  # of the config hash; a new number for a changed default


class Experiment(WholeConfig):
    """Everything that a run depends on: a federation, methods and a seed.

    In Python, `methods` also takes `Method` objects, `model` a callable that returns a module, and `data` a
    `Federation`. Raises ConfigError for anything that is not valid.
    """

    name: str = Field(
        "experiment",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=100,
        description="name of the experiment, the run directory and the MLflow run",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of every random draw")
    rounds: int = Field(30, ge=1, description="T, number of communication rounds")
    methods: list[Any] = Field(
        ["fedavg", "ifca", "stocfl"],
        min_length=1,
        description="methods to run: a name, {name: {option: value}} or path/to/file.py:Class each; the option label "
        "names a method in results",
    )
    task: Any = Field(
        "classification",
        description="what clients learn: classification | regression | multi_label | next_token | "
        "path/to/file.py:Name | {loss: ..., targets: ..., metrics: [...]} with a loss cross_entropy | "
        "token_cross_entropy | mse | mae | huber | bce | file.py:function, targets class | real | binary | tokens, "
        "and metrics as in evaluation.metrics",
    )
    protocol: Literal["pfllib", "fl_bench"] | None = Field(
        None,
        description="preset of another library, whose keys are filled in if they are not given (docs/coming_from.md); "
        f"null: none. {described()}",
    )
    data: Annotated[DataConfig, SOURCE_KINDS] = OfficialDataConfig()
    model: ModelConfig = ModelConfig()
    start: StartConfig = StartConfig()
    local: LocalConfig = LocalConfig()
    cohort: CohortConfig = CohortConfig()
    clock: Annotated[ClockConfig, CLOCK_KINDS] = ClockConfig()
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    attack: Annotated[AttackConfig, ATTACK_KINDS] = AttackConfig()
    privacy: PrivacyConfig | None = Field(
        None, description="differential privacy of clients (docs/privacy.md); null: none"
    )
    secure_aggregation: SecureAggregationConfig | None = Field(
        None, description="sums of masked uploads (docs/secure_aggregation.md); null: of the uploads themselves"
    )
    schedule: list[EventConfig] = Field(
        [], description="clients that join, leave or change; events after the last round are ignored"
    )
    evaluation: EvaluationConfig = EvaluationConfig()
    stopping: StoppingConfig | None = Field(
        None,
        description="the end of a method whose evaluations no longer improve (docs/concepts/evaluation.md); null: a "
        "method makes all rounds",
    )
    keep: KeepConfig = KeepConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    tracking: TrackingConfig = TrackingConfig()
    output: str = Field("runs", description="folder of run directories, shards and the local MLflow store")
    # of an experiment that was loaded from the record of a run: by absolute path, the path as the user wrote it; and if
    # the run directory has moved, by recorded path, the new path
    _written: dict[str, str] = PrivateAttr(default_factory=dict)
    _moved: dict[str, str] = PrivateAttr(default_factory=dict)
    # with code that a run has kept: by each file.py:Name in use, the one that records name
    _recorded: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, /, **values: Any) -> None:
        super().__init__(**values)
        target = self.evaluation.target
        if self.task == "classification" and target is not None and not 0 < target <= 1:
            raise ConfigError(f"evaluation.target: an accuracy is above 0 and at most 1, got {target}")
        self._check_time()
        if (
            self.private_clients is not None
            and self.private_clients.clipping == "adaptive"
            and self.secure_aggregation is not None
        ):
            raise ConfigError(
                "privacy.clipping adaptive, and secure_aggregation: the server counts the uploads within the norm, and "
                "secure sums hide which these are; set privacy.clipping to flat or per_layer"
            )
        moved = (event.round for event in self.schedule for change in event.change if change.data_of is not None)
        if self.privacy is not None and (round := next(moved, None)) is not None:
            raise ConfigError(
                f"privacy, and schedule.change.data_of in round {round}: the accounts are of clients, and would not "
                "count that the data of one are in the uploads of another; leave one of them out"
            )
        if self.cohort.clients and self.data.known_clients:
            check_cohort(self.cohort.clients, self.data.known_clients)

    @property
    def private_clients(self) -> PrivacyConfig | None:
        """The privacy of clients; None: sums have no noise."""
        return self.privacy if self.privacy is not None and self.privacy.of_clients else None

    @property
    def events(self) -> list[EventConfig]:
        """The schedule as single events, in which processes of drift are expanded."""
        return [single for event in self.schedule for single in event.single_events(self.seed)]

    @model_validator(mode="before")
    @classmethod
    def _fill_in_protocol(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return with_protocol(values, cls.model_fields["methods"].default)

    @field_validator("model", mode="before")
    @classmethod
    def _from_name_or_factory(cls, value: Any) -> Any:
        return {"name": value} if callable(value) or isinstance(value, str) else value

    @field_validator("data", mode="before")
    @classmethod
    def _from_federation(cls, value: Any) -> Any:
        return {"source": "arrays", "federation": value} if hasattr(value, "recipe") else value

    @field_validator("output")
    @classmethod
    def _without_tilde(cls, value: str) -> str:
        check_path("output", value)
        return os.path.expanduser(value)

    def _check_time(self) -> None:
        """Raises ConfigError for keys of virtual time and asynchronous rounds that do not fit the others."""
        clock, settings, sampling = self.clock, self.asynchronous, self.cohort.sampling
        wanted = {"cohort.over_selection": self.cohort.over_selection > 1, "asynchronous.buffer": settings.buffer}
        if key := next((key for key, given in wanted.items() if given), None):
            if not isinstance(clock, RunningClockConfig):
                raise ConfigError(
                    f"{key} needs virtual time, in which clients finish one after another; set clock.kind"
                )
            if sampling != "fixed":
                raise ConfigError(
                    f"{key} needs cohorts of a fixed size, got cohort.sampling {sampling}; set it to fixed"
                )
        if settings.buffer is None:
            return
        if self.private_clients is not None:
            raise ConfigError(
                f"privacy, and asynchronous.buffer {settings.buffer}: the accountant knows no asynchronous rounds, in "
                "which fast clients take part more often; leave one of them out"
            )
        if self.secure_aggregation is not None:
            raise ConfigError(
                f"secure_aggregation, and asynchronous.buffer {settings.buffer}: masks cancel among clients of the "
                "same round, and asynchronous rounds have none; leave one of them out"
            )
        if self.cohort.over_selection > 1:
            raise ConfigError(
                f"cohort.over_selection is {self.cohort.over_selection:g}, and asynchronous.buffer {settings.buffer}: "
                "asynchronous rounds wait for no cohort; leave one of them out"
            )
        if isinstance(clock, RunningClockConfig) and clock.deadline is not None:
            raise ConfigError(
                f"clock.deadline is {clock.deadline:g}, and asynchronous.buffer {settings.buffer}: asynchronous rounds "
                "have no deadline; leave one of them out, or set asynchronous.max_staleness"
            )
        check_buffer(settings.buffer, settings.concurrency or self.cohort.clients)

    @property
    def targets(self) -> str:
        """Kind of the task's targets (`core.tasks`). Raises ConfigError for a task that cannot be used."""
        from cfl_ray.core.tasks import resolve_task  # imports torch, which `cfl-ray status` does not need

        return resolve_task(self.task).targets

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value in the types of YAML; objects made in Python appear by their names."""
        values = self.model_dump(exclude={"tracking": {"trackers"}}) | {"methods": self.methods}
        values["tracking"]["trackers"] = self.tracking.trackers
        as_recorded: dict[str, Any] = with_replaced(json.loads(json.dumps(values, default=_name_of)), self._recorded)
        return as_recorded

    def to_yaml(self, credentials: bool = True) -> str:
        """The resolved config; loading it gives an equal experiment if it has the credentials of its URIs."""
        values = self.to_dict() if credentials else redact_values(self.to_dict())
        return yaml_of(values)

    def to_dict_as_written(self) -> dict[str, Any]:
        """Every key with its value; paths that the record of a run made absolute are as they were written."""
        values: dict[str, Any] = with_replaced(self.to_dict(), self._written)
        return values

    def to_record(self) -> str:
        """The resolved config with absolute paths, which are valid in any working directory.

        It has no credentials; `load` inserts those that this user has used before.

        Loading it gives an experiment of the same hash.
        """
        written = {path: old for path, old in self._written.items() if path not in self._recorded}
        line, values = to_record(redact_values(self.to_dict()), written, Experiment)
        return line + yaml_of(values)

    def _from_record(self, written: dict[str, str], moved: dict[str, str]) -> "Experiment":
        """This experiment, loaded from a record with these paths."""
        self._written = self.data._written = written
        self._moved = moved
        return self

    def with_code(self, kept: Mapping[str, str]) -> "Experiment":
        """This experiment with other file.py:Name, by the present ones; hash, record and recipe stay those of these."""
        recorded = self._recorded | {new: self._recorded.get(old, old) for old, new in kept.items()}
        written = self._written | {new: self._written.get(old, old) for new, old in recorded.items()}
        changed = cast("Experiment", replaced_in(self, kept))
        changed = changed.model_copy(update={"data": changed.data.model_copy()})
        changed._recorded, changed._written, changed.data._written = recorded, written, written
        return changed

    @property
    def references(self) -> list[str]:
        """Every file.py:Name of the parts in use; in records, they may name other files (`with_code`)."""
        values = [self.model_dump(), self.methods, self.tracking.trackers]
        return list(dict.fromkeys(text for text in texts_of(values) if ".py:" in text))

    @property
    def has_objects(self) -> bool:
        """Whether data, model or methods are a user's objects made in Python, which a record only names."""
        objects = [part for part in (self.model.name, *self.methods) if not isinstance(part, str | dict)]
        own = [part for part in objects if not getattr(part, "__module__", "").startswith("cfl_ray.")]
        return self.data.federation is not None or bool(own)

    @property
    def moved(self) -> Mapping[str, str]:
        """New paths by recorded path, if this is the record of a run whose folder has moved."""
        return self._moved

    @property
    def contents(self) -> dict[str, str]:
        """The sha256 of each file whose content the config hash covers, by its key; without files that are missing."""
        availability, clock, data = self.cohort.availability, self.clock, self.data
        files = {
            "cohort.availability.file": availability.file if isinstance(availability, TraceConfig) else None,
            "clock.file": clock.file if isinstance(clock, TraceClockConfig) else None,
            "data.root": data.root if isinstance(data, ArraysConfig) else None,
            "model.weights": self.model.weights,
        }
        paths = {key: Path(file or "").expanduser() for key, file in files.items()}
        return {key: sha256_once(path) for key, path in paths.items() if path.is_file()}

    @property
    def config_hash(self) -> str:
        """12 hex digits: a hash of everything that decides a result, except the rounding of engines and devices.

        It covers the keys that differ from their defaults.
        """
        excluded: dict[str, Any] = dict.fromkeys(NOT_HASHED | {"methods"}, True) | {"data": set(NOT_IN_RECIPE)}
        evaluation = self.evaluation.model_copy(update={"verify": True})  # which decides no result
        experiment = self.model_copy(update={"evaluation": evaluation})
        values = experiment.model_dump(exclude_defaults=True, exclude=excluded, by_alias=True)
        values |= {"format": _FORMAT, "methods": [_hashed_method(entry) for entry in self.methods]}
        values |= self.runtime.model_dump(exclude_defaults=True, include={"precision"})
        if self.data.federation is not None:
            values["federation"] = self.data.federation.recipe
        contents = self.contents
        if digest := contents.pop("model.weights", None):
            values["model"]["weights"] = digest
        values |= contents
        values = with_replaced(json.loads(json.dumps(values, default=_name_of)), self._written)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def check_cohort(wanted: int, available: int) -> None:
    """Raises ConfigError if a round wants more clients than the federation has."""
    if wanted > available:
        raise ConfigError(
            f"cohort.clients: {wanted} clients per round, but the federation has {available}; at most {available}"
        )


def check_buffer(buffer: int, concurrency: int | None) -> None:
    """Raises ConfigError if the buffer is larger than the concurrency. concurrency: None: not known yet."""
    if concurrency is not None and buffer > concurrency:
        raise ConfigError(
            f"asynchronous.buffer is {buffer}, but only {concurrency} clients are at work at a time "
            f"(asynchronous.concurrency, or the size of the cohort); at most {concurrency}"
        )


def _name_of(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if is_dataclass(value):  # a method or its class: written the way that `methods` accepts
        name = getattr(value, "name", type(value).__name__)
        if isinstance(value, type):
            return name
        given = {item.name: getattr(value, item.name) for item in fields(value)}
        unset = [key for key in ("local", "label", "private") if given.get(key) is None]
        return {name: {key: option for key, option in given.items() if key not in unset}}
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _hashed_method(entry: Any) -> Any:
    """[name, options] of an entry of `methods`, without its label and the defaults of shared options."""
    entry = _name_of(entry) if is_dataclass(entry) else entry
    name, options = next(iter(entry.items())) if isinstance(entry, dict) and entry else (entry, None)
    if not isinstance(options, dict) or not options:
        return [name, options or {}]
    from cfl_ray.core.method import Method  # imports torch, which `cfl-ray status` does not need

    defaults = {item.name: item.default for item in fields(Method)}
    return [
        name,
        {key: value for key, value in options.items() if key != "label" and (key, value) not in defaults.items()},
    ]


def listed_methods(values: Mapping[str, Any]) -> Any:
    """The entries of `methods` in the keys of an experiment; the default if they have none."""
    return values.get("methods", Experiment.model_fields["methods"].default)


def changed_local(local: LocalConfig, changes: Mapping[str, Any], where: str) -> LocalConfig:
    """The section `local` with some keys changed. Raises ConfigError with `where` in its message."""
    try:
        return LocalConfig(**(local.model_dump() | dict(changes)))
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, LocalConfig)}") from None
