"""The networks of the papers, by registered name."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cfl_ray.core.errors import ConfigError, nearest
from cfl_ray.core.plugin import load_plugin
from cfl_ray.models import cnn, mlp, resnet

REGISTRY: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp.mlp,
    "digits_cnn": cnn.digits_cnn,
    "lenet5": cnn.lenet5,
    "femnist_cnn": cnn.femnist_cnn,
    "leaf_cnn": cnn.leaf_cnn,
    "autocfl_cnn": cnn.autocfl_cnn,
    "resnet9": resnet.resnet9,
}


@dataclass(frozen=True)
class ModelRecipe:
    """Builds the network in any process: `ModelRecipe(...)()` is a new module."""

    factory: Callable[..., nn.Module]
    input_shape: tuple[int, ...]
    num_classes: int
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> nn.Module:
        wanted = inspect.signature(self.factory).parameters
        given = {"input_shape": self.input_shape, "num_classes": self.num_classes}
        return self.factory(**{name: value for name, value in given.items() if name in wanted}, **self.options)

    def check(self) -> None:
        """Raises ConfigError where the network cannot be built, does not take the input, or answers with another number of classes."""
        label = getattr(self.factory, "__name__", repr(self.factory))
        try:
            module = self().eval()
        except Exception as error:
            raise ConfigError(f"model {label} cannot be built with options {self.options}: {type(error).__name__}: {error}") from error
        try:
            with torch.no_grad():
                outputs = module(torch.zeros(2, *self.input_shape)).shape
        except Exception as error:
            raise ConfigError(f"model {label} does not take samples of shape {self.input_shape}: {type(error).__name__}: {error}") from error
        if tuple(outputs) != (2, self.num_classes):
            raise ConfigError(
                f"model {label} answers 2 samples with shape {tuple(outputs)}, but the data has {self.num_classes} classes: its output size must be {self.num_classes}"
            )


def recipe(name: str | Callable[..., nn.Module], options: dict[str, Any], input_shape: tuple[int, ...], num_classes: int) -> ModelRecipe:
    """The recipe of a registered model, of `file.py:Factory`, or of a factory itself. Raises ConfigError for an unknown name."""
    if callable(name):
        factory = name
    elif ":" in name:
        factory = load_plugin(name, "model")
    elif name in REGISTRY:
        factory = REGISTRY[name]
    else:
        raise ConfigError(f"unknown model {name!r}{nearest(name, REGISTRY)}")
    made = ModelRecipe(factory, tuple(input_shape), num_classes, dict(options))
    made.check()
    return made
