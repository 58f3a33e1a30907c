"""Functional dropout with masks by key, as of dropout layers.

The trial passes of a network record its calls of `torch.nn.functional.dropout` and its relatives. From then on, call i
of a forward pass in training multiplies by the mask of layer i of a list, for which engines draw masks as for the
dropout layers of the module.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cfl_ray.core import global_generators
from cfl_ray.errors import RunError
from cfl_ray.nn.layers import AddressedDropout
from cfl_ray.nn.side_effects import ObservingMode

# function -> number of axes of an argument with which PyTorch drops whole channels of each sample; None: single values
_CHANNELS: dict[Callable[..., Any], tuple[int, ...] | None] = {
    functional.dropout: None,
    torch.dropout: None,
    functional.dropout1d: (3,),
    functional.dropout2d: (3, 4),
    functional.dropout3d: (5,),
}


@dataclass(frozen=True)
class DropoutCall:
    """A call of functional dropout in training."""

    p: float
    whole_channels: bool
    shape: tuple[int, ...]  # of its argument
    by_sample: bool  # whether it can have a mask by sample: not in place, and not without a batch

    def layer(self) -> AddressedDropout:
        """A layer that draws its masks."""
        layer = AddressedDropout(self.p, self.whole_channels)
        layer.sample_shape = self.shape[1:]
        return layer


class _Intercepting(TorchFunctionMode):
    """Calls `dropped(x, call)` in place of functional dropout in training."""

    def __init__(self, dropped: Callable[[Tensor, DropoutCall], Tensor]):
        super().__init__()
        self.dropped = dropped

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _CHANNELS:
            return function(*args, **kwargs)
        x, p, trains, inplace = _arguments(*args, **kwargs)
        if not trains or not p:
            return x
        axes = _CHANNELS[function]
        by_sample = not inplace and (axes is None or x.ndim in axes)
        return self.dropped(x, DropoutCall(float(p), axes is not None, tuple(x.shape), by_sample))


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

    def _record(self, x: Tensor, call: DropoutCall) -> Tensor:
        self.calls.append(call)
        return x


def regular(passes: Sequence[Sequence[DropoutCall]], batches: Sequence[int]) -> bool:
    """Whether passes on batches of these sizes have the same calls, all of which can have masks by sample."""
    by_sample = [[(call.p, call.whole_channels, call.shape[1:]) for call in calls] for calls in passes]
    return all(calls == by_sample[0] for calls in by_sample) and all(
        call.by_sample and call.shape[:1] == (batch,)
        for calls, batch in zip(passes, batches, strict=True)
        for call in calls
    )


class Masked(_Intercepting):
    """Context of a forward pass whose calls multiply by masks of these layers, one after the other.

    Raises RunError if the calls are not those of the layers.
    """

    def __init__(self, layers: Sequence[AddressedDropout], masks: Sequence[Tensor]):
        super().__init__(self._masked)
        self.layers, self.masks, self.calls = layers, masks, 0

    def _masked(self, x: Tensor, call: DropoutCall) -> Tensor:
        self.calls += 1
        if self.calls > len(self.layers):
            self._differ(f"there are more than {len(self.layers)}")
        layer = self.layers[self.calls - 1]
        if not call.by_sample or (call.p, call.whole_channels) != (layer.p, layer.whole_channels):
            self._differ(f"number {self.calls} drops {call.p:g} of shape {call.shape}")
        return layer.masked(x, self.masks[self.calls - 1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and self.calls < len(self.layers):
            self._differ(f"there are {self.calls}")

    def _differ(self, what: str) -> NoReturn:
        expected = ", ".join(f"{layer.p:g} of shape (batch, *{layer.sample_shape})" for layer in self.layers)
        raise RunError(
            f"the model's calls of functional dropout are not the same in all passes: {what}; its first passes drop "
            f"{expected}; calls must not depend on values or on the size of the batch"
        )


def repeated_backwards(module: nn.Module, x: Tensor) -> bool:
    """Whether the backward pass draws random numbers: it repeats calls, as with `torch.utils.checkpoint`.

    Also if there is no backward pass.
    """
    params, operations = [part for part in module.parameters() if part.requires_grad], _RandomOperations()
    with global_generators.kept(), torch.enable_grad():
        try:
            output = module(x)
            with operations:
                torch.autograd.grad(output.sum(), params, allow_unused=True)
        except RuntimeError:
            return True
    return operations.any


class _RandomOperations(ObservingMode):
    """Whether any operation draws random numbers; unlike a function mode, it sees those of a backward pass."""

    any = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        return function(*args, **(kwargs or {}))
