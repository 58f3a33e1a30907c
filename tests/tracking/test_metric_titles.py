"""Titles of metrics in figures, reports and tables."""

import pytest

from cfl_ray.tracking.metric_titles import title_of


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("accuracy", "Accuracy (%)"),
        ("accuracy_worst_10", "Accuracy, worst 10 % of clients (%)"),
        ("accuracy_local_trained", "Accuracy, P-local, trained clients (%)"),
        ("accuracy_gini", "Accuracy, Gini of clients"),
        ("newcomer_accuracy_tuned", "Accuracy, P-tune, newcomers (%)"),
        ("validation/accuracy_p10", "Accuracy, 10th percentile of clients, validation (%)"),
        ("validation/loss", "Loss, validation"),
        ("macro_f1", "Macro F1 (%)"),
        ("ece", "ECE"),
        ("mbit", "Traffic per client (Mbit)"),
        ("seconds", "Time (s)"),
        ("omega_score", "Omega score"),
        ("rounds_to_target", "Rounds to target"),
    ],
)
def test_titles(metric, title):
    assert str(title_of(metric)) == title
