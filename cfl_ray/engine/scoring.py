"""Scores of a model. Classification scores come from its confusion matrix, so they can be restricted to any labels."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cfl_ray.core.metrics import mean_f1
from cfl_ray.core.tasks import Task
from cfl_ray.nn.network import Network
from cfl_ray.nn.outputs import outputs_of, outputs_of_row

Logits = Callable[[Tensor], Tensor]  # samples (n, ...) -> outputs (n, C), (n, d) or (n, T, V)


def additive_logits(network: Network, row_P: Tensor, frozen_P: Tensor | None) -> Logits:
    """Predictor of one model; with `frozen_P`, of the sum of its logits and those of the frozen model."""

    def logits(x: Tensor) -> Tensor:
        first = outputs_of(network, x) if row_P is network.flat else outputs_of_row(network, row_P, x)
        return first if frozen_P is None else first + outputs_of_row(network, frozen_P, x)

    return logits


def log_probabilities(network: Network, rows: Sequence[Tensor], x: Tensor) -> Tensor:
    """Logarithms of the class probabilities (K, n, C) of several models."""
    return torch.stack([outputs_of_row(network, row_P, x).log_softmax(1) for row_P in rows])


def mixed(log_p: Tensor, weight_K: Tensor | np.ndarray) -> Tensor:
    """Logarithms (n, C) of the weighted mean of the class probabilities of K models, log_p (K, n, C).

    Equal weights are a soft vote. The weights add up to 1.
    """
    count = len(weight_K)
    relative_K = (torch.as_tensor(weight_K, dtype=torch.float64) * count).to(log_p).log()
    return (log_p + relative_K[:, None, None]).logsumexp(0) - math.log(count)


@torch.no_grad()
def values(task: Task, logits: Tensor, y: Tensor) -> np.ndarray:
    """The metrics of a task on at least one sample, and the mean loss, float64 (`len(task.score_names)`,).

    logits: outputs, on the CPU as the targets y.
    """
    if task.is_classification:
        *_, loss = scores(*confusion(logits, y, logits.shape[1]))
    else:
        loss = task.loss(logits, y).double().mean().item()
    return np.array([*(metric(logits, y) for metric in task.metrics), loss])


@torch.no_grad()
def confusion(logits: Tensor, y: Tensor, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts int64 (C, C), true class by predicted class, and the summed loss float64 (C,) per true class.

    logits: outputs (n, C), on the CPU as y (n,).
    """
    counts_CC = torch.bincount(y * num_classes + logits.argmax(1), minlength=num_classes**2)
    loss_n = cross_entropy(logits, y, reduction="none").double()
    loss_C = torch.zeros(num_classes, dtype=torch.float64).index_add_(0, y, loss_n)
    return counts_CC.reshape(num_classes, num_classes).numpy(), loss_C.numpy()


def scores(
    confusion_CC: np.ndarray, loss_C: np.ndarray, labels_C: np.ndarray | None = None
) -> tuple[float, float, float]:
    """Accuracy, macro-F1 and mean loss over the test samples whose label is in the bool `labels_C` (None: all).

    Macro-F1 averages over the classes that occur as true or predicted class, as scikit-learn's `f1_score` does.
    All three are NaN without such a sample.
    """
    counts = confusion_CC if labels_C is None else confusion_CC * labels_C[:, None]
    total = counts.sum()
    if total == 0:
        return float("nan"), float("nan"), float("nan")
    hit_C, true_C, predicted_C = np.diag(counts), counts.sum(1), counts.sum(0)
    loss = (loss_C if labels_C is None else loss_C * labels_C).sum() / total
    return float(hit_C.sum() / total), mean_f1(hit_C, true_C, predicted_C), float(loss)
