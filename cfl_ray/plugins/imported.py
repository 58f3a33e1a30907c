"""The files that a user's file imports from beside it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from cfl_ray.plugins.calling import is_installed

_IMPORTING = {"import_module", "__import__"}  # functions that import the module that they are given


def imported_beside(file: Path) -> set[Path]:
    """The files of a file's folder, and below it, that it imports, or that such a file imports, at any place."""
    folder, waiting, found = file.parent, [file], set[Path]()
    while waiting:
        for each in set(_imports_of(waiting.pop(), folder)) - found - {file}:
            found.add(each)
            waiting.append(each)
    return found


def _imports_of(file: Path, folder: Path) -> Iterator[Path]:
    """The files below a folder that the text of a file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # a run has imported it before, so this is for files of no run
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of_module(folder, alias.name)
        elif isinstance(node, ast.ImportFrom):
            start = folder if node.level == 0 else file.parents[node.level - 1]
            for name in (node.module or "", *(f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names)):
                yield from _files_of_module(start, name)
        elif isinstance(node, ast.Call) and node.args and isinstance(given := node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in _IMPORTING and isinstance(given.value, str):
                yield from _files_of_module(folder, given.value)


def _files_of_module(folder: Path, name: str) -> Iterator[Path]:
    """The files of a module with a dotted name in a folder, those of its packages included; none elsewhere."""
    place = folder
    for part in name.split("."):
        for file in (place / f"{part}.py", place / part / "__init__.py"):
            if part.isidentifier() and file.is_file() and not is_installed(file.resolve()):
                yield file.resolve()
        place = place / part
    if not name and (folder / "__init__.py").is_file():
        yield (folder / "__init__.py").resolve()
