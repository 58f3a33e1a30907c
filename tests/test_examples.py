"""Every example runs, from any working directory, and finds what it is meant to find."""

import copy
import runpy
from pathlib import Path

import numpy as np
import pytest

from cfl_ray import load, simulate
from cfl_ray.errors import ConfigError
from cfl_ray.setup.prepare import prepare

KINDS = ("method", "aggregation", "shift", "partition", "attack", "availability", "tracker", "backend")
EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = ("first_run", "own_data_and_method", "compare_over_seeds")
WITHOUT_FIGURES = """
from cfl_ray.lifecycle import driver, recorder

driver.write_figures = driver.report_at_the_end = recorder.write_figures = lambda *_: None
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def accuracies(name: str, *overrides: str) -> dict[str, float]:
    """Of the last round, the only one that is evaluated."""
    results = simulate(load(EXAMPLES / name, ["tracking.enabled=false", "evaluation.every=100", *overrides]))
    return {method: result.final["accuracy"] for method, result in results.methods.items()}


def test_every_example_is_run_below():
    assert {file.name for file in EXAMPLES.iterdir() if file.is_file()} == {
        "text.py",
        "text.yaml",
        "table.csv",
        "table.yaml",
        "dataset.py",
        *(f"{name}.ipynb" for name in NOTEBOOKS),
        "adapters.py",
        "adapters.yaml",
        "regression.py",
        "regression.yaml",
        "learning.py",
        "learning.yaml",
        "drift.yaml",
        "privacy.yaml",
    } | {f"own_{kind}.{ending}" for kind in KINDS for ending in ("py", "yaml")}


def test_privacy_stays_within_its_budget():
    fewer = ["tracking.enabled=false", "evaluation.every=10", "data.partition.clients=20", "rounds=6"]
    results = simulate(load(EXAMPLES / "privacy.yaml", fewer))
    for result in results.methods.values():
        assert 7.9 < result.final["epsilon"] <= 8 and result.final["accuracy"] > 0.2, "a guess is right in 0.1"


@pytest.mark.slow
def test_drift_lowers_the_accuracy_of_every_method_and_personal_models_recover():
    results = simulate(load(EXAMPLES / "drift.yaml", ["tracking.enabled=false"]))
    rows = {label: result.recovery().to_dict("records")[0] for label, result in results.methods.items()}
    assert len(rows) == 17 and all(row["after"] < row["before"] for row in rows.values()), rows
    assert rows["apfl"]["rounds"] <= 6 and rows["pfedme"]["rounds"] <= 6, rows
    assert np.isnan(rows["fedavg"]["rounds"]), "one model for clients that disagree"


def test_a_transformer_on_token_ids():
    """Two groups that disagree about every label: one model is right for half of the clients."""
    found = accuracies("text.yaml", "local.batch_size=20", "local.lr=0.2")
    assert found["ifca"] > 0.75 and found["fedavg"] < 0.65, found


def test_adapters_of_a_frozen_transformer():
    """The same groups, with adapters and a head that are trained."""
    found = accuracies("adapters.yaml", "local.batch_size=24", "local.lr=0.2", "rounds=5")
    assert found["ifca"] > 0.7 and found["fedper"] > 0.6 and found["fedavg"] < 0.65, found


@pytest.mark.parametrize(
    "engine, reason",
    [
        ("vectorised", "draws random numbers"),
        ("manual", "the first axis has to be the batch"),
        ("span", "random numbers"),
    ],
)
def test_an_engine_that_cannot_train_it_is_refused_with_the_reason(engine, reason):
    with pytest.raises(ConfigError, match=f"runtime.engine: {engine} cannot train these clients: .*{reason}"):
        accuracies("text.yaml", "rounds=2", "methods=[fedavg]", f"runtime.engine={engine}")


def test_the_chosen_engine_trains_it_as_the_sequential_one():
    few = ("rounds=2", "methods=[fedavg]")
    assert accuracies("text.yaml", *few, "runtime.engine=auto") == accuracies("text.yaml", *few)


def test_a_table():
    assert accuracies("table.yaml")["fedavg"] > 0.85


def test_regression():
    """Two groups with opposite signs: one model answers 0, and its error is the variance of the readings."""
    results = simulate(load(EXAMPLES / "regression.yaml", ["tracking.enabled=false", "rounds=8"]))
    mse = {method: result.final["mse"] for method, result in results.methods.items()}
    assert mse["ifca"] < 0.2 < mse["fedavg"] and results["ifca"].summary["rounds_to_target"] <= 8, mse
    assert "rounds_to_target" not in results["fedavg"].summary


# the pages on tasks and optimisers, which tests/test_docs.py runs, have the default engine
def test_a_loss_and_a_metric_of_ones_own():
    reference = str(EXAMPLES / "regression.py")
    task = f"task={{loss: '{reference}:pinball', targets: real, metrics: [mae, '{reference}:share_below']}}"
    overrides = [task, "tracking.enabled=false", "evaluation.target=null", "runtime.engine=vectorised", "rounds=12"]
    overrides += ["methods=[{ifca: {num_clusters: 2}}]"]
    final = simulate(load(EXAMPLES / "regression.yaml", overrides))["ifca"].final
    assert "mse" not in final and final["mae"] > 0
    assert abs(final["share_below"] - 0.9) < 0.1, "about half of the readings lie below a mean"


def test_own_parts_of_learning():
    """The schedule halves the rate after round 3."""
    fewer = ["tracking.enabled=false", "evaluation.every=100", "data.partition.clients=5", "rounds=4"]
    results = simulate(load(EXAMPLES / "learning.yaml", [*fewer, "runtime.engine=vectorised"]))
    assert len(results.methods) == 3
    for label, result in results.methods.items():
        assert result.final["accuracy"] > 0.7 and 0.5 < result.final["f1_of_class_3"] <= 1, (label, result.final)


def test_a_torch_dataset():
    assert runpy.run_path(str(EXAMPLES / "dataset.py"))["main"]() > 0.9


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    """Cells of each notebook as stored and as they are after a run, of all in one process, which imports once.

    The engine is the fastest for their networks; the others give the same figures up to rounding. Two seeds are enough.
    Runs draw no figures and no page beside those of the cells, as in all tests.
    """
    nbclient = pytest.importorskip("nbclient", reason="notebooks need nbclient: pip install -e .[test]")
    import nbformat

    stored = {name: nbformat.read(EXAMPLES / f"{name}.ipynb", 4) for name in NOTEBOOKS}
    together, ran = copy.deepcopy(stored[NOTEBOOKS[0]]), {}
    together.cells = [nbformat.v4.new_code_cell(WITHOUT_FIGURES)]
    for name, book in stored.items():
        cells = ran[name] = copy.deepcopy(book.cells)
        for cell in cells:
            cell.source = cell.source.replace('"engine": "sequential"', '"engine": "manual"')
            cell.source = cell.source.replace("in range(3)", "in range(2)")
        place = str(tmp_path_factory.mktemp(name))
        together.cells += [nbformat.v4.new_code_cell(f"%reset -f\nimport os\nos.chdir({place!r})\ndel os"), *cells]
    nbclient.NotebookClient(together, timeout=200, kernel_name="python3", allow_errors=True).execute()
    return {name: (book.cells, ran[name]) for name, book in stored.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook(name, notebooks):
    """It runs from top to bottom, and its stored outputs are of the kind that a run gives now."""
    stored, fresh = notebooks[name]
    outputs = [one for cell in fresh for one in cell.get("outputs", [])]
    assert not [one.traceback for one in outputs if one.output_type == "error"]
    assert [_kinds(cell) for cell in stored] == [_kinds(cell) for cell in fresh]
    assert outputs


def _kinds(cell) -> list[tuple[str, list[str]]]:
    """Type and formats of each output, but for warnings of libraries and lines of progress."""
    outputs = (one for one in cell.get("outputs", []) if one.output_type != "stream")
    return [(one.output_type, sorted(one.get("data", {}))) for one in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_of_each_kind_shows_its_example(kind):
    page = (EXAMPLES.parent / "docs" / "extend" / f"{kind}.md").read_text()
    for ending, language in (("py", "python"), ("yaml", "yaml")):
        name = f"own_{kind}.{ending}"
        assert f"```{language}\n# {name}\n{(EXAMPLES / name).read_text()}```" in page


def test_an_own_method_places_newcomers_by_their_loss():
    """Models that fit one group give 0.83; one model for groups that disagree about every label less than half."""
    results = simulate(load(EXAMPLES / "own_method.yaml", ["tracking.enabled=false"]))
    assert results["best_of"].final["accuracy"] > 0.75 and results["fedavg"].final["accuracy"] < 0.5
    assert results["best_of"].summary["newcomer_accuracy"] > 0.75


def test_an_own_aggregation_withstands_attackers():
    found = accuracies("own_aggregation.yaml")
    assert set(found) == {"fedavg", "fedavg-aggregation.own_aggregation.py-GeometricMedian.steps=8"}
    plain, geometric = found["fedavg"], max(found.values())
    assert plain < 0.3 and geometric > 0.65


def test_an_own_shift_makes_two_groups():
    found = accuracies("own_shift.yaml", "rounds=5")
    assert found["ifca"] > found["fedavg"] + 0.2


def test_an_own_partition_gives_sizes_by_a_power_law():
    """Training samples of client i: four fifths of 5 + (n - 8 * 5) share_i."""
    setup = prepare(load(EXAMPLES / "own_partition.yaml"))
    sizes = setup.federation.num_samples_N
    share = 1 / np.arange(1, 9) ** 1.5
    expected = 5 + np.floor(share / share.sum() * (1437 - 40))  # 1437: the training part of digits
    assert setup.federation.view == "holdout" and np.abs(sizes - 0.8 * expected).max() <= 1


def test_an_own_attack_and_own_availability():
    honest = accuracies("own_attack.yaml", "attack.kind=none")["fedavg"]
    assert accuracies("own_attack.yaml")["fedavg"] < honest
    results = simulate(load(EXAMPLES / "own_availability.yaml", ["tracking.enabled=false"]))
    assert results["fedavg"].final["trained_share"] > 0.5


def test_an_own_tracker_and_an_own_backend():
    simulate(load(EXAMPLES / "own_tracker.yaml"), run_dir="tracked")
    lines = Path("tracked/fedavg/accuracy.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert not list(Path("tracked").rglob("mlflow.json"))
    plain = accuracies("own_backend.yaml", "runtime.backend=in_process")
    assert accuracies("own_backend.yaml") == plain
    assert {line.split()[1] for line in Path("exchanges.txt").read_text().splitlines()} == {
        "Train",
        "EvaluateShared",
    }
