"""The operations of a network's forward pass, recorded while it runs.

A forward pass in training mode runs once on a batch of two samples and once on three samples, under a mode that
intercepts every PyTorch function with its arguments: in modules, in functional form and as methods. Python control flow
that depends on shapes is followed (`torch.fx.symbolic_trace` stops at loops over `x.size()`). The two recordings must
agree, and the first axis of every activation must be the batch: then the operations hold for any batch.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from cfl_ray.core import global_generators
from cfl_ray.nn.network import Network

_BATCHES = (2, 3)
# functions of an activation that return no tensor and do not depend on its values
_QUERIES = {"size", "dim", "ndim", "shape", "dtype", "device", "numel", "__len__", "is_contiguous", "stride", "layout"}
_QUERIES |= {"is_floating_point", "ndimension", "nelement", "is_cuda", "requires_grad", "element_size", "is_complex"}
_QUERIES |= {"is_nested", "is_sparse"}
# functions that return their argument itself if they have no effect
_CONVERSIONS = {"contiguous", "float", "to", "type", "flatten", "reshape", "view_as", "expand", "long"}
_CONVERSIONS |= {"requires_grad_"}
RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"}
DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d"}


class Unsupported(Exception):
    """The reason why a network has no graph, with the module that causes it."""


@dataclass(frozen=True)
class _Numbered:
    index: int


class Value(_Numbered):
    """An activation. Number 0 is the input."""


class Parameter(_Numbered):
    """A trained tensor, by its number in `Network.params`."""


class Mask(_Numbered):
    """The mask of a dropout layer, by its number in `Network.dropouts`."""


@dataclass(frozen=True)
class Buffer:
    """A buffer of the network: a float buffer of its row, such as a running mean, or one that no pass changes."""

    name: str


@dataclass(frozen=True)
class Derived:
    """A function of parameters and buffers alone, such as a normalised weight. args, kwargs: as in `Call`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_CONSTANTS = Parameter | Buffer | Derived  # in a forward pass


@dataclass(frozen=True)
class Call:
    """An operation that returns an activation.

    args, kwargs: of the function; `Value`, `Parameter`, `Buffer`, `Mask` and `Derived` stand for tensors.
    """

    name: str  # of the function, without the underscore of an in-place function
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int
    place: str  # name of the module that calls it

    @property
    def references(self) -> list[Value | Parameter | Buffer | Mask]:
        """Activations and tensors among the arguments, in order."""
        references: list[Value | Parameter | Buffer | Mask] = []

        def add(value: object) -> object:
            if isinstance(value, Value | Parameter | Buffer | Mask):
                references.append(value)
            elif isinstance(value, Derived):
                replaced((value.args, value.kwargs), add)
            return value

        replaced((self.args, self.kwargs), add)
        return references

    @property
    def has_derived(self) -> bool:
        """Whether a tensor among the arguments is a function of parameters or buffers."""
        found: list[bool] = []
        replaced((self.args, self.kwargs), lambda value: found.append(isinstance(value, Derived)))
        return any(found)

    @property
    def inputs(self) -> list[int]:
        """Activations among the arguments, in order."""
        return [reference.index for reference in self.references if isinstance(reference, Value)]

    def applied(self, fill: Callable[[Any], Any]) -> Tensor:
        """The result of the function for other arguments: `fill` replaces each one, in the order of `references`."""

        def filled(value: Any) -> Any:
            return _applied(value, filled) if isinstance(value, Derived) else fill(value)

        return _applied(self, filled)

    def unsupported(self, reason: str) -> Unsupported:
        """The error that this operation is not supported."""
        return _unsupported(self.place, self.name, reason)

    def _literals(self) -> object:
        """The arguments, which must not depend on the batch; None for a reshape."""
        return None if self.name in RESHAPES else (self.args, self.kwargs)

    def agrees(self, other: "Call") -> bool:
        """Whether `other`, recorded on another batch, is the same operation."""
        same = self.name == other.name and self.inputs == other.inputs and self.output == other.output
        return same and self._literals() == other._literals()


@dataclass(frozen=True)
class Graph:
    """The operations of a forward pass, in order."""

    calls: tuple[Call, ...]
    shapes: tuple[tuple[int, ...], ...]  # of one sample, by activation
    output: int
    features: int | None = None  # the inputs of the last layer; None: they are no activation

    @property
    def users(self) -> Counter[int]:
        """Number of uses of each activation; the output has an additional use."""
        return Counter([index for call in self.calls for index in call.inputs] + [self.output])

    def first_linear(self) -> Call | None:
        """The linear layer that is the only user of the flattened samples and has the first parameter as weights.

        None without such a layer, or if another operation uses these weights.
        """
        users, value = self.users, 0
        weights = [reference for call in self.calls for reference in call.references if reference == Parameter(0)]
        for call in self.calls:
            if users[value] > 1 or call.inputs != [value]:
                return None
            if call.name not in RESHAPES:
                _, *parameters = call.references
                is_linear = call.name == "linear" and len(self.shapes[value]) == 1 and not call.has_derived
                is_linear = is_linear and all(isinstance(reference, Parameter) for reference in parameters)
                return call if is_linear and parameters[:1] == weights else None
            value = call.output
        return None

    def evaluated(self, after: Call, value: Tensor, parameters: Mapping[int, Tensor]) -> Tensor:
        """The output as a differentiable function of `value`, the result of the call `after`, and the parameters.

        The output must not depend on earlier activations in any other way. parameters: the trained tensors by number.
        """
        values = {after.output: value}

        def fill(argument: object) -> object:
            if isinstance(argument, Value):
                return values[argument.index]
            return parameters[argument.index] if isinstance(argument, Parameter) else argument

        for call in self.calls[self.calls.index(after) + 1 :]:
            if call.name in RESHAPES:
                values[call.output] = values[call.inputs[0]].reshape(len(value), *self.shapes[call.output])
            else:
                values[call.output] = call.applied(fill)
        return values[self.output]


def _applied(call: Call | Derived, fill: Callable[[Any], Any]) -> Any:
    return call.function(*replaced(call.args, fill), **replaced(call.kwargs, fill))


def replaced(value: Any, by: Callable[[Any], Any]) -> Any:
    """Nested tuples, lists and dictionaries with every element replaced."""
    if isinstance(value, tuple | list):
        return type(value)(replaced(part, by) for part in value) if type(value) in (tuple, list) else by(value)
    if isinstance(value, dict):
        return {key: replaced(part, by) for key, part in value.items()}
    return by(value)


def _unsupported(place: str, name: str, reason: str) -> Unsupported:
    return Unsupported(f"{f'module {place}' if place else 'its forward pass'}: {name} {reason}")


_GRAPHS: dict[Hashable, Graph] = {}  # of this process, by key of the network and its precision


def graph_of(network: Network) -> Graph:
    """The graph of a network in training, recorded once for those of the same key. Raises Unsupported."""
    key = network.key and (network.key, network.precision)
    if key in _GRAPHS:
        return _GRAPHS[key]
    graph = _recorded(network)
    if key is not None:
        _GRAPHS[key] = graph
    return graph


def _recorded(network: Network) -> Graph:
    if network.side_effect:
        raise Unsupported(network.side_effect)
    first, second = _recordings(network, _BATCHES, training=True)
    for call, other in zip(first.calls, second.calls, strict=False):
        if not call.agrees(other):
            raise call.unsupported(f"has other arguments for batches of {_BATCHES[0]} and {_BATCHES[1]} samples")
    if len(first.calls) != len(second.calls) or first.shapes != second.shapes or first.output != second.output:
        raise Unsupported(f"its forward pass differs between batches of {_BATCHES[0]} and {_BATCHES[1]} samples")
    return first if first.features == second.features else replace(first, features=None)


def is_graph_in_evaluation(graph: Graph, network: Network) -> bool:
    """Whether this graph of the network is that of a pass in evaluation mode; False for networks with dropout."""
    if network.dropouts:
        return False
    try:
        (other,) = _recordings(network, _BATCHES[:1], training=False)
    except Unsupported:
        return False
    if len(graph.calls) != len(other.calls) or (graph.output, graph.features) != (other.output, other.features):
        return False
    return all(call.agrees(same) for call, same in zip(graph.calls, other.calls, strict=True))


def _recordings(network: Network, batches: Sequence[int], training: bool) -> list[Graph]:
    """The graphs of passes with these batches, after which the network is in training mode, with the row of before."""
    row_P, masks = network.row().clone(), [layer.mask for layer in network.dropouts.values()]
    try:
        with global_generators.kept(), torch.enable_grad():
            return [_record(network, batch, training) for batch in batches]
    finally:
        network.module.train()
        network.load(row_P)
        for layer, mask in zip(network.dropouts.values(), masks, strict=True):
            layer.mask = mask


def _record(network: Network, batch: int, training: bool) -> Graph:
    for layer in network.dropouts.values():
        layer.mask = torch.ones((), device=network.device)  # tensors that identify the layers
    x = network.input(torch.zeros(batch, *network.input_shape, dtype=network.dtype))
    recorder = _Recorder(network, x)
    network.module.train(training)
    with recorder.naming_modules(network.module), recorder:
        output = network.trained_outputs(x)
    index = recorder.values.get(id(output))
    if not isinstance(output, Tensor) or index is None:
        raise Unsupported("its output is not made by recorded functions of PyTorch")
    return Graph(tuple(recorder.calls), tuple(recorder.shapes), index, recorder.features)


class _Recorder(TorchFunctionMode):
    """Records function calls with activations among their arguments."""

    def __init__(self, network: Network, x: Tensor):
        super().__init__()
        self.batch, self.alive, self.place = len(x), [x], ""
        self.calls: list[Call] = []
        self.last = network.module.get_submodule(network.spec.layers[-1])
        self.features: int | None = None
        self.shapes = [tuple(x.shape[1:])]
        self.values = {id(x): 0}  # activations by id of the tensor
        self.storages = {0: x.untyped_storage().data_ptr()}  # memory of each activation
        self.overwritten: set[int] = set()  # ids of tensors whose memory was overwritten
        self.versions: dict[int, int] = {}  # of derived tensors, which grow when they are changed in place
        self.known: dict[int, Parameter | Buffer | Mask | Derived] = {}
        self.known |= {id(p): Parameter(i) for i, p in enumerate(network.params)}
        self.known |= {id(b): Buffer(name) for name, b in network.constant_buffers.items()}
        self.known |= {id(b): Buffer(name) for name, b in network.module.named_buffers() if name in network.spec.names}
        self.known |= {id(layer.mask): Mask(i) for i, layer in enumerate(network.dropouts.values())}
        self.frozen = {id(p): name for name, p in network.module.named_parameters() if not p.requires_grad}

    @contextmanager
    def naming_modules(self, module: nn.Module) -> Iterator[None]:
        """Context in which `place` is the name of the module whose forward pass runs."""
        names, stack = {id(child): name for name, child in module.named_modules()}, [""]

        def enter(child: nn.Module, inputs: tuple[Any, ...]) -> None:
            stack.append(names.get(id(child), stack[-1]))
            self.place = stack[-1]
            if child is self.last and inputs and id(inputs[0]) not in self.overwritten:
                self.features = self.values.get(id(inputs[0]))

        def leave(*_: object) -> None:
            stack.pop()
            self.place = stack[-1]

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.__self__.__name__ if function.__name__ == "__get__" else function.__name__
        tensors: list[Tensor] = []
        replaced((args, kwargs), lambda part: tensors.append(part) if isinstance(part, Tensor) else None)
        if any(id(tensor) in self.overwritten for tensor in tensors):
            raise _unsupported(self.place, name, "uses an activation whose memory another operation has overwritten")
        if not any(id(tensor) in self.values for tensor in tensors):
            return self._without_activations(name, function, args, kwargs, tensors)
        before = torch.get_rng_state()
        result = function(*args, **kwargs)
        if name in _QUERIES and not isinstance(result, Tensor):
            return result
        if not isinstance(result, Tensor):
            kind = "several values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
            raise _unsupported(self.place, name, f"returns {kind}")
        trains = kwargs.get("training", args[2] if len(args) > 2 else True)  # of dropout(input, p, training, inplace)
        if id(result) in self.values and (name in _CONVERSIONS or (name in DROPOUTS and not trains)):
            return result
        if not torch.equal(before, torch.get_rng_state()):
            raise _unsupported(self.place, name, "draws random numbers")
        self._check(name, tensors, result)
        arguments, options = replaced((args, kwargs), partial(self._reference, name))
        self._add(Call(name.strip("_"), function, arguments, options, len(self.shapes), self.place), result)
        return result

    def _without_activations(
        self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """The result of a function of none of the activations, which may be one of parameters and buffers."""
        versions = [tensor._version for tensor in tensors]
        before = torch.get_rng_state()
        result = function(*args, **kwargs)
        for tensor, version in zip(tensors, versions, strict=True):
            if isinstance(self.known.get(id(tensor)), Buffer) and tensor._version != version:
                raise _unsupported(self.place, name, "changes a buffer")
        if isinstance(result, Tensor) and torch.equal(before, torch.get_rng_state()):
            self._derive(function, args, kwargs, tensors, result)
        return result

    def _derive(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], result: Tensor
    ) -> None:
        """Takes up the result of a function of parameters and buffers; not one in place, or without a gradient."""
        known = tensors and all(isinstance(self._known(tensor), _CONSTANTS) for tensor in tensors)
        is_new = not any(result is tensor for tensor in tensors)
        passes = result.requires_grad == any(tensor.requires_grad for tensor in tensors) and torch.is_grad_enabled()
        if known and is_new and passes:
            args, kwargs = replaced((args, kwargs), self._constant)
            self.known[id(result)] = Derived(function, args, kwargs)
            self.versions[id(result)] = result._version
            self.alive.append(result)

    def _constant(self, part: Any) -> Any:
        return self._known(part) if isinstance(part, Tensor) else part

    def _known(self, tensor: Tensor) -> "Parameter | Buffer | Mask | Derived | None":
        """The reference to a tensor; None for other tensors, and for derived ones that were changed in place."""
        if self.versions.get(id(tensor), tensor._version) != tensor._version:
            return None
        return self.known.get(id(tensor))

    def _check(self, name: str, tensors: list[Tensor], result: Tensor) -> None:
        """Raises Unsupported for an operation on these tensors whose result is not an activation."""
        if any(result is tensor for tensor in tensors) and id(result) not in self.values:
            raise _unsupported(self.place, name, "changes a tensor in place that is no activation")
        if result.shape[:1] != (self.batch,):
            what = f"shape {tuple(result.shape)} for a batch of {self.batch} samples"
            raise _unsupported(self.place, name, f"gives {what}; the first axis has to be the batch")
        if result.dtype != torch.float32:
            kind = str(result.dtype).removeprefix("torch.")
            raise _unsupported(self.place, name, f"gives a tensor of {kind}; only those of float32 are written out")
        if result.requires_grad != any(tensor.requires_grad for tensor in tensors) or not torch.is_grad_enabled():
            raise _unsupported(self.place, name, "passes no gradient on")

    def _add(self, call: Call, result: Tensor) -> None:
        """Adds an operation and its activation."""
        in_place = id(result) in self.values
        self.calls.append(_out_of_place(call) if in_place else call)
        if in_place:
            memory = self.storages[self.values[id(result)]]
            self.overwritten |= {key for key, value in self.values.items() if self.storages[value] == memory}
            self.overwritten.remove(id(result))
        self.values[id(result)] = call.output
        self.storages[call.output] = result.untyped_storage().data_ptr()
        self.alive.append(result)  # so that no other tensor has its id
        self.shapes.append(tuple(result.shape[1:]))

    def _reference(self, name: str, tensor: Any) -> Any:
        """The `Value`, `Parameter`, `Buffer`, `Mask` or `Derived` of a tensor; any other argument unchanged."""
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) in self.values:
            return Value(self.values[id(tensor)])
        if known := self._known(tensor):
            return known
        if id(tensor) in self.frozen:
            raise _unsupported(self.place, name, f"uses the frozen parameter {self.frozen[id(tensor)]}")
        raise _unsupported(self.place, name, "uses a tensor that is neither an activation nor a trained parameter")


def _out_of_place(call: Call) -> Call:
    """The out-of-place form of an operation. Raises Unsupported if there is none."""
    kwargs = {key: value for key, value in call.kwargs.items() if key != "inplace"}
    name = call.function.__name__
    if name.endswith("_") and not name.endswith("__"):
        plain = getattr(torch.Tensor, name[:-1], None)
        if plain is None:
            raise call.unsupported("changes an activation in place")
        return replace(call, function=plain, kwargs=kwargs)
    if "inplace" in call.kwargs:
        return replace(call, kwargs=kwargs)
    raise call.unsupported("changes an activation in place")
