"""Every example runs, from any working directory, and finds what it is meant to find."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from cfl_ray import load, simulate
from cfl_ray.runtime.prepare import prepare

KINDS = ("method", "aggregation", "shift", "partition", "attack", "availability", "tracker", "backend")
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def accuracies(name: str, *overrides: str) -> dict[str, float]:
    results = simulate(load(EXAMPLES / name, ["tracking.enabled=false", *overrides]))
    return {method: result.final["accuracy"] for method, result in results.methods.items()}


def test_every_example_is_run_below():
    assert {file.name for file in EXAMPLES.iterdir() if file.is_file()} == {
        "text.py",
        "text.yaml",
        "table.csv",
        "table.yaml",
        "dataset.py",
    } | {f"own_{kind}.{ending}" for kind in KINDS for ending in ("py", "yaml")}


def test_a_transformer_on_token_ids():
    """Two groups that disagree about every label: one model is right for half of the clients."""
    found = accuracies("text.yaml")
    assert found["ifca"] > 0.75 and found["fedavg"] < 0.65, found


@pytest.mark.parametrize("engine", ["vectorised", "manual", "span", "auto"])
def test_every_engine_leaves_it_to_the_sequential_one(engine):
    few = ("rounds=2", "methods=[fedavg]")
    assert accuracies("text.yaml", *few, f"runtime.engine={engine}") == accuracies("text.yaml", *few)


def test_a_table():
    assert accuracies("table.yaml")["fedavg"] > 0.85


def test_a_torch_dataset():
    assert runpy.run_path(str(EXAMPLES / "dataset.py"))["main"]() > 0.9


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
    assert set(found) == {"fedavg", "fedavg-aggregation=-own_aggregation.py-GeometricMedian-steps-8-"}
    plain, geometric = found["fedavg"], max(found.values())
    assert plain < 0.3 and geometric > 0.65


def test_an_own_shift_makes_two_groups():
    found = accuracies("own_shift.yaml")
    assert found["ifca"] > found["fedavg"] + 0.2


def test_an_own_partition_gives_sizes_by_a_power_law():
    """Training samples of client i: four fifths of 5 + (n - 8 * 5) share_i."""
    setup = prepare(load(EXAMPLES / "own_partition.yaml"))
    sizes = setup.federation.num_samples_N
    share = 1 / np.arange(1, 9) ** 1.5
    expected = 5 + np.floor(share / share.sum() * (1437 - 40))  # 1437: the training part of digits
    assert setup.federation.view == "holdout" and np.abs(sizes - 0.8 * expected).max() <= 1


def test_an_own_attack_and_own_availability():
    assert (
        accuracies("own_attack.yaml")["fedavg"]
        < accuracies("own_attack.yaml", "attack.kind=none", "attack.options={}")["fedavg"]
    )
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
