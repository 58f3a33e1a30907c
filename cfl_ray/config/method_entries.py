"""The entries of `methods`: their names and labels, and overrides methods.LABEL.OPTION, without importing a method."""

import ast
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cfl_ray.errors import ConfigError, DataError, did_you_mean
from cfl_ray.system.files import read_text


def name_and_options(entry: Any) -> tuple[str, dict[str, Any]]:
    """The name of a method as it is listed, and its options."""
    name, options = next(iter(entry.items())) if isinstance(entry, dict) and entry else (entry, None)
    return str(name), dict(options) if isinstance(options, dict) else {}


def listed_name(entry: Any) -> str:
    """The label of a method, or else its name as it is listed."""
    name, options = name_and_options(entry)
    return str(options.get("label") or name)


def address(entries: Sequence[Any], path: Sequence[str], where: str) -> tuple[list[int], list[str]]:
    """(places in `entries` of the methods that a path LABEL.OPTION... names, path of the option).

    A label comes before a name. A name addresses every method that has it; it is the name as listed, `file.py:Class`
    with or without its folders, or the name with which that class is declared. Either may contain dots. Raises
    ConfigError if no method is named, or no option. where: the override or the parameter, for messages.
    """
    labels = [listed_name(entry) for entry in entries]
    lengths = range(len(path) - 1, 0, -1)  # the longest name first: a label may contain dots
    for length in lengths:
        name = ".".join(path[:length])
        places = [place for place, label in enumerate(labels) if label == name]
        places = places or [place for place, entry in enumerate(entries) if _is_named(name_and_options(entry)[0], name)]
        if places:
            return places, list(path[length:])
    known = list(dict.fromkeys(labels))
    whole = ".".join(path)
    if whole in labels or any(_is_named(name_and_options(entry)[0], whole) for entry in entries):
        raise ConfigError(f"{where}: name an option of {whole}, as in methods.{whole}.OPTION")
    wanted = ".".join(path[:-1]) if ".py:" in whole else path[0]
    raise ConfigError(f"{where}: no method {wanted!r} is in the config{did_you_mean(wanted, known)}")


def with_option(
    entries: Sequence[Any], path: Sequence[str], value: Any, where: str, set_key: Callable[..., None]
) -> list[Any]:
    """The entries with an option of the methods that a path names. set_key: sets a key of the options."""
    places, option = address(entries, path, where)
    updated = list(entries)
    for place in places:
        name, options = name_and_options(entries[place])
        set_key(options, option, copy.deepcopy(value), where)
        updated[place] = {name: options}
    return updated


def _is_named(listed: str, name: str) -> bool:
    """Whether a method that is listed so may be called by this name."""
    return listed == name or (".py:" in listed and (listed.endswith(f"/{name}") or declared_name(listed) == name))


def declared_name(reference: str) -> str | None:
    """The name in `class C(Method, name="...")` of `file.py:C`, read without running the file; None: not known."""
    file, _, cls = reference.rpartition(":")
    try:
        tree = ast.parse(read_text(Path(file).expanduser(), follow=True) or "")
    except (DataError, SyntaxError, ValueError):
        return None  # said when the file is imported
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            for keyword in node.keywords:
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
    return None
