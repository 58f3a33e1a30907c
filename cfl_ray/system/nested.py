"""Values in nested mappings and lists, as YAML and JSON contain them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def texts_of(values: Any) -> Iterator[str]:
    """Yields every text in the nested values, keys included."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict):
        for key, value in values.items():
            yield from texts_of(key)
            yield from texts_of(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from texts_of(value)


def each_text(values: Any, change: Callable[[str], str]) -> Any:
    """A copy of the nested values with `change` applied to every text, keys included. Tuples become lists."""
    if isinstance(values, str):
        return change(values)
    if isinstance(values, dict):
        return {each_text(key, change): each_text(value, change) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [each_text(value, change) for value in values]
    return values


def leaves_of(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by dotted key; an empty mapping is a value."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, Mapping) and value
        leaves |= leaves_of(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return leaves
