"""Studies: methods x settings x seeds of an experiment, and sweeps over any of its keys."""

import copy
import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cfl_ray.config.experiment import Experiment, listed_methods
from cfl_ray.config.explanation import WholeConfig, explain
from cfl_ray.config.method_entries import address, listed_name, name_and_options
from cfl_ray.config.paths import (
    from_record,
    paths_as_written,
    record_line,
    resolved_in,
    root_resolved_in,
    with_replaced,
)
from cfl_ray.config.reading import PARTS, read_yaml, set_key, split_override
from cfl_ray.config.section import ConfigSection
from cfl_ray.config.yaml_text import yaml_of
from cfl_ray.errors import ConfigError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.security.credentials import redact_values, with_known_credentials
from cfl_ray.system.files import read_text
from cfl_ray.system.nested import texts_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]*")  # of a folder
_NO_NAME = re.compile(r"[^A-Za-z0-9_.=,+-]+")
ALL_SETTINGS = "all"  # the setting of a study that names none
_LONGEST_NAME = 100
_EXACT = ConfigDict(ser_json_inf_nan="constants")  # .inf as it is, rather than as null
_TAKEN = RunDirectory.names_in("study")
# keys of an experiment that are the same in all runs of a study, and what decides them
_OF_STUDY = {"seed": "decided by the study's `seeds`", "name": "decided by the study's `name`"}
_OF_ALL_RUNS = dict.fromkeys(("output", "tracking"), "the same in all runs of a study, a key of its `experiment`")


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

    model_config = _EXACT

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
            place = (_OF_STUDY | _OF_ALL_RUNS).get(str(key).partition(".")[0])
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
    names = [name_of({key: _yaml_copy(value, key)}) for value in values]
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


class Study(WholeConfig):
    """Methods x settings x seeds of an experiment; with `sweep`, also x values of its keys."""

    model_config = _EXACT

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=_LONGEST_NAME,
        description="name of the study, of its folder and run",
    )
    experiment: dict[str, Any] = Field(description="keys of the experiment that all runs share (cfl-ray config)")
    settings: dict[str, dict[str, Any]] = Field(
        {}, description="by name, keys in which runs differ, e.g. {cifar10: {data: {source: cifar10}}}"
    )
    seeds: list[int] = Field([0], min_length=1, description="every method runs in every setting once with each seed")
    metrics: list[str] = Field([], description="metrics of the tables at the end; empty: the usual ones")
    published: str | None = Field(
        None, description="file of published numbers to compare with; a relative path starts at this file's folder"
    )
    tables: list[str] = Field([], description="tables of the published numbers that this study repeats")
    sweep: SweepConfig | None = Field(None, description="values to try (cfl-ray sweep); null: none")
    _written: dict[str, str] = PrivateAttr(default_factory=dict)  # paths as written, by absolute path
    _kept: dict[str, str] = PrivateAttr(default_factory=dict)  # file.py:Name that its runs use, by those named here

    @field_validator("settings", mode="before")
    @classmethod
    def _check_settings(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return {} if settings is None else settings
        for name, values in settings.items():
            if not _NAME.fullmatch(str(name)) or len(str(name)) > _LONGEST_NAME or str(name) in _TAKEN:
                raise ValueError(
                    f"a setting names a folder: at most {_LONGEST_NAME} letters, digits and _ . = , + -, and not "
                    f"the name of a file or folder of the study ({', '.join(_TAKEN)}); got {name!r}"
                )
            for key, place in (_OF_STUDY | _OF_ALL_RUNS).items():
                if isinstance(values, dict) and key in values:
                    raise ValueError(f"{name}.{key} cannot differ between settings: it is {place}; leave it out")
        names = [str(name) for name in settings]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two settings are named {twice[0]!r}, as a text and as a number; rename one")
        return {str(name): _yaml_copy(values or {}, f"settings.{name}") for name, values in settings.items()}

    @field_validator("seeds", "metrics")
    @classmethod
    def _check_once(cls, values: list[Any], info: ValidationInfo) -> list[Any]:
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"{str(info.field_name).removesuffix('s')} {twice[0]} is listed twice")
        return values

    @field_validator("experiment", mode="before")
    @classmethod
    def _check_experiment(cls, experiment: Any) -> Any:
        for key, place in _OF_STUDY.items():
            if isinstance(experiment, dict) and key in experiment:
                raise ValueError(f"{key} is {place}; leave it out")
        return _yaml_copy({} if experiment is None else experiment, "experiment")

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if self.tables and self.published is None:
            raise ValueError("tables are those of published numbers; name their file as `published`")
        return self

    def values(self, setting: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of an experiment in a setting, with the parameters of a trial."""
        values = merged(self.experiment, self.settings.get(setting, {}))
        for key, value in parameters.items():
            set_key(values, key.split("."), copy.deepcopy(value), f"sweep: {key}")
        in_use: dict[str, Any] = with_replaced(values, self._kept)
        return in_use

    def searches(self) -> dict[str | None, list[str]]:
        """The keys of the sweep that have an effect on a method, by its label, or else its name as it is listed.

        These are the shared keys, without those of `local` that the method replaces, and the method's own options, so
        that no run is repeated for a key without effect. None: all methods, if none is listed. Raises ConfigError for
        an option of a method that is not listed.
        """
        swept = self.sweep.parameters if self.sweep is not None else {}
        own = [key for key in swept if key.startswith("methods.")]
        found: dict[str | None, set[str]] = {}
        fixed: dict[str | None, set[str]] = {}  # keys of `local` that a method replaces
        unknown: dict[str, ConfigError] = {}  # the first message about each key that addresses no method so far
        for entries in self._lists_of_methods():
            for entry in entries:
                found.setdefault(listed_name(entry), set())
                local = name_and_options(entry)[1].get("local")
                own_local = {f"local.{key}" for key in local} if isinstance(local, dict) else set()
                fixed[listed_name(entry)] = fixed.get(listed_name(entry), own_local) & own_local
            for key in own:
                try:
                    places, _ = address(entries, key.split(".")[1:], f"sweep: {key}")
                except ConfigError as error:
                    unknown.setdefault(key, error)
                    continue
                for place in places:
                    found[listed_name(entries[place])].add(key)
        addressed = set().union(*found.values())
        for key, message in unknown.items():
            if key not in addressed:
                raise message
        return {
            name: [key for key in swept if key in of_method or (key not in own and key not in fixed[name])]
            for name, of_method in found.items()
        } or {None: list(swept)}

    def _lists_of_methods(self) -> list[list[Any]]:
        """The lists of methods of all settings, or those that the sweep tries."""
        swept = self.sweep.parameters.get("methods") if self.sweep is not None else None
        lists = [listed_methods(self.values(setting, {})) for setting in self.setting_names]
        return [entries for entries in (swept if isinstance(swept, list) else lists) if isinstance(entries, list)]

    def drawn(self) -> list[Trial]:
        """The trials of a grid or of random draws, for each method those of its own keys; without a sweep, one."""
        if self.sweep is None:
            return [Trial()]
        of_methods = [
            [
                Trial(parameters, method)
                for parameters in self.sweep.drawn(keys)
                if method in [None, *(listed_name(entry) for entry in parameters.get("methods") or [method])]
            ]
            for method, keys in self.searches().items()
        ]
        return [trial for of_place in itertools.zip_longest(*of_methods) for trial in of_place if trial is not None]

    @property
    def setting_names(self) -> list[str]:
        """Names of the settings; `ALL_SETTINGS` alone if the study has none."""
        return list(self.settings) or [ALL_SETTINGS]

    @property
    def learns(self) -> bool:
        """Whether later trials of the sweep depend on the results of earlier ones."""
        return self.sweep is not None and self.sweep.sampler == "tpe"

    def to_yaml(self, credentials: bool = True) -> str:
        """The study as YAML; loading it gives an equal study, whose runs have the same config hashes.

        credentials: False leaves them out; `load_study` inserts those that this user has used before.
        """
        values = self.model_dump(mode="json", by_alias=True)
        return record_line(self._written) + yaml_of(values if credentials else redact_values(values))

    def config_text(self, values: dict[str, Any], comment: str) -> str:
        """An experiment of this study as YAML that `cfl-ray run` takes, without credentials, below a comment."""
        return record_line(self._written) + f"# {comment}\n" + yaml_of(redact_values(values))

    def with_metric(self, metric: str) -> "Study":
        """The study with the metric of its sweep."""
        assert self.sweep is not None
        changed = self.model_copy(update={"sweep": self.sweep.model_copy(update={"metric": metric})})
        return changed._with_written(self._written)

    def located(self, base: Path | None = None) -> "Study":
        """The study with `output`, and paths relative to the working directory, as absolute paths.

        base: folder of a relative `output`; None: the working directory.
        """
        try:
            here = Path.cwd()
        except FileNotFoundError:  # the working directory no longer exists
            return self
        before = self.model_dump(mode="json", by_alias=True)
        values = _resolved_in(before, here)
        written = paths_as_written(values, before) | self._written
        output = values["experiment"].get("output") or "runs"
        if isinstance(output, str) and "://" not in output:  # else it is an error of the experiment
            values["experiment"]["output"] = str((base or here) / Path(output).expanduser())
        return Study(**values)._with_written(written)

    def paths_of(self, experiment: Experiment) -> Experiment:
        """An experiment of this study; its config hash covers the paths as written in the study."""
        written = self._written | {new: self._written.get(old, old) for old, new in self._kept.items()}
        located = experiment._from_record(written, {})
        located._recorded = {new: old for old, new in self._kept.items()}
        return located

    def with_code(self, kept: Mapping[str, str]) -> "Study":
        """This study, whose runs use other file.py:Name than it names, by these; see `Experiment.with_code`."""
        changed = self.model_copy()
        changed._kept = dict(kept)
        return changed

    @property
    def references(self) -> list[str]:
        """Every file.py:Name in the study."""
        texts = texts_of(self.model_dump(mode="json", by_alias=True))
        return list(dict.fromkeys(text for text in texts if ".py:" in text))

    def _with_written(self, written: dict[str, str]) -> "Study":
        self._written = written
        return self


def is_study_file(file: str | Path) -> bool:
    """Whether a YAML file is a study, not an experiment. Raises ConfigError for invalid YAML."""
    return "experiment" in read_yaml(Path(file))


def load_study(file: str | Path, overrides: Iterable[str] = (), base: Path | None = None) -> Study:
    """The study of a YAML file. Raises ConfigError.

    overrides: SECTION.KEY=VALUE, changes to the experiment of every run, also if a setting has the key. Relative
        paths are looked for in the file's folder, then in the working directory.
    base: folder of a relative `output`; None: the working directory.
    """
    path = Path(file)
    given = with_known_credentials(read_yaml(path))
    if not isinstance(given.get("experiment"), dict):
        raise ConfigError(
            f"{file} is no study: its key `experiment` must hold the keys that all runs share; a study has name, "
            "experiment, settings, seeds (cfl-ray compare), and sweep (cfl-ray sweep); an experiment alone is run by "
            "`cfl-ray run`"
        )
    try:
        before = Study(**given).model_dump(mode="json", by_alias=True)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    folder = path.parent.resolve()
    values = _resolved_in(before, folder)
    for override in overrides:
        for study in (before, values):
            _override(study, override)
    written = paths_as_written(values, before) | from_record(read_text(path, follow=True) or "")
    _find_roots(values, folder)
    if values["published"] is not None:
        values["published"] = str((folder / Path(values["published"]).expanduser()).resolve())
    return Study(**values)._with_written(written).located(base)


def _resolved_in(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The keys of a study with every relative path that exists in `folder` as a path in it."""
    values = given | {
        "experiment": resolved_in(given["experiment"], folder, Experiment),
        "settings": {name: resolved_in(keys, folder, Experiment) for name, keys in given["settings"].items()},
    }
    if given["sweep"] is not None:
        swept = given["sweep"]["parameters"].items()
        parameters = {key: _choices_resolved_in(key.split("."), choices, folder) for key, choices in swept}
        values["sweep"] = given["sweep"] | {"parameters": parameters}
    return values


def _choices_resolved_in(path: list[str], choices: Any, folder: Path) -> Any:
    """The listed values of the key at a path with paths in `folder`; a range as it is."""
    if not isinstance(choices, list):
        return choices
    nested = [reduce(lambda inner, key: {key: inner}, reversed(path), choice) for choice in choices]
    return [reduce(getitem, path, resolved_in(values, folder, Experiment)) for values in nested]


def _find_roots(values: dict[str, Any], folder: Path) -> None:
    """Sets `data.root` to the folder of the study if `data.train_files` are there."""
    values["experiment"] = root_resolved_in(values["experiment"], folder)
    shared = values["experiment"].get("data")
    if not isinstance(shared, dict) or shared.get("root") is None:
        values["settings"] = {name: root_resolved_in(keys, folder) for name, keys in values["settings"].items()}


def _override(values: dict[str, Any], override: str) -> None:
    """Applies SECTION.KEY=VALUE to the keys of all runs, and to those of the settings that have the key."""
    path, value = split_override(override)
    where = f"override {override!r}"
    if path[0] in Study.model_fields and path[0] != "name":
        raise ConfigError(
            f"{where}: {path[0]} is a key of the study, overrides are of its experiment; change it in the file "
            "(--seed, --method and --setting select runs)"
        )
    if path[0] in _OF_STUDY:
        raise ConfigError(f"{where}: {path[0]} is {_OF_STUDY[path[0]]}; change it in the file")
    if values["sweep"] is not None and ".".join(path) in values["sweep"]["parameters"]:
        raise ConfigError(f"{where}: the sweep decides {'.'.join(path)}")
    sections = list(values["settings"].values())
    if path[0] == "methods" and path[1:]:
        _override_method([values["experiment"], *sections], path, value, where)
        return
    set_key(values["experiment"], path, copy.deepcopy(value), where)
    for section in sections:
        if _has(section, path):
            set_key(section, path, copy.deepcopy(value), where)


def _override_method(sections: list[dict[str, Any]], path: list[str], value: Any, where: str) -> None:
    """Sets an option of a method in each section that lists the method. Raises ConfigError if no section does."""
    errors = []
    listing = [section for section in sections if isinstance(section.get("methods"), list)]
    for section in listing:
        try:
            set_key(section, path, copy.deepcopy(value), where)
        except ConfigError as error:
            errors.append(error)
    if not listing:
        raise ConfigError(f"{where}: the study lists no methods")
    if len(errors) == len(listing):
        raise errors[0]


def _has(section: Any, path: list[str]) -> bool:
    """Whether a section decides the key at a path."""
    for key in path:
        if not isinstance(section, dict):
            return True
        if key not in section:
            return False
        section = section[key]
    return True


def _yaml_copy(value: Any, where: str) -> Any:
    """A copy of a value of YAML. Raises ValueError for a value that YAML cannot express."""
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"keys are texts, got {wrong[0]!r} in {where}")
        return {key: _yaml_copy(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_yaml_copy(entry, where) for entry in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(
        f"{where} is an object of type {type(value).__name__}, but the runs of a study are in processes of their own, "
        "which get YAML: name a file.py:Name instead of an object, and files instead of arrays"
    )


def merged(values: Mapping[str, Any], changes: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy of nested mappings with changes at any depth; lists are replaced.

    A change of a part's kind drops the keys that only other kinds have. path: of the mappings in an experiment.
    """
    result = copy.deepcopy(dict(values))
    kinds = PARTS.get(path)
    if kinds is not None and kinds.key in changes:
        kinds.drop_others(result, changes[kinds.key])
    for key, value in changes.items():
        before = result.get(key)
        both = isinstance(before, dict) and isinstance(value, Mapping)
        result[key] = merged(before, value, (*path, key)) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return result


def name_of(parameters: Mapping[str, Any]) -> str:
    """The parameters of a trial as the name of a folder: LAST_PART_OF_KEY=VALUE, joined by commas.

    A name that is too long, or in which characters are replaced, ends in a hash of the parameters.
    """
    names = short_names(list(parameters))
    exact = ",".join(f"{name}={_text(value)}" for name, value in zip(names, parameters.values(), strict=True))
    plain = _NO_NAME.sub("-", exact)
    if plain == exact and len(plain) <= _LONGEST_NAME:
        return plain
    digits = hashlib.sha256(json.dumps(list(parameters.items())).encode()).hexdigest()[:8]
    return f"{plain[: _LONGEST_NAME - len(digits) - 1].rstrip('-')}-{digits}"


def place_of(study: Study, setting: str, trial: str) -> str:
    """The name of the folder of a setting in a trial; trial: its name, empty outside a sweep."""
    return ",".join(part for part in (setting if study.settings or not trial else "", trial) if part)


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
