"""Every example runs, from any working directory, and finds what it is meant to find."""

import runpy
from pathlib import Path

import pytest

from cfl_ray import load, simulate

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
    }


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
