"""Forward and backward passes over a network's graph.

The passes of the operations in `nn.operations` are written out; every other function is differentiated separately by
autograd. Gradients are summed at activations with several users. Biases and activation functions are applied after a
max pooling that follows them, to a quarter of the values: they are monotone, so both orders select the same values.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from cfl_ray.nn.graph import (
    RESHAPES,
    Buffer,
    Call,
    Graph,
    Mask,
    Parameter,
    Unsupported,
    Value,
    graph_of,
    is_graph_in_evaluation,
)
from cfl_ray.nn.network import Network
from cfl_ray.nn.operations import (
    Activation,
    Add,
    Array,
    AvgPool,
    Bias,
    Buffers,
    ChannelsLastConvolution,
    Concatenation,
    Differentiated,
    Dropout,
    GroupNorm,
    Join,
    Layer,
    Linear,
    MaxPool,
    PatchConvolution,
    Reshape,
    array_of,
    mean_cross_entropy,
    tensor_of,
)


class LossGradients(NamedTuple):
    """A loss, and its gradients at the mean loss, the outputs and the features; None: it does not depend on them."""

    loss: float
    at_mean_loss: Tensor | None
    at_outputs: Tensor | None
    at_features: Tensor | None


# The loss of a batch, of the task's mean loss, the features (B, F) and the outputs (B, ...)
LossOnFeatures = Callable[[Tensor, Tensor, Tensor], LossGradients]

# Samples whose sizes are multiples of 1 KiB, as those of CIFAR-10, have their values in few of the cache's sets: as
# the rows of a matrix they are transposed three to four times as fast if they are _APART values apart.
_SAME_LINES, _APART = 256, 16

# elementwise functions, for which the order of the axes does not matter
_ELEMENTWISE = {"gelu", "silu", "elu", "selu", "celu", "mish", "leaky_relu", "relu6", "hardtanh", "hardswish"}
_ELEMENTWISE |= {"hardsigmoid", "softplus", "softsign", "logsigmoid", "exp", "log", "sqrt", "abs", "neg", "clamp"}
_ELEMENTWISE |= {"add", "sub", "mul", "div", "rsub", "pow"}


@dataclass
class Step:
    """An operation with the numbers of its input and output activations."""

    operation: Layer | Join
    inputs: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class _Back:
    """The backward pass of a step.

    is_first: for each input, whether its gradient is the first at that activation; None: it is not needed.
    """

    step: Step
    copies: bool  # whether the gradient at the output is copied first
    is_first: tuple[bool | None, ...]
    needs_input: bool


def passes_of(network: Network) -> "Passes":
    """The passes of a network, made once. Raises Unsupported."""
    passes = _PASSES.get(network)
    if passes is None:
        try:
            passes = Passes(network)
        except Unsupported as reason:
            passes = str(reason)
        _PASSES[network] = passes
    if isinstance(passes, str):
        raise Unsupported(passes)
    return passes


def why_no_features(network: Network) -> str | None:
    """Reason why the passes have no gradient at the features; None if they have one. The network has passes."""
    passes = passes_of(network)
    if passes.features is None:
        return f"the inputs of the last layer ({network.spec.layers[-1]}) are no activation of its written-out passes"
    return None


def are_passes_in_evaluation(network: Network) -> bool:
    """Whether a pass of the network in evaluation mode is a written-out one. The network has passes."""
    passes = passes_of(network)
    if passes.evaluate is None:
        passes.evaluate = is_graph_in_evaluation(passes.graph, network)
    return passes.evaluate


def why_no_passes(network: Network) -> str | None:
    """Reason why a network has no passes, with the module and its operation; None if it has them."""
    try:
        passes_of(network)
    except Unsupported as reason:
        return str(reason)
    return None


class Passes:
    """Forward and backward passes of a network at the row `row_P`, which write the gradient `g_P`."""

    def __init__(self, network: Network):
        self.graph = graph = graph_of(network)
        self.task, self.wide_input = network.task, network.wide and len(network.input_shape) == 3
        self.row_P, self.g_P = torch.zeros(network.spec.size), torch.zeros(network.spec.trained)
        self.w_P = self.row_P[: network.spec.trained]
        made = _Steps(network, graph, self.row_P, self.g_P)
        self.steps, self.output, self.num_values = made.steps, graph.output, len(made.shapes)
        self.wide_output, self.keeps_output = made.wide(graph.output), not made.may_overwrite(graph.output)
        self.back = made.backward_plan()
        self.features = made.features  # the inputs of the last layer; None: its loss cannot be a function of them
        self.wide_features = self.features is not None and made.wide(self.features)
        self.features_shape = () if self.features is None else graph.shapes[self.features]
        self.trains_features = self.features is not None and made.trained[self.features]
        self.repeated = [(parts[0], parts[1:]) for parts in made.written.values() if len(parts) > 1]
        self.unused = [g for number, g in enumerate(made.g) if number not in made.written]
        self.dropouts = [step.operation for step in self.steps if isinstance(step.operation, Dropout)]
        self.buffers = Buffers()
        self.evaluate: bool | None = None  # `are_passes_in_evaluation`, once it is known

    def arranged(self, x: Tensor) -> Array:
        """All samples of a client, arranged so that batches are converted quickly to the network's layout."""
        x = x.permute(0, 2, 3, 1) if self.wide_input else x
        return x.contiguous().numpy()

    def _input(self, x: Array, index_B: Array | None) -> Array:
        """A batch in the network's layout."""
        if x.dtype != np.float32:  # token ids
            return np.ascontiguousarray(np.moveaxis(x if index_B is None else x[index_B], 0, -1))
        if index_B is not None:
            x = np.take(x, index_B, 0, out=self.buffers.get("batch", (len(index_B), *x.shape[1:])), mode="clip")
        if self.wide_input:
            return x
        arranged, flat = self.buffers.get("input", (*x.shape[1:], len(x))), x.reshape(len(x), -1)
        if flat.shape[1] % _SAME_LINES == 0:
            apart = self.buffers.get("apart", (len(x), flat.shape[1] + _APART))[:, :-_APART]
            np.copyto(apart, flat)
            flat = apart
        np.copyto(arranged.reshape(-1, len(x)), flat.T)
        return arranged

    def forward(self, x: Array, index_B: Array | None, masks: Sequence[Array]) -> list[Any]:
        """All activations of a batch, which the next call overwrites.

        masks: of the dropout layers (B, ...), in the order of `Network.dropouts`.
        """
        for dropout in self.dropouts:
            mask = masks[dropout.index]
            dropout.mask = mask.transpose(0, 2, 3, 1) if mask.ndim == 4 and dropout.wide else np.moveaxis(mask, 0, -1)
        return self._forward(self.steps, {0: self._input(x, index_B)})

    def backward(
        self,
        values: Sequence[Any],
        y_B: Array,
        frozen_BC: Array | None,
        weight_B: Array | None = None,
        own: LossOnFeatures | None = None,
    ) -> np.floating:
        """Writes the gradient of a batch into `g_P`. Returns the loss.

        values: of the latest `forward`; the outputs are overwritten.
        weight_B: weights of the samples in the mean; None: 1 for all.
        own: the loss, of the mean loss, features and outputs, if the passes have `features`; None: the mean loss.
        """
        if own is None:
            loss, grad = self._loss(values[self.output], y_B, frozen_BC, weight_B)
            self._backward(self.back, grad)
        else:
            loss, grad, of_features = self._own_loss(own, values, y_B, frozen_BC, weight_B)
            self._backward(self.back, grad, of_features)
        return loss

    def features_and_outputs(self, values: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Copies of the features (B, F), float32, and the outputs (B, ...), if the passes have `features`."""
        assert self.features is not None, "why_no_features says so"
        features = _copy_of(values[self.features], self.wide_features).flatten(1).float()
        return features, _copy_of(values[self.output], self.wide_output)

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs (B, ...) of a batch, of the pass in training."""
        return _copy_of(self.forward(self.arranged(x), None, [])[self.output], self.wide_output)

    def run_after_first(
        self, z: Array, y_B: Array, frozen_BC: Array | None, weight_B: Array | None
    ) -> tuple[np.floating, Array]:
        """The mean loss, and its gradient at the outputs `z` (H, B) of the first operation that has parameters.

        z may be overwritten. Writes the gradients of all parameters except those of that operation into `g_P`.
        """
        first = self.back[-1].step
        values = self._forward(self.steps[self.steps.index(first) + 1 :], {first.output: z})
        loss, grad = self._loss(values[self.output], y_B, frozen_BC, weight_B)
        return loss, self._backward(self.back[:-1], grad)[first.output]

    def _forward(self, steps: Sequence[Step], known: Mapping[int, Array]) -> list[Any]:
        """All activations, computed by these steps from known ones; the outputs may be overwritten."""
        values: list[Any] = [known.get(index) for index in range(self.num_values)]
        for step in steps:
            inputs = step.inputs
            if len(inputs) == 1:
                values[step.output] = step.operation.forward(values[inputs[0]])
            else:
                values[step.output] = step.operation.forward(*[values[index] for index in inputs])
        if self.keeps_output:
            values[self.output] = values[self.output].copy()
        return values

    def _own_loss(
        self,
        own: LossOnFeatures,
        values: Sequence[Any],
        y_B: Array,
        frozen_BC: Array | None,
        weight_B: Array | None,
    ) -> tuple[np.floating, Array, Array | None]:
        """The loss `own`, and its gradients at the outputs and at the features; None if it has none there.

        The gradient of the mean loss is the written-out one.
        """
        assert self.features is not None, "why_no_features says so"
        features, outputs = self.features_and_outputs(values)
        if frozen_BC is not None:
            outputs += torch.from_numpy(frozen_BC)
        mean_loss, grad = self._loss(values[self.output], y_B, frozen_BC, weight_B)
        loss, at_mean_loss, at_outputs, at_features = own(torch.tensor(float(mean_loss)), features, outputs)
        if at_mean_loss is None:  # not times 0, since it may be infinite
            grad.fill(0)
        elif (factor := at_mean_loss.item()) != 1:
            grad *= np.float32(factor)
        if at_outputs is not None:
            grad += _view_of(at_outputs, self.wide_output)
        if at_features is None or not self.trains_features:
            return np.float32(loss), grad, None
        shaped = at_features.reshape(len(y_B), *self.features_shape)
        return np.float32(loss), grad, _view_of(shaped, self.wide_features)

    def _loss(
        self, outputs: Array, y_B: Array, frozen_BC: Array | None, weight_B: Array | None
    ) -> tuple[np.floating, Array]:
        """The mean loss and its gradient at the outputs, which may be overwritten."""
        if self.task.is_classification and outputs.ndim == 2:
            if frozen_BC is not None:
                outputs += frozen_BC.T
            return mean_cross_entropy(outputs, y_B, weight_B)
        logits = tensor_of(outputs, self.wide_output).contiguous().requires_grad_()
        with torch.enable_grad():
            whole = logits if frozen_BC is None else logits + torch.from_numpy(frozen_BC)
            targets = torch.from_numpy(y_B)
            if weight_B is None:
                loss = self.task.mean_loss(whole, targets)
            else:
                loss = (self.task.loss(whole, targets) * torch.from_numpy(weight_B)).mean()
            (grad,) = torch.autograd.grad(loss, logits)
        return np.float32(loss.item()), array_of(grad, self.wide_output)

    def _backward(self, plan: Sequence[_Back], grad: Array, of_features: Array | None = None) -> list[Any]:
        """Writes the gradients of the parameters. Returns those of the activations.

        grad: gradient at the outputs. of_features: what is added to that at the features; None: nothing.
        """
        grads: list[Any] = [None] * self.num_values
        grads[self.output] = grad
        for back in plan:
            step = back.step
            grad, grads[step.output] = grads[step.output], None
            if of_features is not None and step.output == self.features:
                grad = np.add(grad, of_features, out=self.buffers.get("features", grad.shape))
            if back.copies:
                copy = self.buffers.get(f"copy {step.output}", grad.shape)
                np.copyto(copy, grad)
                grad = copy
            of_inputs = step.operation.backward(grad, back.needs_input)
            listed = (of_inputs,) if isinstance(step.operation, Layer) else of_inputs
            for index, is_first, grad in zip(step.inputs, back.is_first, listed, strict=True):
                if is_first:
                    grads[index] = grad
                elif is_first is not None:
                    total = self.buffers.get(f"sum {index}", grad.shape)
                    grads[index] = np.add(grads[index], grad, out=total)
        for whole, parts in self.repeated:
            for part in parts:
                whole += part
        for part in self.unused:
            part.fill(0)
        return grads


def _copy_of(x: Array, wide: bool) -> Tensor:
    """A copy of an activation in PyTorch's layout (B, ...)."""
    if x.ndim == 2:
        return torch.from_numpy(x.T.copy())
    return tensor_of(x, wide).clone(memory_format=torch.contiguous_format)


def _view_of(x: Tensor, wide: bool) -> Array:
    """An activation (B, ...) in the layout of the passes, in its memory."""
    return (x.permute(0, 2, 3, 1) if wide else x.movedim(0, -1)).numpy()


class _Steps:
    """Builds the steps of a graph."""

    def __init__(self, network: Network, graph: Graph, row_P: Tensor, g_P: Tensor):
        self.network, self.graph = network, graph
        self.steps: list[Step] = []
        self.w = [view.numpy() for view in network.views(row_P)]
        self.g = [view.numpy() for view in network.views(g_P)]
        self.tensors = network.constant_buffers | network.spec.tensors(row_P)
        self.shapes, self.users = list(graph.shapes), graph.users
        self.features = graph.features if graph.features is not None and graph.shapes[graph.features] else None
        if self.features is not None:
            self.users[self.features] += 1  # a loss of its own, which nothing overwrites before
        self.trained = [False] * len(self.shapes)  # whether an activation depends on a parameter
        self.written: dict[int, list[Array]] = {}  # by number of a parameter: a gradient for each use
        for call in self._used_calls():
            self._add(call)
        if not self.trained[graph.output]:
            raise Unsupported("its output does not depend on a trained parameter")
        if self.features not in {0, *(step.output for step in self.steps)}:  # the output does not depend on them
            self.features = None
        self._choose_in_place()

    def wide(self, value: int) -> bool:
        """Whether an activation is an image in the layout (B, H, W, C)."""
        return self.network.wide and len(self.shapes[value]) == 3

    def parameter(self, reference: object) -> tuple[Array, Array]:
        """A trained tensor, and the array for its gradient."""
        assert isinstance(reference, Parameter)
        w, g, uses = self.w[reference.index], self.g[reference.index], self.written.setdefault(reference.index, [])
        uses.append(np.zeros_like(g) if uses else g)
        return w, uses[-1]

    def _used_calls(self) -> list[Call]:
        """The operations that the output depends on, and those that change buffers."""
        needed, used = {self.graph.output}, []
        for call in reversed(self.graph.calls):
            if call.output not in needed:
                kinds = {type(reference) for reference in call.references}
                if Buffer not in kinds:
                    continue
                if Parameter in kinds:
                    raise call.unsupported("is not used by the output")
            needed.update(call.inputs)
            used.append(call)
        return used[::-1]

    def _add(self, call: Call) -> None:
        """Adds the steps of an operation."""
        inputs = tuple(call.inputs)
        has_parameters = any(isinstance(reference, Parameter) for reference in call.references)
        self.trained[call.output] = has_parameters or any(self.trained[index] for index in inputs)
        operations: Sequence[Layer | Join] | None = None
        if call.name in RESHAPES:
            shape, wide_out = self.shapes[call.output], self.wide(call.output)
            operations, inputs = [Reshape(shape, self.wide(inputs[0]), wide_out)], inputs[:1]
        elif call.name in _WRITTEN_OUT and Buffer not in set(map(type, call.references)):
            with suppress(TypeError):  # another signature
                operations = _WRITTEN_OUT[call.name](self, *call.args, **call.kwargs)
        if operations is None:
            operations = [self._differentiated(call)]
        if isinstance(operations[0], MaxPool):
            moved = self._before_pool(inputs[0])
            operations = [*operations, *(step.operation for step in moved)]
            inputs = moved[0].inputs if moved else inputs
        for operation in operations[:-1]:
            inputs = (self._append(operation, inputs),)
        self.steps.append(Step(operations[-1], inputs, call.output))

    def _append(self, operation: Layer | Join, inputs: tuple[int, ...]) -> int:
        """Adds a step with a new activation that has a single user. Returns the number of the activation."""
        index = len(self.shapes)
        self.shapes.append(())
        self.trained.append(True)
        self.users[index] = 1
        self.steps.append(Step(operation, inputs, index))
        return index

    def _before_pool(self, index: int) -> list[Step]:
        """Removes and returns the last bias and activation steps of an activation, as far as nothing else uses them."""
        moved: list[Step] = []
        while self.users[index] == 1:
            made = self._maker(index)
            if made is None or not isinstance(made.operation, Bias | Activation):
                break
            self.steps.remove(made)
            moved.insert(0, made)
            (index,) = made.inputs
        return moved

    def _maker(self, index: int) -> Step | None:
        return next((step for step in self.steps if step.output == index), None)

    def _differentiated(self, call: Call) -> Join:
        """The operation of any function that takes activations, parameters and buffers."""
        if any(isinstance(reference, Mask) for reference in call.references):
            raise call.unsupported("uses the mask of a dropout layer")
        inputs, buffers = call.inputs, self.tensors

        exact = self.network.channels_last or call.name not in self.network.inexact

        def replay(*tensors: Tensor) -> Tensor:
            if not exact:
                tensors = tuple(tensor.contiguous() for tensor in tensors)
            activations, parameters = iter(tensors[: len(inputs)]), iter(tensors[len(inputs) :])

            def fill(argument: object) -> object:
                if isinstance(argument, Value):
                    return next(activations)
                if isinstance(argument, Parameter):
                    return next(parameters)
                return buffers[argument.name] if isinstance(argument, Buffer) else argument

            return call.applied(fill)

        parameters = [self.parameter(used) for used in call.references if isinstance(used, Parameter)]
        same_shape = all(self.shapes[index] == self.shapes[call.output] for index in inputs)
        others = len(call.references) > len(inputs)
        any_layout = call.name in _ELEMENTWISE and same_shape and not others
        wide = None if any_layout else tuple(self.wide(index) for index in inputs)
        needs = tuple(self.trained[index] for index in inputs)
        return Differentiated(replay, wide, self.wide(call.output), needs, parameters)

    # ---- memory

    def may_overwrite(self, index: int) -> bool:
        """Whether an activation has a single user and nothing else needs its memory."""
        made = self._maker(index)
        if made is None or self.users[index] > 1 or made.operation.uses_output:
            return False
        return not made.operation.returns_input or self.may_overwrite(made.inputs[0])

    def _choose_in_place(self) -> None:
        for step in self.steps:
            match step.operation:
                case Activation() | GroupNorm():
                    step.operation.in_place = self.may_overwrite(step.inputs[0])
                case Add():
                    free = [place for place, index in enumerate(step.inputs) if self.may_overwrite(index)]
                    step.operation.overwrites = free[0] if free else None

    def backward_plan(self) -> list[_Back]:
        """The backward passes, the last step first. Gradients that share memory are copied before they are changed."""
        plan: list[_Back] = []
        owned = {self.graph.output: True}  # activations with a gradient: whether its memory is used for nothing else
        for step in reversed(self.steps):
            operation = step.operation
            if step.output not in owned or not self.trained[step.output]:
                continue
            copies = operation.overwrites_grad and not owned[step.output]
            needs = [self.trained[index] for index in step.inputs]
            own = not operation.returns_grad or ((copies or owned[step.output]) and sum(needs) == 1)
            is_first: list[bool | None] = []
            for index, needed in zip(step.inputs, needs, strict=True):
                is_first.append(index not in owned if needed else None)
                if needed:
                    owned[index] = index in owned or own
            plan.append(_Back(step, copies, tuple(is_first), any(needs)))
        return plan


# ---- operations that are written out: functions with PyTorch's signatures. None: not supported for these arguments

_WrittenOut = Callable[..., Sequence[Layer | Join] | None]


def _pair(value: Any) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, tuple | list) else (value,)
    return pair if len(pair) == 2 else (pair[0], pair[0])


def _linear(steps: _Steps, input: Value, weight: object, bias: object = None) -> Sequence[Layer] | None:
    if len(steps.shapes[input.index]) != 1 or not _are_parameters(weight, bias):
        return None
    layers: list[Layer] = [Linear(*steps.parameter(weight))]
    return layers if bias is None else [*layers, Bias(*steps.parameter(bias), axis=0)]


def _conv2d(
    steps: _Steps,
    input: Value,
    weight: object,
    bias: object = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Sequence[Layer] | None:
    image = len(steps.shapes[input.index]) == 3
    plain = groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str)
    if not image or not plain or not _are_parameters(weight, bias):
        return None
    wide = steps.wide(input.index)
    convolution = ChannelsLastConvolution if wide else PatchConvolution
    layers: list[Layer] = [convolution(*steps.parameter(weight), _pair(stride), _pair(padding))]
    return layers if bias is None else [*layers, Bias(*steps.parameter(bias), axis=-1 if wide else 0)]


def _are_parameters(weight: object, bias: object) -> bool:
    return isinstance(weight, Parameter) and (bias is None or isinstance(bias, Parameter))


def _max_pool2d(
    steps: _Steps,
    input: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Sequence[Layer] | None:
    halves = _pair(kernel_size) == _pair(stride or kernel_size) == (2, 2) and _pair(padding) == (0, 0)
    plain = halves and _pair(dilation) == (1, 1) and not ceil_mode and len(steps.shapes[input.index]) == 3
    return [MaxPool()] if plain else None


def _avg_pool2d(
    steps: _Steps,
    input: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Sequence[Layer] | None:
    same = _pair(kernel_size) == _pair(stride or kernel_size) and _pair(padding) == (0, 0)
    plain = same and not ceil_mode and divisor_override is None and len(steps.shapes[input.index]) == 3
    return [AvgPool(_pair(kernel_size))] if plain else None


def _group_norm(
    steps: _Steps,
    input: Value,
    num_groups: int,
    weight: object = None,
    bias: object = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Sequence[Layer] | None:
    if len(steps.shapes[input.index]) != 3 or not all(isinstance(part, Parameter | None) for part in (weight, bias)):
        return None
    w, b = (None if part is None else steps.parameter(part) for part in (weight, bias))
    return [GroupNorm(num_groups, w, b, eps, steps.wide(input.index))]


def _activation(kind: str, steps: _Steps, input: Value, inplace: bool = False) -> Sequence[Layer]:
    return [Activation(kind)]


def _add(steps: _Steps, input: object, other: object, *, alpha: float = 1) -> Sequence[Join] | None:
    if not isinstance(input, Value) or not isinstance(other, Value) or alpha != 1:
        return None
    return [Add()] if steps.shapes[input.index] == steps.shapes[other.index] else None


def _mul(steps: _Steps, input: object, other: object) -> Sequence[Layer] | None:
    match input, other:
        case (Value(index), Mask(mask)) | (Mask(mask), Value(index)):
            return [Dropout(mask, steps.wide(index))]
    return None


def _cat(steps: _Steps, tensors: Sequence[Value], dim: int = 0) -> Sequence[Join] | None:
    if not all(isinstance(tensor, Value) for tensor in tensors):
        return None
    index = tensors[0].index
    sample = len(steps.shapes[index])
    axis = dim % (sample + 1) - 1  # among the axes of a sample
    if axis < 0:
        return None
    return [Concatenation((3, 1, 2)[axis] if steps.wide(index) else axis)]


_WRITTEN_OUT: Mapping[str, _WrittenOut] = {
    "linear": _linear,
    "conv2d": _conv2d,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
    "group_norm": _group_norm,
    "relu": partial(_activation, "relu"),
    "tanh": partial(_activation, "tanh"),
    "sigmoid": partial(_activation, "sigmoid"),
    "add": _add,
    "mul": _mul,
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
}
_PASSES: WeakKeyDictionary[Network, Passes | str] = WeakKeyDictionary()
