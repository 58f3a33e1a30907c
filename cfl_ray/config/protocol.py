"""Presets of keys that repeat how another library divides data, trains and scores: `protocol`.

A preset fills in keys that a config leaves out, so that an experiment with it is the experiment in which these keys are
written out. Sources: TsingZ0/PFLlib, d832e76; KarhouTam/FL-bench, 06e658b (docs/coming_from.md).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from cfl_ray.config.data import SOURCE_KINDS, GeneratedConfig, PluginDataConfig
from cfl_ray.config.method_entries import listed_name, name_and_options
from cfl_ray.config.section import ConfigSection, as_yaml
from cfl_ray.system.nested import leaves_of

# keys of an experiment; of `methods`, options of every method
PROTOCOLS: dict[str, dict[str, Any]] = {
    "pfllib": {
        "rounds": 2000,
        "data": {
            "partition": {"kind": "dirichlet", "clients": 20, "alpha": 0.1, "capped": True, "min_samples": 40},
            "test": {"view": "holdout", "fraction": 0.25, "pool": True},
        },
        "local": {"epochs": 1, "batch_size": 10, "lr": 0.005, "drop_last": True},
        "cohort": {"fraction": 1.0},
        "evaluation": {"weights": "samples", "reported": {"apfl": "local"}},
        "keep": {"which": "best", "metric": "reported"},
        "methods": {"norm": "local_statistics"},
    },
    "fl_bench": {
        "rounds": 100,
        "data": {
            "partition": {"kind": "dirichlet", "clients": 100, "alpha": 0.1, "capped": False, "min_samples": 10},
            "test": {"view": "holdout", "fraction": 0.25, "pool": True},
        },
        "local": {"epochs": 5, "batch_size": 32, "lr": 0.01, "drop_last": "single"},
        "cohort": {"fraction": 0.1},
        "evaluation": {"every": 100, "weights": "samples", "reported": {}},
        "keep": {"which": "best", "metric": "reported"},
        "methods": {"norm": "shared"},
    },
}


def described() -> str:
    """The presets in words: every key with its value."""
    texts = (
        f"{name}: {', '.join(f'{key} {as_yaml(value)}' for key, value in leaves_of(preset).items())}"
        for name, preset in PROTOCOLS.items()
    )
    return " | ".join(texts)


def with_protocol(values: Mapping[str, Any], methods: list[Any]) -> dict[str, Any]:
    """The keys of an experiment, with those of its protocol that they leave out; given keys stay as they are.

    Keys without a meaning for the data, or beside a given key that replaces them, are not filled in. methods: those
    that run if the values have none. A name that is no protocol changes nothing.
    """
    name = values.get("protocol")
    if not isinstance(name, str) or name not in PROTOCOLS:
        return dict(values)
    wanted = dict(PROTOCOLS[name])
    options, entries = wanted.pop("methods"), values.get("methods", methods)
    if isinstance(entries, list):
        entries = [_with_options(entry, options) for entry in entries]
    given = {key: _as_mapping(key, value) for key, value in values.items()}
    for key, other in (("local", "steps"), ("cohort", "clients")):  # a number that replaces the first key of the preset
        if isinstance(given.get(key), Mapping) and given[key].get(other) is not None:
            wanted[key] = {inner: value for inner, value in wanted[key].items() if inner not in ("epochs", "fraction")}
    if isinstance(given.get("keep"), Mapping) and given["keep"].get("which") == "last":
        wanted["keep"] = {}
    if "data" in given:
        wanted["data"] = _meant_for(given["data"], wanted["data"]) if isinstance(given["data"], Mapping) else {}
    return _filled(given, wanted) | {"methods": entries}


def compared_with_protocol(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, value of the experiment, value of its protocol) for the keys that its protocol has.

    values: every key of the experiment; None stands for a key that it does not have.
    """
    if values["protocol"] is None:
        return
    wanted = dict(PROTOCOLS[values["protocol"]])
    options, ours = wanted.pop("methods"), leaves_of(values)
    for key, theirs in leaves_of(wanted).items():
        yield key, ours.get(key), theirs
    for entry in values["methods"]:
        own = name_and_options(entry)[1]
        for option, theirs in options.items():
            yield f"methods.{listed_name(entry)}.{option}", own.get(option, "shared"), theirs


def exceptions_in_words(values: Mapping[str, Any]) -> str:
    """A line on the keys whose value is not that of the protocol; empty if there are none. values: as above."""
    differing = [
        f"{key} {as_yaml(ours)} ({as_yaml(theirs)})"
        for key, ours, theirs in compared_with_protocol(values)
        if ours != theirs
    ]
    if not differing:
        return ""
    return f"protocol {values['protocol']}, except for (in brackets: the protocol): {', '.join(differing)}"


def _filled(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The given keys, and the wanted ones that they lack, in inner sections too."""
    filled = dict(given)
    for key, value in wanted.items():
        if key not in given:
            filled[key] = value
        elif isinstance(value, Mapping) and isinstance(inner := _as_mapping(key, given[key]), Mapping):
            filled[key] = _filled(inner, value)
    return filled


def _as_mapping(key: str, value: Any) -> Any:
    """A section made in Python, or the word for `keep`, as the keys that it was given; any other value as it is."""
    if isinstance(value, ConfigSection):
        fields = type(value).model_fields
        return {key: getattr(value, key) for key in fields if key in value.model_fields_set | {"source", "kind"}}
    return {"which": value} if key == "keep" and isinstance(value, str) else value


def _meant_for(data: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The wanted keys that have a meaning for these keys of the section `data`."""
    source = data.get("source", SOURCE_KINDS.default)
    builtin = SOURCE_KINDS.builtin.get(source) if isinstance(source, str) else None
    section = builtin.section if builtin is not None else PluginDataConfig
    inner = (_as_mapping(key, data.get(key)) for key in ("partition", "test", "columns"))
    partition, test, columns = (keys if isinstance(keys, Mapping) else {} for keys in inner)
    kind = partition.get("kind") or ("writer" if columns.get("client") is not None else "dirichlet")
    division = dict(wanted["partition"])
    if section.has_clients or kind != "dirichlet":
        has_number = issubclass(section, GeneratedConfig) if section.has_clients else kind != "writer"
        division = {"clients": division["clients"]} if has_number and "sizes" not in partition else {}
    if section.has_clients or test.get("view", "holdout") != "holdout":
        return {"partition": division}
    tests = dict(wanted["test"])
    if kind == "writer" or not (section.has_tests or data.get("test_files") is not None):
        del tests["pool"]
    return {"partition": division, "test": tests}


def _with_options(entry: Any, options: Mapping[str, Any]) -> Any:
    """An entry of `methods` with these options unless it has them, or they are the defaults; objects as they are."""
    missing = {key: value for key, value in options.items() if value != "shared"}
    name, own = name_and_options(entry)
    is_named = isinstance(entry, str) or (isinstance(entry, dict) and list(entry.values()) in ([None], [own]))
    return {name: missing | own} if missing and is_named and name != "all" else entry
