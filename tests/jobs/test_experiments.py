"""The runner of published cells: its order, what it leaves out, continues and counts."""

import json
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest

from cfl_ray.errors import ConfigError
from jobs.experiments import __main__ as experiments
from jobs.results import cells as results_cells

BUSY = "import time\nwhile True: sum(range(10**5))"


@pytest.fixture
def order(tmp_path):
    """Returns a function: lines -> the cells of an order that has them."""

    def read(*lines):
        (tmp_path / "order.txt").write_text("\n".join(lines))
        return experiments.read_order(tmp_path / "order.txt")

    return read


def test_the_order_that_is_here_selects_cells():
    cells = experiments.read_order(experiments.ORDER)
    assert {cell.study.partition("/")[0] for cell in cells} >= {"fedac", "autocfl", "cam", "fedclust", "stocfl"}
    assert len({tuple(cell.words) for cell in cells}) == len(cells)


def test_a_line_selects_as_compare_does_and_a_cell_is_taken_once(order):
    cells = order(
        "# first", "fedac/table1 --setting cifar10_dirichlet --method ifca", "fedac/table1 --method ifca --seed 1"
    )
    assert [cell.words[2::2] for cell in cells] == [
        *(["cifar10_dirichlet", "ifca", seed] for seed in "012"),
        *(
            [setting, "ifca", "1"]
            for setting in ("cifar10_pathological", "cifar100_dirichlet", "cifar100_pathological")
        ),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fedac/table9", "table9"),
        ("fedac/table1 --setting nowhere", "nowhere"),
        ("fedac/table1 --seed one", "one"),
        ("fedac/table1 rounds=3", "rounds=3"),
    ],
)
def test_a_line_that_selects_nothing_is_named(order, line, said):
    with pytest.raises(ConfigError, match=f"line 2: .*{said}"):
        order("", line)


def test_what_docs_have_unchanged_is_finished(monkeypatch):
    runs = pd.DataFrame(
        [
            {"setting": "cifar10_dirichlet", "method": method, "seed": 0, "rounds": rounds, "of_rounds": 300}
            | {"changed": changed, "accuracy_local": 0.7}
            for method, rounds, changed in [
                ("fedavg", 300, None),
                ("fedac", 299, None),
                ("fedper", 300, "local.lr=0.1"),
                ("fesem", 300, "evaluation.local_samples=500"),  # of which its published metric depends
                ("fl_hc", 300, "evaluation.every=30"),
            ]
        ]
    )
    monkeypatch.setattr(results_cells, "runs_of", lambda study: runs if study == "fedac-table1" else pd.DataFrame())
    whole = [
        method
        for method in ("fedavg", "fedac", "fedper", "fesem", "fl_hc", "ifca")
        if results_cells.is_whole("fedac-table1", "cifar10_dirichlet", method, 0)
    ]
    assert whole == ["fedavg", "fl_hc"]
    assert not results_cells.is_whole("fedac-table1", "cifar10_dirichlet", "fedavg", 1), "another seed"


@pytest.fixture
def runner(order, tmp_path, monkeypatch):
    """Cells whose work is a script, and the calls of jobs.results that they lead to."""
    done = []
    monkeypatch.setattr(experiments, "_LOOK_EVERY", 0.05)
    monkeypatch.setattr(experiments, "_results", lambda *words: done.append(words[0]))
    monkeypatch.setattr(experiments, "is_whole", lambda study, setting, method, seed: method == "fedavg")
    scripts = {"ifca": "print('trained')", "fedper": "raise SystemExit(2)", "fl_hc": BUSY, "fedac": BUSY}
    monkeypatch.setattr(
        experiments.Cell, "command", lambda cell, runs: [sys.executable, "-c", scripts[cell.run.method]]
    )
    methods = ("fedavg", "ifca", "fedper", "fl_hc", "fedac")
    cells = order(*(f"fedac/table1 --setting cifar10_dirichlet --seed 0 --method {name}" for name in methods))
    return SimpleNamespace(cells=cells, done=done, runs=tmp_path / "runs")


def test_cells_run_until_the_core_hours_are_used_up(runner, capsys):
    budget = experiments.Budget(0.3)
    failed = experiments.run(runner.cells, runner.runs, budget)
    said = capsys.readouterr().out
    assert [cell.run.method for cell in failed] == ["fedper"] and "failed with status 2" in said
    assert runner.done == ["collect", "share", "write"], "of the cell that ended"
    assert "--method fedavg" not in said, "it is in docs"
    assert "fl_hc" in said and "interrupted after" in said and "--method fedac" not in said
    assert 0.3 <= budget.used < 5
    assert "trained" in (runner.runs / "fedac-table1.log").read_text()


def test_what_a_kill_left_is_collected_first(runner):
    (runner.runs / "fedac-table1").mkdir(parents=True)
    experiments.run(runner.cells[:1], runner.runs, experiments.Budget(10))
    assert runner.done == ["collect"]


def test_sigterm_interrupts_the_cell_at_work(runner, order, tmp_path, capsys):
    order("fedac/table1 --setting cifar10_dirichlet --seed 0 --method fl_hc")
    stop = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    stop.start()
    try:
        given = ["--core-hours", "1", "--order", str(tmp_path / "order.txt"), "--runs", str(runner.runs)]
        assert experiments.main(given) == 130
    finally:
        stop.cancel()
    assert "interrupted" in capsys.readouterr().out and runner.done == []
    assert not any(BUSY in child.cmdline() for child in psutil.Process().children()), "it goes on"


def test_what_is_left_is_counted(order, monkeypatch):
    monkeypatch.setattr(experiments, "is_whole", lambda study, setting, method, seed: seed == 0)
    costs = [{"study": "fedac-table1", "setting": "cifar10_dirichlet", "hours_of_one": 0.25}]
    monkeypatch.setattr(experiments, "read_costs", lambda: pd.DataFrame(costs))
    cells = order("fedac/table1 --setting cifar10_dirichlet --setting cifar100_dirichlet --method ifca")
    lines = experiments.left(cells).splitlines()
    assert lines[0] == "fedac/table1: 4 of 6 left, 0.5 core hours, 2 of them without an estimate"
    assert lines[-1] == "all: 0.5 core hours"


def test_the_command_is_one_cell_in_the_folder_of_its_study(order, tmp_path):
    (cell,) = order("fedac/table1 --setting cifar10_dirichlet --method ifca --seed 2")
    words = cell.command(tmp_path)
    assert words[3] == "compare" and words[words.index("--folder") + 1] == str(tmp_path / "fedac-table1")
    assert json.dumps(words).count("--seed") == 1 and words[words.index("--seed") + 1] == "2"
