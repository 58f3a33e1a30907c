"""A function of tensors as the list of PyTorch's operations that it carries out.

The list needs no code of the user: another process can carry it out, or compile it, and its text is a key under which
the result is kept. PyTorch's own tracer has the same list, but imports the compiler: 2 s of CPU and 100 MB in each
process.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cfl_ray.nn.side_effects import ObservingMode

_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
_ATTENTION = "aten::_safe_softmax"  # of `scaled_dot_product_attention` by single operations
_READING = {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage"}  # of a tensor, no operations
_CONVOLUTIONS = {"aten::convolution", "aten::mkldnn_convolution"}


class NotRecordable(Exception):
    """The function does more than operations on its tensors, or other operations for other values. A line."""


@dataclass(frozen=True)
class Ref:
    """A tensor of a recording, by its number: inputs first, then results in order."""

    number: int


@dataclass(frozen=True)
class TensorLayout:
    """The shape, strides and type of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorLayout":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self) -> Tensor:
        """A tensor of this layout, all zero."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype).zero_()


@dataclass(frozen=True)
class RecordedCall:
    """A call of an operation of PyTorch."""

    name: str  # such as "aten::mm"
    overload: str  # such as "default"
    args: tuple[Any, ...]  # with a `Ref` in place of each tensor
    kwargs: tuple[tuple[str, Any], ...]
    results: Any  # the `Ref` of its result, or a list of them

    @property
    def function(self) -> Any:
        namespace, name = self.name.split("::")
        return getattr(getattr(getattr(torch.ops, namespace), name), self.overload)


@dataclass
class RecordedCounts:
    """The work of the operations."""

    products: int = 0  # multiplications of matrix products
    convolved: int = 0  # and of convolutions
    calls: int = 0  # other operations that make new numbers
    written: int = 0  # the numbers that they make
    attended: int = 0  # numbers of the largest matrices of attention


@dataclass(frozen=True)
class RecordedFunction:
    """The operations of a function of tensors with these layouts, and its outputs."""

    inputs: tuple[TensorLayout, ...]
    operations: tuple[RecordedCall, ...]
    outputs: tuple[Ref, ...]
    counts: RecordedCounts = field(default_factory=RecordedCounts, compare=False)

    @cached_property
    def text(self) -> str:
        """The operations as JSON. Recordings of equal text compute the same, in all processes."""
        inputs = [(part.shape, part.strides, str(part.dtype)) for part in self.inputs]
        calls = [(c.name, c.overload, c.args, dict(c.kwargs), c.results) for c in self.operations]
        return json.dumps([inputs, calls, [ref.number for ref in self.outputs]], default=_encoded)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @classmethod
    def of(cls, text: str) -> Self:
        """The recording with this text."""
        inputs, calls, outputs = json.loads(text, object_hook=_decoded)
        layouts = tuple(TensorLayout(tuple(s), tuple(t), getattr(torch, d.partition(".")[2])) for s, t, d in inputs)
        operations = tuple(RecordedCall(n, o, tuple(a), tuple(k.items()), r) for n, o, a, k, r in calls)
        return cls(layouts, operations, tuple(map(Ref, outputs)))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, computed operation by operation."""
        values: dict[int, Any] = dict(enumerate(inputs))

        def filled(value: Any) -> Any:
            if isinstance(value, Ref):
                return values[value.number]
            if isinstance(value, list | tuple):
                return type(value)(filled(part) for part in value)
            return value

        def keep(results: Any, made: Any) -> None:
            if isinstance(results, Ref):
                values[results.number] = made
            elif isinstance(results, list):
                for part, one in zip(results, made, strict=True):
                    keep(part, one)

        for operation in self.operations:
            kwargs = {name: filled(value) for name, value in operation.kwargs}
            keep(operation.results, operation.function(*filled(operation.args), **kwargs))
        return [values[ref.number] for ref in self.outputs]


def _encoded(value: object) -> dict[str, Any]:
    """The JSON of an argument that JSON lacks. Raises NotRecordable for one that no text stands for."""
    if isinstance(value, Ref):
        return {"tensor": value.number}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).partition(".")[2]}
    raise NotRecordable(f"an operation has an argument of {type(value).__name__}")


def _decoded(value: dict[str, Any]) -> Any:
    match value:
        case {"tensor": int(number)}:
            return Ref(number)
        case {"device": str(name)}:
            return torch.device(name)
        case {"torch": str(name)}:
            return getattr(torch, name)
    return value


def record(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> tuple[RecordedFunction, tuple[Tensor, ...]]:
    """The operations of `function(*inputs)`, and further tensors that it uses, such as frozen parameters.

    The further tensors are inputs of the recording, after the others. Raises NotRecordable.
    """
    recorder = _Recorder(inputs)
    with recorder, _Reads(recorder):
        outputs = function(*inputs)
    return recorder.recording(outputs)


class _Recorder(ObservingMode):
    """Records operations. All tensors are kept to the end, so that none has the address of another."""

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.inputs = len(inputs)
        self.varying = {_memory(tensor) for tensor in inputs}  # memory whose values depend on the inputs
        self.tensors: list[Tensor] = list(inputs)
        self.numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
        self.versions = {id(tensor): tensor._version for tensor in inputs}
        self.further: list[int] = []  # numbers of further inputs
        self.operations: list[RecordedCall] = []
        self.counts = RecordedCounts()
        self.reason: str | None = None  # why there is no recording; the function may catch the error

    def refuse(self, name: str) -> NotRecordable:
        """The error of a function that reads values on which its operations may depend."""
        self.reason = f"its passes read values ({name}), so other values may need other operations"
        return NotRecordable(self.reason)

    def number(self, tensor: Tensor) -> int:
        return self.numbers[id(tensor)]

    def _ref(self, value: Any, new: bool) -> Any:
        """The value with a `Ref` in place of each tensor; a tensor that no operation has made is a further input."""
        if isinstance(value, list | tuple):
            parts = [self._ref(part, new) for part in value]
            return parts if new or isinstance(value, list) else tuple(parts)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.versions[id(value)] = value._version
            if not new:
                self.further.append(self.numbers[id(value)])
        return Ref(self.numbers[id(value)])

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = function._schema.name
        tags = set(getattr(function, "tags", ()))
        used = set(map(_memory, _tensors_in((args, tuple(kwargs.values())))))
        varies = not self.varying.isdisjoint(used) or torch.Tag.nondeterministic_seeded in tags
        if varies and (torch.Tag.data_dependent_output in tags or _selects(function, tags, args)):
            raise self.refuse(name)
        given = self._ref(args, False), tuple((key, self._ref(value, False)) for key, value in kwargs.items())
        result = function(*args, **kwargs)
        made, writes = set(map(_memory, _tensors_in(result))), function._schema.is_mutable
        if not made and not writes:  # a value of constants, such as whether a mask is causal
            return result
        if varies:
            self.varying |= made | (used if writes else set())
        self.operations.append(RecordedCall(name, function._overloadname, *given, self._ref(result, True)))
        self._count(function, args, result)
        return result

    def _count(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        name, counts = function._schema.name, self.counts
        if name in _PRODUCTS:
            left, right = args[-2:] if len(args) < 4 else args[1:3]
            counts.products += left.numel() * right.shape[-1]
        elif name == "aten::convolution_backward":  # for the gradients of the inputs and of the weights
            counts.convolved += 2 * args[0].numel() * math.prod(args[2].shape[1:])
        elif name in _CONVOLUTIONS:
            counts.convolved += result.numel() * math.prod(args[1].shape[1:])
        elif all(returned.alias_info is None for returned in function._schema.returns):  # no view
            counts.calls += 1
            counts.written += sum(part.numel() for part in _tensors_in(result))
        if name == _ATTENTION:
            counts.attended = max(counts.attended, result.numel())

    def recording(self, outputs: Sequence[Tensor]) -> tuple[RecordedFunction, tuple[Tensor, ...]]:
        if self.reason:
            raise NotRecordable(self.reason)
        further = [self.tensors[number] for number in self.further]
        if any(tensor._version != self.versions[id(tensor)] for tensor in [*self.tensors[: self.inputs], *further]):
            raise NotRecordable("its passes change tensors that they are given, such as buffers")
        order = [*range(self.inputs), *self.further]
        renumbered = {number: place for place, number in enumerate(order)}
        for number in range(len(self.tensors)):
            renumbered.setdefault(number, len(renumbered))

        def moved(value: Any) -> Any:
            if isinstance(value, Ref):
                return Ref(renumbered[value.number])
            return type(value)(moved(part) for part in value) if isinstance(value, list | tuple) else value

        operations = tuple(
            RecordedCall(call.name, call.overload, moved(call.args), moved(call.kwargs), moved(call.results))
            for call in self.operations
        )
        layouts = tuple(TensorLayout.of(self.tensors[number]) for number in order)
        results = tuple(Ref(renumbered[self.number(output)]) for output in outputs)
        recording = RecordedFunction(layouts, operations, results, self.counts)
        _ = recording.text  # raises NotRecordable
        return recording, tuple(tensor.detach() for tensor in further)


class _Reads(TorchFunctionMode):
    """Finds values that the function takes without an operation, as `numpy` and `tolist` do."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _READING and not self.recorder.varying.isdisjoint(map(_memory, _tensors_in(args))):
            raise self.recorder.refuse(name)
        return function(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)


def _selects(function: Any, tags: set[Any], args: tuple[Any, ...]) -> bool:
    """Whether the shape of the result depends on values, as with masks as indices."""
    if torch.Tag.dynamic_output_shape not in tags:
        return False
    if not function._schema.name.startswith("aten::index"):
        return True
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in args[1])
