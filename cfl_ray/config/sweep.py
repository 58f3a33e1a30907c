"""Sweeps over the keys of an experiment: values to try, their trials, and the names of these.

`config.study` has the study that they are part of.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from cfl_ray.config.explanation import explain
from cfl_ray.config.section import ConfigSection

_NO_NAME = re.compile(r"[^A-Za-z0-9_.=,+-]+")
LONGEST_NAME = 100
EXACT = ConfigDict(ser_json_inf_nan="constants")  # .inf as it is, rather than as null
# keys of an experiment that are the same in all runs of a study, and what decides them
OF_STUDY = {"seed": "decided by the study's `seeds`", "name": "decided by the study's `name`"}
OF_ALL_RUNS = dict.fromkeys(("output", "tracking"), "the same in all runs of a study, a key of its `experiment`")


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
        if self.int_ and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"low and high must be whole numbers with int, got {self.low:g} and {self.high:g}")
        return self

    def at(self, share: float) -> float | int:
        """The value at a share, 0..1, of the range, with six digits."""
        if self.int_ and not self.log:
            return min(int(self.low) + int(share * (int(self.high) - int(self.low) + 1)), int(self.high))
        if self.log:
            value = float(np.exp(np.log(self.low) + share * (np.log(self.high) - np.log(self.low))))
        else:
            value = self.low + share * (self.high - self.low)
        return round(value) if self.int_ else six_digits(value)


@dataclass(frozen=True)
class Trial:
    """Values of the keys of a sweep."""

    parameters: Mapping[str, Any] = field(default_factory=dict)  # by key; empty: no sweep
    method: str | None = None  # label, or else name as listed, of the methods that it is for; None: all methods

    @property
    def name(self) -> str:
        """Its name as a part of that of a folder; empty without parameters."""
        return name_of(self.parameters) if self.parameters else ""


class HalvingConfig(ConfigSection):
    """Successive halving: the trials of a method are compared several times, and the best go on."""

    first: int = Field(ge=1, description="the round after which trials are compared first")
    factor: int = Field(
        3,
        ge=2,
        description="the best of each `factor` trials go on (rounded up), to `factor` times the rounds of the "
        "comparison before",
    )


class SweepConfig(ConfigSection):
    """Values of keys to try: all combinations, random ones, or those that earlier results suggest."""

    model_config = EXACT

    parameters: dict[str, list[Any] | RangeConfig] = Field(
        min_length=1,
        description="by key of the experiment (local.lr, or methods.NAME.OPTION, which only the methods with that "
        "label or name sweep): a list of values, or a range {low, high, log, int}",
    )
    sampler: Literal["grid", "random", "tpe"] = Field(
        "grid",
        description="grid: every combination of the lists | random: drawn independently | tpe: the tree-structured "
        "Parzen estimator of Optuna, which learns from the trials before (needs cfl-ray[sweep])",
    )
    trials: int | None = Field(None, ge=1, description="number of trials (random, tpe)")
    metric: str | None = Field(
        None,
        description="metric that decides which trial is best, of the round whose models are kept: the last evaluated "
        "one, or with keep: best the best one; null: the first metric of the task on the clients' validation data "
        "(validation/accuracy), or without such data on their test data",
    )
    goal: Literal["maximize", "minimize"] | None = Field(
        None,
        description="whether more of the metric is better; null: as it is known of the metric (less of losses, errors, "
        "traffic and seconds, more of everything else)",
    )
    seed: int = Field(0, ge=0, description="seed of the trials that are drawn")
    halving: HalvingConfig | None = Field(
        None,
        description="end trials early that cannot win (grid, random); null: train every trial to its end, as the "
        "papers do",
    )

    @field_validator("parameters", mode="before")
    @classmethod
    def _check_values(cls, parameters: Any) -> Any:
        for key, values in parameters.items() if isinstance(parameters, dict) else ():
            place = (OF_STUDY | OF_ALL_RUNS).get(str(key).partition(".")[0])
            if place is not None:
                raise ValueError(f"{key} cannot be swept: it is {place}")
            if isinstance(values, list):
                _check_list(str(key), values)
            elif isinstance(values, dict):
                _check_range(str(key), values)
            elif not isinstance(values, RangeConfig):
                raise ValueError(f"{key} needs a list of values, as in [{values}], or a range {{low: ..., high: ...}}")
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
        if self.halving is not None and self.sampler == "tpe":
            raise ValueError("halving is for grid and random: tpe learns from trials that are trained to their ends")
        if self.halving is not None and "rounds" in self.parameters:
            raise ValueError("halving compares trials after the same round, so rounds cannot be swept")
        return self

    def drawn(self, keys: Collection[str] | None = None) -> list[dict[str, Any]]:
        """The parameters of every trial of a grid or of random draws. keys: those that have an effect; None: all."""
        chosen = [key for key in self.parameters if keys is None or key in keys]
        if self.sampler == "grid":
            lists = [values for key in chosen if isinstance(values := self.parameters[key], list)]
            return [dict(zip(chosen, values, strict=True)) for values in itertools.product(*lists)]
        draw = np.random.default_rng(self.seed)
        trials: dict[str, dict[str, Any]] = {}
        for _ in range(self.trials or 0):
            drawn = {key: _draw(values, float(draw.random())) for key, values in self.parameters.items()}
            trial = {key: drawn[key] for key in chosen}
            trials.setdefault(name_of(trial), trial)  # the same combination of listed values may be drawn twice
        return list(trials.values())


def _check_list(key: str, values: list[Any]) -> None:
    """Raises ValueError if a list of values is empty, or two values would have the same folder."""
    if not values:
        raise ValueError(f"{key} has no values")
    names = [name_of({key: yaml_copy(value, key)}) for value in values]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{key} has the value {values[names.index(name)]!r} twice")


def _check_range(key: str, values: dict[str, Any]) -> None:
    try:
        RangeConfig(**{str(name): value for name, value in values.items()})
    except ValidationError as error:
        raise ValueError(f"{key}: {explain(error, RangeConfig).removeprefix('config: ')}") from None


def _draw(values: list[Any] | RangeConfig, share: float) -> Any:
    return values.at(share) if isinstance(values, RangeConfig) else values[int(share * len(values))]


def name_of(parameters: Mapping[str, Any]) -> str:
    """The parameters of a trial as the name of a folder: LAST_PART_OF_KEY=VALUE, joined by commas.

    A name that is too long, or in which characters are replaced, ends in a hash of the parameters.
    """
    names = short_names(list(parameters))
    exact = ",".join(f"{name}={_text(value)}" for name, value in zip(names, parameters.values(), strict=True))
    plain = _NO_NAME.sub("-", exact)
    if plain == exact and len(plain) <= LONGEST_NAME:
        return plain
    digits = hashlib.sha256(json.dumps(list(parameters.items())).encode()).hexdigest()[:8]
    return f"{plain[: LONGEST_NAME - len(digits) - 1].rstrip('-')}-{digits}"


def short_names(keys: list[str]) -> list[str]:
    """The last part of each key, or the whole key if another key has the same last part."""
    short = [key.rpartition(".")[2] for key in keys]
    return [last if short.count(last) == 1 else key for key, last in zip(keys, short, strict=True)]


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


def six_digits(value: float) -> float:
    """A number with six significant digits."""
    return float(f"{value:.6g}")


def yaml_copy(value: Any, where: str) -> Any:
    """A copy of a value of YAML. Raises ValueError for a value that YAML cannot express."""
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"keys are texts, got {wrong[0]!r} in {where}")
        return {key: yaml_copy(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [yaml_copy(entry, where) for entry in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(
        f"{where} is an object of type {type(value).__name__}, but the runs of a study are in processes of their own, "
        "which get YAML: name a file.py:Name instead of an object, and files instead of arrays"
    )
