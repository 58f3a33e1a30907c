"""Functional dropout with masks by key, as of dropout layers.

The trial passes of a network record its calls of `torch.nn.functional.dropout` and its relatives. From then on, call i
of a forward pass in training multiplies by the mask of layer i of a list that `attach` adds to the module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cfl_ray.errors import RunError
from cfl_ray.nn.layers import AddressedDropout

_NAME = "_functional_dropouts"
_WHOLE_CHANNELS: dict[Callable[..., Any], bool] = {
    functional.dropout: False,
    torch.dropout: False,
    functional.dropout1d: True,
    functional.dropout2d: True,
    functional.dropout3d: True,
}


@dataclass(frozen=True)
class DropoutCall:
    """A call of functional dropout in training."""

    p: float
    whole_channels: bool
    shape: tuple[int, ...]  # of its argument

    def layer(self) -> AddressedDropout:
        """A layer that draws its masks."""
        layer = AddressedDropout(self.p, self.whole_channels)
        layer.sample_shape = self.shape[1:]
        return layer


class _Intercepting(TorchFunctionMode):
    """Multiplies by `mask_of(call)` in place of functional dropout."""

    def __init__(self, mask_of: Callable[[DropoutCall], Tensor]):
        super().__init__()
        self.mask_of = mask_of

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _WHOLE_CHANNELS:
            return function(*args, **kwargs)
        x, p, trains, inplace = _arguments(*args, **kwargs)
        if not trains or not p:
            return x
        mask = self.mask_of(DropoutCall(float(p), _WHOLE_CHANNELS[function], tuple(x.shape)))
        return x.mul_(mask) if inplace else x * mask


def _arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool | None = None
) -> tuple[Tensor, float, bool, bool]:
    """The arguments of functional dropout in order; `torch.dropout` names the third one `train`."""
    return input, p, training if train is None else train, inplace


class Recording(_Intercepting):
    """Context of a forward pass that adds its calls to `calls`, in order, and has no dropout."""

    def __init__(self) -> None:
        self.calls: list[DropoutCall] = []
        super().__init__(self._record)

    def _record(self, call: DropoutCall) -> Tensor:
        self.calls.append(call)
        return torch.ones(())


def regular(passes: list[list[DropoutCall]], batches: list[int]) -> bool:
    """Whether passes on batches of these sizes have the same calls, on activations whose first axis is the batch."""
    by_sample = [[(call.p, call.whole_channels, call.shape[1:]) for call in calls] for calls in passes]
    return all(calls == by_sample[0] for calls in by_sample) and all(
        call.shape[:1] == (batch,) for calls, batch in zip(passes, batches, strict=True) for call in calls
    )


class _Masked(_Intercepting):
    """Forward passes in training whose calls use the masks of these layers, one after the other."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__(self._next_mask)
        self.layers, self.calls, self.entered = layers, 0, False

    def enter(self, module: nn.Module, inputs: object) -> None:
        if module.training:
            self.calls, self.entered = 0, True
            self.__enter__()

    def leave(self, module: nn.Module, inputs: object, output: object) -> None:
        if self.entered:
            self.entered = False
            self.__exit__(None, None, None)
            if output is not None and self.calls != len(self.layers):
                self._differs(f"{self.calls} calls")

    def _next_mask(self, call: DropoutCall) -> Tensor:
        self.calls += 1
        if self.calls > len(self.layers):
            self._differs("more calls")
        layer = self.layers[self.calls - 1]
        assert isinstance(layer, AddressedDropout)
        if (call.p, call.shape[1:]) != (layer.p, layer.sample_shape):
            self._differs(f"call {self.calls} with p = {call.p:g} on samples of shape {call.shape[1:]}")
        return layer.mask

    def _differs(self, what: str) -> NoReturn:
        there = ", ".join(f"p = {layer.p} on {layer.sample_shape}" for layer in self.layers)
        raise RunError(
            f"the model's functional dropout differs from pass to pass: {what}, where its first pass has "
            f"{len(self.layers)} ({there}); use nn.Dropout layers where calls depend on values"
        )


def repeated_backwards(module: nn.Module, x: Tensor) -> bool:
    """Whether calls are repeated in the backward pass, out of order, as by `torch.utils.checkpoint`."""
    params, found = [part for part in module.parameters() if part.requires_grad], _RandomOperations()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        output = module(x)
        if output.requires_grad:
            with found:
                torch.autograd.grad(output.sum(), params, allow_unused=True)
    return found.any


class _RandomOperations(TorchDispatchMode):
    """Whether any operation draws random numbers; unlike a function mode, it sees those of a backward pass."""

    any = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in function.tags
        return function(*args, **(kwargs or {}))


def attach(module: nn.Module, calls: list[DropoutCall]) -> None:
    """Adds layers that draw the masks of these calls to a submodule without children, whose `forward` ignores them."""
    owner = next(part for part in module.modules() if not list(part.children()))
    layers = nn.ModuleList(call.layer() for call in calls)
    owner.add_module(_NAME, layers)
    masked = _Masked(layers)
    module.register_forward_pre_hook(masked.enter)
    module.register_forward_hook(masked.leave, always_call=True)
