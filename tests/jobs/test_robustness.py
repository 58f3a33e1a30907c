"""The table of attackers and rules, with a federation that takes a second."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Runs the job with these arguments; returns the rows of its file."""
    found = importlib.util.spec_from_file_location("robustness", JOBS / "robustness.py")
    job = importlib.util.module_from_spec(found)
    found.loader.exec_module(job)
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "tiny.yaml"
    config.write_text("rounds: 1\nmethods: [fedavg, {ifca: {num_clusters: 2}}]\nmodel: {options: {hidden: 4}}\nruntime: {engine: sequential}\n"
                      "data: {source: synthetic, synthetic_shape: [4], synthetic_samples: 20, partition: {clients: 10}}\n")  # fmt: skip

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["robustness.py", "--config", str(config), "--out", "out.csv", *arguments])
        job.main()
        with open("out.csv", newline="") as lines:
            return list(csv.DictReader(lines))

    return run


def test_has_a_row_for_every_cell_and_does_none_twice(table, capsys):
    arguments = ("--attacks", "sign_flip", "--fractions", "0", "0.3", "--rules", "mean", "{trimmed_mean: {share: 0.2}}")
    rows = table(*arguments)
    assert len(rows) == 2 * 2 * 2 and len({row["config_hash"] for row in rows}) == 8
    assert all(0 <= float(row["accuracy_honest"]) <= 1 for row in rows)
    assert "8 of 8" in capsys.readouterr().out
    assert table(*arguments) == rows and "of 8:" not in capsys.readouterr().out
    assert len(table(*arguments, "--attacks", "gaussian", "--methods", "ifca")) == 10, "two more of a new attack; nobody attacks in the others"


def test_a_rule_that_does_not_exist_is_told_before_the_first_run(table):
    with pytest.raises(Exception, match="must be one of mean, median"):
        table("--rules", "mean", "medain")
    assert not Path("out.csv").exists()
