"""Paths in a config: to data, and to Python files as `file.py:Name`.

A YAML file may name files relative to its own folder. What a run records must be found from any folder, so the record
has absolute paths; beside them it keeps the paths as they were written, which the config hash covers.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cfl_ray.core.plugins import note_folder

_WRITTEN = "# paths as written "

_PATHS = (
    ("data", "root"),
    ("data", "source"),
    ("data", "shift", "kind"),
    ("data", "partition", "kind"),
    ("model",),
    ("model", "name"),
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
        value, whole = section[path[-1]], path[-1] in ("root", "file")
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
    return str(folder / value) if not path.is_absolute() and (folder / path).exists() else value


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
    if as_written(absolute, changed) != as_written(values, written):  # one file, written in two ways
        return "", values
    return f"{_WRITTEN}{json.dumps(changed)}\n" if changed else "", absolute


def from_record(text: str) -> dict[str, str]:
    """Returns the paths as written, by their absolute form, of the text of a record; of other YAML, none."""
    for line in text.splitlines()[:2]:
        if line.startswith(_WRITTEN):
            try:
                return {str(new): str(old) for new, old in dict(json.loads(line.removeprefix(_WRITTEN))).items()}
            except (ValueError, TypeError):  # the line was edited
                return {}
    return {}


def as_written(values: Any, written: Mapping[str, str]) -> Any:
    """Returns the values with every recorded path as it was written."""
    if isinstance(values, dict):
        return {written.get(key, key): as_written(value, written) for key, value in values.items()}
    if isinstance(values, list):
        return [as_written(value, written) for value in values]
    return written.get(values, values) if isinstance(values, str) else values


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
