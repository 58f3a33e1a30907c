"""Paths in a config: to data, and to Python files as `file.py:Name`.

A YAML file may name files relative to its own folder. The record of a run must be valid in any working directory, so it
has absolute paths, and also keeps the paths as they were written, which the config hash covers.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cfl_ray.config.part import keys_of
from cfl_ray.config.section import FILE, ConfigSection
from cfl_ray.errors import ConfigError
from cfl_ray.plugins.loading import note_folder
from cfl_ray.system.nested import each_text, texts_of
from cfl_ray.system.sqlite_uris import absolute_sqlite, sqlite_path, sqlite_uri

_WRITTEN = "# paths as written "
_RECORDED_IN = "# run directory "
_HEADER_LINES = 4
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def resolved_in(values: dict[str, Any], folder: Path, section: type[ConfigSection]) -> dict[str, Any]:
    """The values of a section with every relative path that exists in `folder` as a path in `folder`.

    Paths are the keys that are marked `FILE`, and the file of every text of the form file.py:Name.
    """
    result: dict[str, Any] = each_text(values, lambda text: _reference_in(folder, text))
    for *above, key in file_keys(section):
        inner: Any = result
        for name in above:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get(key), str):
            inner[key] = _in_folder(folder, inner[key])
    return result


def check_variables(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for an environment variable in a place to which a run writes.

    It is not replaced: a folder of the name `$SCRATCH` would be made. A folder that has such a name is taken.
    """
    for path in ("output",), ("data", "shards"), ("tracking", "uri"):
        place: Any = values
        for key in path:
            place = place.get(key) if isinstance(place, Mapping) else None
        if not isinstance(place, str) or (variable := _VARIABLE.search(place)) is None:
            continue
        begin = place[: variable.end()] + place[variable.end() :].partition("/")[0]
        on_disk = path[0] != "tracking" or "://" not in place or place.startswith(("sqlite:", "file:"))
        if not on_disk or os.path.exists(os.path.expanduser(begin)):  # of a server: a password may have the sign
            continue
        key = ".".join(path)
        raise ConfigError(
            f"{key}: {place} has the variable {variable[0]}, which a config does not replace; write its value, or give "
            f"the key on the command line, where the shell replaces it: {key}={place}"
        )


@cache
def file_keys(section: type[ConfigSection]) -> set[tuple[str, ...]]:
    """The keys of a section and of its inner sections that are marked `FILE`, each as a path."""
    return {path for path, info in keys_of(section) if FILE in info.metadata}


def _reference_in(folder: Path, text: str) -> str:
    file, name = _split_reference(text)
    if not name:
        return text
    note_folder(Path(file).expanduser(), folder)
    return f"{_in_folder(folder, file)}{name}"


def _split_reference(text: str) -> tuple[str, str]:
    """The file of a text of the form file.py:Name, and ":Name"; the whole text and "" for other texts."""
    file, colon, name = text.rpartition(":")
    return (file, colon + name) if file.endswith(".py") else (text, "")


def _in_folder(folder: Path, file: str) -> str:
    """The path in `folder`; the given path if it is absolute or `folder` has no such file."""
    path = Path(file).expanduser()
    return str(folder / file) if not path.is_absolute() and os.path.exists(folder / path) else file


def root_resolved_in(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The values with `folder` as `data.root`, if no root is given and `data.train_files` are there."""
    data = values.get("data")
    if not isinstance(data, dict) or data.get("root") is not None:
        return values
    pattern = data.get("train_files")
    if isinstance(pattern, str) and not Path(pattern).is_absolute() and pattern and any(folder.glob(pattern)):
        return values | {"data": data | {"root": str(folder)}}
    return values


# ---- the record of a run


def to_record(
    values: dict[str, Any], written: Mapping[str, str], section: type[ConfigSection]
) -> tuple[str, dict[str, Any]]:
    """The line of a record that keeps the paths as written, and the values with absolute paths.

    values: all keys of a config; relative paths in them start at the working directory. written: by absolute path, the
    paths as written that an earlier record kept. section: class of the config, which marks the keys that are paths.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the folder in which the run was started no longer exists
        return "", values
    absolute = resolved_in(values, here, section)
    changed = {new: written.get(old, old) for new, old in _changes(absolute, values)} | dict(written)
    if with_replaced(absolute, changed) != with_replaced(values, written):  # the same file, written in two ways
        return "", _with_absolute_places(values, here)
    return record_line(changed), _with_absolute_places(absolute, here)


def record_line(written: Mapping[str, str]) -> str:
    """The line of a record that keeps the paths as written; empty if there are none."""
    return f"{_WRITTEN}{json.dumps(dict(written))}\n" if written else ""


def paths_as_written(absolute: dict[str, Any], values: dict[str, Any]) -> dict[str, str]:
    """The paths of `values` by their absolute form; none if a file is written in two ways."""
    changed = dict(_changes(absolute, values))
    return changed if with_replaced(absolute, changed) == values else {}


def _with_absolute_places(values: dict[str, Any], here: Path) -> dict[str, Any]:
    """The values with absolute paths for the output, shards and MLflow's SQLite store; they are not hashed."""
    data, tracking = values["data"], values["tracking"]
    shards = data["shards"]
    if shards and "://" not in shards and not shards.startswith("~"):
        shards = str(here / shards)
    uri = tracking["uri"]
    uri = uri and absolute_sqlite(uri, here)
    places = {"output": str(here / values["output"])}
    return values | places | {"data": data | {"shards": shards}, "tracking": tracking | {"uri": uri}}


def recorded_in(run_dir: Path) -> str:
    """The line of a record that keeps the run directory, so that its files can be located after a move."""
    return f"{_RECORDED_IN}{json.dumps(str(run_dir))}\n"


def is_record(text: str) -> bool:
    """Whether the text of a config is the record of a run."""
    return _header(text, _RECORDED_IN) is not None


def moves_of(values: Any, text: str, folder: Path) -> dict[str, str]:
    """New by old paths, for the absolute paths of a record that do not exist.

    text: of the record; folder: its present folder. A path is replaced if a file exists at the same place relative to
    the present folder, and an `output` that is nowhere by the folder that the run is in: files of a run that was copied
    are not written where its author had them.
    """
    old, new = _header(text, _RECORDED_IN), folder.absolute()
    if not isinstance(old, str) or Path(old) == new:
        return {}
    moved = {}
    for value in texts_of(values):
        store = sqlite_path(value)
        path = value if store is None else str(store)
        if not path.startswith("/"):
            continue
        file, name = _split_reference(path)
        there = os.path.normpath(new / os.path.relpath(file, old))
        if not os.path.exists(file) and os.path.exists(there):
            moved[value] = f"{there}{name}" if store is None else sqlite_uri(Path(there))
    output = values.get("output") if isinstance(values, dict) else None
    if isinstance(output, str) and output.startswith("/") and output not in moved and not os.path.exists(output):
        moved[output] = str(new.parent)
    return moved


def from_record(text: str) -> dict[str, str]:
    """The paths as written, by their absolute form, of the text of a record; empty for other YAML."""
    written = _header(text, _WRITTEN)
    return {str(new): str(old) for new, old in written.items()} if isinstance(written, dict) else {}


def _header(text: str, begins: str) -> Any:
    """The value in the header line that starts with `begins`; None if it is missing or is not valid JSON."""
    for line in text.splitlines()[:_HEADER_LINES]:
        if line.startswith(begins):
            try:
                return json.loads(line.removeprefix(begins))
            except ValueError:
                return None
    return None


def with_replaced(values: Any, new: Mapping[str, str]) -> Any:
    """The values with their texts (keys and values) replaced as in `new`."""
    return each_text(values, lambda text: new.get(text, text))


def _changes(new: Any, old: Any) -> Iterator[tuple[str, str]]:
    """The pairs of texts (keys and values) in which two configs of equal structure differ."""
    if isinstance(new, dict):
        yield from _changes(list(new), list(old))
        yield from _changes(list(new.values()), list(old.values()))
    elif isinstance(new, list):
        for new_entry, old_entry in zip(new, old, strict=True):
            yield from _changes(new_entry, old_entry)
    elif new != old:
        yield new, old
