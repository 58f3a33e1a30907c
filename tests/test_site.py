"""The documentation as a site: it builds without a warning, its links resolve, and it loads nothing from elsewhere."""

import os
import posixpath
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import cfl_ray
from cfl_ray.config import Experiment, keys
from cfl_ray.methods import REGISTRY

ROOT = Path(__file__).parents[1]
needs_mkdocs = pytest.mark.skipif(
    not all(find_spec(name) for name in ("material", "mkdocstrings", "nbconvert")),
    reason="the site needs MkDocs Material, mkdocstrings and nbconvert: pip install -e .[docs]",
)
pytestmark = [needs_mkdocs, pytest.mark.slow]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "embed": "src", "object": "data"}


@dataclass
class Seen(HTMLParser):
    """Anchors of a page, what it links to, and what a browser loads for it."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        self.classes |= set(values.get("class", "").split())
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.loaded.append(values["href"])
        if values.get(LOADED.get(tag, "")):
            self.loaded.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Seen]:
    found = {}
    for file in site.rglob("*.html"):
        found[file.relative_to(site).as_posix()] = seen = Seen()
        seen.feed(file.read_text())
    return found


def test_every_page_is_there_and_in_the_navigation(pages):
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    sources = [path.with_name("index.md") if path.name == "README.md" else path for path in sources]
    expected = {path.with_suffix(".html").as_posix() for path in sources}
    expected |= {f"reference/methods/{name}.html" for name in REGISTRY}
    expected |= {f"notebooks/{path.stem}.html" for path in (ROOT / "examples").glob("*.ipynb")}
    expected |= {"overview.html", "contributing.html", "changelog.html", "cluster_configs.html", "cite.html"}
    assert expected <= pages.keys()
    reached, waiting = set(), ["index.html"]
    while waiting:  # Material shows the pages of a section beside them, so not all are linked from the first page
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            linked = (posixpath.normpath(posixpath.join(posixpath.dirname(page), one)) for one in pages[page].links)
            waiting += [one for one in linked if one in pages and not one.startswith("files/")]
    assert expected <= reached, expected - reached


def test_every_link_leads_to_a_page_and_an_anchor(site, pages):
    checked = 0
    for name, seen in pages.items():
        if name == "404.html":  # its links begin with /, wherever the site is
            continue
        for link in seen.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            path = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
            )
            path = posixpath.join(path, "index.html") if (site / path).is_dir() else path
            assert (site / path).is_file(), f"{name}: {link}"
            if parts.fragment and path in pages:
                assert unquote(parts.fragment) in pages[path].ids, f"{name}: {link}"
            checked += 1
    assert checked > 1000


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for name, seen in pages.items():
        for address in seen.loaded:
            assert not re.match(r"(https?:)?//", address), f"{name} loads {address}"
            if name != "404.html" and not address.startswith("data:"):
                assert (site / posixpath.dirname(name) / address.partition("?")[0]).exists(), f"{name}: {address}"
        # diagrams and formulas in these classes would make Material fetch their renderers
        assert not seen.classes & {"mermaid", "arithmatex"}, name
    for sheet in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = sheet.read_text()
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", text), sheet


def test_every_key_command_method_and_public_name_is_explained(pages):
    names = {key.name.replace("[]", "") for section in keys.sections(Experiment) for key in section.keys}
    assert len(names) > 80 and names <= pages["reference/config.html"].ids
    import typer

    from cfl_ray.cli.commands import app

    commands = {f"cfl-ray-{name}" for name in typer.main.get_command(app).commands}
    assert commands <= pages["reference/commands.html"].ids
    places = pages["reference/api.html"].ids
    assert {f"cfl_ray.{name}" for name in cfl_ray.__all__} <= places
    assert "cfl_ray.core.clients.Clients.train" in places


def test_a_method_has_its_paper_its_equations_and_its_options(site):
    for name, cls in REGISTRY.items():
        page = (site / "reference" / "methods" / f"{name}.html").read_text()
        assert "Deviations from the paper" in page and "Paper and equations" in page
        for option in cls.options():
            assert f"<code>{option['name']}</code>" in page, (name, option["name"])
    assert "https://arxiv.org/abs/2006.04088" in (site / "reference" / "methods" / "ifca.html").read_text()


def test_keys_in_texts_lead_to_their_explanation(pages):
    assert "reference/config.html#evaluation.every" in pages["metrics.html"].links


def test_pictures_are_those_of_the_script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    import pictures

    pictures.write(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(pictures.PICTURES)
    for file in tmp_path.iterdir():
        assert file.read_text() == (ROOT / "docs" / "images" / file.name).read_text(), (
            f"{file.name}: run python docs/generate/pictures.py"
        )


def test_images_are_small():
    for file in (ROOT / "docs" / "images").iterdir():
        assert 1000 < file.stat().st_size < 200_000, file
