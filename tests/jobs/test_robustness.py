"""The table of attacks and aggregation rules, on a small federation."""

import csv
import sys
from pathlib import Path

import pytest

from jobs import robustness

CONFIG = """
rounds: 1
methods: [fedavg, {ifca: {num_clusters: 2}}]
model: {options: {hidden: 4}}
runtime: {engine: sequential}
data: {source: synthetic, synthetic_shape: [4], synthetic_samples: 20, partition: {clients: 10}}
"""


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Returns a function that runs the job with its arguments and returns the rows of the CSV file."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["robustness.py", "--config", str(config), "--out", "out.csv", *arguments])
        robustness.main()
        with open("out.csv", newline="") as lines:
            return list(csv.DictReader(lines))

    return run


def test_every_cell_has_one_row_and_no_run_is_repeated(table, capsys):
    arguments = ("--attacks", "sign_flip", "--fractions", "0", "0.3", "--rules", "mean", "{trimmed_mean: {share: 0.2}}")
    rows = table(*arguments)
    assert len(rows) == 2 * 2 * 2 and len({row["config_hash"] for row in rows}) == 8
    assert all(0 <= float(row["accuracy_honest"]) <= 1 for row in rows)
    assert "8 of 8" in capsys.readouterr().out
    assert table(*arguments) == rows and "of 8:" not in capsys.readouterr().out
    more = table(*arguments, "--attacks", "gaussian", "--methods", "ifca")
    assert len(more) == 10, "two new rows with the new attack; the rows without an attack exist"


def test_an_unknown_rule_is_an_error_before_the_first_run(table):
    with pytest.raises(Exception, match="unknown aggregation rule 'medain' .did you mean 'median'"):
        table("--rules", "mean", "medain")
    assert not Path("out.csv").exists()
