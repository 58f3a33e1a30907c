"""Studies: methods x settings x seeds of one experiment, and sweeps over any of its keys."""

import copy
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from cfl_ray.config.experiment import explain, read_yaml, set_key, split_override
from cfl_ray.config.paths import beside, root_beside
from cfl_ray.config.sections import ConfigSection
from cfl_ray.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]*")  # of a folder
_ALL = "all"  # the setting of a study that names none
_LONGEST_NAME = 100


class RangeConfig(ConfigSection):
    """A range from which a sweep draws a number."""

    low: float = Field(description="least value")
    high: float = Field(description="greatest value")
    log: bool = Field(False, description="true: the logarithm is drawn uniformly; false: the value")
    int_: bool = Field(False, alias="int", description="true: whole numbers; false: real ones")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low must be less than high, got {self.low:g} and {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"low must be greater than 0 with log, got {self.low:g}")
        return self

    def at(self, share: float) -> float | int:
        """Returns the value at a share, 0..1, of the range, with six digits."""
        if self.int_ and not self.log:
            return min(int(self.low) + int(share * (int(self.high) - int(self.low) + 1)), int(self.high))
        if self.log:
            value = float(np.exp(np.log(self.low) + share * (np.log(self.high) - np.log(self.low))))
        else:
            value = self.low + share * (self.high - self.low)
        return round(value) if self.int_ else float(f"{value:.6g}")


class SweepConfig(ConfigSection):
    """Values of keys to try: all combinations, random ones, or those that earlier results suggest."""

    parameters: dict[str, list[Any] | RangeConfig] = Field(
        min_length=1,
        description="by key of the experiment (local.lr, methods.LABEL.OPTION): a list of values, or a range "
        "{low, high, log, int}",
    )
    sampler: Literal["grid", "random", "tpe"] = Field(
        "grid",
        description="grid: every combination of the lists | random: drawn independently | tpe: the tree-structured "
        "Parzen estimator of Optuna, which learns from the trials before (needs cfl-ray[sweep])",
    )
    trials: int | None = Field(None, ge=1, description="number of trials (random, tpe)")
    metric: str = Field("accuracy", description="metric of the last evaluation that decides which trial is best")
    goal: Literal["maximize", "minimize"] = Field("maximize", description="whether more of the metric is better")
    seed: int = Field(0, ge=0, description="seed of the trials that are drawn")

    @field_validator("parameters")
    @classmethod
    def _check_values(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        for key, values in parameters.items():
            if isinstance(values, list) and not values:
                raise ValueError(f"{key} has no values")
        return parameters

    @model_validator(mode="after")
    def _check_sampler(self) -> Self:
        if self.sampler == "grid":
            for key, values in self.parameters.items():
                if isinstance(values, RangeConfig):
                    raise ValueError(f"{key}: a grid needs a list of values; use sampler random or tpe for a range")
            if self.trials is not None:
                raise ValueError(f"trials is for random and tpe, got {self.trials} with a grid")
        elif self.trials is None:
            raise ValueError(f"sampler {self.sampler} needs trials, their number")
        return self

    def drawn(self) -> list[dict[str, Any]]:
        """Returns the parameters of every trial of a grid or of random draws."""
        keys = list(self.parameters)
        if self.sampler == "grid":
            lists = [values for values in self.parameters.values() if isinstance(values, list)]
            return [dict(zip(keys, values, strict=True)) for values in itertools.product(*lists)]
        draw = np.random.default_rng(self.seed)
        trials: dict[str, dict[str, Any]] = {}
        for _ in range(self.trials or 0):
            one = {key: _draw(values, float(draw.random())) for key, values in self.parameters.items()}
            trials.setdefault(name_of(one), one)  # of choices, a combination may be drawn twice
        return list(trials.values())


def _draw(values: list[Any] | RangeConfig, share: float) -> Any:
    return values.at(share) if isinstance(values, RangeConfig) else values[int(share * len(values))]


class Study(ConfigSection):
    """Methods x settings x seeds of one experiment; with `sweep`, also over values of its keys."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="name of the study, of its folder and run")
    experiment: dict[str, Any] = Field(description="keys of the experiment that all runs share (cfl-ray config)")
    settings: dict[str, dict[str, Any]] = Field(
        {}, description="by name, keys in which runs differ, e.g. {cifar10: {data: {source: cifar10}}}"
    )
    seeds: list[int] = Field([0], min_length=1, description="every method and setting runs once with each of them")
    metrics: list[str] = Field([], description="metrics of the table at the end; empty: the usual ones")
    published: str | None = Field(None, description="file of published numbers to compare with, beside this one")
    tables: list[str] = Field([], description="tables of that file that this study repeats")
    sweep: SweepConfig | None = Field(None, description="values to try (cfl-ray sweep); null: none")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, Study)) from None

    @field_validator("settings")
    @classmethod
    def _check_names(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for name in settings:
            if not _NAME.fullmatch(name):
                raise ValueError(f"a setting names a folder: letters, digits and _ . = , + -, got {name!r}")
        return settings

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, seeds: list[int]) -> list[int]:
        if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
            raise ValueError(f"seed {twice[0]} is listed twice")
        return seeds

    @field_validator("experiment")
    @classmethod
    def _check_experiment(cls, experiment: dict[str, Any]) -> dict[str, Any]:
        for key, place in (("seed", "seeds"), ("name", "name")):
            if key in experiment:
                raise ValueError(f"{key} is decided by the study's {place}; leave it out")
        return experiment

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if self.tables and self.published is None:
            raise ValueError("tables are those of published numbers; name their file as `published`")
        return self

    def values(self, setting: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys of an experiment in one setting, with the parameters of one trial."""
        values = merged(self.experiment, self.settings.get(setting, {}))
        for key, value in parameters.items():
            set_key(values, key.split("."), copy.deepcopy(value), f"sweep: {key}")
        return values

    @property
    def setting_names(self) -> list[str]:
        """Names of the settings; one name where the study has none."""
        return list(self.settings) or [_ALL]

    def to_yaml(self) -> str:
        """Returns the study as YAML; loading it gives an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json", by_alias=True), sort_keys=False, width=120)


def load_study(file: str | Path, overrides: Iterable[str] = ()) -> Study:
    """Returns the study of a YAML file. Raises ConfigError.

    overrides: SECTION.KEY=VALUE, changes to the experiment of every run. Relative paths are looked for in the file's
    folder, then in the working directory.
    """
    path = Path(file)
    values = read_yaml(path)
    if "experiment" not in values:
        raise ConfigError(
            f"{file} is no study: it has no key `experiment`; a study has name, experiment, settings, seeds "
            "(an experiment alone is run by `cfl-ray run`)"
        )
    for section in (values["experiment"], *dict(values.get("settings") or {}).values()):
        if isinstance(section, dict):
            section.update(root_beside(beside(section, path.parent), path.parent))
    if isinstance(published := values.get("published"), str):
        values["published"] = str((path.parent / published).resolve())
    study = Study(**values)
    changed = copy.deepcopy(study.experiment)
    for override in overrides:
        key, value = split_override(override)
        set_key(changed, key, value, f"override {override!r}")
    return study.model_copy(update={"experiment": changed})


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of nested mappings with changes at any depth; lists are replaced."""
    result = copy.deepcopy(dict(values))
    for key, value in changes.items():
        before = result.get(key)
        both = isinstance(before, dict) and isinstance(value, Mapping)
        result[key] = merged(before, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return result


def name_of(parameters: Mapping[str, Any]) -> str:
    """Returns the parameters of a trial as the name of a folder: LAST_PART_OF_KEY=VALUE, joined by commas."""
    keys = list(parameters)
    short = [key.rpartition(".")[2] for key in keys]
    names = [last if short.count(last) == 1 else key for key, last in zip(keys, short, strict=True)]
    parts = [f"{name}={_text(value)}" for name, value in zip(names, parameters.values(), strict=True)]
    return re.sub(r"[^A-Za-z0-9_.=,+-]+", "-", ",".join(parts))[:_LONGEST_NAME]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "-".join(map(_text, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
