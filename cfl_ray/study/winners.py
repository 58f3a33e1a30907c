"""The best trials of a sweep as one study, which compares the methods with the values that were found for each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from cfl_ray.config.experiment import listed_methods
from cfl_ray.config.method_entries import name_and_options
from cfl_ray.config.reading import set_key
from cfl_ray.config.section import as_yaml
from cfl_ray.config.study import ALL_SETTINGS, Study, merged
from cfl_ray.config.sweep import RangeConfig
from cfl_ray.core.method import Method
from cfl_ray.errors import ConfigError
from cfl_ray.study.study_plan import entries_by_label
from cfl_ray.study.sweep import RankedTrial

_NEAR = 0.05  # share of a range, from either end, that counts as its edge


def study_of_winners(study: Study, best: Sequence[RankedTrial]) -> Study:
    """The study, without its sweep, whose methods have the values of their best trials, each in each setting.

    Keys of `local` and options are those of the method alone. Raises ConfigError if the best values of a key that all
    methods share differ: no single study has them; and if there is no best trial.
    """
    if not best:
        raise ConfigError("no trial has a value of the metric that chooses")
    settings: dict[str, dict[str, Any]] = {}
    for setting in dict.fromkeys(trial.setting for trial in best):
        winners = [trial for trial in best if trial.setting == setting]
        settings[setting] = _shared(winners) | {"methods": [_entry(study, trial) for trial in winners]}
    values = study.model_dump(mode="json", by_alias=True) | {"name": f"{study.name}-best", "sweep": None}
    if study.settings:
        values["settings"] = {name: merged(study.settings[name], keys) for name, keys in settings.items()}
    else:
        values["experiment"] = merged(values["experiment"], settings[ALL_SETTINGS])
    return Study(**values)._with_written(study._written)


def _shared(winners: Sequence[RankedTrial]) -> dict[str, Any]:
    """The keys of the winners of a setting that no method can have for itself."""
    found: dict[str, Any] = {}
    of_key: dict[str, RankedTrial] = {}
    for trial in winners:
        for key, value in trial.parameters.items():
            if key.partition(".")[0] in ("methods", "local"):
                continue
            other = of_key.setdefault(key, trial)
            if other.parameters[key] != value:
                raise ConfigError(
                    f"the best values of {key} differ: {as_yaml(other.parameters[key])} for {other.method}, "
                    f"{as_yaml(value)} for {trial.method}; a study has one {key} for all methods"
                )
            set_key(found, key.split("."), copy.deepcopy(value), key)
    return found


def _entry(study: Study, trial: RankedTrial) -> Any:
    """The entry of a list of methods with the options, the label and the keys of `local` of a trial."""
    values = study.values(trial.setting, trial.trial.parameters)
    entries = entries_by_label(listed_methods(values))
    (entry,) = [entry for label, entry, _ in entries if label == trial.method]
    if isinstance(entry, Method):  # of `all`
        entry = trial.method
    name, options = name_and_options(entry)
    keys = {key.split(".")[1] for key in trial.parameters if key.startswith("local.")}
    own = {key: value for key, value in values.get("local", {}).items() if key in keys or "local" in trial.parameters}
    if local := own | dict(options.pop("local", None) or {}):
        options["local"] = local
    return {name: options} if options else name


def at_the_edge(study: Study, best: Sequence[RankedTrial]) -> list[str]:
    """The numbers of the best trials that are the least or largest of those that were tried, in words."""
    assert study.sweep is not None
    found = []
    for trial in best:
        for key, value in trial.parameters.items():
            if where := _edge(study.sweep.parameters[key], value):
                place = "" if trial.setting == ALL_SETTINGS else f" in {trial.setting}"
                found.append(f"{trial.method}{place} {key}={as_yaml(value)} ({where})")
    return found


def _edge(tried: list[Any] | RangeConfig, value: Any) -> str:
    """Whether a number is at an end of those that were tried, in words; empty if it is not."""
    if isinstance(tried, RangeConfig):
        low, high = float(tried.at(_NEAR)), float(tried.at(1 - _NEAR))
        ends = (low, high) if low < high else (tried.low, tried.high)
    else:
        numbers = [one for one in tried if type(one) in (int, float)]  # a bool is none
        if len(set(numbers)) < 2 or value not in numbers:
            return ""
        ends = (min(numbers), max(numbers))
    return "the least" if value <= ends[0] else "the largest" if value >= ends[1] else ""
