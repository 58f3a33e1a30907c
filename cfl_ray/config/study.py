"""Studies: methods x settings x seeds of an experiment; `config.sweep` has sweeps over any of its keys."""

import copy
import itertools
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Self

from pydantic import (
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cfl_ray.config.experiment import Experiment, listed_methods
from cfl_ray.config.explanation import WholeConfig
from cfl_ray.config.method_entries import address, listed_name, name_and_options
from cfl_ray.config.paths import (
    check_variables,
    from_record,
    paths_as_written,
    record_line,
    resolved_in,
    root_resolved_in,
    with_replaced,
)
from cfl_ray.config.reading import PARTS, read_yaml, set_key, split_override
from cfl_ray.config.sweep import EXACT, LONGEST_NAME, OF_ALL_RUNS, OF_STUDY, SweepConfig, Trial, yaml_copy
from cfl_ray.config.yaml_text import yaml_of
from cfl_ray.errors import ConfigError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.security.credentials import redact_values, with_known_credentials
from cfl_ray.system.files import read_text
from cfl_ray.system.nested import texts_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]*")  # of a folder
ALL_SETTINGS = "all"  # the setting of a study that names none
_TAKEN = RunDirectory.names_in("study")


class Study(WholeConfig):
    """Methods x settings x seeds of an experiment; with `sweep`, also x values of its keys."""

    model_config = EXACT

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=LONGEST_NAME,
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
            if not _NAME.fullmatch(str(name)) or len(str(name)) > LONGEST_NAME or str(name) in _TAKEN:
                raise ValueError(
                    f"a setting names a folder: at most {LONGEST_NAME} letters, digits and _ . = , + -, and not "
                    f"the name of a file or folder of the study ({', '.join(_TAKEN)}); got {name!r}"
                )
            for key, place in (OF_STUDY | OF_ALL_RUNS).items():
                if isinstance(values, dict) and key in values:
                    raise ValueError(f"{name}.{key} cannot differ between settings: it is {place}; leave it out")
        names = [str(name) for name in settings]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two settings are named {twice[0]!r}, as a text and as a number; rename one")
        return {str(name): yaml_copy(values or {}, f"settings.{name}") for name, values in settings.items()}

    @field_validator("seeds", "metrics")
    @classmethod
    def _check_once(cls, values: list[Any], info: ValidationInfo) -> list[Any]:
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"{str(info.field_name).removesuffix('s')} {twice[0]} is listed twice")
        return values

    @field_validator("experiment", mode="before")
    @classmethod
    def _check_experiment(cls, experiment: Any) -> Any:
        for key, place in OF_STUDY.items():
            if isinstance(experiment, dict) and key in experiment:
                raise ValueError(f"{key} is {place}; leave it out")
        return yaml_copy({} if experiment is None else experiment, "experiment")

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
    if not RunDirectory(folder).study_lock.exists():  # else the file is the record of a study
        for keys in (before["experiment"], *before["settings"].values()):
            check_variables(keys)
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
    if path[0] in OF_STUDY:
        raise ConfigError(f"{where}: {path[0]} is {OF_STUDY[path[0]]}; change it in the file")
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


def place_of(study: Study, setting: str, trial: str) -> str:
    """The name of the folder of a setting in a trial; trial: its name, empty outside a sweep."""
    return ",".join(part for part in (setting if study.settings or not trial else "", trial) if part)
