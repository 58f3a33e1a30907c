"""Keys of an experiment that have no effect, because other keys replace them or switch them off."""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

from cfl_ray.config.data import ColumnsDataConfig, DataConfig, GeneratedConfig
from cfl_ray.config.experiment import Experiment
from cfl_ray.config.partition import LabelSkewConfig
from cfl_ray.config.protocol import PROTOCOLS
from cfl_ray.config.section import ConfigSection
from cfl_ray.plugins.calling import reference_of
from cfl_ray.system.nested import leaves_of

USES_OF_TESTS = (
    "data.test.pool: true divides them among the clients as well, data.test.view: cluster, label or all tests clients "
    "on them, and a function that returns clients and test_clients gives each client its own"
)


def unused_keys(experiment: Experiment) -> dict[str, str]:
    """The keys without effect, dotted, each with the reason."""
    return {f"{section}.{key}": reason for section, keys, reason in _rules(experiment) for key in keys}


def warnings_of(experiment: Experiment) -> list[str]:
    """Warnings of keys whose value is not the default and has no effect, or probably not the intended effect."""
    data = experiment.data
    return (data.warnings if data.federation is None else []) + _warnings(experiment, unused_keys(experiment))


def warnings_of_division(data: DataConfig, protocol: str | None) -> list[str]:
    """Warnings of the keys that divide samples, for samples that turned out to belong to clients already.

    protocol: of the experiment, which may have filled in keys: those with its values are left out.
    """
    rules, preset = _rules_of_division(data), {} if protocol is None else leaves_of(PROTOCOLS[protocol]["data"])
    unused = {f"{section}.{key}": reason for section, keys, reason in rules for key in keys}
    filled_in = {key for key, value in not_default(data, unused).items() if key in preset and preset[key] == value}
    return _warnings(data, {key: reason for key, reason in unused.items() if key not in filled_in}, "data.")


def _warnings(config: ConfigSection, unused: dict[str, str], prefix: str = "") -> list[str]:
    return [
        f"{prefix}{key} ({reference_of(value) if key.endswith('.kind') else value}) has no effect: {unused[key]}"
        for key, value in not_default(config, unused).items()
    ]


def not_default(config: ConfigSection, keys: Iterable[str]) -> dict[str, Any]:
    """The dotted keys of an experiment, or of a section, whose value is not the default, with their values."""
    values = {}
    for key in keys:
        *sections, name = key.split(".")
        section: Any = reduce(getattr, sections, config)
        if (value := getattr(section, name)) != type(section).model_fields[name].default:
            values[key] = value
    return values


def _rules(experiment: Experiment) -> Iterator[tuple[str, Iterable[str], str]]:
    """Yields (section, keys in it, the reason why they have no effect)."""
    local, cohort, asynchronous = experiment.local, experiment.cohort, experiment.asynchronous
    privacy = experiment.privacy
    if experiment.data.federation is None:
        yield from _rules_of_data(experiment.data)
    if local.steps is not None:
        yield "local", ["epochs"], f"local.steps is {local.steps}"
    if cohort.clients is not None:
        yield "cohort", ["fraction"], f"cohort.clients is {cohort.clients}"
    if asynchronous.buffer is None:
        reason = "asynchronous.buffer is null"
        yield "asynchronous", _keys(asynchronous, "buffer", "staleness"), reason
        yield "asynchronous.staleness", _keys(asynchronous.staleness), reason
    if getattr(experiment.attack, "clients", None) is not None:
        yield "attack", ["fraction"], "attack.clients names them"
    if (first := getattr(experiment.attack, "from_round", 1)) > experiment.rounds:
        yield "attack", ["kind"], f"attack.from_round is {first}, the last round is {experiment.rounds}"
    if privacy and not privacy.of_clients:
        keys = ("delta", "clip", "clipping", "quantile", "clip_lr", "count_noise", "signatures", "extrapolate")
        yield "privacy", keys, "privacy has neither target_epsilon nor noise_multiplier"
    elif privacy and privacy.clipping != "adaptive":
        yield "privacy", ("quantile", "clip_lr", "count_noise"), f"privacy.clipping is {privacy.clipping}"
    if experiment.private_clients and experiment.secure_aggregation:
        yield "secure_aggregation", ["clip"], "privacy.clip bounds changes"
    if experiment.clock.kind == "none":
        yield "cohort", ["over_selection"], "clock.kind is none"
    elif cohort.availability.kind == "always":
        yield "clock", ["availability_seconds"], "cohort.availability is always"
    if experiment.keep.which == "last":
        yield "keep", ["metric", "goal"], "keep.which is last"
    if not any(event.change for event in experiment.schedule):
        yield "evaluation", ["past"], "the schedule changes no client's data"


def _rules_of_data(data: DataConfig) -> Iterator[tuple[str, Iterable[str], str]]:
    partition, test = data.partition, data.test
    if data.has_clients:
        yield from ((f"data.{section}", keys, reason) for section, keys, reason in _rules_of_division(data))
        if isinstance(data, GeneratedConfig):
            yield "data", ["normalize"], f"source {data.source} generates the inputs as the model gets them"
    elif isinstance(partition, LabelSkewConfig) and not partition.groups:
        yield "data.partition", [partition.key_of_groups], "data.partition.groups is null"
    if test.view is not None:
        keys = ["max_samples"] if test.view == "holdout" else ["fraction", "order"]
        yield "data.test", keys, f"data.test.view is {test.view}"
    if test.view == "holdout" and not test.pool and hasattr(data, "test_files"):
        yield "data", ["test_files"], f"data.test.view is holdout; {USES_OF_TESTS}"
    if data.validation is not None and data.names_validation_part:
        yield "data.validation", ["fraction", "order"], f"source {data.source} has a validation part of its own"
    if isinstance(data, ColumnsDataConfig):
        other = "image" if data.source == "csv" else "features"
        yield "data.columns", [other], f"source {data.source} does not read it"
        if test.order != "last" and (data.validation is None or data.validation.order != "last"):
            yield "data.columns", ["time"], "neither data.validation.order nor data.test.order is last"


def _rules_of_division(data: DataConfig) -> Iterator[tuple[str, Iterable[str], str]]:
    """As `_rules`, with keys of `data`, for a source whose samples belong to clients already."""
    is_generated, source = isinstance(data, GeneratedConfig), reference_of(data.source)
    reason = f"the samples of source {source} belong to clients already"
    yield "shift", _keys(data.shift), reason
    yield "partition", _keys(data.partition, *(["clients"] if is_generated else [])), reason
    yield "test", ["max_samples"], f"source {source} has the test samples that it gives to each client"


def _keys(section: ConfigSection, *others: str) -> list[str]:
    """The keys of a section without `others`."""
    return [key for key in type(section).model_fields if key not in others]
