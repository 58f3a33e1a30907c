"""Hooks of MkDocs: pages made from the code, links of the Markdown files, pictures in both colour schemes."""

import posixpath
import re
from pathlib import Path
from typing import Any

import links
import notebooks
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
KEYS_PAGE = "reference/config.md"
KEYS = reference.key_anchors()
PAGES = {  # page -> the file of the repository that it shows; links to one are links to the other
    "overview.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "cluster_configs.md": "cluster_configs/README.md",
}
SOURCES = {  # page -> the code or folder that it is made from
    KEYS_PAGE: "cfl_ray/config",
    "reference/study.md": "cfl_ray/config/study.py",
    "reference/commands.md": "cfl_ray/cli/commands.py",
    "reference/api.md": "cfl_ray/__init__.py",
    "reference/methods/index.md": "cfl_ray/methods",
    "cite.md": "CITATION.cff",
}


def _generated() -> dict[str, str | bytes]:
    """Returns the content of every page and picture that is no file of its own, by its place in the site."""
    made: dict[str, str | bytes] = {
        KEYS_PAGE: reference.config_page(),
        "reference/study.md": reference.study_page(),
        "reference/commands.md": reference.commands_page(),
        "reference/api.md": reference.api_page(),
        "cite.md": reference.cite_page(ROOT / "CITATION.cff"),
        **reference.method_pages(),
        **notebooks.pages(ROOT / "examples"),
    }
    return made | {page: (ROOT / source).read_text() for page, source in PAGES.items()}


def _site_map(made: dict[str, str | bytes]) -> links.SiteMap:
    site = links.SiteMap(ROOT)
    for page, source in (PAGES | SOURCES).items():
        site.add(source, page)
    for page in made:
        if page.startswith("reference/methods/") and page not in SOURCES:
            site.add(f"cfl_ray/methods/{Path(page).stem}.py", page)
        if page.startswith("notebooks/") and page.endswith(".md"):
            site.add(f"examples/{Path(page).stem}.ipynb", page)
    return site


def on_config(config: MkDocsConfig) -> None:
    """Makes the pages, and replaces `folder/*` in the navigation by the pages of the folder."""
    made = _generated()
    site = _site_map(made)
    for page in (ROOT / "docs").rglob("*.md"):
        site.find_linked_files(page.relative_to(ROOT).as_posix(), page.read_text())
    for source in PAGES.values():
        site.find_linked_files(source, (ROOT / source).read_text())
    made |= {page: links.file_page(ROOT, name, site) for name, page in site.linked_files().items()}
    config.extra["made"], config.extra["site"] = made, site
    known = {*made, *(page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md"))}
    config.nav = [_expanded(entry, known) for entry in config.nav]


def _expanded(entry: Any, pages: set[str]) -> Any:
    if not isinstance(entry, dict):
        return entry
    ((title, value),) = entry.items()
    if isinstance(value, list):
        return {title: [_expanded(one, pages) for one in value]}
    if not value.endswith("/*"):
        return entry
    inside = (page for page in pages if Path(page).parent.as_posix() == value[:-2] and page.endswith(".md"))
    return {title: sorted(inside, key=_index_first)}


def _index_first(page: str) -> tuple[bool, str]:
    return Path(page).stem != "index", page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that were made."""
    for place, content in config.extra["made"].items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at pages of the site, and shows pictures as elements of the page."""
    uri = page.file.src_uri
    source = PAGES.get(uri, f"docs/{uri}")
    if uri in config.extra["made"] and uri not in PAGES:
        return markdown  # made for the site
    return _with_pictures(config.extra["site"].rewrite(markdown, source, uri), (ROOT / source).parent)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links the keys of an experiment that a text names to their explanation."""
    if page.file.src_uri == KEYS_PAGE:
        return html
    there = posixpath.relpath(KEYS_PAGE.replace(".md", ".html"), posixpath.dirname(page.file.src_uri) or ".")

    def link(found: re.Match[str]) -> str:
        before, name = found.groups()
        return f'{before}<a href="{there}#{name}"><code>{name}</code></a>' if name in KEYS else found[0]

    return re.sub(r"(\s|\(|<(?:td|li|p)>)<code>([a-z_]+\.[a-z_.]+)</code>", link, html)


def _with_pictures(markdown: str, folder: Path) -> str:
    """Replaces each SVG image by its elements, which extra.css colours; as a file it follows the reader's system."""

    def inline(image: re.Match[str]) -> str:
        svg = (folder / image[2]).read_text()
        if "pic-text" not in svg:
            return image[0]  # a screen, with colours of its own
        svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.S)
        return f'<figure class="picture" markdown="0">\n{svg.strip()}\n<figcaption>{image[1]}</figcaption>\n</figure>'

    return re.sub(r"!\[([^\]]*)\]\(((?!http)[^)]*/images/[^)/]*\.svg|images/[^)/]*\.svg)\)", inline, markdown)
