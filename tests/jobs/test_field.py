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
from cfl_ray.results.comparison import compare_runs
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
    """Four methods on rotated digits: rows have the metrics of the runs, and the tests of `cfl-ray table`."""
    monkeypatch.setattr(study_run, "WorkerPool", InlinePool)
    overrides = [
        "methods=[fedavg,local,{ifca: {num_clusters: 4}},fedper]",
        "rounds=2",
        "evaluation.every=2",
        "model.options.hidden=4",
        "local.epochs=1",
    ]
    selection = Selection(settings=["rotated"], seeds=[0])
    results = study_run.run_study(load_study(field.STUDY, overrides), tmp_path / "field", selection, at_once=1)
    assert not results.failed
    field.write_figures(*field.figures(results.root), "A machine.", tmp_path / "tables")
    rows, clients, machine = field.read_figures(tmp_path / "tables")
    assert machine == "A machine." and (rows["cpu"] > 0).all() and len(rows) == 4
    of_runs = results.to_frame().set_index("method")
    for row in rows.to_dict("records"):
        for name in ("accuracy", "accuracy_worst_10", "ari", "mbit"):
            assert row[name] == pytest.approx(of_runs[name][row["method"]], rel=1e-5, nan_ok=True)
    of = field.means(rows, {name: field.kind_of(name, {name: name}) for name in rows["method"]})
    for column, against in field.TESTED.items():
        table = compare_runs([results.root], ["accuracy"], test="wilcoxon", correction="holm", against=against)
        assert of[column].tolist() == pytest.approx(table["p"].tolist(), rel=0.01, nan_ok=True)
    assert rows["pairs"].tolist() == [16] * 4 and len(clients) == 16  # no two clients are one test
    assert clients["fedavg"].mean() == pytest.approx(of_runs["accuracy"]["fedavg"], abs=0.01)  # weighted by images
    page = field.section(rows, clients, machine)
    assert "4 of 735 runs; seeds: 0. A machine." in page and "- **Rotated: " in page
    assert "methods by accuracy over 16 clients, each with its mean over the seeds" in page
    best = rows.sort_values("accuracy", kind="stable").iloc[-1]
    accuracy, worst, mbit = 100 * best["accuracy"], 100 * best["accuracy_worst_10"], best["mbit"]
    ari = "-" if np.isnan(best["ari"]) else f"{best['ari']:.2f}"
    kind = field.kind_of(best["method"], {name: name for name in REGISTRY})
    start = f"| {best['method']} | {kind} | {accuracy:.1f} | {worst:.1f} | {ari} | {mbit:.1f} |"
    assert page.count(start) == 1


NAN = float("nan")
HELPS, LESS = (
    "clustering helps, and the best of the other methods is not told apart",
    "clustering helps less than other methods",
)
NO_MORE = "clustering is better than one model, but not than training alone"


@pytest.mark.parametrize(
    ("ours", "other", "p", "words", "reason"),
    [
        # p: of ifca and fedper, of ifca against FedAvg, which has 80 %, and against Local, which has 75 %
        (
            0.95,
            0.9,
            (0.01, 0.01, 0.01),
            "clustering helps most",
            "15.0 points above FedAvg (p = 0.010) and 20.0 points",
        ),
        (0.95, 0.9, (0.2, 0.01, 0.01), HELPS, "fedper 90.0, is 5.0 points below it (p = 0.200, not told apart)"),
        (0.9, 0.95, (0.2, 0.01, 0.01), HELPS, "fedper 95.0, is 5.0 points above it (p = 0.200, not told apart)"),
        (0.9, 0.95, (0.01, 0.01, 0.01), LESS, "fedper 95.0, is 5.0 points above it (p = 0.010)"),
        (0.9, 0.9, (NAN, 0.01, 0.01), HELPS, "fedper 90.0, is level with it (no test: equal for each client)"),
        (0.9, 0.95, (0.01, 0.01, 0.2), NO_MORE, "15.0 points above Local (p = 0.200, not told apart)"),
        (
            0.9,
            0.95,
            (0.01, 0.2, 0.01),
            "clustering does not help",
            "10.0 points above FedAvg (p = 0.200, not told apart)",
        ),
        (0.7, 0.95, (0.01, 0.01, 0.01), "clustering does not help", "10.0 points below FedAvg (p = 0.010)"),
        (0.8, 0.95, (0.01, NAN, 0.2), "clustering does not help", "level with FedAvg (no test: equal for each client)"),
        (0.9, 0.95, (NAN, NAN, NAN), "no test of clustering", "10.0 points above FedAvg (no test: too few clients)"),
    ],
)
def test_the_page_says_where_clustering_does_not_help(ours, other, p, words, reason):
    """A difference counts only if the test tells it; without p, the page says why there is none."""
    accuracy = {"fedavg": 0.8, "local": 0.75, "ifca": ours, "fedper": other}
    of = pd.DataFrame({"accuracy": pd.Series(accuracy)}).assign(
        kind=["one", "personalised", "clustered", "personalised"], pairs=16, p=0.001
    )
    of = of.assign(clustered_fedavg=[NAN, NAN, p[1], NAN], clustered_local=[NAN, NAN, p[2], NAN], accuracy_worst_10=0.5)
    best, loser = ("ifca", "fedper") if ours >= other else ("fedper", "ifca")
    of.loc[[best, loser], "p"] = NAN, p[0]
    assert field.verdict(of).startswith(words) and reason in field.reasons(of)


def test_clustered_methods_that_are_told_above_and_below_fedavg_are_counted():
    """IFCA is above and CFL below FedAvg; FeSEM is not told from it; FedPer is not clustered."""
    of = pd.DataFrame(
        {"accuracy": [0.8, 0.9, 0.7, 0.81, 0.9], "clustered_fedavg": [NAN, 0.01, 0.01, 0.5, NAN]},
        index=["fedavg", "ifca", "cfl", "fesem", "fedper"],
    ).assign(kind=["one", *["clustered"] * 3, "personalised"])
    above, below = (field.told_from(of, "fedavg", sign) for sign in (1, -1))
    assert above[above].index.tolist() == ["ifca"] and below[below].index.tolist() == ["cfl"]


def test_p_is_corrected_for_the_clustered_methods_and_for_all():
    """Of three methods against FedAvg, IFCA with p = 0.02 is the first of three, and the only clustered one."""
    methods = ["fedavg", "ifca", "fedper", "ditto"]
    rows = pd.DataFrame({"method": methods, **dict.fromkeys(field.METRICS, 0.5), "pairs": 16}).assign(
        p=[0.01, NAN, 0.04, 0.5], p_fedavg=[NAN, 0.02, 0.03, 0.9], p_local=0.5
    )
    of = field.means(rows, dict(zip(methods, ["one", "clustered", "personalised", "personalised"], strict=True)))
    assert of["p_fedavg"].tolist() == pytest.approx([NAN, 3 * 0.02, 2 * 0.03, 0.9], nan_ok=True)
    assert of["clustered_fedavg"].tolist() == pytest.approx([NAN, 0.02, NAN, NAN], nan_ok=True)
    assert of["p"].tolist() == pytest.approx([3 * 0.01, NAN, 2 * 0.04, 0.5], nan_ok=True)


def test_methods_are_ranked_over_the_clients_of_all_kinds():
    """Client 0 of each kind is a block of its own: a wins two of three, b one."""
    clients = pd.DataFrame(
        {
            "setting": ["x", "x", "y"],
            "client": [0, 1, 0],
            "a": [0.9, 0.9, 0.1],
            "b": [0.8, 0.8, 0.8],
            "c": [0.7, 0.7, 0.05],
        }
    )
    ranks = field.ranks_over_clients(clients)
    assert ranks.blocks == 3 and ranks.mean_rank == {"a": 4 / 3, "b": 5 / 3, "c": 3.0}
    assert "over 3 clients, each with its mean over the seeds" in ranks.in_words
    assert field.ranks_over_clients(clients[:1]) is None


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

    def test_each_image_belongs_to_one_client_whose_group_turns_it(self):
        """Two angles with two sets of labels: groups 0 to 3, two clients each; turned back, all images are there."""
        data = digits_clients.by_group(8, [0, 90], [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]])
        assert {(client, group) for client, group in zip(data["clients"], data["groups"], strict=True)} == {
            (client, client // 2) for client in range(8)
        }
        assert {group: set(data["y"][data["groups"] == group]) for group in range(4)} == {
            group: {3, 4, 5, 6, 7, 8, 9} if group % 2 else {0, 1, 2} for group in range(4)
        }
        upright, turned = digits_clients.by_writer()["x"], data["groups"] >= 2
        assert (data["x"][~turned] == upright[~turned]).all()
        assert (np.rot90(data["x"][turned], -1, (-2, -1)) == upright[turned]).all()

    def test_clients_by_labels_have_at_least_so_many_images(self):
        data = digits_clients.by_label(16, 0.1, 40)
        sizes = np.bincount(data["clients"])
        assert sizes.sum() == 1797 and sizes.min() >= 40
        digits = [len(set(data["y"][data["clients"] == client])) for client in range(16)]
        assert np.median(digits) <= 5  # of 10

    def test_cpu_seconds_of_several_starts_are_added(self, tmp_path, monkeypatch):
        times = iter([1.0, 3.0, 10.0, 14.0])
        monkeypatch.setattr(time, "process_time", lambda: next(times))
        for _ in range(2):
            tracker = cpu_time.CpuTime()
            tracker.open(tmp_path, None, 0)
            tracker.log(None)
            tracker.close(None)
        assert json.loads((tmp_path / cpu_time.FILE).read_text()) == 2.0 + 4.0
