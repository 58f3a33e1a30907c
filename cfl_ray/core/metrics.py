"""Metrics: scores of a model's outputs on the test samples of one client.

Outputs are (n, C) for classes and labels, (n, d) for real numbers and (n, T, V) for tokens; targets as `core.tasks`
says. All are computed in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cfl_ray.errors import ConfigError, RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of
from cfl_ray.plugins.registry import Registry

IGNORED = -100  # a target token that is not learned and not counted, as of PyTorch's cross_entropy
MetricFunction = Callable[[Tensor, Tensor], Any]  # (outputs, targets) of one client's test samples -> one number


@dataclass(frozen=True)
class Metric:
    """One number per client from the outputs of its model and its test targets; NaN if it is not defined."""

    name: str  # in tables and records, e.g. "f1_of_class_3"
    function: MetricFunction
    higher_is_better: bool = True
    meaning: str = ""
    targets: tuple[str, ...] = ()  # kinds of targets (`core.tasks`) that it is for; empty: any
    title: str = ""  # in tables of papers, e.g. "Macro F1"; empty: the name in words
    unit: str = ""  # there, e.g. "m"; "%" for a share, 0..1, which is shown in percent

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """The value. Raises RunError, with the author's line, for anything but one number."""
        value = call_plugin(f"metric {self.name}:", self.function, outputs, targets)
        if isinstance(value, (Tensor, np.ndarray)) and not value.shape:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            where = f"metric {self.name}: {place_of(self.function)}"
            raise RunError(f"{where} returns {described(value)}, expected one number")
        return float(value)


def mean_f1(hit_C: np.ndarray, true_C: np.ndarray, predicted_C: np.ndarray) -> float:
    """Mean F1 score over the classes that are true or predicted anywhere, as scikit-learn's `f1_score`."""
    occurs = (true_C + predicted_C) > 0
    return float((2 * hit_C[occurs] / (true_C + predicted_C)[occurs]).mean()) if occurs.any() else float("nan")


def _counts(outputs: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number of hits, of true and of predicted samples of each class or label, int64 (C,)."""
    if targets.is_floating_point():
        predicted, true = outputs > 0, targets > 0.5
        return (predicted & true).sum(0).numpy(), true.sum(0).numpy(), predicted.sum(0).numpy()
    count = outputs.shape[1]
    pairs = torch.bincount(targets * count + outputs.argmax(1), minlength=count**2)
    counts_CC = pairs.reshape(count, count).numpy()  # true class by predicted class
    return np.diag(counts_CC), counts_CC.sum(1), counts_CC.sum(0)


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of the samples whose largest output is that of their class."""
    return (outputs.argmax(1) == targets).sum().item() / len(targets)


def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    """Mean F1 score of the classes (or labels) that are true or predicted anywhere."""
    return mean_f1(*_counts(outputs, targets))


def micro_f1(outputs: Tensor, targets: Tensor) -> float:
    """F1 score of all decisions (sample, label) together; NaN if no label is true or predicted."""
    hit_C, true_C, predicted_C = _counts(outputs, targets)
    total = int(true_C.sum() + predicted_C.sum())
    return float(2 * hit_C.sum() / total) if total else float("nan")


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Mean over the classes that occur of the share of their samples whose class is predicted."""
    hit_C, true_C, _ = _counts(outputs, targets)
    occurs = true_C > 0
    return float((hit_C[occurs] / true_C[occurs]).mean())


def roc_auc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve of each class (or label) against the others, mean over those with samples of both kinds.

    The area is the share of pairs of a sample of the class and another one in which the former has the higher
    probability; equal ones count half (Hanley and McNeil 1982). NaN without any such pair.
    """
    if targets.is_floating_point():
        score_nC, is_true_nC = outputs.double().numpy(), (targets > 0.5).numpy()
    else:
        score_nC = outputs.double().log_softmax(1).numpy()
        is_true_nC = targets.numpy()[:, None] == np.arange(outputs.shape[1])
    areas = []
    for score_n, is_true_n in zip(score_nC.T, is_true_nC.T, strict=True):
        others, own = np.sort(score_n[~is_true_n]), score_n[is_true_n]
        if len(others) and len(own):
            below_n, not_above_n = (np.searchsorted(others, own, side) for side in ("left", "right"))
            areas.append((below_n + not_above_n).mean() / (2 * len(others)))
    return float(np.mean(areas)) if areas else float("nan")


def subset_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of the samples with every label right; a label is predicted if its output is above 0."""
    return ((outputs > 0) == (targets > 0.5)).all(1).double().mean().item()


def mse(outputs: Tensor, targets: Tensor) -> float:
    """Mean squared error."""
    return (outputs.double() - targets.double().reshape(outputs.shape)).square().mean().item()


def mae(outputs: Tensor, targets: Tensor) -> float:
    """Mean absolute error."""
    return (outputs.double() - targets.double().reshape(outputs.shape)).abs().mean().item()


def r2(outputs: Tensor, targets: Tensor) -> float:
    """1 - sum (y - f)^2 / sum (y - mean y)^2, mean over the d targets that are not constant; NaN if all are."""
    targets = targets.double().reshape(outputs.shape)
    rest_d = (outputs.double() - targets).square().sum(0)
    total_d = (targets - targets.mean(0)).square().sum(0)
    varies_d = total_d > 0
    return (1 - rest_d[varies_d] / total_d[varies_d]).mean().item()


def token_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of the tokens whose output is the largest; NaN if none counts."""
    return (outputs.argmax(-1) == targets)[targets != IGNORED].double().mean().item()


def perplexity(outputs: Tensor, targets: Tensor) -> float:
    """Exponential of the mean cross entropy of a token; NaN if none counts."""
    return cross_entropy(outputs.double().transpose(1, 2), targets, ignore_index=IGNORED).exp().item()


def ece(outputs: Tensor, targets: Tensor) -> float:
    """Expected calibration error with 15 bins of equal width.

    C. Guo, G. Pleiss, Y. Sun, K. Q. Weinberger. On Calibration of Modern Neural Networks. ICML 2017, Eq. (3): the mean
    over samples of |accuracy - confidence| of the sample's bin; the confidence is the largest probability.
    """
    confidence_n, predicted_n = outputs.double().softmax(1).max(1)
    bin_n = (confidence_n * _BINS).ceil().long().clamp(1, _BINS) - 1  # bin m holds the confidences in ((m-1)/M, m/M]
    gap_n = (predicted_n == targets).double() - confidence_n
    gap_B = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bin_n, gap_n)
    return gap_B.abs().sum().item() / len(targets)


_BINS = 15  # M of the paper
_BUILTIN = (
    Metric("accuracy", accuracy, True, "share of the samples whose class is predicted", ("class",), unit="%"),
    Metric(
        "macro_f1",
        macro_f1,
        True,
        "mean F1 score of the classes or labels that occur",
        ("class", "binary"),
        title="Macro F1",
        unit="%",
    ),
    Metric(
        "micro_f1", micro_f1, True, "F1 score of all labels together", ("class", "binary"), title="Micro F1", unit="%"
    ),
    Metric(
        "balanced_accuracy",
        balanced_accuracy,
        True,
        "mean over the classes that occur of the share of their samples that is predicted",
        ("class",),
        title="Balanced accuracy",
        unit="%",
    ),
    Metric(
        "roc_auc",
        roc_auc,
        True,
        "area under the ROC curve, mean over the classes or labels",
        ("class", "binary"),
        title="ROC AUC",
    ),
    Metric(
        "subset_accuracy", subset_accuracy, True, "share of the samples with every label right", ("binary",), unit="%"
    ),
    Metric("ece", ece, False, "expected calibration error", ("class",), title="ECE"),
    Metric("mse", mse, False, "mean squared error", ("real",), title="MSE"),
    Metric("mae", mae, False, "mean absolute error", ("real",), title="MAE"),
    Metric("r2", r2, True, "coefficient of determination", ("real",), title="R²"),
    Metric("token_accuracy", token_accuracy, True, "share of the tokens that are predicted", ("tokens",), unit="%"),
    Metric("perplexity", perplexity, False, "exp of the mean cross entropy of a token", ("tokens",)),
)
METRICS: Registry[Metric | MetricFunction] = Registry(
    "metric", {metric.name: metric for metric in _BUILTIN}, "cfl_ray.metrics"
)


def resolve_metric(reference: Any, targets: str) -> Metric:
    """The metric of a name, `file.py:function`, a function or a Metric, for these targets. Raises ConfigError."""
    metric: Any = METRICS.resolve(reference)
    if isinstance(metric, Metric):
        if metric.targets and targets not in metric.targets:
            raise ConfigError(
                f"metric {metric.name} is for targets {' or '.join(metric.targets)}, those of the task are {targets}"
            )
        return metric
    if not callable(metric):
        raise ConfigError(f"metric {reference!r} is {type(metric).__name__}, expected a function or a Metric")
    name = getattr(metric, "__name__", type(metric).__name__)
    return Metric(name, metric, getattr(metric, "higher_is_better", True), (metric.__doc__ or "").split("\n")[0])
