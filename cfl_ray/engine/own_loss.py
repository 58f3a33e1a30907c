"""The own loss of a client program as a function of features, outputs and mean loss, for written-out passes.

Autograd differentiates the hook at these three alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cfl_ray.core.client_program import Batch, Forward
from cfl_ray.engine.engine import NotTrained
from cfl_ray.engine.local_steps import LocalGradient, held_model, scalar_loss
from cfl_ray.errors import RunError
from cfl_ray.nn.passes import LossGradients
from cfl_ray.plugins.calling import place_of

_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class OwnLoss:
    """The own loss of a client on the batches of its steps.

    gradient: of the client, whose `forward` passes a batch through a held model. trains_features: whether the loss has
    a gradient at the features.
    """

    def __init__(self, gradient: LocalGradient, trains_features: bool):
        self.gradient, self.program, self.held = gradient, gradient.task.program, gradient.held
        self.trains_features = trains_features
        network, task = gradient.network, gradient.task
        used = task.steps * task.batches_per_step * int(task.local.batch_of(task.size, task.batches_per_step))
        # a sample has the same values in other batches
        self.keeps = used >= len(task.y) and not network.random_forward and not network.batch_statistics
        self.passes: dict[str, tuple[Tensor, Tensor]] = {}  # features and outputs of all samples, by held model
        self.real_B = torch.ones(0)  # of the latest batch
        self.is_seen = False  # whether the hook has been called

    def at(self, batch: int, mean_loss: Tensor, features_BF: Tensor, outputs: Tensor, y_B: Tensor) -> LossGradients:
        """The loss of a batch of the present step, and its gradients.

        Raises NotTrained if the hook fails, also by a use of autograd, which has no graph of the last layer here.
        """
        if len(self.real_B) != len(y_B):
            self.real_B = torch.ones(len(y_B))
        at = [mean_loss.requires_grad_(), outputs.requires_grad_()]
        if self.trains_features:
            at.append(features_BF.requires_grad_())
        # a copy of the mean loss, to which the hook may add in place
        seen = Batch(at[0].clone(), features_BF, outputs, y_B, self.real_B, partial(self._forward, batch))
        watched: AbstractContextManager[object] = nullcontext() if self.is_seen else _Watched()
        try:
            with watched:
                loss = scalar_loss(self.program, seen, self.held)
        except RunError as error:  # `sequential` finds it again, or trains the client
            raise NotTrained(
                f"the loss of {place_of(self.program)} needs more than the features and outputs of a batch, such as "
                "autograd through the last layer or changes in place"
            ) from error
        self.is_seen = True
        grads = torch.autograd.grad(loss, at, allow_unused=True)
        return LossGradients(loss.item(), *grads, *[None] * (3 - len(grads)))

    def _forward(self, batch: int, model: str) -> Forward:
        """The pass of a held model on a batch: of all samples once, if the steps use as many."""
        task, index_B = self.gradient.task, self.gradient.batches[batch]
        if not self.keeps or model in self.program.moves:
            return self.gradient.forward(model, batch)
        if model not in self.passes:
            row_P = held_model(self.program, task.held.models, model)
            self.passes[model] = self.gradient.network.evaluated_in_batches(row_P, task.x)
        features_nF, outputs_n = self.passes[model]
        if index_B is None:
            return Forward(features_nF, outputs_n, task.y, self.real_B)
        return Forward(features_nF[index_B], outputs_n[index_B], task.y[index_B], self.real_B)


class _Watched(TorchFunctionMode):
    """Context in which PyTorch's autograd raises RunError."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DIFFERENTIATING:
            raise RunError("no graph connects features and outputs")
        return func(*args, **(kwargs or {}))
