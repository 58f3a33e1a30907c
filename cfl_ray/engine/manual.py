"""The manual engine: mini-batch SGD on sequences of common layers, with forward and backward passes written out.

Most of the time of a step on a small network is spent between the operations: PyTorch needs 3 to 8 microseconds per
call, records a graph, allocates, and updates one tensor after another. Here the layers compute in NumPy on arrays that
are allocated once, and the parameters and their gradients are two flat rows, so that an update is one operation. One
client is trained at a time, because the arrays of several would not fit into the cache.

The layout of activations follows the convolutions (letters here: C channels or classes, H height, W width):
    narrow    (C, H, W, B): the patches of a convolution are copied once and multiplied in one product. The batch is the
              innermost axis, so that copies and pooling work on long contiguous runs for any number of channels.
    wide      (B, H, W, C): the convolutions are PyTorch's, in its channels-last memory format.
    flattened (F, B) in both cases.
Biases and activation functions are applied after a max pooling that follows them, to a quarter of the values: they are
monotone, so both orders select the same values. The result equals that of `sequential` up to rounding.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor, nn

from cfl_ray.core.local_sgd import LocalStep
from cfl_ray.engine import sequential
from cfl_ray.engine.layers import AddressedDropout, HalvingMaxPool
from cfl_ray.engine.network import Network
from cfl_ray.engine.task import ProximalTask, TrainingResult, TrainingTask

_MAX_BATCH = 256  # activations of larger batches leave the cache

Array = np.ndarray[Any, np.dtype[Any]]


def why_not(network: Network, tasks: Sequence[TrainingTask]) -> str | None:
    """Reason why this engine cannot train the network or, with tasks, these clients; None if it can."""
    if network.device.type != "cpu":
        return "it computes on a CPU only"
    if network.precision == "bf16":
        return "in bf16, PyTorch's autocast decides what is computed in which precision"
    if not network.task.is_classification:
        return f"its loss is the cross-entropy of classes, and the task is {network.task.name}"
    for task in tasks:
        if task.local.optimizer is not None:
            return "the local optimiser is not SGD"
        if min(int(task.local.batch_of(len(task.y), task.batches_per_step)), len(task.y)) > _MAX_BATCH:
            return f"a batch has more than {_MAX_BATCH} samples"
    return why_no_passes(network)


def why_no_passes(network: Network) -> str | None:
    """Reason why the network has no written passes, on any device; None if it is a sequence of supported layers.

    The layers share no parameters, and all of them are trained.
    """
    layers, names = _layers(network.module), {id(layer): name for name, layer in network.module.named_modules()}
    for layer in layers:
        if not _supported(layer):
            name = names[id(layer)]
            return f"{f'layer {name}' if name else 'the network'} ({type(layer).__name__}) has no written passes"
    with_parameters = [layer for layer in layers if isinstance(layer, (nn.Linear, nn.Conv2d))]
    num_tensors = sum(1 if layer.bias is None else 2 for layer in with_parameters)
    if not with_parameters or not num_tensors == network.spec.num_params == len(network.spec.shapes):
        return "parameters are absent, frozen or shared by layers"
    if len(network.dropouts) != sum(isinstance(layer, AddressedDropout) for layer in layers):
        return "a dropout layer is used twice"
    flat, image = len(network.input_shape) == 1, len(network.input_shape) == 3
    for layer in layers:
        flat = flat or isinstance(layer, nn.Flatten)
        if isinstance(layer, nn.Linear) and not flat:
            return f"layer {names[id(layer)]} (Linear) has an input that is not flat"
        if isinstance(layer, (nn.Conv2d, nn.AvgPool2d, HalvingMaxPool)) and (flat or not image):
            return f"layer {names[id(layer)]} ({type(layer).__name__}) has an input that is no image"
    return None


def train(network: Network, tasks: Sequence[TrainingTask]) -> Iterator[TrainingResult]:
    """Trains each task in turn, from its own start. `why_not` must be None for them."""
    for index, task in enumerate(tasks):
        frozen_BC = sequential.frozen_logits(network, task)
        passes = passes_of(network)
        with np.errstate(all="ignore"):  # the worker excludes updates that are not finite
            result = _train_one(network, passes, index, task, frozen_BC)
        yield result


def _train_one(
    network: Network, passes: "Passes", index: int, task: TrainingTask, frozen_BC: Tensor | None
) -> TrainingResult:
    """Trains one client."""
    w_P = passes.w_P
    w_P.copy_(task.start_P)
    gradient = _Gradient(network, passes, task, frozen_BC)
    proximal = [FlatProximalGradient(network, term) for term in task.proximal]
    velocity = torch.zeros_like(w_P) if task.velocity is None else task.velocity.clone()
    update = sequential.SGDUpdate(task.local, [velocity])
    batches = task.batches()
    for number in range(task.steps):
        gradient.begin([next(batches) for _ in range(task.batches_per_step)])
        step_P = gradient.of_batch(0) if task.local_step is None else gradient.direction_of(task.local_step)
        if task.local.clips:  # in the order of `sequential`
            for term in proximal:
                term.add_to(step_P, w_P)
            sequential.clip_([step_P], task.local)
            update.decay([step_P], [w_P])
        else:
            update.decay([step_P], [w_P])
            for term in proximal:
                term.add_to(step_P, w_P)
        update.apply([w_P], [step_P], task.local.lr_at(number, task.steps))
        for term in proximal:
            if term.term.moves_after(number, task.steps):
                term.move(w_P)
    loss = float(np.mean(gradient.losses[-task.tail :]))
    anchor_P = next((term.anchor_P for term in proximal if term.term.follow), None)
    persists = task.local.persist and task.local.momentum
    return TrainingResult(index, w_P, loss, anchor_P, velocity if persists else None)


class FlatProximalGradient:
    """Gradient of (weight / 2) ||w - anchor||^2 on flat rows.

    first: first column of the rows that are passed; tensors before it are left out.
    """

    def __init__(self, network: Network, term: ProximalTask, first: int = 0):
        starts = (0, *network.spec.ends)
        self.term, self.weight = term, term.weight
        self.anchor_P = (term.anchor_P.clone() if term.follow else term.anchor_P)[first:]
        self.ranges: list[slice] = []  # neighbouring tensors are joined
        for tensor in network.tensors_in(term.columns):
            start, stop = starts[tensor] - first, starts[tensor + 1] - first
            if start < 0:
                continue
            joined = self.ranges.pop().start if self.ranges and self.ranges[-1].stop == start else start
            self.ranges.append(slice(joined, stop))

    def add_to(self, step_P: Tensor, w_P: Tensor) -> None:
        """Adds the gradient to `step_P`, in place."""
        for part in self.ranges:
            step_P[part].add_(w_P[part], alpha=self.weight).sub_(self.anchor_P[part], alpha=self.weight)

    def move(self, w_P: Tensor) -> None:
        """Moves the anchor: anchor <- anchor - follow * weight * (anchor - w)."""
        for part in self.ranges:
            self.anchor_P[part].lerp_(w_P[part], self.term.follow * self.weight)


class _Gradient:
    """Gradients of one client's loss on the batches of the current step."""

    def __init__(self, network: Network, passes: "Passes", task: TrainingTask, frozen_BC: Tensor | None):
        self.network, self.passes = network, passes
        self.x, self.y = passes.arranged(task.x), task.y.numpy()
        self.frozen = None if frozen_BC is None else frozen_BC.numpy()
        self.noise = task.noise() if network.dropouts else None
        self.losses: list[np.floating] = []  # one per step
        self.batches: list[Array | None] = []  # of the current step
        self.masks: dict[int, list[Array]] = {}  # dropout masks of the current step, by batch and layer

    def begin(self, batches: list[Array | None]) -> None:
        """Begins a step that uses these batches."""
        self.batches, self.masks = batches, {}

    def of_batch(self, batch: int) -> Tensor:
        """Gradient (P,) at the present row on one batch of the step. The next gradient reuses its memory."""
        index_B = self.batches[batch]
        y_B = self.y if index_B is None else self.y[index_B]
        frozen_BC = self.frozen if index_B is None or self.frozen is None else self.frozen[index_B]
        if self.noise is not None and batch not in self.masks:  # the same in all gradients of a batch in a step
            draws = [layer.draw(len(y_B), self.noise) for layer in self.network.dropouts.values()]
            self.masks[batch] = [draw.numpy() for draw in draws]
        self.losses.append(self.passes.run(self.x, index_B, y_B, frozen_BC, self.masks.get(batch, [])))
        return self.passes.g_P

    def direction_of(self, local_step: LocalStep) -> Tensor:
        """The direction (P,) of a local step. The loss of the step is that of its first gradient."""
        w_P, past = self.passes.w_P.clone(), len(self.losses)

        def gradient(row_P: Tensor, batch: int) -> Tensor:
            self.passes.w_P.copy_(row_P)
            return self.of_batch(batch).clone()

        direction_P = local_step(gradient, w_P)
        del self.losses[past + 1 :]
        self.passes.w_P.copy_(w_P)
        return direction_P


# ---- layers


@dataclass
class _Buffers:
    """Arrays that are allocated once, by name and shape. Shapes of one name share memory: one is used at a time."""

    memory: dict[str, Tensor] = field(default_factory=dict)
    views: dict[tuple[str, tuple[int, ...]], Array] = field(default_factory=dict)

    def get(self, name: str, shape: tuple[int, ...]) -> Array:
        """The array of this name and shape, with arbitrary values."""
        view = self.views.get((name, shape))
        return self._new(name, shape) if view is None else view

    def _new(self, name: str, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape)
        if name not in self.memory or len(self.memory[name]) < size:
            self.memory[name] = torch.empty(size)  # by PyTorch, which aligns it to cache lines
            self.views = {key: view for key, view in self.views.items() if key[0] != name}
        view: Array = self.memory[name][:size].numpy().reshape(shape)
        self.views[name, shape] = view
        return view


class Layer(ABC):
    """A layer with its arrays. `backward` belongs to the `forward` before it."""

    uses_output = False  # whether `backward` reads the output, which the next layer may therefore not overwrite

    def __init__(self) -> None:
        self.buffers = _Buffers()

    @abstractmethod
    def forward(self, x: Array) -> Array:
        """The output."""

    @abstractmethod
    def backward(self, grad: Array, needs_input: bool) -> Array:
        """The gradient at the input, from that at the output, which may be overwritten.

        Writes the gradients of the parameters. needs_input: False where the gradient at the input is not needed.
        """


class _Linear(Layer):
    """Product with the weights (O, F), without bias."""

    def __init__(self, weight: Array, grad_weight: Array):
        super().__init__()
        self.weight, self.grad_weight = weight, grad_weight

    def forward(self, x: Array) -> Array:
        self.x = x
        return np.matmul(self.weight, x, out=self.buffers.get("out", (len(self.weight), x.shape[1])))

    def backward(self, grad: Array, needs_input: bool) -> Array:
        np.matmul(grad, self.x.T, out=self.grad_weight)
        if not needs_input:
            return grad
        return np.matmul(self.weight.T, grad, out=self.buffers.get("grad", self.x.shape))


class _PatchConvolution(Layer):
    """Convolution in the layout (C, H, W, B), without bias: one product of the weights and all patches."""

    def __init__(self, conv: nn.Conv2d, weight: Array, grad_weight: Array):
        super().__init__()
        self.weight, self.grad_weight = weight.reshape(len(weight), -1), grad_weight.reshape(len(weight), -1)
        self.kernel, self.stride, self.padding = _pair(conv.kernel_size), _pair(conv.stride), _pair(conv.padding)

    def _patches(self, x: Array) -> tuple[Array, Array]:
        """All patches (C, kernel height, kernel width, H, W, B) of the padded input, as a view, and that input."""
        channels, height, width, batch = x.shape
        (rows, columns), (down, right) = self.padding, self.stride
        if rows or columns:
            padded = self.buffers.get("padded", (channels, height + 2 * rows, width + 2 * columns, batch))
            padded.fill(0)
            padded[:, rows : rows + height, columns : columns + width] = x
            x = padded
        out_height = (x.shape[1] - self.kernel[0]) // down + 1
        out_width = (x.shape[2] - self.kernel[1]) // right + 1
        c, h, w, b = x.strides
        strides = (c, h, w, h * down, w * right, b)
        return as_strided(x, (channels, *self.kernel, out_height, out_width, batch), strides), x

    def forward(self, x: Array) -> Array:
        self.in_shape = x.shape
        view, padded = self._patches(x)
        self.padded_shape, self.out_shape = padded.shape, view.shape[3:]
        patches = self.buffers.get("patches", view.shape)
        np.copyto(patches, view)
        self.patches = patches.reshape(self.weight.shape[1], -1)
        out = self.buffers.get("out", (len(self.weight), math.prod(self.out_shape)))
        return np.matmul(self.weight, self.patches, out=out).reshape(-1, *self.out_shape)

    def backward(self, grad: Array, needs_input: bool) -> Array:
        flat = grad.reshape(len(grad), -1)
        np.matmul(flat, self.patches.T, out=self.grad_weight)
        if not needs_input:
            return grad
        (rows, columns), (down, right) = self.padding, self.stride
        height, width = self.out_shape[:2]
        grad_patches = np.matmul(self.weight.T, flat, out=self.buffers.get("grad patches", self.patches.shape))
        grad_patches = grad_patches.reshape(self.in_shape[0], *self.kernel, *self.out_shape)
        # two sums, over the columns and then over the rows of the kernel, add fewer values in longer runs than one
        channels, _, padded_width, batch = self.padded_shape
        grad_rows = self.buffers.get("grad rows", (channels, self.kernel[0], height, padded_width, batch))
        grad_rows.fill(0)
        for j in range(self.kernel[1]):
            part = grad_rows[:, :, :, j : j + right * width : right]
            np.add(part, grad_patches[:, :, j], out=part)
        grad_padded = self.buffers.get("grad", self.padded_shape)
        grad_padded.fill(0)
        for i in range(self.kernel[0]):
            part = grad_padded[:, i : i + down * height : down]
            np.add(part, grad_rows[:, i], out=part)
        return grad_padded[:, rows : rows + self.in_shape[1], columns : columns + self.in_shape[2]]


class _ChannelsLastConvolution(Layer):
    """Convolution by PyTorch in the layout (B, H, W, C), without bias."""

    def __init__(self, conv: nn.Conv2d, weight: Array, grad_weight: Array):
        super().__init__()
        self.weight, self.grad_weight = torch.from_numpy(weight), torch.from_numpy(grad_weight)
        self.weight_last = torch.empty_like(self.weight, memory_format=torch.channels_last)
        self.stride, self.padding = list(_pair(conv.stride)), list(_pair(conv.padding))

    def forward(self, x: Array) -> Array:
        self.x = torch.from_numpy(x).permute(0, 3, 1, 2)
        self.weight_last.copy_(self.weight)
        out = torch.conv2d(self.x, self.weight_last, None, self.stride, self.padding)
        return _channels_last_array(out)

    def backward(self, grad: Array, needs_input: bool) -> Array:
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            torch.from_numpy(grad).permute(0, 3, 1, 2),
            self.x,
            self.weight_last,
            None,
            self.stride,
            self.padding,
            [1, 1],
            False,
            [0, 0],
            1,
            [needs_input, True, False],
        )
        self.grad_weight.copy_(grad_weight)
        return _channels_last_array(grad_x) if needs_input else grad


def _channels_last_array(x: Tensor) -> Array:
    """The array (B, H, W, C) of a tensor (B, C, H, W): without a copy where its format is channels-last."""
    array: Array = x.permute(0, 2, 3, 1).contiguous().numpy()
    return array


class _Bias(Layer):
    """Adds a bias along one axis, in place."""

    def __init__(self, bias: Array, grad_bias: Array, axis: int):
        super().__init__()
        self.bias, self.grad_bias, self.axis = bias, grad_bias, axis

    def forward(self, x: Array) -> Array:
        x += self.bias if self.axis else self.bias.reshape(-1, *[1] * (x.ndim - 1))
        return x

    def backward(self, grad: Array, needs_input: bool) -> Array:
        channels = len(self.bias)
        if self.axis:
            flat = grad.reshape(-1, channels)
            ones = self.buffers.get("ones", (len(flat),))
            ones.fill(1)
            np.matmul(ones, flat, out=self.grad_bias)  # faster than a sum over the outer axis
        else:
            np.add.reduce(grad.reshape(channels, -1), 1, out=self.grad_bias)
        return grad


class _Activation(Layer):
    """ReLU, tanh or the logistic function. in_place: whether the output overwrites the input."""

    uses_output = True

    def __init__(self, layer: nn.Module, in_place: bool):
        super().__init__()
        self.kind, self.in_place = type(layer), in_place

    def forward(self, x: Array) -> Array:
        out = x if self.in_place else self.buffers.get("out", x.shape)
        if self.kind is nn.ReLU and x.ndim == 4:
            torch.clamp_min(torch.from_numpy(x), 0, out=torch.from_numpy(out))  # faster on many values, see `_pair_of`
        elif self.kind is nn.ReLU:
            np.maximum(x, 0, out=out)
        elif self.kind is nn.Tanh:
            np.tanh(x, out=out)
        else:
            np.negative(x, out=out)
            np.exp(out, out=out)
            out += 1
            np.reciprocal(out, out=out)
        self.out = out
        return out

    def backward(self, grad: Array, needs_input: bool) -> Array:
        if self.kind is nn.ReLU and grad.ndim == 4:
            grad_x = torch.from_numpy(grad)
            torch.ops.aten.threshold_backward.grad_input(grad_x, torch.from_numpy(self.out), 0, grad_input=grad_x)
            return grad
        if self.kind is nn.ReLU:
            grad *= self.out > 0
            return grad
        slope = self.buffers.get("slope", grad.shape)
        if self.kind is nn.Tanh:
            np.multiply(self.out, self.out, out=slope)
            np.subtract(1, slope, out=slope)
        else:
            np.subtract(1, self.out, out=slope)
            slope *= self.out
        grad *= slope
        return grad


class _MaxPool(Layer):
    """Max pooling with kernel and stride 2 along axes 1 and 2.

    The gradient goes to the first maximum of a window in row-major order, as in PyTorch: the left value of a row and
    the upper row win ties.
    """

    def forward(self, x: Array) -> Array:
        outer, height, width, inner = x.shape
        height, width = height // 2, width // 2
        self.in_shape = x.shape
        self.left, self.right = _pair_of(x[:, :, : 2 * width], 2)
        wide = self.buffers.get("wide", (outer, x.shape[1], width, inner))
        torch.maximum(self.left, self.right, out=torch.from_numpy(wide))
        self.upper, self.lower = _pair_of(wide[:, : 2 * height], 1)
        out = self.buffers.get("out", (outer, height, width, inner))
        torch.maximum(self.upper, self.lower, out=torch.from_numpy(out))
        return out

    def backward(self, grad: Array, needs_input: bool) -> Array:
        outer, height, width, inner = grad.shape
        grad_wide = self.buffers.get("grad wide", (outer, self.in_shape[1], width, inner))
        grad_x = self.buffers.get("grad", self.in_shape)
        self._divide(torch.from_numpy(grad), self.upper, self.lower, _pair_of(grad_wide[:, : 2 * height], 1))
        grad_wide[:, 2 * height :] = 0  # a last row or column without a partner is in no window
        left_right = _pair_of(grad_x[:, :, : 2 * width], 2)
        self._divide(torch.from_numpy(grad_wide), self.left, self.right, left_right)
        grad_x[:, :, 2 * width :] = 0
        return grad_x

    def _divide(self, grad: Tensor, first: Tensor, second: Tensor, grads: tuple[Tensor, Tensor]) -> None:
        """Gives the gradient of each maximum to the first value where it is not smaller, else to the second."""
        takes = torch.from_numpy(self.buffers.get("takes", tuple(grad.shape)))
        torch.ge(first, second, out=takes)  # as 0 and 1 in float32, which is faster than with bool
        torch.mul(grad, takes, out=grads[0])
        torch.sub(grad, grads[0], out=grads[1])


def _pair_of(x: Array, axis: int) -> tuple[Tensor, Tensor]:
    """The values at even and at odd places of an axis: tensors, because PyTorch is twice as fast on such views."""
    even, odd = (x[:, 0::2], x[:, 1::2]) if axis == 1 else (x[:, :, 0::2], x[:, :, 1::2])
    return torch.from_numpy(even), torch.from_numpy(odd)


class _AvgPool(Layer):
    """Average pooling with kernel = stride along axes 1 and 2."""

    def __init__(self, kernel: tuple[int, int]):
        super().__init__()
        self.kernel, self.scale = kernel, np.float32(1 / math.prod(kernel))

    def _window(self, x: Array) -> list[Array]:
        """The values of `x` at each position of a window."""
        (rows, columns), (height, width) = self.kernel, x.shape[1:3]
        height, width = height // rows * rows, width // columns * columns
        return [x[:, i:height:rows, j:width:columns] for i in range(rows) for j in range(columns)]

    def forward(self, x: Array) -> Array:
        self.in_shape = x.shape
        first, *others = self._window(x)
        out = self.buffers.get("out", first.shape)
        np.copyto(out, first)
        for part in others:
            out += part
        out *= self.scale
        return out

    def backward(self, grad: Array, needs_input: bool) -> Array:
        grad *= self.scale
        grad_x = self.buffers.get("grad", self.in_shape)
        grad_x.fill(0)
        for part in self._window(grad_x):
            np.copyto(part, grad)
        return grad_x


class _Dropout(Layer):
    """Product with a mask in the layout of the activations, which is set before each pass."""

    mask: Array

    def forward(self, x: Array) -> Array:
        return np.multiply(x, self.mask, out=self.buffers.get("out", x.shape))

    def backward(self, grad: Array, needs_input: bool) -> Array:
        grad *= self.mask
        return grad


class _Flatten(Layer):
    """From the layout of images to (F, B)."""

    def __init__(self, wide: bool):
        super().__init__()
        self.wide = wide

    def forward(self, x: Array) -> Array:
        self.in_shape = x.shape
        if not self.wide or x.ndim == 2:
            return x.reshape(-1, x.shape[-1])
        batch, height, width, channels = x.shape
        out = self.buffers.get("out", (channels, height, width, batch))
        np.copyto(out, x.transpose(3, 1, 2, 0))
        return out.reshape(-1, batch)

    def backward(self, grad: Array, needs_input: bool) -> Array:
        if not self.wide or len(self.in_shape) == 2:
            return grad.reshape(self.in_shape)
        batch, height, width, channels = self.in_shape
        grad_x = self.buffers.get("grad", self.in_shape)
        np.copyto(grad_x, grad.reshape(channels, height, width, batch).transpose(3, 1, 2, 0))
        return grad_x


def _layers(module: nn.Module) -> list[nn.Module]:
    """The layers of nested sequences, in order."""
    if type(module) is nn.Sequential:
        return [layer for child in module for layer in _layers(child)]
    return [module]


def _pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _supported(layer: nn.Module) -> bool:
    """Whether the layer has an implementation here with these settings."""
    kinds = (nn.Linear, nn.Conv2d, nn.Flatten, nn.AvgPool2d, HalvingMaxPool, nn.ReLU, nn.Tanh, nn.Sigmoid)
    if type(layer) not in (*kinds, AddressedDropout) or layer._forward_hooks or layer._forward_pre_hooks:
        return False  # a subclass may compute something else
    match layer:
        case nn.Conv2d():
            plain = layer.groups == 1 and _pair(layer.dilation) == (1, 1)
            return plain and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        case nn.AvgPool2d():
            same = _pair(layer.kernel_size) == _pair(layer.stride) and _pair(layer.padding) == (0, 0)
            return same and not layer.ceil_mode and layer.divisor_override is None
        case nn.Flatten():
            return (layer.start_dim, layer.end_dim) == (1, -1)
    return True


# ---- the network


def passes_of(network: Network) -> "Passes":
    """The passes of a network that has them (`why_no_passes`), made once."""
    if network not in _PASSES:
        _PASSES[network] = Passes(network)
    return _PASSES[network]


class Passes:
    """Forward and backward passes of a network at the row `w_P`, which write the gradient `g_P`."""

    def __init__(self, network: Network):
        self.w_P, self.g_P = torch.zeros(network.spec.trained), torch.zeros(network.spec.trained)
        self.image, self.wide = len(network.input_shape) == 3, network.channels_last
        self.layers = _compiled(network, self.w_P, self.g_P)
        self.dropouts = [layer for layer in self.layers if isinstance(layer, _Dropout)]
        with_parameters = (_Linear, _PatchConvolution, _ChannelsLastConvolution, _Bias)
        self.first = next(number for number, layer in enumerate(self.layers) if isinstance(layer, with_parameters))
        self.buffers = _Buffers()

    def arranged(self, x: Tensor) -> Array:
        """All samples of a client, so that a batch of rows is quickly brought into the network's layout."""
        x = x.permute(0, 2, 3, 1) if self.image and self.wide else x
        array: Array = x.contiguous().numpy()
        return array

    def _input(self, x: Array, index_B: Array | None) -> Array:
        """A batch in the network's layout."""
        if index_B is not None:
            x = np.take(x, index_B, 0, out=self.buffers.get("batch", (len(index_B), *x.shape[1:])), mode="clip")
        if self.image and self.wide:
            return x
        arranged = self.buffers.get("input", (*x.shape[1:], len(x)))
        np.copyto(arranged.reshape(-1, len(x)), x.reshape(len(x), -1).T)
        return arranged

    def run(
        self, x: Array, index_B: Array | None, y_B: Array, frozen_BC: Array | None, masks: list[Array]
    ) -> np.floating:
        """Writes the gradient of one batch into `g_P`. Returns the mean loss.

        masks: of the dropout layers (B, ...), in the order of the network.
        """
        activations = self._input(x, index_B)
        for dropout, mask in zip(self.dropouts, masks, strict=True):
            dropout.mask = mask.transpose(0, 2, 3, 1) if mask.ndim == 4 and self.wide else np.moveaxis(mask, 0, -1)
        for layer in self.layers:
            activations = layer.forward(activations)
        if frozen_BC is not None:
            activations += frozen_BC.T
        loss, grad = mean_cross_entropy(activations, y_B)
        for number in range(len(self.layers) - 1, self.first - 1, -1):
            grad = self.layers[number].backward(grad, needs_input=number > self.first)
        return loss


def mean_cross_entropy(logits_CB: Array, y_B: Array) -> tuple[np.floating, Array]:
    """The mean cross-entropy and its gradient (C, B), which overwrites the logits."""
    chosen = (y_B, np.arange(len(y_B)))
    logits_CB -= np.maximum.reduce(logits_CB, 0)
    target_B = logits_CB[chosen]
    p_CB = np.exp(logits_CB, out=logits_CB)
    total_B = np.add.reduce(p_CB, 0)
    p_CB /= total_B
    p_CB[chosen] -= 1
    p_CB *= np.float32(1 / len(y_B))
    return (np.log(total_B) - target_B).mean(), p_CB


def _compiled(network: Network, w_P: Tensor, g_P: Tensor) -> list[Layer]:
    """The network's layers on views of these rows, with max pooling moved before biases and activations."""
    w, g = ([view.numpy() for view in network.views(row_P)] for row_P in (w_P, g_P))
    at, wide = 0, network.channels_last
    layers: list[Layer] = []
    for module in _layers(network.module):
        match module:
            case nn.Linear():
                layers.append(_Linear(w[at], g[at]))
            case nn.Conv2d():
                convolution = _ChannelsLastConvolution if wide else _PatchConvolution
                layers.append(convolution(module, w[at], g[at]))
            case AddressedDropout():
                layers.append(_Dropout())
            case nn.Flatten():
                layers.append(_Flatten(wide))
            case nn.AvgPool2d():
                layers.append(_AvgPool(_pair(module.kernel_size)))
            case HalvingMaxPool():
                place = len(layers)
                while place and isinstance(layers[place - 1], (_Bias, _Activation)):
                    place -= 1
                layers.insert(place, _MaxPool())
            case _:
                layers.append(_Activation(module, in_place=bool(layers) and not layers[-1].uses_output))
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            at += 1
            if module.bias is not None:
                layers.append(_Bias(w[at], g[at], axis=-1 if wide and isinstance(module, nn.Conv2d) else 0))
                at += 1
    return layers


_PASSES: WeakKeyDictionary[Network, Passes] = WeakKeyDictionary()
