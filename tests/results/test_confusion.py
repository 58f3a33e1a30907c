"""Confusion matrices and accuracies of classes by cluster, names of classes, numbers over clients in records."""

from dataclasses import replace

import numpy as np
import pytest

import cfl_ray
from cfl_ray.core.over_clients import gini, worst_tenth
from cfl_ray.core.reported import OTHER_CLUSTERS
from cfl_ray.core.tasks import CLASSIFICATION, resolve_task
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.runtime import evaluation
from cfl_ray.setup.checks import check_classes
from cfl_ray.tracking import RoundRecord

NAMES = ["pear", "plum", "quince"]


def arrays(**more):
    draw = np.random.default_rng(0)
    y = np.tile([0, 1], 60)
    x = (draw.normal(size=(120, 3)) + 3 * np.eye(3)[y]).astype("float32")
    return {"x": x, "y": y, "clients": np.repeat(np.arange(6), 20)} | more


@pytest.fixture(scope="module")
def result():
    experiment = cfl_ray.Experiment(
        rounds=2,
        methods=[{"ifca": {"num_clusters": 2}}],
        data=cfl_ray.federation_from_arrays(**arrays(), class_names=NAMES),
        local={"lr": 0.1},
        model={"options": {"hidden": 8}},
        evaluation={"over_clients": ["gini", "worst_10"], "metrics": ["macro_f1", "ece"], "confusion": True},
        runtime={"engine": "manual"},
    )
    return cfl_ray.simulate(experiment)["ifca"]


def test_confusion_matrices_add_up(result):
    """The sum over clusters is that of all clients; the share of the diagonal is the mean accuracy (equal sizes)."""
    whole = result.confusion()
    clusters = sorted(set(result.assignments()["cluster"]))
    assert whole.index.tolist() == whole.columns.tolist() == NAMES and whole.index.name == "true"
    assert whole.to_numpy().sum() == 6 * 4 and (sum(map(result.confusion, clusters)) == whole).all(axis=None)
    assert np.trace(whole) / 24 == pytest.approx(result.final["accuracy"])
    frame = result.class_accuracy()
    assert frame.index.tolist() == clusters and frame.columns.tolist() == NAMES and frame["quince"].isna().all()
    of_first = result.confusion(clusters[0])
    assert frame.loc[clusters[0], "pear"] == of_first.loc["pear", "pear"] / of_first.loc["pear"].sum()
    with pytest.raises(ConfigError, match="cluster 7 has no clients with a model; such clusters are"):
        result.confusion(7)


@pytest.mark.parametrize(
    "method, changes",
    [
        ({"ifca": {"num_clusters": 2}}, {}),  # models of clusters on their clients' test data
        ({"ifca": {"num_clusters": 2}}, {"data": {"test": {"view": "label"}}}),  # counts of a shared test, by label
        ({"ifca": {"num_clusters": 2}}, {"evaluation": {"metrics": ["ece"]}}),  # scores that need the outputs
        ("fedem", {}),  # mixtures, tested one by one
        ("local", {"evaluation": {"local_samples": 2000}}),  # personal models, in exchanges of some clients each
    ],
)
def test_recorded_counts_are_those_of_the_models(method, changes, monkeypatch):
    monkeypatch.setattr(evaluation, "_MOST_COUNTS", 2 * 10**2)  # two clients in an exchange
    experiment = cfl_ray.Experiment(
        rounds=1,
        methods=[method],
        data={"shift": {"kind": "rotated"}, "partition": {"clients": 5, "samples": 30}} | changes.get("data", {}),
        evaluation={"confusion": True} | changes.get("evaluation", {}),
        model={"options": {"hidden": 4}},
        local={"epochs": 1, "batch_size": 10},
    )
    (result,) = cfl_ray.simulate(experiment).methods.values()
    recorded = result.recorded_confusion()
    assert recorded.round == 1 and recorded.clusters == sorted(set(result.trained.state.assign_N.tolist()))
    for cluster, counts_CC in zip(recorded.clusters, recorded.counts_KCC, strict=True):
        rows = np.zeros((10, 10), np.int64)
        for client in np.flatnonzero(result.trained.state.assign_N == cluster).tolist():
            x, y = result.test(client)
            np.add.at(rows, (y.numpy(), result.predict(x, like=client)), 1)
        assert counts_CC.sum() and np.array_equal(counts_CC, rows)


def test_the_smallest_of_many_clusters_are_added_up(monkeypatch):
    monkeypatch.setattr(evaluation, "MOST_VALUES", 2 * 2**2)  # two matrices of two classes
    counts = evaluation.ClassCounts(np.array([0, 1, 2, -1]))
    counts.add(np.arange(4), np.array([0, 1, 1, 0]), np.array([[[1, 0], [0, 0]], [[0, 2], [3, 0]]]))
    diagnostic = counts.diagnostic()
    assert diagnostic.labels[0].tolist() == [1, OTHER_CLUSTERS]
    assert diagnostic.value.tolist() == [[[0, 2], [3, 0]], [[2, 2], [3, 0]]]


def test_counts_need_few_classes():
    shape = replace(cfl_ray.federation_from_arrays(**arrays()).shape, num_classes=1001)
    with pytest.raises(ConfigError, match="the counts of 1,001 classes are not recorded, at most 1,000 classes"):
        check_classes(CLASSIFICATION, shape, confusion=True)
    with pytest.raises(ConfigError, match="evaluation.confusion needs classes, the targets of the task are 'real'"):
        check_classes(resolve_task("regression"), shape, confusion=True)
    check_classes(CLASSIFICATION, shape)


def test_numbers_over_clients_are_those_of_their_last_scores(result):
    last = result.client_metrics().query("round == 2")
    scores = last["accuracy"].to_numpy()
    assert result.final["accuracy_gini"] == pytest.approx(gini(scores))
    assert result.final["accuracy_worst_10"] == worst_tenth(scores) == scores.min()
    assert "accuracy_jain" not in result.final and list(last.columns)[2:] == ["accuracy", "macro_f1", "ece", "loss"]


def test_events_are_a_table_too(result):
    frame = result.events_frame()
    assert len(frame) == len(result.events) and frame.columns[:4].tolist() == ["round", "event", "cluster", "into"]
    assert cfl_ray.run is not None and isinstance(result.records[0], RoundRecord)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"class_names": ["a", "b"], "num_classes": 3}, "class_names has 2 names, num_classes is 3"),
        ({"class_names": ["a", "a"]}, "class_names has 'a' twice"),
        ({"class_names": "ab"}, "class_names is a list of names for targets 'class', got 'ab'"),
        ({"class_names": ["a"]}, "1"),
        (
            {"class_names": ["a"], "labels": "dense"},
            "class_names has 1 names, for labels 0 .. 0, but y has the labels 0, 1",
        ),
        (
            {"x": [[1, 2], [1]], "y": [0, 1], "clients": [0, 0], "vocabulary": 3},
            "x has rows of 1 to 2 entries; fill all",
        ),
    ],
)
def test_names_and_ragged_rows_that_are_refused(more, message):
    with pytest.raises(DataError, match=message):
        cfl_ray.federation_from_arrays(**arrays(**more))


def test_names_from_a_loader(tmp_path):
    (tmp_path / "own.py").write_text(
        "import numpy as np\n\n\ndef load():\n    x = np.random.default_rng(0).normal(size=(60, 4)).astype('float32')\n"
        "    return {'x': x, 'y': np.arange(60) % 2, 'class_names': ['low', 'high']}\n"
    )
    data = {"source": f"{tmp_path}/own.py:load", "partition": {"clients": 3}}
    settings = {"model": {"options": {"hidden": 4}}, "runtime": {"engine": "manual"}}
    results = cfl_ray.simulate(cfl_ray.Experiment(rounds=1, methods=["fedavg"], data=data, **settings))
    assert results["fedavg"].class_names == ("low", "high")
    assert results["fedavg"].confusion().columns.tolist() == ["low", "high"]


def test_the_text_on_own_test_samples():
    given = arrays()
    own = cfl_ray.federation_from_arrays(
        **given, x_test=given["x"][:6], y_test=given["y"][:6], test_clients=np.arange(6)
    )
    assert own.tested_on == "each client is tested on its own samples of x_test (test_clients)"
    assert "held out from training" in cfl_ray.federation_from_arrays(**given).tested_on
