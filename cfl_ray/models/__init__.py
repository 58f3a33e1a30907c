"""Networks of the papers, by registered name, and networks that users provide."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cfl_ray.errors import ConfigError
from cfl_ray.models import cnn, mlp, resnet, vgg
from cfl_ray.models.factory import ModelRecipe
from cfl_ray.models.trial import tried
from cfl_ray.nn.shared import FrozenParameter
from cfl_ray.plugins.registry import Registry

__all__ = ["MODELS", "REGISTRY", "ModelRecipe", "read_weights", "recipe"]

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
_TRIED: dict[Any, tuple[tuple[str, ...], dict[str, Any]]] = {}  # what the trials of this process found


def recipe(
    name: str | Callable[..., nn.Module],
    options: dict[str, Any],
    input_shape: tuple[int, ...],
    num_classes: int,
    dtype: torch.dtype = torch.float32,
    outputs: tuple[int, ...] = (),
    weights: str | Path | None = None,
    seed: int = 0,
) -> ModelRecipe:
    """The recipe of a model. Raises ConfigError if the network cannot be built or does not fit the data.

    name: a registered name, the name of an installed package's entry point, `file.py:Factory`, or a factory.
    seed: of the run.
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
    made = ModelRecipe(factory, tuple(input_shape), num_classes, dict(options), dtype, outputs, tensors)
    if factory not in REGISTRY.values() or tensors:
        return tried(made, seed)
    # a process carries out many runs of a study; what the trial of a network of this package finds depends on no seed
    key = factory, repr((made.input_shape, num_classes, sorted(options.items()), dtype, outputs))
    if key not in _TRIED:
        done = tried(made, seed)
        _TRIED[key] = done.warnings, done.constants
    found, constants = _TRIED[key]
    return replace(made, warnings=found, constants=dict(constants), key=key)


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
            f"model.weights: {file} cannot be read as a safetensors file "
            f"({type(error).__name__} {str(error).partition(chr(10))[0]}); "
            "safetensors.torch.save_file(model.state_dict(), FILE) writes such a file"
        ) from error
