"""The published methods, a file for each paper. Importing this package registers them all."""

import dataclasses
import importlib
import pkgutil
import re
from typing import Any

from cfl_ray.core.method import Method
from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.plugins.calling import check_hooks, described, no_dataclass, parse_choice, place_of
from cfl_ray.plugins.registry import Registry

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

REGISTRY: dict[str, type[Method[Any]]] = {
    name: cls for name, cls in sorted(Method.registry.items()) if cls.__module__.startswith(__name__)
}
_FOLDER = re.compile(r"[^\s'{]*/")  # the folder of a file in an option
METHODS: Registry[type[Method[Any]]] = Registry("method", REGISTRY, "cfl_ray.methods")


def resolve(entries: list[Any]) -> dict[str, Method[Any]]:
    """Methods by label, in the order of `entries`.

    entries: each is a name, {name: {option: value}}, `file.py:Class`, a class or a Method; `all` means every method of
        this package. The label of a method is its option `label`, or else its name, with its options if several
        methods have the same name.
    Raises ConfigError for a label that occurs twice.
    """
    methods = [method for entry in entries for method in _methods(entry)]
    names = [method.label or method.name for method in methods]
    labels = [
        method.label or (name if names.count(name) == 1 else full_label(method))
        for name, method in zip(names, methods, strict=True)
    ]
    for method in methods:
        check_hooks(method, Method, ("init", "round", "serve", "join", "drift", "leave", "diagnose"))
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"methods: {label!r} is listed twice; give the second other options or a `label`")
    return dict(zip(labels, methods, strict=True))


def _methods(entry: Any) -> list[Method[Any]]:
    if isinstance(entry, Method):
        _require_name(type(entry))
        return [entry]
    if entry == "all":
        return [cls() for cls in REGISTRY.values()]
    method, options = parse_choice("methods: an entry", entry)
    if not isinstance(method, str | type):
        raise ConfigError(
            f"methods: an entry is a name, {{name: {{option: value}}}}, file.py:Class or, in Python, a subclass of "
            f"cfl_ray.Method or an object of it, got {place_of(method) if callable(method) else described(method)}"
        )
    cls = _require_name(method, method.__name__) if isinstance(method, type) else find(method)
    return [construct(cls, options)]


def find(name: str) -> type[Method[Any]]:
    """The class of a method: built in, of an installed package (group `cfl_ray.methods`), or `file.py:Class`.

    A name may be written as in its paper: FL+HC, FedAvg+. Raises ConfigError for an unknown method.
    """
    plain = re.sub(r"[-+ ]", "_", re.sub(r"\+$", "_plus", name.lower()))
    return _require_name(METHODS.find(plain if plain in REGISTRY else name), name)


def _require_name(cls: Any, called: str = "") -> type[Method[Any]]:
    """The class itself. Raises ConfigError for a class of something else, or without a name. called: in the config."""
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        what = place_of(cls) if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise ConfigError(f"method {called!r} is {what}, not a subclass of cfl_ray.Method")
    if "name" not in vars(cls):
        definition = f'class {cls.__name__}({cls.__bases__[0].__name__}, name="{cls.__name__.lower()}")'
        raise ConfigError(f"{cls.__name__} has no name; write `{definition}`")
    _require_dataclasses(cls)
    return cls


def _require_dataclasses(method: type[Method[Any]]) -> None:
    """Raises ConfigError if the class or its state declares fields, but is no dataclass: they would not be fields."""
    for cls in (method, method.state_type):
        if refusal := no_dataclass(cls):
            raise ConfigError(refusal)


def construct(cls: type[Method[Any]], options: dict[str, Any]) -> Method[Any]:
    """A method with these options. Raises ConfigError for an unknown option or a value out of range."""
    valid = [item.name for item in dataclasses.fields(cls)]
    for name in options:
        if name not in valid:
            meant = " (did you mean 'label'?)" if name == "name" else did_you_mean(name, valid)
            raise ConfigError(f"method {cls.name} has no option {name!r}{meant}")
    try:
        return cls(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"methods: {error}") from None


def full_label(method: Method[Any]) -> str:
    """The label of a method, or else its name with every option that differs from its default."""
    if method.label is not None:
        return str(method.label)
    changed = [
        part
        for item in dataclasses.fields(method)
        if getattr(method, item.name) != item.default
        for part in _parts(item.name, getattr(method, item.name))
    ]
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", "-".join([method.name, *changed]))


def _parts(name: str, value: Any) -> list[str]:
    """An option as parts of a label: NAME=VALUE, or for a mapping NAME.KEY=VALUE for each key."""
    if not isinstance(value, dict):
        return [f"{name}={_FOLDER.sub('', str(value))}"]
    inner = {str(key): part for key, part in value.items()}
    if len(inner) == 1 and all(part is None for part in inner.values()):
        return _parts(name, *inner)  # {median: null} has the same label as median
    return [text for key, part in inner.items() for text in _parts(f"{name}.{_FOLDER.sub('', key)}", part)]
