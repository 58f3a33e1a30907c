"""Reading of experiments: YAML files, and overrides SECTION.KEY=VALUE."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.config.experiment import Experiment
from cfl_ray.config.method_entries import with_option
from cfl_ray.config.model import ModelConfig
from cfl_ray.config.part import keys_of, kinds_of, with_present_names
from cfl_ray.config.paths import (
    check_variables,
    from_record,
    is_record,
    moves_of,
    resolved_in,
    root_resolved_in,
    with_replaced,
)
from cfl_ray.config.yaml_text import parse_yaml
from cfl_ray.errors import ConfigError, command
from cfl_ray.security.credentials import with_known_credentials
from cfl_ray.system.files import read_text

QUICKSTART = Path(__file__).with_name("quickstart.yaml")
# the kinds of each part, by path, e.g. ("data", "shift")
PARTS = {path: kinds for path, info in keys_of(Experiment) if (kinds := kinds_of(info)) is not None}


def load(file: str | Path | None = None, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a YAML file with `section.key=value` overrides. Raises ConfigError.

    file: None for the built-in example, whose events follow the number of clients. A relative path in a file (a data
    folder, a Python file) is looked for in the file's folder, then in the working directory; those of overrides are
    relative to the working directory.
    In the record of a run that has moved, recorded paths that do not exist are looked for next to its new place.
    """
    values, overrides = read_yaml(QUICKSTART if file is None else Path(file)), list(overrides)
    if "experiment" in values:
        verb = "sweep" if values.get("sweep") else "compare"
        raise ConfigError(f"{file} is a study, no experiment; run it with: {command(verb, file)}")
    written: dict[str, str] = {}
    moved: dict[str, str] = {}
    if file is not None:
        values, written, moved = _located(values, Path(file))
    for override in overrides * 2:  # twice, so that a key dropped by a later override of the kind is an error
        key, value = split_override(override)
        value = with_known_credentials(value)  # of a command that was pasted from our output, which hides them
        set_key(values, key, value, f"override {override!r}")
    if file is None and not any(override.startswith("schedule") for override in overrides):
        values["schedule"] = _events_for(values["schedule"], values["data"])
    try:
        if file is None or not is_record(read_text(Path(file), follow=True) or ""):
            check_variables(values)
        return Experiment(**values)._from_record(written, moved)
    except ConfigError as error:
        if file is None or overrides:  # an override may be the cause
            raise
        raise type(error)(f"{file}: {error}") from error


def _located(values: dict[str, Any], file: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """The values of a file with paths that are valid in the working directory, and with known credentials.

    Also returns, for the record of a run, the paths as written by present path, and the new paths by recorded path.
    """
    text, folder = read_text(file, follow=True) or "", file.parent
    if is_record(text):
        values = with_present_names(values, Experiment)
    moved = moves_of(values, text, folder)
    recorded = {path: path for path in moved} | from_record(text)  # other moved paths: as they are recorded
    written = {moved.get(path, path): old for path, old in recorded.items()}
    values = resolved_in(with_replaced(values, moved), folder, Experiment)
    return with_known_credentials(root_resolved_in(values, folder)), written, moved


def _events_for(events: list[dict[str, Any]], data: Any) -> list[dict[str, Any]]:
    """The events of the built-in experiment for another number of clients: the last clients join later.

    An empty list for data whose number of clients is not in the config.
    """
    newcomers = [event for event in events if "join" in event]
    partition = data.get("partition") if isinstance(data, dict) else None
    count = partition.get("clients") if isinstance(partition, dict) else None
    source = data.get("source", "digits") if isinstance(data, dict) else None
    joining = sum(len(event["join"]) for event in newcomers)
    if not isinstance(count, int) or source not in SOURCE_KINDS.builtin or source == "arrays" or count < 2 * joining:
        return []
    last = count - joining
    for event in newcomers:
        event["join"] = list(range(last, last + len(event["join"])))
        last += len(event["join"])
    return events


def read_yaml(file: Path) -> dict[str, Any]:
    """The keys and values of a YAML file. Raises ConfigError."""
    text = read_text(file, follow=True)
    if text is None:
        advice = "`cfl-ray run` without a file runs the built-in example"
        if str(file).partition(".")[0] in Experiment.model_fields and file.suffix not in (".yaml", ".yml"):
            advice = f"if the key {file} is meant, write {file}=VALUE"
        raise ConfigError(f"there is no config file {file}; {advice}")
    values = parse_yaml(text, str(file)) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold keys and values, e.g. `rounds: 30`, got {type(values).__name__}")
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(f"{file} must hold keys and values, e.g. `rounds: 30`, got the key {key!r}")
    return values


def split_override(override: str) -> tuple[list[str], Any]:
    """The path and the value of SECTION.KEY=VALUE. Raises ConfigError."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} must look like section.key=value, e.g. local.lr=0.05")
    # in a file, * begins the name of an anchor, which an override cannot have: *.csv is a text
    return key.split("."), text if text.startswith("*") else parse_yaml(text, override)


def set_key(values: dict[str, Any], path: list[str], value: Any, where: str) -> None:
    """Sets the key at a path; `methods.NAME.OPTION` sets an option of the methods with that label or name.

    Raises ConfigError.
    A change of a part's kind drops the keys that only other kinds have, and one of the model drops its options.
    where: the override or the parameter, for messages.
    """
    if path[0] == "methods" and path[1:] and isinstance(values.get("methods"), list):
        values["methods"] = with_option(values["methods"], path[1:], value, where, set_key)
        return
    kinds = PARTS.get(tuple(path[:-1]))
    for key in path[:-1]:
        if values.get(key) is None:
            values[key] = {}
        values = values[key]
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: {key} is a value, not a section")
    if kinds is not None and path[-1] == kinds.key and values.get(kinds.key) != value:
        kinds.drop_others(values, value)
    if path == ["model", "name"] and values.get("name", ModelConfig().name) != value:
        values.pop("options", None)
    values[path[-1]] = value
