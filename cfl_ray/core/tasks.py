"""Tasks, which clients learn. A task is a loss, the kind of its targets, and the metrics that its models are scored by.

targets    of n samples            outputs of the network    tasks
class      int64 (n,)              (n, C)                    classification
real       float32 (n,) or (n, d)  (n, 1) or (n, d)          regression
binary     float32 (n, C), 0 or 1  (n, C)                    multi_label
tokens     int64 (n, T)            (n, T, V)                 next_token

A target token of IGNORED is not learned and counts in no metric, as padding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cfl_ray.core.metrics import IGNORED, METRICS, Metric, resolve_metric
from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.plugins.calling import call_plugin, failure_of, place_of
from cfl_ray.plugins.registry import Registry

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) of n samples -> the loss of each (n,)


@dataclass(frozen=True)
class TargetKind:
    """A kind of targets."""

    dtype: torch.dtype  # of a batch
    stored: str  # numpy's name of the type in shards
    metrics: tuple[str, ...]  # by default; the first is the score


TARGETS = {
    "class": TargetKind(torch.int64, "int16", ("accuracy", "macro_f1")),
    "real": TargetKind(torch.float32, "float32", ("mse", "mae", "r2")),
    "binary": TargetKind(torch.float32, "uint8", ("subset_accuracy", "micro_f1", "macro_f1")),
    "tokens": TargetKind(torch.int64, "int32", ("token_accuracy", "perplexity")),
}


@dataclass(frozen=True)
class Task:
    """A loss, the kind of its targets, and metrics.

    loss: a function of outputs and targets of n samples that returns the loss of each, (n,). Its operations must be
        PyTorch's; the vectorised engine calls it under `torch.func.vmap`, one client at a time.
    """

    loss: Loss
    targets: str = "class"  # "class", "real", "binary" or "tokens"
    # the first is the score that tables show; functions and names become metrics; empty: those of the targets
    metrics: tuple[Metric, ...] = ()
    name: str = "own"

    def __post_init__(self) -> None:
        if self.targets not in TARGETS:
            raise ConfigError(
                f"task {self.name}: unknown targets {self.targets!r}{did_you_mean(self.targets, TARGETS)}"
            )
        if not callable(self.loss):
            raise ConfigError(f"task {self.name}: its loss is {type(self.loss).__name__}, expected a function")
        given = self.metrics or TARGETS[self.targets].metrics
        object.__setattr__(self, "metrics", tuple(resolve_metric(metric, self.targets) for metric in given))
        names = [metric.name for metric in self.metrics]
        if twice := [name for name in names if names.count(name) > 1]:
            listed = ", ".join(names)
            raise ConfigError(f"metric {twice[0]!r} is measured twice: {listed}; evaluation.metrics adds to the task's")

    @property
    def is_classification(self) -> bool:
        """Whether clients learn classes by cross entropy, which every engine supports."""
        return self.loss is cross_entropy

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the scores of a client: the metrics, then the loss."""
        return (*(metric.name for metric in self.metrics), "loss")

    @property
    def by_confusion(self) -> bool:
        """Whether the confusion matrix suffices for all metrics: accuracy and macro-F1."""
        counted = tuple(METRICS.builtin[name] for name in TARGETS["class"].metrics)
        return self.is_classification and self.metrics == counted

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch."""
        return F.cross_entropy(outputs, targets) if self.is_classification else self.loss(outputs, targets).mean()

    def total_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of a batch."""
        if self.is_classification:
            return F.cross_entropy(outputs, targets, reduction="sum")
        return self.loss(outputs, targets).sum()

    def with_metrics(self, references: list[Any]) -> "Task":
        """This task with more metrics, each a name, `file.py:function` or object. Raises ConfigError.

        Metrics that it has already are not added again.
        """
        more = [resolve_metric(reference, self.targets) for reference in references]
        return replace(self, metrics=(*self.metrics, *(metric for metric in more if metric not in self.metrics)))

    def check(self, outputs: tuple[int, ...], target_shape: tuple[int, ...]) -> None:
        """Computes the loss of three samples. Raises ConfigError, with the author's line, if that fails.

        The losses of the first two must not depend on the third: outputs (n, 1) and targets (n,) broadcast unnoticed.
        """
        draw = torch.Generator().manual_seed(0)
        logits = torch.randn(3, *outputs, generator=draw).requires_grad_()
        targets = self._random_targets((3, *target_shape), outputs, draw)
        other = [torch.cat([tensor[:2], tensor[:1]]) for tensor in (logits.detach(), targets)]
        try:
            losses = self.loss(logits, targets)
            again = self.loss(*other)
        except Exception as error:
            raise ConfigError(
                f"task {self.name}: loss {failure_of(self.loss, error)}; it gets outputs {tuple(logits.shape)} and "
                f"targets {tuple(targets.shape)} of {targets.dtype}"
            ) from error
        if not isinstance(losses, Tensor) or losses.shape != (3,) or not losses.requires_grad:
            got = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            more = "" if not isinstance(losses, Tensor) or losses.requires_grad else " without a gradient"
            raise ConfigError(
                f"task {self.name}: loss {place_of(self.loss)} returns {got}{more} for 3 samples, expected the loss of "
                "each, shape (3,)"
            )
        if not losses.isfinite().all():
            raise ConfigError(
                f"task {self.name}: loss {place_of(self.loss)} returns {losses.tolist()} for 3 samples, expected "
                "finite numbers; outputs are any real numbers, as logits are"
            )
        if not torch.equal(losses.detach()[:2], again[:2]):
            raise ConfigError(
                f"task {self.name}: loss {place_of(self.loss)} mixes samples: a sample's loss depends on others; "
                f"with outputs {tuple(logits.shape)} and targets {tuple(targets.shape)}, write out the broadcasting, "
                "e.g. targets.reshape(outputs.shape)"
            )

    def _random_targets(self, shape: tuple[int, ...], outputs: tuple[int, ...], draw: torch.Generator) -> Tensor:
        """Targets (n, ...) of this kind."""
        dtype = TARGETS[self.targets].dtype
        if self.targets in ("class", "tokens"):
            return torch.randint(outputs[-1], shape, generator=draw, dtype=dtype)
        values = torch.randn(shape, generator=draw)
        return values.to(dtype) if self.targets == "real" else (values > 0).to(dtype)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the class of each sample."""
    return F.cross_entropy(outputs, targets, reduction="none")


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the tokens of each sample, without those that are IGNORED; 0 for a sample of only these."""
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return losses.mean(1) * (targets.shape[1] / (targets != IGNORED).sum(1).clamp(min=1))


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error (f - y)^2 of each sample, mean over its targets."""
    return F.mse_loss(outputs, targets.reshape(outputs.shape), reduction="none").flatten(1).mean(1)


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute error |f - y| of each sample, mean over its targets."""
    return F.l1_loss(outputs, targets.reshape(outputs.shape), reduction="none").flatten(1).mean(1)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Huber's loss with delta 1 of each sample, mean over its targets."""
    return F.huber_loss(outputs, targets.reshape(outputs.shape), reduction="none").flatten(1).mean(1)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross entropy of each sample's logits, mean over its labels."""
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)


CLASSIFICATION = Task(cross_entropy, name="classification")

_TARGETS_OF: dict[str, str] = {
    "cross_entropy": "class",
    "token_cross_entropy": "tokens",
    "mse": "real",
    "mae": "real",
    "huber": "real",
    "bce": "binary",
}
LOSSES: Registry[Loss] = Registry(
    "loss",
    {function.__name__: function for function in (cross_entropy, token_cross_entropy, mse, mae, huber, bce)},
    "cfl_ray.losses",
)
TASKS: Registry[Task | Callable[[], Task]] = Registry(
    "task",
    {
        "classification": CLASSIFICATION,
        "regression": Task(mse, "real", name="regression"),
        "multi_label": Task(bce, "binary", name="multi_label"),
        "next_token": Task(token_cross_entropy, "tokens", name="next_token"),
    },
    "cfl_ray.tasks",
)


def resolve_task(value: Any) -> Task:
    """The task of a name, `file.py:Name`, {loss: ..., targets: ..., metrics: [...]}, a Task or a function.

    A function without arguments returns the Task. Raises ConfigError for anything else.
    """
    if isinstance(value, Mapping):
        return _task_of(value)
    task: Any = TASKS.resolve(value)
    if not isinstance(task, Task) and callable(task):
        task = call_plugin(f"task {value!r}:", task, error=ConfigError)
    if not isinstance(task, Task):
        raise ConfigError(
            f"task {value!r} is {type(task).__name__}, expected a cfl_ray.Task or a function that returns one"
        )
    return task


def _task_of(value: Mapping[str, Any]) -> Task:
    keys = ("loss", "targets", "metrics")
    for key in value:
        if key not in keys:
            raise ConfigError(f"task has no key {key!r}{did_you_mean(str(key), keys)}")
    if "loss" not in value:
        raise ConfigError(f"task needs a loss: {', '.join(LOSSES.names())} or file.py:function")
    reference = value["loss"]
    loss: Any = LOSSES.resolve(reference)
    if not callable(loss):
        raise ConfigError(f"task.loss {reference!r} is {type(loss).__name__}, expected a function")
    targets = value.get("targets", _TARGETS_OF.get(reference) if isinstance(reference, str) else None)
    if targets not in TARGETS:
        raise ConfigError(
            f"task.targets must say what the loss {place_of(loss)} is for: {', '.join(TARGETS)}; got {targets!r}"
        )
    name = reference if isinstance(reference, str) else place_of(loss)
    return Task(loss, targets, tuple(value.get("metrics") or ()), name)
