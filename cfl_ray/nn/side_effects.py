"""Side effects of a forward pass: what it changes besides its output, of its inputs, parameters and buffers.

Layers with a constraint on their weights change parameters (`weight.data = torch.renorm(...)`), normalisation changes
buffers, and `x.sub_(mean)` changes the samples. A forward pass shows it: PyTorch's operations declare which arguments
they write to, and a tensor that is replaced has another memory afterwards.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class SideEffects:
    """Side effects of the observed forward passes of a module, by full names of its tensors."""

    def __init__(self) -> None:
        self.inputs = False  # whether a pass writes to the samples
        self.changed: set[str] = set()  # parameters and buffers that a pass writes to or replaces
        self.replaced: set[str] = set()  # of these, those that it replaces by other tensors

    @contextmanager
    def observed(self, module: nn.Module, x: Tensor) -> Iterator[None]:
        """Context of a forward pass of the module on samples `x`."""
        before, buffers = _tensors(module)
        values = {name: before[name].clone() for name in buffers}  # normalisation changes them without a declaration
        with _Writes() as writes:
            yield
        after, buffers = _tensors(module)
        self.inputs |= _memory(x) in writes.memory
        self.replaced |= {name for name, tensor in after.items() if _memory(tensor) != _memory(before.get(name))}
        self.changed |= self.replaced | {name for name, tensor in before.items() if _memory(tensor) in writes.memory}
        self.changed |= {n for n in buffers if n in values and not torch.equal(after[n], values[n])}


class ObservingMode(TorchDispatchMode):
    """A mode that looks at operations and carries them out as they are, also in modules that are compiled.

    PyTorch's compiler must not compile it. By default PyTorch imports the compiler to tell it so, at the first
    operation: a second and 80 MB in each process of a run. Here a compiler that is in use is told.
    """

    _is_told = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        kind = type(self)
        if "torch._dynamo" in sys.modules and not kind._is_told:
            kind.__torch_dispatch__ = torch.compiler.disable(kind.__torch_dispatch__)  # type: ignore[method-assign]
            kind._is_told = True
        return super().__enter__()


class _Writes(ObservingMode):
    """Records the memory that operations write to."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int | None] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            for number, argument in enumerate(function._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[number] if number < len(args) else kwargs.get(argument.name)
                    parts = value if isinstance(value, list | tuple) else [value]
                    self.memory |= {_memory(part) for part in parts if isinstance(part, Tensor)}
        return function(*args, **kwargs)


def _tensors(module: nn.Module) -> tuple[dict[str, Tensor], set[str]]:
    """Parameters and buffers by name, as aliases, which keep the memory if a parameter gets another one.

    And which of them are buffers.
    """
    buffers = dict(module.named_buffers())
    tensors = dict(module.named_parameters()) | buffers
    return {name: tensor.detach() for name, tensor in tensors.items()}, set(buffers)


def _memory(tensor: Tensor | None) -> int | None:
    """The address of a tensor's memory; None if it has none."""
    if tensor is None or tensor.numel() == 0 or tensor.is_sparse:
        return None
    return tensor.untyped_storage().data_ptr()
