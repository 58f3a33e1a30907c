"""The order in which a forward pass calls the layers of a module."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from cfl_ray.core.params import layer_of


class LayerOrder:
    """Context of forward passes that notes the calls of modules that own trained parameters, but contain no others.

    A parameter of several layers, such as an embedding that is also the output layer, counts for each of them.

    called: the names of these modules, in the order of the calls.
    not_linear: those with a matrix as weight whose outputs are not inputs times this matrix, transposed, plus the bias.
    """

    def __init__(self, module: nn.Module):
        trained = [name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
        owners = set(map(layer_of, trained))
        self.layers = {
            name: part
            for name, part in module.named_modules()
            if name in owners
            and not any(other.startswith(f"{name}." if name else "") for other in owners - {name})
            and not isinstance(part, torch.jit.ScriptModule)  # refuses hooks: its calls are not seen
        }
        self.called: list[str] = []
        self.not_linear: set[str] = set()
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> "LayerOrder":
        self.handles = [part.register_forward_hook(self._noting(name)) for name, part in self.layers.items()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self.handles:
            handle.remove()

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
            self.called.append(name)
            if not _is_linear(module, inputs, outputs):
                self.not_linear.add(name)

        return note

    def last_of(self, layers: Sequence[str]) -> str:
        """The layer called last; the last of `layers` if its calls are not seen, as those of attention are not."""
        expected = layers[-1] if layers else ""
        return self.called[-1] if expected in self.called else expected


def _is_linear(module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> bool:
    """Whether this call multiplied its inputs by the weight (C, F), and added the bias (C,) if there is one."""
    if type(module) is nn.Linear:
        return True
    x, weight, bias = inputs[0] if inputs else None, getattr(module, "weight", None), getattr(module, "bias", None)
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and isinstance(outputs, Tensor)):
        return False
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:] or not x.dtype == weight.dtype == outputs.dtype:
        return False
    bias = bias if isinstance(bias, Tensor) else None
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    expected = functional.linear(x, weight, bias)
    return expected.shape == outputs.shape and torch.allclose(expected, outputs, rtol=1e-3, atol=1e-5, equal_nan=True)
