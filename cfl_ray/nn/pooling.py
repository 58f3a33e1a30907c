"""Max pooling of large batches without gradients: on a CPU in a tenth of the time of PyTorch's function.

PyTorch's kernel for images with channels first compares value by value: in the evaluation of a LeNet-5 it takes more
time than the convolutions. Maxima of strided views use vector instructions and are the same values, so no bit of an
output changes.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_POOLS = (functional.max_pool2d, torch.max_pool2d)
_LEAST = 10_000  # values; calls for fewer are no faster
_HALVING = (2, 2)  # kernel and stride that are faster also with channels last

Size = int | Sequence[int]


class FastPooling(TorchFunctionMode):
    """Context in which max pooling without padding, in a module or function, is computed as maxima of views.

    calls: calls of max pooling so far. A network without any saves the context, which looks at each operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _POOLS:
            self.calls += 1
            if (out := max_pool(*args, **kwargs)) is not None:
                return out
        return func(*args, **kwargs)


def max_pool(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """As `torch.nn.functional.max_pool2d`; None for what that function computes as fast, or alone.

    The names of the parameters are those of PyTorch.
    """
    is_plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not ceil_mode and not return_indices
    size = _pair(kernel_size)
    step = size if stride is None or stride in ((), []) else _pair(stride)
    is_large = input.device.type == "cpu" and input.is_floating_point() and input.numel() >= _LEAST
    is_faster = input.is_contiguous() or size == step == _HALVING
    if not (is_plain and is_large and is_faster) or input.requires_grad:
        return None
    if size == (1, 1) or any(kernel > length for kernel, length in zip(size, input.shape[-2:], strict=True)):
        return None  # a copy, and an error of PyTorch
    return _maxima(_maxima(input, -2, size[0], step[0]), -1, size[1], step[1])


def _maxima(x: Tensor, axis: int, kernel: int, step: int) -> Tensor:
    """The maxima of windows along one axis."""
    reach = (x.shape[axis] - kernel) // step * step + 1  # from the first window to the last
    every = (slice(None, None, step),) if axis == -1 else (slice(None, None, step), slice(None))
    return reduce(torch.maximum, (x.narrow(axis, first, reach)[(..., *every)] for first in range(kernel)))


def _pair(size: Size) -> tuple[int, int]:
    """Height and width."""
    if isinstance(size, int):
        return size, size
    height, width = size if len(size) == 2 else (size[0], size[0])
    return height, width
