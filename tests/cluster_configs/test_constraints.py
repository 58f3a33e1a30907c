"""The pinned versions of an installation satisfy pyproject.toml and name all of its dependencies."""

import re
import shlex
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FILE = ROOT / "cluster_configs" / "constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return dict(re.fullmatch(r"([a-z0-9-]+)==([\w.]+)", line).groups() for line in lines)


def command() -> list[str]:
    return shlex.split(re.search(r"^#    (uv pip compile .*)$", FILE.read_text(), re.M)[1])


def extras() -> list[str]:
    words = command()
    return [words[place + 1] for place, word in enumerate(words) if word == "--extra"]


def test_every_direct_dependency_is_pinned_within_its_bounds():
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras())]
    wanted = [Requirement(line) for lines in lists for line in lines]
    assert len(wanted) > 20
    for requirement in wanted:
        pinned = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{requirement} allows no {pinned}; {' '.join(command())}"


def test_the_extras_of_a_running_system_are_pinned():
    assert set(extras()) == PROJECT["optional-dependencies"].keys() - {"test", "docs", "dev"}


def test_the_dependencies_of_dependencies_are_pinned_where_they_are_known():
    """As far as the packages of this environment say that are not older than their pins."""
    from importlib.metadata import PackageNotFoundError, requires, version

    pinned, missing = pins(), set()
    for name in pinned:
        try:
            lines = (requires(name) or []) if Version(version(name)) >= Version(pinned[name]) else []
        except PackageNotFoundError:
            continue
        needed = [found for line in lines if not (found := Requirement(line)).marker]
        missing |= {canonicalize_name(found.name) for found in needed} - pinned.keys()
    assert not missing


def test_it_names_no_place_to_install_from_and_no_other_platform():
    text = FILE.read_text()
    assert "://" not in text and "index" not in text and "@" not in text
    words = command()
    assert words[words.index("--python-version") + 1] == "3.12"  # as in the Dockerfile
    assert words[words.index("--python-platform") + 1].startswith("x86_64-manylinux")
    assert words[words.index("-o") + 1] == FILE.relative_to(ROOT).as_posix()


def test_the_guide_for_contributors_has_the_command():
    shown = (ROOT / "CONTRIBUTING.md").read_text().replace("\\\n", " ")
    assert " ".join(command()) in " ".join(shown.split())
