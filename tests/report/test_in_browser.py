"""The page in a browser: drawn, sorted, narrow, printed, and quiet."""

from dataclasses import replace

import pytest
from browser import CHROMIUM, Browser
from pages import HOSTILE, report, with_phases

from cfl_ray.report.page import render

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
NARROW = 360  # pixels of a small phone


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(report(name=f"digits {HOSTILE}", other=HOSTILE)), encoding="utf-8")
    return path


def test_all_figures_are_drawn_without_a_complaint_or_a_request(browser, page):
    browser.open(page)
    assert browser.run("document.querySelectorAll('.plot').length") == 14
    browser.wait("[...document.querySelectorAll('.plot')].every(one => one.querySelector('svg .trace, svg .hm image'))")
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]


def test_hostile_names_are_shown_as_text(browser, page):
    browser.open(page)
    assert browser.run("document.querySelectorAll('img').length") == 0
    legend = "[...document.querySelectorAll('.legendtext')].some(one => one.textContent.startsWith('<img'))"
    assert browser.run(legend)
    assert browser.complaints() == []


def test_a_click_sorts_the_table_and_another_one_turns_it_round(browser, page):
    browser.open(page)
    order = "[...document.querySelectorAll('table.sortable')[0].tBodies[0].rows].map(row => row.cells[0].textContent)"
    heading = "document.querySelectorAll('table.sortable')[0].tHead.rows[0].cells[2]"
    for expected, direction in ((["ifca", HOSTILE], "descending"), ([HOSTILE, "ifca"], "ascending")):
        browser.run(f"{heading}.querySelector('button').click()")
        assert browser.run(order) == expected
        assert browser.run(f"{heading}.getAttribute('aria-sort')") == direction
    assert browser.run(f"{heading}.querySelector('button').tabIndex") == 0  # the keyboard reaches it


def test_a_phone_shows_it_without_scrolling_sideways(browser, page):
    browser.open(page, width=NARROW)
    assert browser.run("document.documentElement.scrollWidth") == NARROW
    rights = "[...document.querySelectorAll('figure, svg.main-svg')].map(one => one.getBoundingClientRect().right)"
    assert browser.run(f"Math.max(...{rights})") <= NARROW


@pytest.mark.parametrize("width", [NARROW, 1280])
def test_texts_of_figures_neither_overlap_nor_are_cut_off(width, browser, tmp_path):
    """The phases of two methods begin in the same round."""
    shown = report(other="a_method_of_mine")
    for label, runs in shown.experiments[0].methods.items():
        with_phases(runs, f"first phase of {label}")
    path = tmp_path / "report.html"
    path.write_text(render(shown), encoding="utf-8")
    browser.open(path, width=width)
    assert browser.unreadable() == []


def test_bars_of_phases_are_in_the_rows_of_their_methods(browser, tmp_path):
    shown = report()
    for runs in shown.experiments[0].methods.values():
        with_phases(runs, "cluster")
    path = tmp_path / "report.html"
    path.write_text(render(shown), encoding="utf-8")
    browser.open(path)
    middles = """(find => [...[...document.querySelectorAll('.plot')].find(plot => plot.querySelector('.bars'))
        .querySelectorAll(find)].map(one => one.getBoundingClientRect())
        .map(box => Math.round(box.top + box.height / 2)))"""
    bars, rows = browser.run(f"{middles}('.bars .point path')"), browser.run(f"{middles}('.ytick text')")
    assert len(bars) == 4 and len(rows) == 2
    assert all(min(abs(bar - row) for row in rows) <= 1 for bar in bars), (bars, rows)


def test_the_usual_table_of_several_seeds_needs_no_scrolling(browser, tmp_path):
    metrics = ["accuracy", "accuracy_local", "accuracy_tuned", "accuracy_p10", "macro_f1", "ari", "num_clusters"]
    metrics += ["mbit", "rounds_to_target", "seconds"]
    values = [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 3.7, 4.4, 13.3, 41.7]
    stds = [0.01, 0.01, 0.01, 0.01, 0.01, 0.2, 0.6, 0.01, 3.2, 4.8]
    shown = report()
    scores = dict(zip(metrics, values, strict=True)) | {
        f"{name}_std": std for name, std in zip(metrics, stds, strict=True)
    }
    rows = [row | scores | {"runs": 3, "p": 0.003, "effect": -10.5} for row in shown.rows]
    path = tmp_path / "report.html"
    path.write_text(render(replace(shown, columns=metrics, rows=rows)), encoding="utf-8")
    browser.open(path, width=1280)
    table = "document.querySelector('.scroll')"
    assert browser.run(f"{table}.querySelectorAll('th').length") == len(metrics) + 3
    wide, room = browser.run(f"[{table}.scrollWidth, {table}.clientWidth]")
    assert wide <= room


def test_it_prints_with_every_figure(browser, page, tmp_path):
    """Figures that have not been in view are drawn before printing, and are no wider than the paper."""
    browser.open(page, draw=False)
    assert browser.run("[...document.querySelectorAll('.plot')].some(one => !one.querySelector('svg'))")
    browser.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert browser.run("[...document.querySelectorAll('.plot')].every(one => one.querySelector('svg.main-svg'))")
    assert browser.run("Math.max(...[...document.querySelectorAll('figure')].map(one => one.offsetWidth))") <= 704
