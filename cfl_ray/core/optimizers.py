"""Local optimisers: how a client applies the gradient of a step.

The engines implement `sgd`, with `local.momentum` and `local.weight_decay`. All others are classes of `torch.optim` or
of the user; a client begins every round with a new optimiser, because moments are not kept between rounds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, optim

from cfl_ray.errors import ConfigError
from cfl_ray.plugins.calling import check_options, failure_of, place_of
from cfl_ray.plugins.registry import Registry

OptimizerFactory = Callable[..., optim.Optimizer]  # (parameters, lr=..., **options)
# Each of their numbers depends on the numbers in its own column alone: rows of many clients can be one tensor.
_ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Rprop),
)
OPTIMIZERS: Registry[OptimizerFactory] = Registry(
    "optimizer",
    {factory.__name__.lower(): factory for factory in _ELEMENTWISE},
    "cfl_ray.optimizers",
)


@dataclass(frozen=True)
class LocalOptimizer:
    """Makes the optimiser of a client."""

    factory: OptimizerFactory
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, params: list[Tensor], lr: float) -> optim.Optimizer:
        """A fresh optimiser of these parameters."""
        return self.factory(params, lr=lr, **self.options)

    @property
    def elementwise(self) -> bool:
        """Whether a number's update depends on no other number, so that the rows of many clients can be one tensor.

        A user's optimiser declares it with an attribute `elementwise = True`.
        """
        return self.factory in _ELEMENTWISE or getattr(self.factory, "elementwise", False) is True


def resolve_optimizer(value: Any, options: Mapping[str, Any]) -> LocalOptimizer | None:
    """The optimiser of a name, `file.py:Name` or a class; None for sgd. Raises ConfigError.

    Makes one step with it, so that wrong options are errors before a run.
    """
    if value == "sgd":
        if options:
            raise ConfigError(
                f"local.optimizer_options {dict(options)}: sgd has none; set local.momentum and local.weight_decay"
            )
        return None
    factory: Any = OPTIMIZERS.resolve(value)
    if not callable(factory):
        raise ConfigError(f"local.optimizer {value!r} is {type(factory).__name__}, expected a torch.optim class")
    check_options("local.optimizer", factory, {"lr": 0.1, **options}, ("parameters",))
    made = LocalOptimizer(factory, dict(options))
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    try:
        optimizer = made([parameter], 0.1)
        if isinstance(optimizer, optim.Optimizer):
            optimizer.step()
    except Exception as error:
        raise ConfigError(f"local.optimizer: {failure_of(factory, error)}, with options {dict(options)}") from error
    if not isinstance(optimizer, optim.Optimizer):
        raise ConfigError(
            f"local.optimizer: {place_of(factory)} makes {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )
    return made
