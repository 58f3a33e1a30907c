"""The list of keys is that of the sections: every key with its meaning, its values and its default."""

import pytest
import yaml

from cfl_ray.config import Experiment, keys
from cfl_ray.config.nearest import SYNONYMS
from cfl_ray.config.part import keys_of
from cfl_ray.errors import ConfigError
from cfl_ray.tracking import flatten

BY_NAME = {key.name: key for section in keys.sections(Experiment) for key in section.keys}


def test_every_key_of_an_experiment_is_listed_with_its_default():
    sections_with_free_keys = {"model.options"}
    written = {}
    for name, text in flatten(Experiment().to_dict()).items():
        written[name] = "{}" if name in sections_with_free_keys else text
    top = {name: key for name, key in BY_NAME.items() if "[]" not in name}
    assert not written.keys() - top.keys()
    of_other_kinds = top.keys() - written.keys()
    assert {"data.shift.angles", "data.partition.alpha", "attack.scale", "data.columns.label"} < of_other_kinds
    chosen = {"data.test.view"}  # null stands for the view that fits
    for name in written.keys() - chosen:
        assert yaml.safe_load(top[name].default) == yaml.safe_load(written[name]), name
    assert {name for name, key in BY_NAME.items() if key.default is None} == {
        "data.partition.cut[].keep",
        "data.partition.cut[].clients",
        "schedule[].round",
        "schedule[].change[].clients",
        "cohort.availability.file",
        "privacy.signatures.noise_multiplier",
        "privacy.examples.noise_multiplier",
        "privacy.extrapolate.cohort",
        "privacy.extrapolate.population",
        "clock.file",
        "clock.classes",
        "clock.classes[].share",
    }


def test_every_key_has_a_meaning_and_values():
    for name, key in BY_NAME.items():
        assert key.meaning and key.values, name


def test_values_are_choices_or_a_type_with_its_range():
    shown = {name: BY_NAME[name].values for name in ("runtime.device", "local.momentum", "seed", "data.test.view")}
    assert shown == {
        "runtime.device": "auto | cpu | cuda",
        "local.momentum": "number >= 0 and < 1",
        "seed": "whole number >= 0 and < 2147483648",
        "data.test.view": "cluster | label | all | holdout | null",
    }
    assert BY_NAME["data.partition.sizes"].values == "list of whole numbers >= 1 | null"
    assert BY_NAME["data.shift.label_sets"].values == "list of lists of whole numbers"
    assert BY_NAME["schedule[].join"].values == "list of client ids and ranges"
    assert BY_NAME["schedule"].values == "list of {round, join, leave, change}"


@pytest.mark.parametrize("name", ["schedule[].join", "schedule.join", "schedule.0.join"])
def test_items_of_a_list_are_named_in_three_ways(name):
    (section,) = keys.find(Experiment, name)
    assert (section.name, [key.name for key in section.keys]) == ("schedule[]", ["schedule[].join"])


def test_a_section_comes_with_those_in_it():
    assert [section.name for section in keys.find(Experiment, "cohort")] == ["cohort", "cohort.availability"]
    assert [section.name for section in keys.find(Experiment, "schedule")] == ["", "schedule[]", "schedule[].change[]"]


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("local.lrr", "local.lr"),
        ("locl", "local"),
        ("round", "rounds"),
        ("lr", "local.lr"),
        ("schedule.jion", "schedule[].join"),
        ("alhpa", "data.partition.alpha"),
        ("local.learning_rate", "local.lr"),
        ("data.num_clients", "data.partition.clients"),
        ("data.alpha", "data.partition.alpha"),
        ("cohort.num_clients", "cohort.clients"),
    ],
)
def test_an_unknown_key_names_the_nearest(wrong, nearest):
    with pytest.raises(ConfigError) as error:
        keys.find(Experiment, wrong)
    assert str(error.value) == f"unknown key {wrong!r} (did you mean {nearest!r}?)"


def test_names_of_the_field_stand_for_keys_that_are_there():
    known = {".".join(path) for path, _ in keys_of(Experiment)}
    assert not {*SYNONYMS.values()} - known and not {*SYNONYMS} & known


def test_an_unknown_key_that_is_near_to_none():
    with pytest.raises(ConfigError, match="unknown key 'zzz'; valid: asynchronous, attack, clock, cohort, data, "):
        keys.find(Experiment, "zzz")


@pytest.mark.parametrize(
    ("name", "method"), [("aggregation", "fedavg"), ("server_optimizer", "fedavg"), ("methods.stocfl.tau", "stocfl")]
)
def test_options_of_methods_are_no_keys(name, method):
    with pytest.raises(ConfigError, match=rf"unknown key '{name}': it is an option of .*: cfl-ray methods {method}$"):
        keys.find(Experiment, name)


def test_meanings_list_every_name_of_a_part():
    """The sections do not import torch, so that the names are written there by hand."""
    from cfl_ray.core.metrics import METRICS
    from cfl_ray.core.optimizers import OPTIMIZERS
    from cfl_ray.core.schedules import SCHEDULES
    from cfl_ray.core.tasks import LOSSES, TARGETS, TASKS

    parts = {
        "task": (*TASKS.builtin, *LOSSES.builtin, *TARGETS),
        "evaluation.metrics": METRICS.builtin,
        "local.optimizer": OPTIMIZERS.builtin,
        "local.schedule": SCHEDULES.builtin,
    }
    for key, names in parts.items():
        words = BY_NAME[key].meaning.replace(",", " ").replace(":", " ").split()
        assert set(names) <= set(words), f"{key} lacks {set(names) - set(words)}"
