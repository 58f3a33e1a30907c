"""Label counts of the clients of whom a method reports a matrix, as a run records them."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from federations import Stage, uneven
from torch import nn

import cfl_ray
from cfl_ray import Experiment, simulate
from cfl_ray.core.diagnostics import CLIENTS
from cfl_ray.core.reported import Diagnostic, ReportedDiagnostic
from cfl_ray.errors import RunError
from cfl_ray.methods.ifca import IFCA
from cfl_ray.runtime.round_evaluation import LabelCounts, compared_clients
from cfl_ray.setup.prepare import prepare


@dataclass(frozen=True)
class Comparing(IFCA, name="comparing"):
    """IFCA that reports a matrix of four clients in round 1, and of other ones in round 3."""

    def round(self, state, clients, rng):
        ids = {1: [7, 0, 2, 5], 3: [2, 6, 9]}.get(clients.round)
        if ids:
            clients.record("distance", np.zeros((len(ids), len(ids))), ("clients", "clients"), ids=np.array(ids))
        return super().round(state, clients, rng)


def skewed(folder, **changes) -> Experiment:
    """Twelve clients of two labels each; rounds 2, 4 and 5 are evaluated."""
    values = {
        "rounds": 5,
        "methods": [Comparing(num_clusters=2)],
        "data": {"source": "digits", "partition": {"kind": "classes", "clients": 12, "classes_per_client": 2}},
        "model": {"options": {"hidden": 4}},
        "local": {"epochs": 1, "batch_size": 20},
        "evaluation": {"every": 2},
        "tracking": {"enabled": False},
        "runtime": {"engine": "manual"},
        "output": str(folder),
    }
    return Experiment(**(values | changes))


def counts_of(federation, ids) -> np.ndarray:
    return np.stack([np.bincount(federation.train(client)[1], minlength=10) for client in ids])


def test_a_run_records_those_of_the_clients_that_were_compared(tmp_path):
    experiment = skewed(tmp_path)
    federation = prepare(experiment).federation
    result = simulate(experiment)["comparing"]
    found = result.diagnostics["label_counts"]
    assert {round: one.labels[0].tolist() for round, one in found.items()} == {2: [0, 2, 5, 7], 4: [2, 6, 9]}
    for one in found.values():
        assert one.axes == ("clients", "classes")
        assert np.array_equal(one.value, counts_of(federation, one.labels[0]))
    assert "label_counts" not in simulate(skewed(tmp_path, methods=["ifca"]))["ifca"].diagnostics


def test_no_figure_depends_on_them(tmp_path, monkeypatch, figures):
    """Traffic, scores and training are those of a run that records none."""
    with_counts = figures(simulate(skewed(tmp_path)))
    monkeypatch.setattr("cfl_ray.runtime.round_evaluation.compared_clients", lambda reported: np.zeros(0, np.int64))
    assert figures(simulate(skewed(tmp_path))) == with_counts


def test_clients_that_left_or_attack_have_none(tmp_path):
    changes = {"schedule": [{"round": 2, "leave": [5]}], "attack": {"kind": "label_flip", "clients": [7]}}
    found = simulate(skewed(tmp_path, **changes))["comparing"].diagnostics["label_counts"]
    assert found[2].labels[0].tolist() == [0, 2]


def test_changed_data_are_counted_again(tmp_path):
    """Client 2 gets the labels of client 6 before round 3."""
    experiment = skewed(tmp_path, schedule=[{"round": 3, "change": [{"clients": [2], "data_of": [6]}]}])
    federation = prepare(experiment).federation
    found = simulate(experiment)["comparing"].diagnostics["label_counts"]
    assert np.array_equal(found[2].value[1], counts_of(federation, [2])[0])
    assert np.array_equal(found[4].value[0], counts_of(federation, [6])[0])
    assert not np.array_equal(found[2].value[1], found[4].value[0])


def test_targets_that_are_no_classes_have_none(tmp_path):
    draw = np.random.default_rng(0)
    x, client = draw.normal(size=(240, 3)).astype("float32"), np.repeat(np.arange(12), 20)
    federation = cfl_ray.federation_from_arrays(x, x[:, :1], client, targets="real")
    one = skewed(tmp_path, data=federation, task="regression", methods=["fedclust"], local={"lr": 0.01}, rounds=2)
    found = simulate(one)["fedclust"].diagnostics
    assert "distance" in found and "label_counts" not in found


def test_a_method_cannot_report_them(tmp_path):
    @dataclass(frozen=True)
    class Counting(IFCA, name="counting"):
        """For tests."""

        def diagnose(self, state, clients):
            clients.record("label_counts", np.zeros((len(clients), 10)), ("clients", "classes"))

    with pytest.raises(RunError, match="the diagnostic 'label_counts' has the name of a metric"):
        simulate(skewed(tmp_path, methods=[Counting(num_clusters=2)]))


def test_a_client_is_asked_once_and_one_without_valid_data_has_none():
    federation = uneven([4, 6, 8, 5], classes=3)
    train = federation.train
    asked = []
    federation.train = lambda client: (
        asked.append(client) or (train(client) if client != 1 else (train(1)[0] * torch.nan, train(1)[1]))
    )
    one, counts = Stage(federation, lambda: nn.Linear(6, 3)), LabelCounts(3)
    for ids, expected in (([3, 0], [3, 0]), ([0, 2, 3], [0, 2, 3]), ([1, 2], [2]), ([1], []), ([], [])):
        found, counts_MC = counts.of(one.clients(ids), federation)
        assert found.tolist() == expected
        assert counts_MC.tolist() == [np.bincount(train(client)[1], minlength=3).tolist() for client in expected]
    assert asked == [3, 0, 2, 1, 1]
    federation.data_version = lambda client: "changed"
    counts.of(one.clients([0, 3]), federation)
    assert asked[5:] == [0, 3] and {(0, "changed"), (3, "changed")} < counts.known.keys() and len(counts.known) == 3


def test_the_clients_of_all_matrices_within_the_bounds_of_a_diagnostic():
    def one(name, ids, axes):
        labels = tuple(np.array(ids) for _ in axes)
        return ReportedDiagnostic(name, 1, Diagnostic(np.zeros((len(ids),) * len(axes)), axes, labels))

    pairs = (CLIENTS, CLIENTS)
    found = compared_clients([one("a", [4, 1], pairs), one("b", [1, 9], pairs), one("c", [7], (CLIENTS,))])
    assert found.tolist() == [1, 4, 9] and len(compared_clients([])) == 0
    ids = np.arange(2000)
    assert len(LabelCounts(10).bounded(ids, 0)) == 2000 and len(LabelCounts(1000).bounded(ids, 0)) == 1000
