"""YAML texts: written, and read: strict, limited in size, with errors on one line that say how to mend them."""

from contextlib import suppress
from typing import Any

import yaml

from cfl_ray.errors import ConfigError

_MERGE = "tag:yaml.org,2002:merge"  # of the key <<, which may be repeated
_DEEPEST, _LARGEST = 100, 10_000_000  # levels and values of a YAML file
_CURES = {  # words of PyYAML's message -> the cure
    "mapping values are not allowed": "indent the keys of a section alike, and put a text with ': ' into quotes",
    "block end": "indent the entries of a section or a list alike",
    "'\\t'": "indent with spaces, not with tabs",
    "cannot start any token": "put the text into quotes",
    "undefined alias": "put the text into quotes",
    "expected alphabetic or numeric character": "put the text into quotes",  # *.csv
    "unexpected end of stream": "close the quotes",
    "expected ',' or": "close the bracket, and separate its entries by commas",
    "found '<stream end>'": "close the bracket",
}


def yaml_of(values: dict[str, Any]) -> str:
    """The text of a config, by libyaml: a run writes its record in a tenth of the time of PyYAML's own emitter."""
    emitter = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(values, Dumper=emitter, sort_keys=False, width=120)
    return text


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises ConfigError, which names `where`: a file, or an override."""
    try:
        value = _value_of(text)
        _size_of(value, {}, _DEEPEST)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {_in_one_line(error)}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two for an invalid number or date
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is not valid YAML: it is nested too deep") from None
    return value


def _value_of(text: str) -> Any:
    """The value by libyaml, in a tenth of the time of PyYAML's own parser, whose errors say more.

    libyaml accepts some tabs in indentation, and reads a byte order mark inside a text in another way.
    """
    if not {"\t", "\ufeff"} & set(text):
        with suppress(yaml.YAMLError, ValueError, OverflowError):
            return _FastLoader(text).get_single_data()
    return _Loader(text).get_single_data()


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader that raises ValueError for a repeated key; PyYAML itself uses the last value."""

    def get_single_node(self) -> Any:
        root = super().get_single_node()
        nodes, seen = [root], set[int]()
        while nodes:
            node = nodes.pop()
            if isinstance(node, yaml.CollectionNode) and id(node) not in seen:
                seen.add(id(node))
                if isinstance(node, yaml.MappingNode):
                    _require_different_keys(node)
                    nodes += [part for pair in node.value for part in pair]
                else:
                    nodes += node.value
        return root


class _Loader(yaml.SafeLoader):
    """The same in Python, with the message for the first problem of a text."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        _require_different_keys(node)
        return node


def _require_different_keys(node: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        line, name = key.start_mark.line + 1, (key.tag, key.value)
        if name in lines:
            where = f"line {line}" if line == lines[name] else f"lines {lines[name]} and {line}"
            raise ValueError(f"key {key.value!r} is given twice, in {where}; leave one out")
        lines[name] = line


def _in_one_line(error: yaml.MarkedYAMLError) -> str:
    """Place, problem and cure of a PyYAML error, on a single line."""
    problem, mark = str(error.problem), error.problem_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    cure = next((f"; {cure}" for words, cure in _CURES.items() if words in problem), "")
    return f"{place}{problem}{cure}"


def _size_of(value: Any, known: dict[int, int], levels: int) -> int:
    """Number of nested values, each alias counted in full. Raises ValueError beyond the limits."""
    if not isinstance(value, dict | list):
        return 1
    if levels == 0:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
    if id(value) not in known:
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size_of(entry, known, levels - 1) for entry in inner)
        if known[id(value)] > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST:,} values, as its aliases repeat them")
    return known[id(value)]
