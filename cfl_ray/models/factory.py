"""A network's factory with its arguments, from which every process builds the same module."""

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.nn.plain import plain
from cfl_ray.plugins.calling import check_names, place_of

INPUT_NAMES = ("input_shape", "in_shape", "shape")  # a factory's parameter of this name gets the shape of a sample
CLASS_NAMES = ("num_classes", "n_classes", "classes", "num_outputs")  # these get the number of classes


@dataclass(frozen=True)
class ModelRecipe:
    """A network's factory with its arguments; calling the recipe returns a new module, in any process.

    The factory is called with all `options`, and with the shape of a sample and the number of classes if it has
    parameters for them: parameters named in INPUT_NAMES and CLASS_NAMES, or else its remaining parameters without a
    default, in this order.

    num_classes: number of classes; if the targets are not classes, the number of outputs for each predicted number.
    dtype: type of the inputs: float32, or int64 for token ids.
    """

    factory: Callable[..., nn.Module]
    input_shape: tuple[int, ...]
    num_classes: int
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    outputs: tuple[int, ...] = ()  # shape of the output for a sample; empty: (num_classes,)
    # pretrained tensors by name, loaded into every new module; the recipe's pickle contains them
    weights: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    # of `models.trial`: lines for the user, and fingerprints of the tensors that stay as the factory makes them
    warnings: tuple[str, ...] = field(default=(), compare=False)
    constants: dict[str, list[str | float]] = field(default_factory=dict, repr=False, compare=False)
    key: Hashable = field(default=None, repr=False, compare=False)  # see `Network`

    def __call__(self) -> nn.Module:
        """A new module with the initial weights of its layers. Lazy layers get their sizes in a forward pass."""
        positional, named = self._arguments()
        module = self.factory(*positional, **named)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model {self.place} returns {type(module).__name__}, expected a torch.nn.Module")
        module = plain(module)
        if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            self._materialise(module)
        if self.weights:
            self._load_weights(module)
        return module

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments of the factory. Raises ConfigError if a parameter gets no value."""
        try:
            signature = inspect.signature(self.factory)
        except (TypeError, ValueError):  # a function written in C has no signature
            return [], dict(self.options)
        check_names("model", self.factory, signature, self.options)
        parameters = list(signature.parameters.values())
        names = [parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY]
        named, left = dict(self.options), []
        for value, known in ((self.input_shape, INPUT_NAMES), (self.num_classes, CLASS_NAMES)):
            name = next((name for name in known if name in names), None)
            if name is None:
                left.append(value)
            elif name not in named:
                named[name] = value
        positional = []
        for parameter in parameters:
            variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if variable or parameter.default is not parameter.empty or parameter.name in named:
                continue
            if not left:
                raise ConfigError(
                    f"model {self.place} has a parameter {parameter.name!r} without a value; a factory is passed the "
                    f"shape of a sample {self.input_shape} and the number of classes {self.num_classes}: "
                    f"set model.options.{parameter.name}, or give the parameter a default"
                )
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(left.pop(0))
            else:
                named[parameter.name] = left.pop(0)
        return positional, named

    def _materialise(self, module: nn.Module) -> None:
        """Runs a forward pass, in which lazy layers get their sizes and initial weights."""
        with torch.no_grad():
            module.eval()(self.samples())
        module.train()
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise ConfigError(
                    f"model {self.place}: {name} of a lazy layer has no size after a forward pass in evaluation mode, "
                    "in which the layer is not called; give the layer its sizes"
                )

    def _load_weights(self, module: nn.Module) -> None:
        own = module.state_dict()
        # as of a module that `torch.compile` wraps
        weights = {name.replace("_orig_mod.", ""): tensor for name, tensor in self.weights.items()}
        for name, tensor in weights.items():
            if name not in own:
                raise ConfigError(f"model.weights: {self.place} has no tensor {name!r}{did_you_mean(name, own)}")
            if tensor.shape != own[name].shape:
                raise ConfigError(
                    f"model.weights: {name} has shape {tuple(tensor.shape)}, but {tuple(own[name].shape)} in "
                    f"{self.place}; remove it from the file to initialise it at random"
                )
        module.load_state_dict(weights, strict=False)

    def samples(self) -> torch.Tensor:
        """Two samples of zeros."""
        return torch.zeros(2, *self.input_shape, dtype=self.dtype)

    def others(self) -> torch.Tensor:
        """Two other samples: numbers from 0 to 1, or the tokens 0 and 1 by turns."""
        x = self.samples()
        if x.is_floating_point():
            return torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
        return torch.arange(x.numel()).remainder_(2).view(x.shape).to(x.dtype)

    @property
    def place(self) -> str:
        return place_of(self.factory)

    @property
    def arguments(self) -> str:
        """The arguments of the factory, for messages."""
        positional, named = self._arguments()
        return ", ".join([*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())])
