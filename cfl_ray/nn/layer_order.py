"""The order in which a forward pass calls the layers of a module."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class LayerOrder:
    """Context of forward passes that notes the calls of modules that own trained parameters, but contain no others.

    A parameter of several layers, such as an embedding that is also the output layer, counts for each of them.
    """

    def __init__(self, module: nn.Module):
        self.layers = {
            name: part
            for name, part in module.named_modules()
            if any(p.requires_grad for p in part.parameters(recurse=False))
            and not any(p.requires_grad for child in part.children() for p in child.parameters())
            and not isinstance(part, torch.jit.ScriptModule)  # refuses hooks: its calls are not seen
        }
        self.called: list[str] = []
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
        return lambda module, inputs, outputs: self.called.append(name)

    def last_of(self, layers: Sequence[str]) -> str:
        """The layer called last; the last of `layers` if its calls are not seen, as those of attention are not."""
        expected = layers[-1] if layers else ""
        return self.called[-1] if expected in self.called else expected
