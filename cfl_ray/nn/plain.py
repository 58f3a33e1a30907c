"""Modules in the form in which every engine trains them: not compiled, with dense gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# function -> name and place of the argument that asks for a sparse gradient
_SPARSE: dict[Callable[..., Any], tuple[str, int]] = {
    functional.embedding: ("sparse", 6),
    functional.embedding_bag: ("sparse", 7),
    torch.embedding: ("sparse", 4),
    torch.embedding_bag: ("sparse", 5),
    torch.gather: ("sparse_grad", 3),
    torch.Tensor.gather: ("sparse_grad", 3),
}


def plain(module: nn.Module) -> nn.Module:
    """The module, or the module that `torch.compile` wraps; compiled parts are replaced in place.

    The engines change tensors and modes between steps, for which compiled code would be compiled again. Rows of
    parameters are dense, so embeddings get dense gradients. Modules of `torch.export`, which refuse a change of their
    mode, answer the same in training and evaluation.
    """
    module = _uncompiled(module)
    for part in list(module.modules()):
        for name, child in list(part._modules.items()):
            if child is not None and child is not (original := _uncompiled(child)):
                part._modules[name] = original
    for part in module.modules():
        if getattr(part, "_compiled_call_impl", None) is not None:  # by `module.compile()`
            part._compiled_call_impl = None
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False
        if isinstance(part, torch.fx.GraphModule):
            for name in ("train", "eval"):
                vars(part).pop(name, None)
    return module


def _uncompiled(module: nn.Module) -> nn.Module:
    """The module inside one that `torch.compile` returned; the type is not imported, since that takes a second."""
    while type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        module = module.get_submodule("_orig_mod")
    return module


class DenseGradients(TorchFunctionMode):
    """Context in which functions that would have sparse gradients have dense ones.

    calls: number of these calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _SPARSE:
            name, place = _SPARSE[function]
            if kwargs.get(name, args[place] if place < len(args) else False):
                self.calls += 1
                args = (*args[:place], False, *args[place + 1 :]) if place < len(args) else args
                kwargs = kwargs if place < len(args) else kwargs | {name: False}
        return function(*args, **kwargs)
