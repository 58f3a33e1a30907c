"""Links between files of the repository as links between pages of the site."""

import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

_LINK = re.compile(r"(!?\[(?P<text>[^\]]*)\])\((?P<target>(?![a-z]+:)[^)#\s]*)(?P<anchor>#[^)]*)?\)")
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`(?!\]))", re.S | re.M)
_LANGUAGE = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash"}


class SiteMap:
    """The page of the site for each file of the repository that is linked from a page."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pages: dict[str, str] = {}  # by the path of a file or folder, relative to the root
        self._files: dict[str, str] = {}  # likewise, of those that have no page of their own

    def add(self, path: str, page: str) -> None:
        """Says that `page` shows the file or folder `path`."""
        self._pages[path] = page

    def linked_files(self) -> dict[str, str]:
        """Returns the pages of files that are linked and have no page of their own, by the path of the file."""
        return dict(self._files)

    def find_linked_files(self, source: str, markdown: str) -> None:
        """Remembers the files that `source` links to and that only the repository has."""
        for target in self._targets(source, markdown):
            outside = not target.startswith("docs/") and target not in self._pages
            if outside and (self.root / target).exists():
                self._files[target] = f"files/{target.removesuffix('.md')}.md"

    def rewrite(self, markdown: str, source: str, page: str) -> str:
        """Returns the text of the file `source` with links that hold where `page` is."""

        def link(found: re.Match[str]) -> str:
            if not found["target"]:
                return found[0]
            path = self._resolve(source, found["target"])
            there = self._page_of(path)
            if there is None:
                return found[0]
            label = found[1]
            if there.endswith(".md") and (name := found["text"].strip("`")) and path.endswith(name) and "." in name:
                label = f"[{self._title(path) or found['text']}]"
            return f"{label}({posixpath.relpath(there, posixpath.dirname(page) or '.')}{found['anchor'] or ''})"

        return _outside_code(markdown, lambda text: _LINK.sub(link, text))

    def _targets(self, source: str, markdown: str) -> list[str]:
        found: list[str] = []

        def collect(text: str) -> str:
            found.extend(self._resolve(source, link["target"]) for link in _LINK.finditer(text) if link["target"])
            return text

        _outside_code(markdown, collect)
        return found

    @staticmethod
    def _resolve(source: str, target: str) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))

    def _page_of(self, path: str) -> str | None:
        if path in self._pages or path in self._files:
            return self._pages.get(path) or self._files[path]
        return path.removeprefix("docs/") if path.startswith("docs/") else None

    def _title(self, path: str) -> str | None:
        """Returns the first heading of a Markdown file."""
        if not path.endswith(".md"):
            return None
        heading = re.search(r"^# (.+)$", (self.root / path).read_text(), re.M)
        return heading[1] if heading else None


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = _CODE.split(markdown)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def file_page(root: Path, name: str, site: SiteMap) -> str:
    """Returns a page that shows a file of the repository, or the files of a folder."""
    path = root / name
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    shown = "\n".join(_section(file, name, path.is_dir()) for file in files)
    return f"---\nsearch:\n  exclude: true\n---\n# {name}\n\nAs in the repository.\n\n{shown}"


def _section(file: Path, name: str, in_folder: bool) -> str:
    heading = f"## {file.name}\n\n" if in_folder else ""
    if file.suffix == ".ipynb":
        title = "".join(json.loads(file.read_text())["cells"][0]["source"]).splitlines()[0].lstrip("# ")
        return f"{heading}A notebook: {title}\n"
    return f"{heading}~~~~{_LANGUAGE.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n~~~~\n"
