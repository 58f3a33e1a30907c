"""Paths in a config: to data, and to Python files as `file.py:Name`.

A YAML file may name files relative to its own folder. What a run records must be found from any folder, so the record
has absolute paths; beside them it keeps the paths as they were written, which the config hash covers.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cfl_ray.plugins.loading import note_folder
from cfl_ray.system.nested import texts_of

_WRITTEN = "# paths as written "
_RECORDED_IN = "# run directory "
_HEADER_LINES = 4
_SQLITE = "sqlite:///"

_PATHS = (
    ("data", "root"),
    ("data", "source"),
    ("data", "shift", "kind"),
    ("data", "partition", "kind"),
    ("model",),
    ("model", "name"),
    ("model", "weights"),
    ("cohort", "availability", "kind"),
    ("cohort", "availability", "file"),
    ("attack", "kind"),
    ("task",),
    ("task", "loss"),
    ("task", "metrics"),
    ("evaluation", "metrics"),
    ("local", "optimizer"),
    ("local", "schedule"),
    ("local", "step_schedule"),
)


def beside(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the values with every relative path that exists in `folder` as a path in `folder`."""
    for path in _PATHS:
        section: Any = values
        for key in path[:-1]:
            section = section.get(key) if isinstance(section, dict) else None
        if not isinstance(section, dict) or path[-1] not in section:
            continue
        value, whole = section[path[-1]], path[-1] in ("root", "file", "weights")
        if isinstance(value, dict) and path[-1] in ("schedule", "step_schedule"):
            value = _choice_in_folder(value, folder)
        elif isinstance(value, list):
            value = [_in_folder(one, folder) for one in value]
        section[path[-1]] = _in_folder(value, folder, whole)
    if isinstance(values.get("methods"), list):
        values["methods"] = [_method_in_folder(entry, folder) for entry in values["methods"]]
    runtime, tracking = values.get("runtime"), values.get("tracking")
    if isinstance(runtime, dict) and "backend" in runtime:
        runtime["backend"] = _choice_in_folder(runtime["backend"], folder)
    if isinstance(tracking, dict) and isinstance(tracking.get("trackers"), list):
        tracking["trackers"] = [_choice_in_folder(entry, folder) for entry in tracking["trackers"]]
    return values


def _method_in_folder(entry: Any, folder: Path) -> Any:
    """Returns an entry of `methods` with its file, and those of its aggregation and server optimiser, in `folder`."""
    entry = _choice_in_folder(entry, folder)
    if isinstance(entry, dict):
        for name, options in entry.items():
            if isinstance(options, dict):
                own = {key: options[key] for key in ("aggregation", "server_optimizer") if key in options}
                entry[name] = options | {key: _choice_in_folder(value, folder) for key, value in own.items()}
                if isinstance(local := options.get("local"), dict):  # as the section `local`
                    entry[name]["local"] = beside({"local": dict(local)}, folder)["local"]
    return entry


def _choice_in_folder(value: Any, folder: Path) -> Any:
    """Returns a name, or {name: options}, with the name's file in `folder`."""
    if isinstance(value, dict):
        return {_in_folder(name, folder): options for name, options in value.items()}
    return _in_folder(value, folder)


def _in_folder(value: Any, folder: Path, whole: bool = False) -> Any:
    """Returns a path, or with `whole` False the path before the colon in `file.py:Name`, as one in `folder`.

    The value itself where there is no such file.
    """
    if not isinstance(value, str) or not (whole or ":" in value):
        return value
    path = Path(value if whole else value.rpartition(":")[0]).expanduser()
    if not whole:
        note_folder(path, folder)
    return str(folder / value) if not path.is_absolute() and os.path.exists(folder / path) else value


def root_beside(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the values with `folder` as `data.root`, where no root is given and `data.train_files` are there."""
    data = values.get("data")
    if not isinstance(data, dict) or data.get("root") is not None:
        return values
    pattern = data.get("train_files")
    if isinstance(pattern, str) and not Path(pattern).is_absolute() and pattern and any(folder.glob(pattern)):
        return values | {"data": data | {"root": str(folder)}}
    return values


# ---- the record of a run


def to_record(values: dict[str, Any], written: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Returns the line of a record that keeps the paths as written, and the values with absolute paths.

    values: of a whole config; a relative path in them is relative to the working directory. written: the paths as
    written of those that are absolute already.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the folder in which the run was started is gone, and its files with it
        return "", values
    absolute = beside(json.loads(json.dumps(values)), here)
    changed = {new: written.get(old, old) for new, old in _changes(absolute, values)} | dict(written)
    if with_replaced(absolute, changed) != with_replaced(values, written):  # one file, written in two ways
        return "", _with_absolute_places(values, here)
    return record_line(changed), _with_absolute_places(absolute, here)


def record_line(written: Mapping[str, str]) -> str:
    """Returns the line of a record that keeps the paths as written; empty where there are none."""
    return f"{_WRITTEN}{json.dumps(dict(written))}\n" if written else ""


def paths_as_written(absolute: dict[str, Any], values: dict[str, Any]) -> dict[str, str]:
    """Returns the paths of `values` by their absolute form; none where one file is written in two ways."""
    changed = dict(_changes(absolute, values))
    return changed if with_replaced(absolute, changed) == values else {}


def _with_absolute_places(values: dict[str, Any], here: Path) -> dict[str, Any]:
    """Returns the values with absolute paths of what a run writes beside its folder: no part of the config hash."""
    data, tracking = values["data"], values["tracking"]
    shards = data["shards"]
    if shards and "://" not in shards and not shards.startswith("~"):
        shards = str(here / shards)
    uri = tracking["uri"]
    if uri and uri.startswith(_SQLITE):
        uri = _SQLITE + str(here / uri.removeprefix(_SQLITE))
    places = {"output": str(here / values["output"])}
    return values | places | {"data": data | {"shards": shards}, "tracking": tracking | {"uri": uri}}


def recorded_in(run_dir: Path) -> str:
    """Returns the line of a record that keeps the run directory, so that a run is found after it has moved."""
    return f"{_RECORDED_IN}{json.dumps(str(run_dir))}\n"


def moves_of(values: Any, text: str, folder: Path) -> dict[str, str]:
    """Returns new values by old ones for the absolute paths of a record that are not here.

    text: of the record; folder: the one that it is in now. A path is looked for where it is as seen from the run
    directory, and moves only if it is there.
    """
    old, new = _header(text, _RECORDED_IN), folder.absolute()
    if not isinstance(old, str) or Path(old) == new:
        return {}
    found = {}
    for value in texts_of(values):
        scheme = _SQLITE if value.startswith(_SQLITE) else ""
        path = value.removeprefix(scheme)
        if not path.startswith("/"):
            continue
        file, colon, name = (path, "", "") if scheme else path.rpartition(":") if ":" in path else (path, "", "")
        there = os.path.normpath(new / os.path.relpath(file, old))
        if not os.path.exists(file) and os.path.exists(there):
            found[value] = f"{scheme}{there}{colon}{name}"
    return found


def from_record(text: str) -> dict[str, str]:
    """Returns the paths as written, by their absolute form, of the text of a record; of other YAML, none."""
    written = _header(text, _WRITTEN)
    return {str(new): str(old) for new, old in written.items()} if isinstance(written, dict) else {}


def _header(text: str, begins: str) -> Any:
    """Returns what a line at the beginning of a record says; None where there is none, or it was edited."""
    for line in text.splitlines()[:_HEADER_LINES]:
        if line.startswith(begins):
            try:
                return json.loads(line.removeprefix(begins))
            except ValueError:
                return None
    return None


def with_replaced(values: Any, new: Mapping[str, str]) -> Any:
    """Returns the values with other texts, keys as well as values, in the place of some."""
    if isinstance(values, dict):
        return {new.get(key, key): with_replaced(value, new) for key, value in values.items()}
    if isinstance(values, list):
        return [with_replaced(value, new) for value in values]
    return new.get(values, values) if isinstance(values, str) else values


def _changes(new: Any, old: Any) -> Iterator[tuple[str, str]]:
    """The pairs of texts, keys as well as values, in which two configs of one form differ."""
    if isinstance(new, dict):
        yield from _changes(list(new), list(old))
        yield from _changes(list(new.values()), list(old.values()))
    elif isinstance(new, list):
        for one, other in zip(new, old, strict=True):
            yield from _changes(one, other)
    elif new != old:
        yield new, old
