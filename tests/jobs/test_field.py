"""The table of the field: its study has all methods, and its page is made from runs."""

import json
import time
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from studies import InlinePool

from benchmarks import cpu_time, digits_clients
from cfl_ray.config.method_entries import name_and_options
from cfl_ray.config.study import load_study
from cfl_ray.methods import REGISTRY
from cfl_ray.study import run as study_run
from cfl_ray.study.study_plan import Selection, plan
from jobs import field as job
from jobs.results import field


@pytest.fixture(scope="module")
def study():
    return load_study(field.STUDY)


def test_the_study_has_every_method_in_five_kinds_with_three_seeds(study):
    assert set(field.labels(study).values()) == set(REGISTRY), "add the method to benchmarks/field.yaml"
    assert len(study.settings) == 5 and len(study.seeds) == 3
    runs = plan(study, Selection(methods=["fedavg"]))
    assert len(runs) == 15 and {run.setting for run in runs} == set(study.settings)


def test_methods_are_told_the_same_number_of_clusters_and_else_have_the_values_of_their_authors(study):
    for entry in study.experiment["methods"]:
        name, options = name_and_options(entry)
        counts = {
            item.name: 4
            for item in fields(REGISTRY[name])
            if item.name in ("num_clusters", "num_models") and item.default is not None
        }
        assert {key: value for key, value in options.items() if key not in ("label", "eager", "step_rounds")} == counts


def test_readme_has_every_method_under_a_kind():
    for name in REGISTRY:
        assert field.kind_of(name, {name: name}) in field.KINDS, f"README's table lacks {field.title(name)}"


def test_the_page_is_made_from_the_runs(tmp_path, monkeypatch):
    """Three methods on rotated digits: their rows have the metrics of the runs, and the sentence compares them."""
    monkeypatch.setattr(study_run, "WorkerPool", InlinePool)
    overrides = [
        "methods=[fedavg,{ifca: {num_clusters: 4}},fedper]",
        "rounds=2",
        "evaluation.every=2",
        "model.options.hidden=4",
        "local.epochs=1",
    ]
    selection = Selection(settings=["rotated"], seeds=[0])
    results = study_run.run_study(load_study(field.STUDY, overrides), tmp_path / "field", selection, at_once=1)
    assert not results.failed
    file = tmp_path / "field.csv"
    field.write_figures(field.figures(results.root), "A machine.", file)
    rows, machine = field.read_figures(file)
    assert machine == "A machine." and (rows["cpu"] > 0).all() and len(rows) == 3
    of_runs = results.to_frame().set_index("method")
    for row in rows.to_dict("records"):
        for name in ("accuracy", "accuracy_worst_10", "ari", "mbit"):
            assert row[name] == pytest.approx(of_runs[name][row["method"]], rel=1e-5)
    page = field.section(rows, machine)
    assert "3 of 735 runs; seeds: 0. A machine." in page and "- Rotated: " in page
    best = rows.sort_values("accuracy", kind="stable").iloc[-1]
    ari, mbit = f"{best['ari']:.2f}", f"{best['mbit']:.1f}"
    start = (
        f"| {best['method']} | {100 * best['accuracy']:.1f} | {100 * best['accuracy_worst_10']:.1f} | {ari} | {mbit} |"
    )
    assert page.count(start) == 1


@pytest.mark.parametrize(
    ("ours", "other", "p", "words"),
    [
        (0.805, 0.9, 0.01, "clustering does not help"),
        (0.95, 0.9, 0.01, "clustering helps: ifca 95.0 is the best of all, before fedper 90.0"),
        (0.85, 0.9, 0.01, "clustering helps less than other methods**: fedper 90.0 before ifca 85.0 (p = 0.010)"),
        (0.85, 0.9, 0.2, "clustering helps no more than other methods"),
    ],
)
def test_the_page_says_where_clustering_does_not_help(ours, other, p, words):
    """One point more than FedAvg's 80 % is none, and a method that the test tells from the best is worse."""
    of = pd.DataFrame({"accuracy": [0.8, ours, other], "p": [0.001, p, p]}, index=["fedavg", "ifca", "fedper"])
    assert words in field.verdict(of, {"clustered": "ifca", "personalised": "fedper"})


def test_a_job_whose_runs_fail_writes_no_page(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(
        job.subprocess, "run", lambda command: commands.append(command) or SimpleNamespace(returncode=3)
    )
    monkeypatch.setattr(job, "write", lambda folder: pytest.fail("written"))
    with pytest.raises(SystemExit, match="3"):
        job.main(["--folder", str(tmp_path), "--at-once", "1"])
    assert commands[0][2:] == ["cfl_ray", "compare", str(field.STUDY), f"--folder={tmp_path}", "--at-once=1"]


class TestParts:
    """The source and the tracker of the study."""

    def test_every_form_begins_with_the_digits_in_order(self):
        data = digits_clients.by_writer()
        assert data["x"].shape == (1797, 1, 8, 8) and data["x"].min() == 0 and data["x"].max() == 1
        assert np.bincount(data["clients"]).tolist() == np.diff([*digits_clients.FIRST, 1797]).tolist()
        for form in range(14):
            digits = data["y"][data["clients"] == form]
            expected = list(range(form == 7, 10))  # the first 0 of form 7 is missing
            assert digits[: len(expected)].tolist() == expected

    def test_cpu_seconds_of_several_starts_are_added(self, tmp_path, monkeypatch):
        times = iter([1.0, 3.0, 10.0, 14.0])
        monkeypatch.setattr(time, "process_time", lambda: next(times))
        for _ in range(2):
            tracker = cpu_time.CpuTime()
            tracker.open(tmp_path, None, 0)
            tracker.log(None)
            tracker.close(None)
        assert json.loads((tmp_path / cpu_time.FILE).read_text()) == 2.0 + 4.0
