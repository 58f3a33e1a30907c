"""The size of a network's forward pass, counted and not timed, so that it is equal on all machines."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cfl_ray.core import global_generators
from cfl_ray.nn.graph import RESHAPES, replaced
from cfl_ray.nn.network import Network

_BATCH = 2
_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
_FREE = RESHAPES | {"__get__"}  # __get__: of an attribute such as `shape` or `mT`


class Counts(NamedTuple):
    """The functions of PyTorch in a forward pass, and what they do for one sample."""

    calls: int
    activations: int  # numbers of the sample and of what the functions return
    convolved: int  # multiplications of convolutions


def counts_of(network: Network) -> Counts:
    """The counts of a network in evaluation mode, without reshapes and attributes of tensors."""
    x = network.input(torch.zeros(_BATCH, *network.input_shape, dtype=network.dtype))
    module = network.module.eval()
    with global_generators.kept(), torch.no_grad(), _Counting() as counting:
        module(x)
    return Counts(counting.calls, (x.numel() + counting.numbers) // _BATCH, counting.convolved // _BATCH)


class _Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = self.numbers = self.convolved = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors: list[Tensor] = []
        replaced(result, lambda part: tensors.append(part) if isinstance(part, Tensor) else None)
        name = getattr(function, "__name__", "")
        if name in _CONVOLUTIONS:
            weight = args[1] if len(args) > 1 else (kwargs or {})["weight"]
            self.convolved += result.numel() * weight[0].numel()
        if tensors and name not in _FREE:
            self.calls += 1
            self.numbers += sum(tensor.numel() for tensor in tensors)
        return result
