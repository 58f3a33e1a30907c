"""The published methods, one paper per file. Importing this package registers them all."""

import dataclasses
import importlib
import pkgutil
import re
from typing import Any

from cfl_ray.core.errors import ConfigError, nearest
from cfl_ray.core.method import Method
from cfl_ray.core.plugin import load_plugin

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

REGISTRY: dict[str, type[Method]] = {name: cls for name, cls in Method.registry.items() if cls.__module__.startswith(__name__)}


def resolve(entries: list[Any]) -> dict[str, Method]:
    """Methods by label, in order. An entry is a name, {name: {option: value}}, `file.py:Class`, a class or a Method.

    Labels are unique: a method that occurs twice is labelled with its options. Raises ConfigError.
    """
    methods = [method for entry in entries for method in _all(entry)]
    labels = [method.name for method in methods]
    named = [label if labels.count(label) == 1 else _label(method) for label, method in zip(labels, methods)]
    if len(set(named)) < len(named):
        raise ConfigError(f"methods: {next(label for label in named if named.count(label) > 1)!r} is listed twice with the same options")
    return dict(zip(named, methods))


def _all(entry: Any) -> list[Method]:
    return [cls() for _, cls in sorted(REGISTRY.items())] if entry == "all" else [_one(entry)]


def _one(entry: Any) -> Method:
    if isinstance(entry, Method):
        return entry
    options = {}
    if isinstance(entry, dict):
        if len(entry) != 1:
            raise ConfigError(f"methods: an entry is one name with its options, e.g. {{stocfl: {{tau: 0.5}}}}, got {entry}")
        entry, options = next(iter(entry.items()))
    cls = _named(entry) if isinstance(entry, type) else find(str(entry))
    return construct(cls, options or {})


def find(name: str) -> type[Method]:
    """The method of that name, or that `file.py:Class` holds. A name may be written as in its paper: FL+HC, FedAvg+. Raises ConfigError."""
    plain = re.sub(r"[-+ ]", "_", re.sub(r"\+$", "_plus", name.lower()))
    found = load_plugin(name, "method") if ":" in name else REGISTRY.get(plain)
    if found is None:
        raise ConfigError(f"unknown method {name!r}{nearest(name, REGISTRY)}")
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"method {name!r} is a {type(found).__name__}, not a subclass of cfl_ray.Method")
    return _named(found)


def _named(cls: type[Method]) -> type[Method]:
    """The class itself. Raises ConfigError where it has no name of its own."""
    if "name" not in vars(cls):
        raise ConfigError(f"{cls.__name__} has no name; write `class {cls.__name__}({cls.__base__.__name__}, name=\"{cls.__name__.lower()}\")`")
    return cls


def construct(cls: type[Method], options: dict[str, Any]) -> Method:
    """A method with these options. Raises ConfigError for an unknown one or a value out of range."""
    valid = [item.name for item in dataclasses.fields(cls)]
    for name in options:
        if name not in valid:
            raise ConfigError(f"method {cls.name} has no option {name!r}{nearest(name, valid)}")
    try:
        return cls(**{name: _plain(value) for name, value in options.items()})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"methods: {error}") from None


def _plain(value: Any) -> Any:
    """A number such as 1e-3, which YAML 1.1 takes for text, as a number."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value) else value


def _label(method: Method) -> str:
    """The name with every option that is not at its default."""
    changed = [f"{item.name}={getattr(method, item.name)}" for item in dataclasses.fields(method) if getattr(method, item.name) != item.default]
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", "-".join([method.name, *changed]))
