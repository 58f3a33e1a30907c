"""The page that compares systems: what is measured is written, what fails is written with the reason."""

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks import compare
from benchmarks.workloads import WORKLOADS, first_model

PAGE = f"# Performance\n\nby hand\n\n{compare.BEGIN}\nold\n{compare.END}\n\n## What limits what\n"


@pytest.fixture
def arguments(tmp_path):
    return argparse.Namespace(
        workloads=["W2"], peers=["bare", "blaze_fl"], venvs=tmp_path, rounds=1, repetitions=2, clients=1, timeout=60
    )


def test_only_the_measured_part_of_the_page_is_replaced():
    assert compare.with_section(PAGE, "new") == PAGE.replace("\nold\n", "\n\nnew\n\n")
    with pytest.raises(ValueError, match="no part between"):
        compare.with_section("# Performance\n", "new")
    page = compare.ROOT / "docs" / "performance.md"
    assert "\n## " in compare.with_section(page.read_text(), "").partition(compare.END)[2]


@pytest.mark.slow
def test_a_system_that_trains_agrees_with_the_plain_loop_and_others_do_not():
    far = compare.check(compare.PEERS["bare"], Path(sys.executable), "W2", 300)
    assert far < compare.TOLERANCE
    work = WORKLOADS["W2"].for_check()
    first = first_model(work)
    expected = compare.plain_round(work, first)
    assert compare.distance(first, expected, first) == pytest.approx(1.0)  # a system that does not train
    late = [array + 0.01 * (array - start) for array, start in zip(expected, first)]
    assert compare.distance(late, expected, first) == pytest.approx(0.01, rel=1e-3) and compare.TOLERANCE < 0.01


def test_failures_have_their_reason_in_the_table_and_the_others_go_on(arguments, monkeypatch):
    def environment_of(peer, venvs):
        if peer.module == "blaze_fl":
            raise compare.CannotRun("needs Python >=3.14")
        return Path("python")

    line = {"seconds": [2.0, 4.0, 3.0], "peak_mb": 1234, "versions": {"python": "3.11", "torch": "2.14"}}
    monkeypatch.setattr(compare, "environment_of", environment_of)
    monkeypatch.setattr(compare, "check", lambda *given: 1e-7)
    monkeypatch.setattr(compare, "run_peer", lambda *given: line)
    *_, results = compare.measure(arguments)
    section = compare.page_section(results, arguments, "python benchmarks/compare.py --venvs DIR", 0.1)
    assert "| bare PyTorch loop | 3.00 (2.00 .. 4.00) | 1.00 | 1,234 MB | 1e-07 of the change |" in section
    assert "| BlazeFL | not measured: needs Python >=3.14 | | | |" in section
    assert "A short run" in section and "`python benchmarks/compare.py --venvs DIR`" in section
    assert "| BlazeFL | blazefl" in section  # its pinned versions


def test_a_model_that_differs_is_no_figure(arguments, monkeypatch):
    monkeypatch.setattr(compare, "environment_of", lambda peer, venvs: Path("python"))
    monkeypatch.setattr(compare, "check", lambda *given: 0.5)
    *_, results = compare.measure(arguments)
    assert not results.lines and "away from that of the plain loop" in results.reasons["W2", "bare"]


def test_a_repetition_that_fails_leaves_the_figures_of_the_others(arguments, monkeypatch):
    monkeypatch.setattr(compare, "environment_of", lambda peer, venvs: Path("python"))
    monkeypatch.setattr(compare, "check", lambda *given: 0.0)
    calls = Counter()

    def run_peer(peer, interpreter, workload, arguments):
        calls[peer.module] += 1
        if peer.module == "flower" and calls[peer.module] == 2:
            raise compare.CannotRun("out of luck")
        return {"seconds": [2.0 + calls[peer.module]], "peak_mb": 1, "versions": {}}

    monkeypatch.setattr(compare, "run_peer", run_peer)
    arguments.peers, arguments.workloads, arguments.repetitions = ["bare", "flower"], ["W2"], 3
    *_, results = compare.measure(arguments)
    assert results.seconds("W2", "flower") == {0: 3.0, 2: 5.0} and results.ratio("W2", "flower") == 1.0
    section = compare.page_section(results, arguments, "compare", 0.0)
    assert "| Flower | 4.00 (3.00 .. 5.00), 2 times; once out of luck | 1.00 |" in section


def test_ratios_are_taken_within_a_repetition():
    results = compare.Results()
    for repetition, (bare, other) in enumerate(((1.0, 2.0), (10.0, 20.0), (1.0, 2.0), (1.0, None))):
        results.lines["W1", "bare"][repetition] = {"seconds": [bare]}
        if other is not None:
            results.lines["W1", "flower"][repetition] = {"seconds": [other]}
    assert results.ratio("W1", "flower") == 2.0
    assert np.isnan(results.ratio("W2", "flower"))


@pytest.mark.parametrize(
    "errors, reason",
    [
        ("Traceback ...\n  File x\nValueError: no | such thing\n", "ValueError: no / such thing"),
        ("ERROR: Could not find a version\nERROR: No matching distribution for a==1\n", "ERROR: No matching"),
        (
            "ERROR: Ignored the following versions: 2.0 Requires-Python >=3.12; 3.0.0 Requires-Python >=3.14\n"
            "ERROR: Could not find a version that satisfies the requirement blazefl[x,y]==3.0.0 (from versions: )\n",
            "needs Python >=3.14, here is",
        ),
        ("", "failed without a message"),
    ],
)
def test_reasons_are_one_line(errors, reason):
    assert compare.reason_of(errors).startswith(reason)
