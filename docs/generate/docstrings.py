"""Parameters in docstrings as lists: a line `name: meaning` of a parameter, in the style of this project."""

import re
from typing import Any

import griffe


class ParameterLists(griffe.Extension):
    """Turns lines such as `low, high: limits` into items, where all names are parameters of the function."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Changes the docstring of one function."""
        if func.docstring is None:
            return
        names = {parameter.name for parameter in func.parameters}
        lines: list[str] = []
        for line in func.docstring.value.splitlines():
            found = re.match(r"(\w+(?:, \w+)*): (.*)", line)
            if found and set(found[1].split(", ")) <= names:
                if lines and lines[-1] and not lines[-1].startswith(("- ", "  ")):
                    lines.append("")
                line = f"- `{found[1]}`: {found[2]}"
            lines.append(line)
        func.docstring.value = "\n".join(lines)
