"""The tutorial and the guide to methods: their blocks run in order, in one folder, and print what the pages show."""

import contextlib
import functools
import io
import re
import shlex
from itertools import zip_longest
from pathlib import Path

import pytest
from commands import status_of

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {page.stem: page for page in [*DOCS.glob("tutorial/*.md"), DOCS / "extend/method_steps.md"]}
BEFORE = {"method": ["data"]}  # pages whose files and runs a page goes on with
_NUMBER = re.compile(r"-?\d+(\.\d+)?$")
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.S)


def run_page(name: str) -> list[tuple[str, str]]:
    """Runs all blocks of a page, files first written where a block begins with a file's name.

    The engine is the fastest for the networks of these pages, with the same figures up to rounding.

    Returns the texts that the page shows as output, each with what the block before it printed.
    """
    space, printed, shown = {"__name__": f"tutorial_{name}"}, "", []
    for language, block in _BLOCK.findall(PAGES[name].read_text()):
        out = io.StringIO()
        if language == "text":
            shown.append((block, printed))
            continue
        if file := re.match(r"# ([\w/]+\.\w+)\n", block):
            Path(file[1]).write_text(block.replace("engine: sequential", "engine: manual"))
            continue
        with contextlib.redirect_stdout(out):
            if language == "bash":
                for line in block.splitlines():
                    assert status_of(*shlex.split(line, comments=True)[1:]) == 0, line
            else:
                assert language == "python", language
                exec(compile(block, f"{name}.md", "exec"), space)
        printed = out.getvalue()
    return shown


def tokens(text: str) -> list[list[str]]:
    """Words of each line that has any, without the lines of tables."""
    lines = [re.sub(r"[─-╿]", " ", line).replace("±", " ± ").split() for line in text.splitlines()]
    return [line for line in lines if line]


def alike(shown: list[str], printed: list[str]) -> bool:
    """Whether a printed line begins like the one shown; numbers may differ as they do between processors."""
    for mine, other in zip_longest(shown, printed[: len(shown)]):
        if mine is None or other is None:
            return False
        if _NUMBER.match(mine) and _NUMBER.match(other):
            if abs(float(mine) - float(other)) > 0.06 + 0.1 * abs(float(mine)):
                return False
        elif mine != other:
            return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all pages, as readers go on in the folder of the page before."""
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module")
def shown_by():
    """`run_page`, which runs each page once, and before it those that it goes on with."""

    @functools.cache
    def shown(name: str) -> list[tuple[str, str]]:
        for before in BEFORE.get(name, []):
            shown(before)
        return run_page(name)

    return shown


# the page on tables does what the notebook compare_over_seeds does
@pytest.mark.parametrize("name", ["data", "method", "method_steps", pytest.param("table", marks=pytest.mark.slow)])
def test_its_blocks_run_and_print_what_is_shown(name, folder, shown_by, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.syspath_prepend(str(folder))
    shown = shown_by(name)
    assert shown
    for block, printed in shown:
        for line in tokens(block):
            if line[0] not in ("method", "P-server"):  # headings, abridged in the page
                assert any(alike(line, one) for one in tokens(printed)), (line, printed)


def test_the_comparison_can_fail():
    assert alike(["fedavg", "0.68"], ["fedavg", "0.70", "12.3"])
    assert not alike(["fedavg", "0.68"], ["fedavg", "0.88"])
    assert not alike(["fedavg", "0.68"], ["local", "0.68"])
    assert not alike(["fedavg", "0.68"], ["fedavg"])
