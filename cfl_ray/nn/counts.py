"""The size of a network's forward pass, counted and not timed, so that it is equal on all machines."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cfl_ray.core import global_generators
from cfl_ray.nn.graph import RESHAPES, replaced
from cfl_ray.nn.network import Network

_BATCH = 2
_FREE = RESHAPES | {"__get__"}  # __get__: of an attribute such as `shape` or `mT`


class Counts(NamedTuple):
    """Functions of PyTorch in a forward pass, and the numbers of one sample that it reads and that they return."""

    calls: int
    activations: int


def counts_of(network: Network) -> Counts:
    """The counts of a network in evaluation mode, without reshapes and attributes of tensors."""
    x = network.input(torch.zeros(_BATCH, *network.input_shape, dtype=network.dtype))
    module = network.module.eval()
    with global_generators.kept(), torch.no_grad(), _Counting() as counting:
        module(x)
    return Counts(counting.calls, (x.numel() + counting.numbers) // _BATCH)


class _Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = self.numbers = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors: list[Tensor] = []
        replaced(result, lambda part: tensors.append(part) if isinstance(part, Tensor) else None)
        if tensors and getattr(function, "__name__", "") not in _FREE:
            self.calls += 1
            self.numbers += sum(tensor.numel() for tensor in tensors)
        return result
