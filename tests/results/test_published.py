from pathlib import Path

import pytest
import yaml

from cfl_ray.errors import ConfigError
from cfl_ray.results.published import PublishedTables, load_published

FOLDER = Path(__file__).parents[2] / "jobs" / "experiments" / "published"


def tables(**changed):
    """Two methods in two settings; changes are of the one table."""
    table = {
        "caption": "Accuracy",
        "study": "toy/table1.yaml",
        "metric": "accuracy_local",
        "columns": ["mnist", "svhn"],
        "rows": {
            "fedavg": {"metric": "accuracy", "values": {"mnist": [77.1, 3.29], "svhn": 81}},
            "ifca": {"values": {"svhn": None}},
        },
        "misprints": [{"row": "fedavg", "column": "svhn", "note": "as in another table"}],
    }
    paper = {"title": "Toy", "authors": "A. Author", "venue": "2024", "url": "https://example.org"}
    return {"paper": paper, "tables": {"table1": table | changed}}


def test_a_number_has_its_metric_unit_and_misprint():
    table = PublishedTables(**tables()).table("table1")
    first = table.number("fedavg", "mnist")
    assert (first.mean, first.std, first.metric, first.misprint) == (77.1, 3.29, "accuracy", "")
    assert first.unit == "percent" and first.scale == 100
    second = table.number("fedavg", "svhn")
    assert (second.mean, second.std, second.misprint) == (81, None, "as in another table")
    not_reached = table.number("ifca", "svhn")
    assert not_reached.mean is None and not_reached.metric == "accuracy_local"
    assert table.number("ifca", "mnist") is None and table.number("stocfl", "mnist") is None
    assert [(row, column) for row, column, _ in table.cells()] == [
        ("fedavg", "mnist"),
        ("fedavg", "svhn"),
        ("ifca", "svhn"),
    ]
    assert PublishedTables(**tables(unit="rounds")).table("table1").number("fedavg", "mnist").scale == 1


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"colums": ["mnist"]}, "unknown key 'tables.table1.colums' .did you mean 'columns'"),
        ({"unit": "shares"}, "tables.table1.unit: Input should be 'percent'"),
        ({"rows": {"ifca": {"values": {"cifar": 1}}}}, "rows.ifca: no column is called 'cifar'"),
        ({"rows": {"ifca": {"values": {"mnist": [1, 2, 3]}}}}, r"a list is \[mean, standard deviation\], got 3"),
        ({"rows": {"ifca": {"values": {"mnist": float("nan")}}}}, "mnist.float: .* finite number, got nan"),
        ({"rows": {"ifca": {"values": {"mnist": [1.0, float("inf")]}}}}, r"mnist.*\.1: .* finite number, got inf"),
        ({"rows": {"ifca": {"values": {"mnist": [1, -2]}}}}, "mnist: a standard deviation is at least 0, got -2"),
        ({"rows": {"ifca": {"values": {"mnist": "77"}, "note": "x"}}}, "unknown key 'tables.table1.rows.ifca.note'"),
        (
            {"misprints": [{"row": "ifca", "column": "mnist", "note": "x"}]},
            "row 'ifca' has no number in column 'mnist'",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_its_file(tmp_path, changed, message):
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(tables(**changed)))
    with pytest.raises(ConfigError, match=message) as error:
        load_published(file)
    assert str(file) in str(error.value)


def test_an_unknown_table_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="no published table is called 'tabel1' .did you mean 'table1'"):
        PublishedTables(**tables()).table("tabel1")


@pytest.mark.parametrize(
    "paper, table, row, column, metric, mean, std",
    [
        ("fedclust", "table1", "fedavg", "cifar10", "accuracy", 50.27, 2.63),
        ("fedclust", "table1", "pacfl", "fashion_mnist", "accuracy_local", 97.46, 0.13),
        ("fedclust", "table2", "local", "svhn", "accuracy_local", 68.84, 2.86),
        ("fedclust", "table3", "cfl", "cifar100", "accuracy", 31.62, 1.76),
        ("fedclust", "table4", "fedclust", "cifar100", "rounds_to_target_local", 32, None),
        ("fedclust", "table4", "fedavg", "cifar10", "rounds_to_target", None, None),
        ("fedclust", "table5", "ifca", "cifar100", "mbit_to_target_local", 3495.19, None),
        ("fedclust", "table6", "lg_fedavg", "cifar100", "newcomer_accuracy_tuned", 11.08, 0.25),
        ("fedac", "table1", "fedac", "cifar100_dirichlet", "accuracy_local", 51.28, 0.35),
        ("fedac", "table1", "fl_hc", "cifar10_pathological", "accuracy_local", 80.22, 0.68),
        ("stocfl", "table1", "stocfl_chain", "clients_4800", "accuracy", 97.00, 0.04),
        ("stocfl", "table1", "ifca_4", "clients_2400_all", "accuracy", 90.75, 2.48),
        ("stocfl", "table1", "ditto", "cifar10", "accuracy", 46.91, 0.38),
        ("stocfl", "table2", "stocfl_0.60", "femnist", "accuracy", 90.71, 0.04),
        ("stocfl", "table3", "lam_0.05", "rotated", "accuracy", 95.86, None),
        ("stocfl", "table3", "fedavg", "shifted", "accuracy", 24.46, None),
        ("stocfl", "table4_unseen", "cfl", "writers_3597", "newcomer_accuracy", 73.24, 0.99),
        ("stocfl", "cfl_setting", "cfl", "shifted_cifar10", "accuracy", 55.23, 1.02),
        ("autocfl", "table1", "autocfl", "fashion_mnist_label_b", "accuracy", 94.79, 0.27),
        ("autocfl", "table1", "cfl", "mnist_input_im", "accuracy", 95.36, 0.97),
        ("autocfl", "table2_std", "local", "cifar10_label_im", "accuracy_std", 11.19, None),
        ("autocfl", "table3_rounds", "ifca", "cifar10_label_im", "rounds_to_stable_clusters", 11, None),
        ("autocfl", "table3_clients", "cfl", "fashion_mnist_label_b", "correct_clients", 15, None),
        ("autocfl", "table5_clients", "autocfl", "mnist_input_b", "correct_clients", 19, None),
        ("cam", "table1_accuracy", "ifca_cam", "fashion_mnist_dirichlet_k10", "accuracy", 95.42, 2.54),
        ("cam", "table1_macro_f1", "ifca_cam", "fashion_mnist_dirichlet_k10", "macro_f1", 88.45, 5.46),
        ("cam", "table2_macro_f1", "fesem_cam_10", "cifar10_classes", "macro_f1", 49.5, 1.42),
        ("cam", "table2_accuracy", "fedavg", "cifar10_dirichlet", "accuracy", 25.62, 3.47),
    ],
)
def test_numbers_as_printed(paper, table, row, column, metric, mean, std):
    number = load_published(FOLDER / f"{paper}.yaml").table(table).number(row, column)
    assert (number.metric, number.mean, number.std) == (metric, mean, std)


@pytest.mark.parametrize(
    "paper, table, row, column",
    [
        ("fedclust", "table6", "fedclust", "cifar100"),
        ("fedclust", "table1", "fedclust", "cifar10"),
        ("stocfl", "table3", "lam_10", "pathological"),
        ("autocfl", "table3_clients", "autocfl", "mnist_input_b"),
        ("cam", "table1_macro_f1", "fedavg_plus", "fashion_mnist_classes_k5"),
    ],
)
def test_misprints_are_marked(paper, table, row, column):
    assert load_published(FOLDER / f"{paper}.yaml").table(table).number(row, column).misprint
