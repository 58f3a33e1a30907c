"""Own parts of learning: a metric, a local optimiser, a learning-rate schedule and a server optimiser."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def f1_of_class_3(outputs: Tensor, targets: Tensor) -> float:
    """F1 score of class 3; NaN for a client that has none and predicts none."""
    predicted, true = outputs.argmax(1) == 3, targets == 3
    total = int(predicted.sum() + true.sum())
    return 2 * int((predicted & true).sum()) / total if total else float("nan")


class SignSGD(torch.optim.Optimizer):
    """Every number moves by lr against the sign of its gradient."""

    elementwise = True  # no number depends on another one, so that the vectorised engine can stack clients

    def __init__(self, params: list[Tensor], lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def halving(t: int, total: int, every: int = 5) -> float:
    """Half the learning rate after every so many rounds."""
    return 0.5 ** ((t - 1) // every)


@dataclass(frozen=True)
class Lookahead:
    """The server goes only a part of the way, and keeps no moments."""

    share: float = 0.5

    def __call__(self, delta_P: Tensor, moments: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.share * delta_P, ()
