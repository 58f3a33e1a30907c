"""Tables of classes from recorded counts: accuracies by cluster, confusions, their formats, and `cfl-ray table`."""

import shutil

import numpy as np
import pytest
from commands import call

import cfl_ray
from cfl_ray import load_run
from cfl_ray.core.reported import OTHER_CLUSTERS
from cfl_ray.report.report_data import RecordedConfusion
from cfl_ray.results.class_tables import accuracy_tables, confusion_tables


def recorded(names, clusters=(0, 1), factor=1):
    """Every sample of the first class is right, of all others a third, and two thirds are taken for the class before;
    cluster k has factor (k + 1) times as many.
    """
    one_CC = np.diag(np.full(len(names), 1)) + 2 * np.eye(len(names), k=-1, dtype=int)
    one_CC[-1] *= 2
    return RecordedConfusion(5, names, clusters, np.array([factor * (k + 1) * one_CC for k in range(len(clusters))]))


def test_few_classes_are_columns():
    text = accuracy_tables(
        {("e", "ifca"): {0: recorded(["a", "b|c"])}, ("e", "fedavg"): {0: recorded("xy", [0])}}, "md"
    )
    assert text.splitlines() == [
        "Accuracy of each class on the test samples of all clients and of the clients of each cluster",
        "",
        r"| method | clients | samples | a | b\|c |",
        "| --- | --- | --- | --- | --- |",
        "| ifca | all clients | 21 | 1.000 | 0.333 |",
        "| ifca | cluster 0 | 7 | 1.000 | 0.333 |",
        "| ifca | cluster 1 | 14 | 1.000 | 0.333 |",
        "| fedavg | all clients | 7 | 1.000 | 0.333 |",
    ]


def test_many_classes_are_rows_and_clusters_are_of_a_seed():
    names = [f"letter_{number}" for number in range(62)]
    of_seeds = {seed: recorded(names, [-1, *range(12), OTHER_CLUSTERS]) for seed in (3, 4)}
    first, *others = accuracy_tables({("e", "ifca"): of_seeds, ("e", "moon"): of_seeds}, "md").split("\n\nAcc")
    lines = first.splitlines()
    assert lines[0].endswith("of all clients; mean ± standard deviation over 2 seeds")
    assert lines[2] == "| class | samples | ifca | moon |" and len(lines) == 4 + 62
    assert lines[5] == "| letter_1 | 315 | 0.333 ± 0.000 | 0.333 ± 0.000 |"  # 105 times 3
    assert len(others) == 2 * 3, "28 clusters in 12 columns"
    assert "the clients of each cluster of ifca" in others[0] and "no cluster, seed 3 | cluster 0, seed 3" in others[0]
    assert "other clusters, seed 4" in others[2]
    latex = accuracy_tables({("e", "ifca"): of_seeds}, "latex")
    assert r"letter\_1 & 315 & $0.333 \pm 0.000$ \\" in latex and r"\begin{tabular}{lrr}" in latex
    assert r"\footnotesize" in latex and r"; mean $\pm$ standard deviation over 2 seeds.}" in latex


def test_a_class_without_samples_has_no_accuracy():
    counts = RecordedConfusion(1, ["a", "b"], [0], np.array([[[2, 2], [0, 0]]]))
    assert "| m | all clients | 4 | 0.500 |  |" in accuracy_tables({("e", "m"): {0: counts}}, "md")
    assert accuracy_tables({("e", "m"): {0: counts}}, "csv").endswith("e,m,0,all clients,b,0,")
    assert "| a | 2 | 2 |" in confusion_tables({("e", "m"): {0: counts}}, "md")


def test_of_many_classes_the_most_frequent_confusions_are_listed():
    one = recorded([f"<{number}>" for number in range(30)], [0])
    text = confusion_tables({("e", "m"): {0: one}}, "html")
    assert text.startswith("<h3>m, all clients: the 20 most frequent confusions</h3>") and text.count("<tr>") == 20
    assert "&lt;29&gt;" in text and "<29>" not in text
    first = confusion_tables({("e", "m"): {0: one}}, "md").splitlines()[4]
    assert first == "| <29> | <28> | 4 | 0.667 |"
    assert len(confusion_tables({("e", "m"): {0: one}}, "csv").splitlines()) == 1 + 30 + 29


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has recorded its counts, copied to a place without its data."""
    folder = tmp_path_factory.mktemp("classes")
    (folder / "own.py").write_text(
        "import numpy as np\n\n\ndef load():\n    x = np.random.default_rng(0).normal(size=(60, 4)).astype('float32')\n"
        "    return {'x': x, 'y': np.arange(60) % 2, 'class_names': ['low', 'high']}\n"
    )
    experiment = cfl_ray.Experiment(
        rounds=1,
        methods=["fedavg"],
        data={"source": f"{folder}/own.py:load", "partition": {"clients": 3}},
        model={"options": {"hidden": 4}},
        evaluation={"confusion": True},
        runtime={"engine": "manual"},
        tracking={"enabled": False},
        output=str(folder),
    )
    cfl_ray.simulate(experiment, folder / "run")
    shutil.move(folder / "run", folder / "copied")
    (folder / "own.py").unlink()
    return folder / "copied"


def test_tables_of_a_copied_run_have_the_names(run, capsys):
    _, output, _ = call(capsys, "table", run, "--classes", "--trust")
    assert "| method | clients | samples | low | high |" in output and "| fedavg | all clients | 12 |" in output
    assert "| true | low | high |" in call(capsys, "table", run, "--confusion", "--trust")[1]
    assert load_run(run, trust=True)["fedavg"].class_names == ("low", "high")
    status, _, error = call(capsys, "table", run, "--classes", "--metric", "accuracy", "--trust")
    assert status == 2 and "--classes, --confusion and --metric are different tables" in " ".join(error.split())


def test_a_run_without_counts_says_how_to_get_them(run, capsys):
    (run / "fedavg" / "diagnostics.arrow").unlink()
    status, _, error = call(capsys, "table", run, "--classes", "--trust")
    assert status == 2 and "no run has recorded its classes: runs with evaluation.confusion" in " ".join(error.split())
