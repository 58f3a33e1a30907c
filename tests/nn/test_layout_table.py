"""The table of docs/performance.md, in short."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.cpu
SHORT = ["batch_norm, training", "batch_norm, evaluation", "group_norm, 1 groups", "group_norm, 8 groups"]
SHORT += ["instance_norm", "layer_norm", "avg_pool2d", "var, axes (2, 3)", "own normalisation, mean and var"]


def layouts():
    spec = importlib.util.spec_from_file_location("layouts", ROOT / "docs/generate/layouts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_names_the_functions_that_lose_digits():
    made, text = layouts(), (ROOT / "docs/performance.md").read_text()
    cases = made.cases()
    for name in SHORT:
        assert made.loses(made.errors_of(cases[name])) == (f"| {name} |" in text), name
