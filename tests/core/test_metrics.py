"""Metrics equal scikit-learn's; a user's own is called with outputs and targets, and its errors name its line."""

import math

import pytest
import torch
from sklearn import metrics as sklearn_metrics

from cfl_ray.core.metrics import METRICS, Metric, resolve_metric
from cfl_ray.errors import ConfigError, RunError

DRAW = torch.Generator().manual_seed(0)


def value(name: str, outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return METRICS.builtin[name](outputs, targets)


def test_of_classes():
    outputs, y = torch.randn(40, 5, generator=DRAW), torch.randint(4, (40,), generator=DRAW)
    predicted = outputs.argmax(1)
    assert value("accuracy", outputs, y) == sklearn_metrics.accuracy_score(y, predicted)
    for average in ("macro", "micro"):
        expected = sklearn_metrics.f1_score(y, predicted, average=average)
        assert value(f"{average}_f1", outputs, y) == pytest.approx(expected, abs=1e-12)
    assert value("balanced_accuracy", outputs, y) == pytest.approx(
        sklearn_metrics.balanced_accuracy_score(y, predicted)
    )


def test_area_under_the_curve_of_classes():
    """The fifth class has no sample. Of the second outputs, many are equal."""
    draw = torch.Generator().manual_seed(1)
    outputs, y = torch.randn(60, 5, generator=draw), torch.randint(4, (60,), generator=draw)
    for of in (outputs, outputs[torch.randint(8, (60,), generator=draw)]):
        p = of.double().softmax(1)
        expected = [sklearn_metrics.roc_auc_score(y == c, p[:, c]) for c in range(4)]
        assert value("roc_auc", of, y) == pytest.approx(sum(expected) / 4)
    two = torch.randn(30, 2, generator=draw)
    y = torch.arange(30) % 2
    assert value("roc_auc", two, y) == pytest.approx(sklearn_metrics.roc_auc_score(y, two.softmax(1)[:, 1]))
    assert math.isnan(value("roc_auc", two, torch.ones(30, dtype=torch.int64)))


def test_of_labels():
    outputs, y = torch.randn(40, 3, generator=DRAW), torch.randint(2, (40, 3), generator=DRAW).float()
    predicted = outputs > 0
    assert value("subset_accuracy", outputs, y) == pytest.approx(sklearn_metrics.accuracy_score(y, predicted))
    assert value("roc_auc", outputs, y) == pytest.approx(sklearn_metrics.roc_auc_score(y, outputs))
    for average in ("macro", "micro"):
        expected = sklearn_metrics.f1_score(y, predicted, average=average)
        assert value(f"{average}_f1", outputs, y) == pytest.approx(expected, abs=1e-12)


def test_of_real_numbers():
    outputs, y = torch.randn(40, 2, generator=DRAW), torch.randn(40, 2, generator=DRAW)
    assert value("mse", outputs, y) == pytest.approx(sklearn_metrics.mean_squared_error(y, outputs))
    assert value("mae", outputs, y) == pytest.approx(sklearn_metrics.mean_absolute_error(y, outputs))
    assert value("r2", outputs, y) == pytest.approx(sklearn_metrics.r2_score(y, outputs))
    assert value("mse", outputs[:, :1], y[:, 0]) == pytest.approx(float(((outputs[:, 0] - y[:, 0]) ** 2).mean()))
    assert math.isnan(value("r2", outputs[:, :1], torch.ones(40)))


def test_of_tokens():
    outputs, y = torch.randn(6, 4, 5, generator=DRAW), torch.randint(5, (6, 4), generator=DRAW)
    p = outputs.double().softmax(-1).gather(-1, y[..., None])
    assert value("perplexity", outputs, y) == pytest.approx(math.exp(-p.log().mean()))
    assert value("token_accuracy", outputs, y) == pytest.approx(float((outputs.argmax(-1) == y).double().mean()))
    counted = torch.rand(6, 4, generator=DRAW) > 0.5
    y[~counted] = -100
    assert value("perplexity", outputs, y) == pytest.approx(math.exp(-p[..., 0][counted].log().mean()))
    hits = (outputs.argmax(-1) == y)[counted]
    assert 0 < hits.double().mean() < 1
    assert value("token_accuracy", outputs, y) == pytest.approx(float(hits.double().mean()))
    assert math.isnan(value("token_accuracy", outputs, torch.full_like(y, -100)))


def test_a_function_becomes_a_metric_with_its_name():
    def largest(outputs, targets):
        """The largest output. More text."""
        return outputs.max()

    metric = resolve_metric(largest, "class")
    assert (metric.name, metric.higher_is_better, metric.meaning) == ("largest", True, "The largest output. More text.")
    assert metric(torch.tensor([[1.0, 3.0]]), torch.tensor([0])) == 3
    largest.higher_is_better = False
    assert not resolve_metric(largest, "class").higher_is_better


@pytest.mark.parametrize(
    "wrong, text",
    [
        ("'high'", "returns str 'high'"),
        ("outputs", r"returns Tensor of .* shape \(2, 3\)"),
        ("None", "NoneType"),
    ],
)
def test_a_wrong_value_names_the_line(tmp_path, wrong, text):
    file = tmp_path / "own.py"
    file.write_text(f"\n\ndef score(outputs, targets):\n    return {wrong}\n")
    metric = resolve_metric(f"{file}:score", "class")
    with pytest.raises(
        RunError, match=rf"metric score: score \(.*own.py, line 3\) {text if 'returns' in text else ''}"
    ):
        metric(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))


def test_an_error_inside_names_the_line(tmp_path):
    file = tmp_path / "failing.py"
    file.write_text("def score(outputs, targets):\n    return outputs[9, 9]\n")
    with pytest.raises(RunError, match=r"failing.py, line 1\) failed: IndexError: .* \(line 2\)"):
        resolve_metric(f"{file}:score", "class")(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))


def test_a_metric_of_other_targets_is_refused():
    with pytest.raises(ConfigError, match="metric mse is for targets real, those of the task are class"):
        resolve_metric("mse", "class")
    with pytest.raises(ConfigError, match="unknown metric 'acuracy'.*did you mean 'accuracy'"):
        resolve_metric("acuracy", "class")
    with pytest.raises(ConfigError, match="is int, expected a function or a Metric"):
        resolve_metric(3, "class")
    assert isinstance(resolve_metric("r2", "real"), Metric)


def test_calibration_error_by_hand():
    """Confidences 0.9, 0.9, 0.6 in two of 15 bins: (|2 - 1.8| + |0 - 0.6|) / 3; and of equal outputs |1 - 1/2|."""
    outputs = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.6, 0.4]]).log()
    assert METRICS.builtin["ece"](outputs, torch.tensor([0, 1, 1])) == pytest.approx((0.2 + 0.6) / 3, abs=1e-6)
    assert METRICS.builtin["ece"](torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)) == pytest.approx(0.5)
