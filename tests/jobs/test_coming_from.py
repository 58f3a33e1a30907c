"""The tables of docs/coming_from.md: their arithmetic, and that their methods and rules exist."""

from types import SimpleNamespace

import numpy as np
import pytest

from cfl_ray import Experiment
from cfl_ray.methods import resolve
from jobs.coming_from import fl_bench, measured, pfllib, rules


def test_a_difference_is_compared_with_the_noise_of_the_seeds():
    """t(0.975, 4) sqrt((s1^2 + s2^2) / 3); differences up to 0.002 agree without any noise."""
    theirs, ours = [0.5, 0.6, 0.7], [0.55, 0.65, 0.75]
    cells = measured.compared(theirs, ours)
    assert cells == ["0.6000 ± 0.1000", "0.6500 ± 0.1000", "+0.0500", f"{2.776 * np.sqrt(0.02 / 3):.4f}", "yes"]
    assert (
        measured.compared([0.5] * 3, [0.501] * 3)[-1] == "yes" and measured.compared([0.5] * 3, [0.51] * 3)[-1] == "no"
    )


def test_scores_of_a_row_stand_side_by_side(capsys):
    scores = {"a": [(0.5, 0.6), (0.7, 0.6)], "b": [(0.2, 0.9), (0.2, 0.9)]}
    rows = [SimpleNamespace(label=name) for name in scores]
    found = measured.side_by_side("Theirs", rows, range(2), lambda row, seed: scores[row.label][seed])
    assert [row[:1] + row[3:4] + row[5:] for row in found] == [
        ["method", "difference", "agree"],
        ["a", "+0.0000", "yes"],
        ["b", "+0.7000", "no"],
    ]
    assert found[0][1] == "Theirs" and capsys.readouterr().out.count("\n") == 2


def test_our_runs_use_the_samples_and_the_rules():
    """`best` is the best of `reported` so far; the weights are the numbers of test samples, 12 and 3."""
    rng = np.random.default_rng(0)
    x = rng.random((44, 1, 4, 4)).astype(np.float32)
    y = np.arange(44) % 2
    whole = measured.Client(x[:20], y[:20], x[20:32], y[20:32])
    clients = [whole.part(1.0), whole.part(0.25)]
    assert [len(client.y) for client in clients] == [20, 5] and [len(client.y_test) for client in clients] == [12, 3]
    model = {"name": "mlp", "options": {"hidden": 4}}
    found = measured.ours("pfllib", clients, 0, 3, "fedavg", model, local={"lr": 0.5})
    assert found["best"].tolist() == np.maximum.accumulate(found["accuracy"]).tolist()
    assert np.allclose(found["accuracy"] * 15, np.round(found["accuracy"] * 15))  # a share of all 15 test samples


@pytest.mark.parametrize("rows", [pfllib.ROWS, fl_bench.ROWS], ids=["pfllib", "fl_bench"])
def test_the_methods_of_the_tables_exist(rows):
    for row in rows:
        (method,) = resolve([row.ours]).values()
        assert method.name == next(iter(row.ours)) if isinstance(row.ours, dict) else row.ours


def test_each_rule_changes_the_experiment():
    def of(changes):
        base = {"methods": list(rules.METHODS), "data": {"partition": {"clients": 10}, "test": {}}}
        return Experiment(protocol="pfllib", **rules.merged(base, changes)).config_hash

    hashes = [of(changes) for changes in rules.RULES.values()]
    assert len(set(hashes)) == len(rules.RULES) == 9
