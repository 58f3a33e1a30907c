"""Networks of the papers, by registered name, and networks that users provide."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.models import cnn, mlp, resnet, vgg
from cfl_ray.nn.functional_dropout import Recording
from cfl_ray.nn.shared import FrozenParameter
from cfl_ray.plugins.calling import explained, place_of
from cfl_ray.plugins.registry import Registry

REGISTRY: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp.mlp,
    "digits_cnn": cnn.digits_cnn,
    "lenet5": cnn.lenet5,
    "femnist_cnn": cnn.femnist_cnn,
    "leaf_cnn": cnn.leaf_cnn,
    "autocfl_cnn": cnn.autocfl_cnn,
    "resnet9": resnet.resnet9,
    "vgg16": vgg.vgg16,
}
MODELS = Registry("model", REGISTRY, "cfl_ray.models")
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

    def __call__(self) -> nn.Module:
        """A new module with the initial weights of its layers. Lazy layers get their sizes in a forward pass."""
        positional, named = self._arguments()
        module = self.factory(*positional, **named)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model {self._place} returns {type(module).__name__}, expected a torch.nn.Module")
        if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            self._materialise(module)
        if self.weights:
            self._load_weights(module)
        return module

    def check(self) -> None:
        """Builds the network and tries it on two samples. Raises ConfigError if clients cannot train it."""
        try:
            module = self()
        except ConfigError:
            raise
        except Exception as error:
            positional, named = self._arguments()
            arguments = ", ".join([*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())])
            raise ConfigError(
                f"model {self._place} cannot be built with ({arguments}): {explained(self.factory, error)}"
            ) from error
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(f"model {self._place} has no parameter to train, expected at least 1")
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                kind = str(parameter.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"model {self._place}: the parameter {name} is {kind}, those that are trained must be float32; "
                    "runtime.precision sets what passes are computed in"
                )
        for training in (False, True):
            self._check_forward(module.train(training))
        self._check_repetition(module.eval())
        self._check_gradient(module.train())

    def _check_forward(self, module: nn.Module) -> None:
        samples = "samples" if self.dtype.is_floating_point else f"{self.dtype} samples"
        mode = " in training mode" if module.training else ""
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), Recording() as dropouts:
                outputs = module(self._zeros())
        except Exception as error:
            raise ConfigError(
                f"model {self._place} does not take {samples} of shape {self.input_shape}{mode}: "
                f"{explained(self.factory, error)}"
            ) from error
        if dropouts.calls and not module.training:
            raise ConfigError(
                f"model {self._place} calls functional dropout in evaluation, where predictions would be random; write "
                "F.dropout(x, p, self.training)"
            )
        if not isinstance(outputs, torch.Tensor):
            raise ConfigError(f"model {self._place} answers with {type(outputs).__name__}, expected one tensor")
        expected = (2, *(self.outputs or (self.num_classes,)))
        if tuple(outputs.shape) != expected:
            need = f"the data has {self.num_classes} classes: its output size must be {self.num_classes}"
            if self.outputs:
                need = f"the targets of the data need {expected}"
            raise ConfigError(f"model {self._place} answers 2 samples with shape {tuple(outputs.shape)}, but {need}")

    def _check_repetition(self, module: nn.Module) -> None:
        x, draw = self._zeros(), torch.Generator().manual_seed(0)
        outputs = []
        for _ in range(2):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                outputs.append(
                    module(torch.rand(x.shape, generator=draw.manual_seed(0)) if x.is_floating_point() else x)
                )
        if not torch.allclose(outputs[0], outputs[1], rtol=1e-3, equal_nan=True):
            raise ConfigError(
                f"model {self._place} answers the same samples differently the second time, in evaluation: its forward "
                "pass depends on Python state or a buffer that it changes, or on random numbers of NumPy or `random`; "
                "then results depend on the process"
            )

    def _check_gradient(self, module: nn.Module) -> None:
        trained = next(parameter for parameter in module.parameters() if parameter.requires_grad)
        try:
            for _ in range(2):
                with torch.random.fork_rng(devices=[]):
                    outputs = module(self._zeros())
                if not outputs.requires_grad:
                    raise ValueError("its outputs have no gradient; do not use detach, no_grad or NumPy in forward")
                torch.autograd.grad(outputs.sum(), trained, allow_unused=True)
        except Exception as error:
            raise ConfigError(f"model {self._place} cannot be trained: {explained(self.factory, error)}") from error

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments of the factory. Raises ConfigError if a parameter gets no value."""
        try:
            parameters = list(inspect.signature(self.factory).parameters.values())
        except (TypeError, ValueError):  # a function written in C has no signature
            return [], dict(self.options)
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
                    f"model {self._place} has a parameter {parameter.name!r} without a value; a factory is passed the "
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
            module.eval()(self._zeros())
        module.train()
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise ConfigError(
                    f"model {self._place}: {name} of a lazy layer has no size after a forward pass in evaluation mode, "
                    "in which the layer is not called; give the layer its sizes"
                )

    def _load_weights(self, module: nn.Module) -> None:
        own = module.state_dict()
        for name, tensor in self.weights.items():
            if name not in own:
                raise ConfigError(f"model.weights: {self._place} has no tensor {name!r}{did_you_mean(name, own)}")
            if tensor.shape != own[name].shape:
                raise ConfigError(
                    f"model.weights: {name} has shape {tuple(tensor.shape)}, but {tuple(own[name].shape)} in "
                    f"{self._place}; remove it from the file to initialise it at random"
                )
        module.load_state_dict(self.weights, strict=False)

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(2, *self.input_shape, dtype=self.dtype)

    @property
    def _place(self) -> str:
        return place_of(self.factory)


def recipe(
    name: str | Callable[..., nn.Module],
    options: dict[str, Any],
    input_shape: tuple[int, ...],
    num_classes: int,
    dtype: torch.dtype = torch.float32,
    outputs: tuple[int, ...] = (),
    weights: str | Path | None = None,
) -> ModelRecipe:
    """The recipe of a model. Raises ConfigError if the network cannot be built or does not fit the data.

    name: a registered name, the name of an installed package's entry point, `file.py:Factory`, or a factory.
    weights: a .safetensors file of pretrained tensors; None: the network starts with the factory's initialisation.
    """
    factory = MODELS.resolve(name)
    if isinstance(factory, nn.Module):
        raise ConfigError(
            f"model: {type(factory).__name__} is given as a module, expected what makes new ones: its class, or a "
            "function that returns one"
        )
    if not callable(factory):
        raise ConfigError(f"model {name!r} is {type(factory).__name__}, expected a function or class to call")
    tensors = {} if weights is None else read_weights(Path(weights).expanduser())
    model = ModelRecipe(factory, tuple(input_shape), num_classes, dict(options), dtype, outputs, tensors)
    model.check()
    return model


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors in a .safetensors file, by name. Reading runs no code. Raises ConfigError if it cannot be read."""
    from safetensors.torch import load_file  # imported here, so that networks need only torch

    if not file.is_file():
        raise ConfigError(f"model.weights: there is no file {file}")
    try:
        # processes on a machine that receive the recipe share the memory of such tensors
        return {name: FrozenParameter(tensor, requires_grad=False) for name, tensor in load_file(file).items()}
    except Exception as error:  # safetensors does not document which errors a damaged file raises
        raise ConfigError(
            f"model.weights: {file} cannot be read as a safetensors file ({str(error).splitlines()[0]}); "
            "safetensors.torch.save_file(model.state_dict(), FILE) writes such a file"
        ) from error
