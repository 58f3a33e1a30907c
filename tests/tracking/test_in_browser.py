"""The comparison of methods in MLflow's own pages, in a browser with a fresh profile; skipped without Chromium."""

import pytest
from browser import CHROMIUM, Browser
from studies import InlinePool, small_study

from cfl_ray.study import run
from cfl_ray.study.run import run_study
from cfl_ray.tracking import where_to_look

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
SEEDS = 5
METHODS = ["fedavg", {"ifca": {"num_clusters": 2}}, "stocfl"]
SETTINGS = {"slow": {"local": {"lr": 0.01}}, "fast": {"local": {"lr": 0.1}}}
FIGURES = ("accuracy by mbit", "accuracy by round", "clusters by round")


@pytest.fixture(scope="module")
def study(server, tmp_path_factory, drawing):
    """A study of 30 runs on the server, and the address that its end prints."""
    with pytest.MonkeyPatch.context() as patch, drawing():
        patch.setattr(run, "WorkerPool", InlinePool)
        patch.setattr(InlinePool, "done", [])
        experiment = {"methods": METHODS, "tracking": {"uri": server.uri}}
        made = small_study(
            tmp_path_factory.mktemp("study"), experiment=experiment, settings=SETTINGS, seeds=[*range(SEEDS)]
        )
        results = run_study(made)
        assert not results.failed and len(InlinePool.done) == 6 * SEEDS
    return where_to_look(results.root, results.tracking)


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path / "profile") as browser:
        yield browser


def test_the_address_at_the_end_of_a_study_has_table_figures_and_report_after_one_click(study, browser):
    browser.visit(study)
    browser.click("Show more")
    figures = "[...document.images].filter(image => image.src.includes('get-artifact'))"
    browser.wait(f"{figures}.length === 6 && {figures}.every(image => image.naturalWidth > 0)")
    room = "image.closest('p').getBoundingClientRect().right - image.getBoundingClientRect().right"
    assert min(browser.run(f"{figures}.map(image => {room})")) >= 0, "cut off"
    text = browser.run("document.body.innerText")
    assert all(f"{setting}/{method}" in text for setting in SETTINGS for method in ("fedavg", "ifca", "stocfl"))
    assert all(f"{setting} {figure}" in text for setting in SETTINGS for figure in FIGURES)
    report = browser.run("[...document.links].find(link => link.innerText === 'Report').href")
    assert report.endswith("/artifacts/report.html?workflowType=machine_learning")


def test_the_list_of_runs_has_the_latest_comparison_above_it(study, browser):
    browser.visit(study.partition("/runs/")[0] + "?workflowType=machine_learning")
    browser.wait("document.body.innerText.includes('Latest comparison: small')")
    browser.wait(f"/{6 * SEEDS + 1}\\s+matching runs/.test(document.body.innerText)")
