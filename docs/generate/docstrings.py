"""Docstrings in the style of this project: parameters as lists, and fields with the comments beside them."""

import re
from pathlib import Path
from typing import Any

import griffe


class ProjectStyle(griffe.Extension):
    """Shows lines such as `low, high: limits` of a function as items, and a field's comment as its docstring."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Changes lines of the docstring that begin with names of parameters."""
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

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Takes the comment at the end of a field's line, or those above it, where the field has no docstring."""
        if attr.docstring is None and attr.lineno and isinstance(attr.filepath, Path):
            comment = _comment(attr.filepath.read_text().splitlines(), attr.lineno - 1, (attr.endlineno or attr.lineno))
            if comment:
                attr.docstring = griffe.Docstring(comment, parent=attr)


def _comment(lines: list[str], first: int, end: int) -> str:
    """Returns the comment of the statement in lines first .. end, without its `#`; empty where it has none."""
    above = []
    while first > 0 and (found := re.match(r"\s+# (?!---)(.*)", lines[first - 1])):
        above.insert(0, found[1])
        first -= 1
    beside = re.search(r"  # (?!type:|noqa)(.*)$", lines[end - 1])
    return " ".join([*above, *([beside[1]] if beside else [])])
