"""Functions that lose digits in PyTorch's channels-last memory layout.

The layout of images in memory may make a network faster, but not change its results beyond rounding. Some of PyTorch's
kernels for channels-last images are less exact than those for contiguous ones: group normalisation computes a variance
as a difference of squares, batch normalisation adds up values one by one. Far from zero few digits are left. So each
function that a forward pass applies to images is tried, with its backward pass, on values far from zero in both
layouts. The result depends on the network alone, never on its weights, on data or on times.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cfl_ray.nn.fingerprints import fingerprint_of

OFFSETS = (1e2, 1e4)  # means of the tried values, whose standard deviation is 1
RATIO = 8.0  # of the errors in both layouts from which a function is less exact in channels-last
ROUNDING = 2e-5  # relative error that is called rounding
_WIDE = 32  # channels from which oneDNN is faster channels-last (measured: 1.25 times on a CNN with 32 and 64)
_POSITIONS = 4096  # of an image, times the samples of a batch: sums over fewer positions hide errors
# Products, most of the time of a forward pass: oneDNN's are equally exact in both layouts.
_PRODUCTS = {"conv1d", "conv2d", "conv_transpose2d", "linear", "matmul", "bmm"}
# Without sums over positions, if all images have one shape: a value or gradient depends on few others.
_BY_VALUE = {
    *("relu", "leaky_relu", "relu6", "elu", "celu", "selu", "silu", "gelu", "mish", "hardswish", "hardsigmoid"),
    *("hardtanh", "sigmoid", "tanh", "softplus", "clone", "contiguous", "flatten", "reshape", "view", "cat", "concat"),
    *("add", "iadd", "radd", "sub", "isub", "rsub", "mul", "imul", "rmul", "max_pool2d", "dropout"),
    *("maximum", "minimum", "get", "getitem"),  # get: of an attribute such as `shape` or `mT`
}
_tried: dict[str, bool] = {}  # whether calls, with the values of their arguments, lose digits; of all modules


def suits_channels_last(module: nn.Module) -> bool:
    """Whether a CPU computes the module's convolutions faster in channels-last layout."""
    return any(isinstance(m, nn.Conv2d) and m.out_channels >= _WIDE for m in module.modules())


@dataclass(frozen=True)
class Stand:
    """Stands for a float tensor of a call. image: an activation of four axes."""

    shape: tuple[int, ...]
    image: bool = False

    def tensor(self, values: "_Values") -> Tensor:
        shape = (values.batch, *self.shape[1:]) if self.image and values.batch else self.shape
        drawn = torch.randn(shape, generator=values.generator) + (values.offset if self.image else 0)
        layout = values.layout if self.image else torch.contiguous_format
        leaf = torch.empty(shape, dtype=values.dtype, memory_format=layout).copy_(drawn).requires_grad_()
        values.leaves.append(leaf)
        return leaf.clone(memory_format=torch.preserve_format)  # which functions in place may write to


class _Values:
    """Values of a trial, equal for all layouts and types. batch: samples of each image; 0: as recorded."""

    def __init__(self, offset: float, batch: int, layout: torch.memory_format, dtype: torch.dtype):
        self.offset, self.batch, self.layout, self.dtype = offset, batch, layout, dtype
        self.generator = torch.Generator().manual_seed(0)
        self.leaves: list[Tensor] = []


@dataclass(frozen=True)
class FunctionCall:
    """A function of PyTorch with arguments in which a `Stand` stands for each float tensor that is no buffer."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # args, kwargs

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "").strip("_")

    @property
    def samples(self) -> list[Stand]:
        return list(_samples_in(self.arguments))

    @property
    def batch(self) -> int:
        """Number of samples with which images have enough positions."""
        return max(math.ceil(_POSITIONS / max(math.prod(s.shape[2:]), 1)) for s in self.samples if s.image)

    def results(self, offset: float, batch: int, layout: torch.memory_format, dtype: torch.dtype) -> list[Tensor]:
        """Outputs and gradients for values with this mean; none if the function draws random numbers."""
        values = _Values(offset, batch, layout, dtype)
        before = torch.get_rng_state()
        with torch.enable_grad():
            args, kwargs = _filled(self.arguments, values)
            made = self.function(*args, **kwargs)
            parts = made if isinstance(made, tuple | list) else [made]
            outputs = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
            if not torch.equal(before, torch.get_rng_state()):
                return []
            if not any(part.requires_grad for part in outputs):
                return [part.detach().double() for part in outputs]
            outputs = [part for part in outputs if part.requires_grad]
            upstream = [torch.randn(part.shape, generator=values.generator).to(part.dtype) for part in outputs]
            grads = torch.autograd.grad(outputs, values.leaves, upstream, materialize_grads=True)
        return [part.detach().double() for part in (*outputs, *grads)]

    def errors(self, offset: float, batch: int) -> list[tuple[float, float]]:
        """Relative errors of outputs and gradients in the contiguous and in the channels-last layout."""
        exact = self.results(offset, batch, torch.contiguous_format, torch.float64)
        plain = self.results(offset, batch, torch.contiguous_format, torch.float32)
        last = self.results(offset, batch, torch.channels_last, torch.float32)
        return [(_error(a, x), _error(b, x)) for a, b, x in zip(plain, last, exact, strict=True)]

    def loses_digits(self) -> bool:
        """Whether it is less exact in channels-last, by more than rounding."""
        for batch in (self.batch, 0):
            with suppress(Exception):  # of user code and of PyTorch, for another batch or for these values
                return any(
                    last > ROUNDING and not last <= RATIO * plain
                    for offset in OFFSETS
                    for plain, last in self.errors(offset, batch)
                )
        return False


def _error(values: Tensor, exact: Tensor) -> float:
    """Root mean square of the errors, relative to that of the exact values."""
    return float((values - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-300))


class _Calls(TorchFunctionMode):
    """Records the functions of images, each once for equal arguments."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.weights = {id(parameter) for parameter in module.parameters()}
        self.buffers = {id(buffer) for buffer in module.buffers()}
        self.calls: dict[str, FunctionCall] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = _mapped((args, kwargs or {}), self._sample)
        call = FunctionCall(function, arguments)
        samples = call.samples
        if any(sample.image for sample in samples) and not (
            call.name in _PRODUCTS or (call.name in _BY_VALUE and len({sample.shape for sample in samples}) == 1)
        ):
            described = _mapped(arguments, lambda part: tuple(part.shape) if isinstance(part, Tensor) else part)
            self.calls.setdefault(f"{function} {described}", call)
        return function(*args, **(kwargs or {}))

    def _sample(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point() or id(value) in self.buffers:
            return value.clone()
        return Stand(tuple(value.shape), value.ndim == 4 and id(value) not in self.weights)


def recorded_calls(module: nn.Module, x: Tensor) -> list[FunctionCall]:
    """The functions of images in forward passes in training and in evaluation, without products.

    The passes change the module's buffers. If one fails, which other checks find, its functions until then.
    """
    calls = _Calls(module)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for training in (True, False):
            with suppress(Exception), calls:
                module.train(training)(x.clone())
    return list(calls.calls.values())


def inexact_functions(module: nn.Module, x: Tensor) -> frozenset[str]:
    """Names of the functions in forward passes of the module that lose digits in channels-last.

    x: a few samples. The passes change the module's buffers. Scripted modules hide their functions, and so lose digits.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        return frozenset({"script"})
    names = set[str]()
    with torch.random.fork_rng(devices=[]):
        for call in recorded_calls(module, x):
            if call.name not in names and _loses_digits(call):
                names.add(call.name)
    return frozenset(names)


def _loses_digits(call: FunctionCall) -> bool:
    """`call.loses_digits()`, computed once in a process, which makes several networks of a module."""
    values = _mapped(call.arguments, lambda part: fingerprint_of(part) if isinstance(part, Tensor) else part)
    key = f"{call.function} {values}"
    if key not in _tried:
        _tried[key] = call.loses_digits()
    return _tried[key]


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested tuples, lists and dictionaries with every element changed."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    return change(value)


def _samples_in(value: Any) -> Iterator[Stand]:
    found: list[Stand] = []
    _mapped(value, lambda part: found.append(part) if isinstance(part, Stand) else None)
    return iter(found)


def _filled(arguments: tuple[Any, ...], values: _Values) -> Any:
    def fill(part: Any) -> Any:
        if isinstance(part, Stand):
            return part.tensor(values)
        if isinstance(part, Tensor):
            return part.to(values.dtype, copy=True) if part.is_floating_point() else part.clone()
        return part

    return _mapped(arguments, fill)
