"""The page of results: made from the figures of runs and the published numbers, and up to date."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from studies import InlinePool

from cfl_ray.config.study import load_study
from cfl_ray.results.published import PublishedNumber
from cfl_ray.study import run as study_run
from jobs.results import __main__ as results
from jobs.results import cells as results_cells
from jobs.results import heterogeneity
from jobs.results import page as results_page

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cells():
    """Every published cell beside its runs."""
    return results_cells.compared()


def compared(mean, runs, unit="percent", metric="accuracy", because="", state="explained"):
    number = PublishedNumber(metric, unit, mean, None, "")
    reason = results_cells.Reason(because, state) if because else results_cells.Reason()
    others = pd.DataFrame([run | {"method": method} for run in runs for method in ("fedavg", "ifca")])
    others = others if runs else pd.DataFrame({"method": []})
    return results_cells.Compared("paper", "table1", "fedavg", "here", number, pd.DataFrame(runs), reason, others)


def test_the_page_is_that_of_the_figures(cells):
    pages = results_page.pages(cells)
    for place, text in pages.items():
        assert (ROOT / "docs" / place).read_text() == text, "python -m jobs.results write"
    others = {f"results/{path.name}" for path in (ROOT / "docs/results").glob("*.md")}
    assert others == {*pages} - {results_page.MAIN}


def test_the_tables_of_methods_are_those_of_the_figures():
    for page, text in heterogeneity.pages().items():
        assert page.read_text() == text, "python -m jobs.results write"
    with pytest.raises(ValueError, match="needs the lines"):
        heterogeneity.with_table("# Another page\n", "")


def test_every_published_cell_is_counted_once(cells):
    assert len({(cell.paper, cell.table, cell.row, cell.column) for cell in cells}) == len(cells)
    counted = 0
    for lines in "\n".join(results_page._count(cells)).split("\n\n"):
        _, _, *rows = lines.split("\n")
        *papers, everything = [[int(one) for one in row.strip("| ").split(" | ")[1:]] for row in rows]
        assert everything == [sum(column) for column in zip(*papers, strict=True)]
        for published, unchanged, repeated, close, run, *states, missing in [*papers, everything]:
            assert run == sum(states) and published == run + missing
            assert repeated <= unchanged <= run and close <= min(unchanged, states[0] + states[-1])
        counted += everything[0]
    assert counted == len(cells)


@pytest.mark.parametrize(
    ("row", "metric", "changed", "rounds", "expected"),
    [
        ("fedavg", "accuracy", "", 100, True),
        ("fedavg", "accuracy", "rounds=50", 50, False),
        ("fedavg", "accuracy", "local.lr=0.1", 100, False),
        (
            "fedavg",
            "accuracy",
            "evaluation.every=50 evaluation.local_samples=500 evaluation.choice_samples=256",
            100,
            True,
        ),
        ("fedavg", "rounds_to_target", "evaluation.every=50", 100, False),
        ("fedavg", "accuracy_local", "evaluation.local_samples=500", 100, False),
        ("ditto", "accuracy", "evaluation.local_samples=500", 100, False),
        ("per_fedavg", "accuracy", "evaluation.local_samples=500", 100, False),
        ("pacfl", "newcomer_accuracy_tuned", "evaluation.local_samples=500", 100, False),
        ("ifca_2", "accuracy", "evaluation.choice_samples=256", 100, False),
    ],
)
def test_a_cell_is_unchanged_if_no_other_value_can_change_its_metric(row, metric, changed, rounds, expected):
    run = {"rounds": rounds, "of_rounds": 100, "every": 5, "changed": changed, metric: 0.5}
    cell = replace(compared(50.0, [run], "percent", metric), row=row)
    assert cell.is_unchanged == expected
    assert not replace(cell, runs=cell.runs[:0]).is_unchanged


def test_the_headline_counts_accuracies_of_unchanged_runs_alone():
    runs = [{"accuracy": 0.49, "rounds": 9, "of_rounds": 9, "changed": change} for change in ("", "", "", "local.lr=1")]
    cells = [compared(mean, runs[:3]) for mean in (50.0, 60.0)]
    cells += [compared(50.0, runs[2:]), compared(50.0, [])]
    assert " ".join(results_page._headline(cells)) == (
        "**Of 4 published accuracies and F1 scores, 2 were run with the unchanged recipe and all its rounds, 2 of them "
        "with 3 seeds or more. Of these 2, 1 are within two points.**"
    )


def test_conclusions_are_counted_by_signs():
    assert results_page._signs([1.0] * 6) == "6 of 6, +1.0 (p = 0.031)"  # 2 / 2^6
    assert results_page._signs([1.0, -3.0, 0.0]) == "1 of 3, -0.7"  # a test of fewer than six says nothing


def test_conclusions_compare_with_the_best_other_method_of_the_same_rounds(monkeypatch):
    monkeypatch.setattr(results_page, "OWN", {"paper": ("own",)})
    methods = (("own", 70.0, 0.6, 9), ("a", 60.0, 0.7, 9), ("b", 65.0, 0.5, 9), ("c", 90.0, 0.9, 5))
    cells = []
    for row, mean, here, rounds in methods:
        run = {"accuracy": here, "rounds": rounds, "of_rounds": 9}
        cells.append(replace(compared(mean, [run]), row=row))
    rows = results_page._conclusions(cells)
    assert [row for row in rows if row.startswith("| paper | own |")] == [
        f"| paper | own | {other} | 1 | {published} | {here} | {here} |"
        for other, published, here in (
            ("the best other", "1 of 1, +5.0", "0 of 1, -10.0"),
            ("a", "1 of 1, +10.0", "0 of 1, -10.0"),
            ("b", "1 of 1, +5.0", "1 of 1, +10.0"),
        )
    ]


@pytest.mark.parametrize(
    ("here", "word"),
    [((0.7, 0.7), "Repeated"), ((0.7, 0.5), "Repeated in part"), ((0.5, 0.5), "Not repeated"), ((), "Not tested")],
)
def test_a_claim_is_judged_by_the_cells_in_which_the_paper_has_it(monkeypatch, here, word):
    """Published: 70 against 65, in each of two settings; here the other method has 60."""
    monkeypatch.setattr(results_page, "OWN", {"paper": ("own",)})
    monkeypatch.setattr(results_page, "CLAIMS", {"paper": "it is better"})
    monkeypatch.setattr(results_page, "TITLES", {"paper": "Own"})
    cells = []
    for column, value in enumerate(here or (0.7, 0.7)):
        for row, mean, accuracy, rounds in (("own", 70.0, value, 9), ("a", 65.0, 0.6, 9 if here else 5)):
            run = {"accuracy": accuracy, "rounds": rounds, "of_rounds": 9, "changed": ""}
            cells.append(replace(compared(mean, [run]), row=row, column=str(column)))
    text = re.sub(r"\s+", " ", " ".join(results_page._in_words(cells)))
    assert f"it is better. {word} for own: " in text
    above = sum(value > 0.6 for value in here)
    assert not here or f"above the best other in {above} of 2 cells, published 2" in text


def test_conclusions_have_a_sign_test_over_the_cells_of_all_papers(monkeypatch):
    monkeypatch.setattr(results_page, "OWN", {"paper": ("own",), "other": ("own",)})
    cells = []
    for paper, columns in (("paper", 2), ("other", 4)):
        for column, (row, mean, here) in product(range(columns), (("own", 70.0, 0.6), ("a", 60.0, 0.7))):
            run = {"accuracy": here, "rounds": 9, "of_rounds": 9}
            cells.append(replace(compared(mean, [run]), paper=paper, row=row, column=str(column)))
    published, here = "6 of 6, +10.0 (p = 0.031)", "0 of 6, -10.0 (p = 0.031)"  # 2 / 2^6
    of_all = [f"| all | its own | {other} | 6 | {published} | {here} | {here} |" for other in ("the best other", "a")]
    assert [row for row in results_page._conclusions(cells) if row.startswith("| all |")] == of_all
    fewer = [cell for cell in cells if cell.column != "3"]
    assert not any(row.startswith("| all |") for row in results_page._conclusions(fewer))


def test_the_figure_has_a_point_for_each_accuracy_that_was_run(cells):
    drawn = results_page.scatter(cells)
    run = [cell for cell in cells if cell.number.unit == "percent" and cell.is_run]
    assert drawn.count("<circle") == len(run)
    assert drawn.count("<circle") - drawn.count('fill="none"') == sum(cell.is_unchanged for cell in run)
    assert (ROOT / "docs" / results_page.FIGURE).read_text() == drawn, "python -m jobs.results write"


@pytest.mark.parametrize(
    ("mean", "runs", "unit", "state"),
    [
        (50.0, [{"accuracy": 0.48}], "percent", "within 2 points"),
        (50.0, [{"accuracy": 0.479}], "percent", "open"),
        (50.0, [{"accuracy": 0.46}, {"accuracy": 0.50}], "percent", "within 2 points"),
        (50.0, [], "percent", "not run"),
        (50.0, [{"ari": 1.0}], "percent", "not run"),
        (100.0, [{"accuracy": 98.0}], "rounds", "within 2 points"),
        (10.0, [{"accuracy": 10.3}], "rounds", "open"),
        (None, [{"accuracy": 10.0}], "rounds", "open"),
        (3.0, [{"accuracy": 3.0}], "count", "within 2 points"),
        (3.0, [{"accuracy": 4.0}], "count", "open"),
    ],
)
def test_state_of_a_cell(mean, runs, unit, state):
    def of(because, how):
        return compared(mean, runs, unit, because=because, state=how).state

    assert of("", "explained") == state
    assert of("the cause is shown", "explained") == ("explained" if state == "open" else state)
    assert of("the cause is not known", "open") == state
    assert of("the protocol is not known", "not comparable") == (state if state == "not run" else "not comparable")


WHOLE = {"rounds": 200, "of_rounds": 200, "every": 5, "changed": ""}
QUARTER = WHOLE | {"rounds": 50}
REACHED_IN_15 = {"rounds_to_target": 15, "mbit_to_target": 30.0}


@pytest.mark.parametrize(
    ("metric", "mean", "run", "state"),
    [
        ("rounds_to_target", None, WHOLE, "within 2 points"),  # reached in neither
        ("rounds_to_target", 10.0, WHOLE, "open"),  # not reached here
        ("rounds_to_target", None, QUARTER, "not run"),  # it may be reached later
        ("rounds_to_target", 120.0, QUARTER, "not run"),
        ("rounds_to_target", 40.0, QUARTER, "open"),  # long enough
        ("rounds_to_target", 120.0, QUARTER | REACHED_IN_15, "open"),
        ("rounds_to_target", None, QUARTER | REACHED_IN_15, "open"),
        ("rounds_to_target", 11.0, QUARTER | REACHED_IN_15, "within 2 points"),  # tests in rounds 10 and 15
        ("rounds_to_target", 10.0, QUARTER | REACHED_IN_15, "open"),
        ("rounds_to_target", 16.0, QUARTER | REACHED_IN_15, "open"),
        ("mbit_to_target", 21.0, QUARTER | REACHED_IN_15, "within 2 points"),  # 2 Mbit a round
        ("mbit_to_target", 20.0, QUARTER | REACHED_IN_15, "open"),
        ("mbit_to_target", 240.0, QUARTER, "not run"),
        ("rounds_to_target", None, WHOLE | {"changed": "evaluation.target=None"}, "not run"),  # tested without a target
        ("rounds_to_target", 10.0, WHOLE | {"changed": "evaluation.target=0.5"}, "not run"),  # with another one
        ("rounds_to_stable_clusters", 8.0, QUARTER | {"rounds_to_stable_clusters": 8}, "within 2 points"),
        ("rounds_to_stable_clusters", 90.0, QUARTER | {"rounds_to_stable_clusters": 8}, "not run"),  # may change again
    ],
)
def test_a_target_beyond_the_rounds_of_a_run_is_not_run(metric, mean, run, state):
    unit = "mbit" if metric.startswith("mbit") else "rounds"
    assert compared(mean, [run], unit, metric).state == state


def test_reasons_are_those_of_the_cell_or_of_its_row_column_or_table():
    reasons = {"paper": {"table1": {"fedavg/here": "cell", "fedavg/*": "row", "*/there": "column", "*/*": "table"}}}
    found = [
        results_cells.reason_of(reasons, "paper", "table1", row, column)
        for row, column in (("fedavg", "here"), ("fedavg", "there"), ("ifca", "there"), ("ifca", "here"))
    ]
    assert found == [results_cells.Reason(one, "explained") for one in ("cell", "row", "column", "table")]
    assert results_cells.reason_of(reasons, "paper", "table2", "fedavg", "here") == results_cells.Reason()
    reasons["paper"]["table1"]["fedavg/here"] = {"not comparable": "other data"}
    found = results_cells.reason_of(reasons, "paper", "table1", "fedavg", "here")
    assert found == results_cells.Reason("other data", "not comparable")


def test_every_reason_is_of_a_published_cell(cells):
    """A reason that names nothing would never be shown."""
    reasons = results_cells.read_reasons()
    known = {(cell.paper, cell.table) for cell in cells}
    names = {(cell.paper, cell.table, name) for cell in cells for name in (cell.row, cell.column, "*")}
    for paper, tables in reasons.items():
        shown = "\n".join(results_page._figures(paper)) if str in map(type, tables.values()) else ""
        for table, of_cells in tables.items():
            if isinstance(of_cells, str):
                assert f"\nFound: {of_cells.strip()}\n" in shown, table
                continue
            assert (paper, table) in known
            for key, because in of_cells.items():
                if isinstance(because, dict):
                    ((state, because),) = because.items()
                    assert state in results_cells.STATES
                assert because.strip().endswith(".")
                if key == "table":
                    continue
                row, column = key.split("/")
                assert {(paper, table, row), (paper, table, column)} <= names, key


def test_runs_are_collected_with_the_settings_that_differ_from_their_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(study_run, "WorkerPool", InlinePool)
    recipe = tmp_path / "paper" / "table1.yaml"
    recipe.parent.mkdir()
    recipe.write_text(
        "name: collected\nexperiment:\n  rounds: 3\n  methods: [fedavg, local]\n  tracking: {enabled: false}\n"
        "  data: {partition: {clients: 4, samples: 20}}\n  model: {options: {hidden: 4}}\n"
        "  runtime: {engine: sequential}\nsettings: {here: {}}\n"
    )
    monkeypatch.setattr(results, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(results, "STUDIES", tmp_path)
    study = load_study(recipe, ["rounds=1", f"output={tmp_path / 'runs'}", "tracking.report=false"])
    done = study_run.run_study(study, at_once=1)
    file = results.collect(done.root, None)
    assert file == tmp_path / "figures" / "paper-table1.csv"
    found = pd.read_csv(file)
    assert found["method"].tolist() == ["fedavg", "local"] and set(found["changed"]) == {"rounds=1"}
    assert found["accuracy"].tolist() == pytest.approx(
        [done.run_metrics["here", m][0]["accuracy"] for m in found.method]
    )
    results.collect(done.root, recipe)
    assert len(pd.read_csv(file)) == 2, "a run that is collected again replaces its row"


def test_a_run_is_shared_with_studies_that_plan_the_same_experiment(tmp_path, monkeypatch):
    """Instead of a run with other values; one with fewer rounds or another evaluation too, and no other."""
    head = "experiment:\n  methods: [fedavg, local]\n  data: {partition: {clients: 4, samples: 20}}\n"
    (tmp_path / "paper").mkdir()
    settings = {"budget": "settings: {three: {rounds: 3}, five: {rounds: 5}, fast: {rounds: 5, local: {lr: 0.7}}}"}
    settings["table1"] = "settings: {here: {rounds: 5}}"
    settings["table2"] = "settings: {here: {rounds: 4, evaluation: {choice_samples: null}}}"
    for name, text in settings.items():
        (tmp_path / "paper" / f"{name}.yaml").write_text(f"name: paper-{name}\n{head}{text}\n")
    keys = ["setting", "method", "seed", "rounds", "of_rounds", "changed", "accuracy"]

    def write(name, *rows):
        pd.DataFrame(rows, columns=keys).to_csv(tmp_path / f"paper-{name}.csv", index=False)

    monkeypatch.setattr(results, "FIGURES", tmp_path)
    monkeypatch.setattr(results, "STUDIES", tmp_path)
    fast, other = ("fast", "fedavg", 0, 5, 5, None, 0.9), ("here", "fedavg", 0, 2, 5, "rounds=2 local.lr=1", 0.1)
    write("table1", other)
    write("budget", fast)
    assert results.share() == []
    write("budget", fast, ("three", "fedavg", 0, 3, 3, None, 0.3), ("three", "local", 0, 2, 3, "rounds=2", 0.2))
    assert results.share(["other"]) == [], "of another paper"
    assert results.share(["paper"]) == ["paper-budget, three, fedavg -> paper-table1.csv: here, fedavg"]
    (row,) = pd.read_csv(tmp_path / "paper-table1.csv").to_dict("records")
    assert (row["accuracy"], row["rounds"], row["of_rounds"], row["changed"]) == (0.3, 3, 5, "rounds=3")
    write("budget", fast, ("five", "fedavg", 0, 5, 5, None, 0.5), ("three", "fedavg", 0, 3, 3, None, 0.3))
    assert len(results.share()) == 1 and results.share() == [], "all rounds, and then nothing is left to share"
    (row,) = pd.read_csv(tmp_path / "paper-table1.csv").to_dict("records")
    assert row["accuracy"] == 0.5 and pd.isna(row["changed"]) and row["run_of"] == "paper-budget, five"
    write("table2", (*other[:5], "rounds=2 evaluation.choice_samples=256 local.lr=1", 0.1))
    assert len(results.share()) == 1, "not the run with more rounds"
    (row,) = pd.read_csv(tmp_path / "paper-table2.csv").to_dict("records")
    assert (row["accuracy"], row["changed"]) == (0.3, "rounds=3 evaluation.choice_samples=256")
    (tmp_path / "paper-table2.csv").unlink()
    write("table1", ("here", "fedavg", 1, 4, 5, "rounds=4", 0.4))
    write("budget", ("three", "fedavg", 0, 3, 3, None, 0.3))
    assert results.share() == [], "not beside a longer run with another seed"


@pytest.mark.parametrize(
    ("before", "rounds", "expected"),
    [
        ("rounds=50 methods.fedclust.num_clusters=null", 50, True),
        ("rounds=50 methods.fedclust.num_clusters=null", 25, False),  # fewer rounds
        ("rounds=50 methods.fedclust.num_clusters=null", 0, False),  # of a study without published numbers
        ("rounds=50", 50, False),
    ],
)
def test_a_run_that_trains_as_the_recipe_is_shared_instead_of_one_that_does_not(tmp_path, before, rounds, expected):
    file, cell = tmp_path / "runs.csv", SimpleNamespace(setting="here", method="fedclust", seed=0)
    rows = pd.DataFrame([vars(cell) | {"rounds": 50, "changed": before}])
    rows.to_csv(file, index=False)
    assert results._is_better("rounds=50 evaluation.target=null", rounds, file, cell) == expected


def test_options_of_the_method_that_differ_from_the_recipe_are_named():
    here, there = ({"rounds": 2, "methods": [entry]} for entry in ("ifca", {"ifca": {}}))
    assert results.differences(here, there) == ""
    changed = there | {"methods": [{"ifca": {"num_clusters": 5, "label": "ifca_5"}}]}
    assert results.differences(changed, there) == "methods.ifca.num_clusters=5"
    assert results.differences(there, changed) == "methods.ifca.num_clusters=4", "the default, which is not written"
    one, other, third = (
        there | {"model": {"name": f"/{top}/jobs/experiments/{file}.py:make"}}
        for top, file in (("here", "a"), ("home/there", "a"), ("here", "b"))
    )
    assert results.differences(one, other) == "", "the same file in another checkout"
    assert results.differences(third, one) == "model.name=jobs/experiments/b.py:make"


def test_a_folder_of_no_recipe(tmp_path):
    with pytest.raises(results.UserError, match="is the folder of no study in .*; name its recipe with --recipe"):
        results.find_recipe(tmp_path)


def test_the_runs_of_a_figure_are_a_table_in_the_order_of_its_study(tmp_path, monkeypatch):
    monkeypatch.setattr(results_cells, "FIGURES", tmp_path)
    (tmp_path / "explanations.yaml").write_text("fedclust: {figure4: As in the figure.}\n")
    columns = ["setting", "method", "seed", "changed", "accuracy", "num_clusters", "seconds"]
    rows = [
        ("fashion_mnist,threshold=2", "fedclust", 0, None, 0.5, 1, 60),
        ("fashion_mnist,threshold=0.5", "fedclust", 0, "rounds=9", 0.91, 40, 60),
        ("fashion_mnist,threshold=0.5", "fedclust", 1, "rounds=9", 0.93, 42, 60),
    ]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "fedclust-figure4.csv", index=False)
    lines = results_page._figures("fedclust")
    command = "cfl-ray sweep jobs/experiments/fedclust/figure4.yaml --setting fashion_mnist"
    assert lines[:9] == [
        *("## Fig. 4", ""),
        *("```bash", f"{command}", f"{command} rounds=9", "```", ""),
        *("3 runs, 3 core minutes.", ""),
    ]
    assert lines[9].startswith("Expected: the best `accuracy` with one cluster")
    assert lines[-7:] == [
        *("Found: As in the figure.", ""),
        "| setting | accuracy | num_clusters | seeds |",
        "|---|---|---|---|",
        "| fashion_mnist,threshold=0.5 | 92.0 ± 1.4 | 41 ± 1 | 2 |",
        "| fashion_mnist,threshold=2 | 50.0 | 1 | 1 |",
        "",
    ]


def test_the_range_of_the_last_rounds_stands_beside_the_accuracy_of_a_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(results_cells, "FIGURES", tmp_path)
    (tmp_path / "explanations.yaml").write_text("{}\n")
    columns = ["setting", "method", "seed", "changed", "accuracy", "accuracy_low", "accuracy_high", "seconds"]
    rows = [
        ("fashion_mnist,threshold=0.5", "fedclust", 0, None, 0.91, 0.9, 0.91, 60),
        ("fashion_mnist,threshold=0.5", "fedclust", 1, None, 0.93, 0.88, 0.94, 60),
        ("fashion_mnist,threshold=2", "fedclust", 0, None, 0.5, None, None, 60),
    ]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "fedclust-figure4.csv", index=False)
    assert results_page._figures("fedclust")[-5:] == [
        "| setting | accuracy | accuracy in the last quarter of the rounds | seeds |",
        "|---|---|---|---|",
        "| fashion_mnist,threshold=0.5 | 92.0 ± 1.4 | 88.0 to 94.0 | 2 |",
        "| fashion_mnist,threshold=2 | 50.0 | - | 1 |",
        "",
    ]


def test_a_metric_that_some_runs_of_a_cell_lack_is_not_shown_beside_the_mean_over_all():
    whole = [{"accuracy": 0.5, "accuracy_best": 0.6}, {"accuracy": 0.7, "accuracy_best": 0.8}]
    assert results_page._beside(compared(50.0, whole), "accuracy_best").startswith("70.0")
    assert results_page._beside(compared(50.0, [whole[0], {"accuracy": 0.7}]), "accuracy_best") == "-"


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("fashion_mnist_c", "Fashion-MNIST-C"),
        ("rotated_mnist", "Rotated MNIST"),
        ("cifar10_iid_b", "CIFAR-10 iid b"),
        ("num_clusters", "Num clusters"),
    ],
)
def test_headings_have_the_names_of_data_sets(name, heading):
    assert results_cells.heading_of(name) == heading


def test_reasons_and_settings_that_differ_are_notes_of_the_rows():
    changed = {"changed": "rounds=9 evaluation.every=3 evaluation.choice_samples=256 local.lr=0.1"}
    run = {"setting": "cifar10_iid_b", "method": "fedavg", "seed": 0, "accuracy": 0.4, "rounds": 9, "of_rounds": 20}
    runs = [run | changed | {"seconds": 90}]
    because = "it reaches {accuracy} only, IFCA {ifca.accuracy}"
    cells = [compared(mean, runs if mean else [], because=because if mean == 50 else "") for mean in (50, 60, 0)]
    table = results_page.load_published(ROOT / "jobs/experiments/published/autocfl.yaml").tables["table1"]
    table = table.model_copy(update={"columns": ["here"]})
    assert "Recipe: 20 clients, of which 100 % take part" in "\n".join(
        results_page._table("table1", table, cells, True)
    )
    title, _, caption, _, _, command, *lines = results_page._table("table1", table, cells, False)
    assert title == "## Table 1" and caption == f"{table.caption}."
    selected = "cfl-ray compare jobs/experiments/autocfl/table1.yaml --setting cifar10_iid_b --method fedavg --seed 0"
    assert command == f"{selected} rounds=9 \\\n    evaluation.every=3 evaluation.choice_samples=256 local.lr=0.1"
    assert lines == [
        "```",
        "",
        "2 runs, 3 core minutes.",
        "",
        "| setting | method | published | here | difference | seeds | rounds | notes |",
        "|---|---|---|---|---|---|---|---|",
        "| here | fedavg | 50.0 | 40.0 | -10.0 | 1 | 9 of 20 | 1, 2 |",
        "| here | fedavg | 60.0 | 40.0 | -20.0 | 1 | 9 of 20 | 3, 2 |",
        "",
        "1. it reaches 40.0 only, IFCA 40.0",
        "2. Run with local.lr=0.1 instead of the recipe's values.",
        "3. Open: not examined.",
        "",
    ]


def test_a_long_text_that_an_earlier_table_has_is_a_reference():
    long, commands = "Open: " + "the cause is not known;" * 9, "```bash\n" + "cfl-ray compare a.yaml\n" * 9 + "```"
    tables = {"Table 1": [commands, "", "1. short", f"2. {long}", ""], "Table 2": [commands, "", f"1. {long}", ""]}
    assert results_page._without_repeats(tables) == [
        *[*commands.split("\n"), "", "1. short", f"2. {long}", ""],
        *["Commands: as for Table 1.", "", "1. Open: as note 2 of Table 1.", ""],
    ]


def test_the_cost_of_what_was_not_run_has_every_recipe_with_the_cost_of_one_run(tmp_path, monkeypatch):
    counted = pd.read_csv(results_cells.FIGURES / "costs.csv").groupby("study")["runs"].sum()
    recipes = {f"{file.parent.name}-{file.stem}": file for file in results._recipes()}
    assert dict(counted) == {study: len(results_cells.cells_of(file)) for study, file in recipes.items()}
    assert all(map(results_page._cost, recipes.values()))
    rows = [("start", "two_epochs", 36, 60.0), ("table1", "here", 4, 7200.0), ("table1", "there", 2, None)]
    costs = pd.DataFrame(rows, columns=["study", "setting", "runs", "gigaflop"])
    costs.assign(study="fedac-" + costs["study"]).to_csv(tmp_path / "costs.csv", index=False)
    for module in (results_cells, results_page):
        monkeypatch.setattr(module, "FIGURES", tmp_path)
    assert [line for line in results_page._missing() if line.startswith("| ")][1:] == [
        "| fedac-start | 36 | 0 |  | 20.0 | 0.0 | 10 seconds |",
        "| fedac-table1 | 6 | 0 | 2 | 20.0 | 0.4 | about 15 minutes |",
        "| all | 42 | 0 | 2 |  | 0 |  |",
    ]
