"""The sections of docs/official.md."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "official.md"


def with_section(page: str, section: str) -> str:
    """The page with this section, which begins with `## NAME`, in the place of the one of this name, or at the end."""
    title = section.split("\n")[0]
    parts = re.split(r"(?m)^(?=## )", page)
    kept = [section.rstrip("\n") + "\n" if part.split("\n")[0] == title else part.rstrip("\n") + "\n" for part in parts]
    if title not in [part.split("\n")[0] for part in parts]:
        kept.append(section.rstrip("\n") + "\n")
    return "\n".join(kept)


def table(*rows: Iterable[object]) -> list[str]:
    """Lines of a Markdown table; the first row is its head, and a blank line ends it."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(list(rows[0])), *lines[1:], ""]
