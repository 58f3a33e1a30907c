"""Operations of networks with forward and backward passes written out, on arrays that are allocated once.

The layout of activations follows the convolutions (letters here: C channels or classes, H height, W width):
    narrow    (C, H, W, B): the patches of a convolution are copied once and multiplied line by line. The batch is the
              innermost axis, so that copies and pooling work on long contiguous runs for any number of channels.
    wide      (B, H, W, C): the convolutions are PyTorch's, in its channels-last memory format.
    others    the axes of a sample, then B, in both cases: (F, B) after flattening.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

# NumPy's OpenBLAS copies the factors of a product before it multiplies them, which takes most of the time for the few
# channels of narrow convolutions, except in products up to this size (its AVX-512 kernels for small matrices): measured
# on those of LeNet-5 for CIFAR-10 in batches of 32, they have 60 to 100 GFLOP/s instead of 13 to 40.
_SMALL = 1_000_000  # multiplications
_LEAST_PART = 128  # values of a line, below which its products are not divided
_KEPT_SHAPES = 100  # of inputs: batches of any size in `outputs`
_MANY = 1 << 14  # values from which PyTorch's elementwise functions are faster than NumPy's, for all their longer calls


@dataclass
class Buffers:
    """Arrays that are allocated once, by name and shape. Arrays of a name share memory: only the latest is valid."""

    memory: dict[str, Tensor] = field(default_factory=dict)
    views: dict[tuple[str, tuple[int, ...]], Array] = field(default_factory=dict)

    def get(self, name: str, shape: tuple[int, ...]) -> Array:
        """The array of this name and shape, with arbitrary values."""
        view = self.views.get((name, shape))
        if view is not None:
            return view
        size = math.prod(shape)
        before = len(self.memory[name]) if name in self.memory else 0
        if before < size:  # at least doubled, since kept views hold the memory of before
            self.memory[name] = torch.empty(max(size, 2 * before))  # by PyTorch, which aligns it to cache lines
            self.views = {key: view for key, view in self.views.items() if key[0] != name}
        self.views[name, shape] = self.memory[name][:size].numpy().reshape(shape)
        return self.views[name, shape]


class Operation:
    """An operation with its arrays. `backward` refers to the latest `forward`."""

    uses_output = False  # whether `backward` reads the output, which the next operation may therefore not overwrite
    returns_input = False  # whether the output shares the memory of the input
    overwrites_grad = False  # whether `backward` overwrites the gradient that it is given
    returns_grad = False  # whether gradients at the inputs share memory with the gradient at the output

    def __init__(self) -> None:
        self.buffers = Buffers()


class Layer(Operation, ABC):
    """An operation with one input."""

    @abstractmethod
    def forward(self, x: Array) -> Array:
        """The output."""

    @abstractmethod
    def backward(self, grad: Array, needs_input: bool) -> Array:
        """The gradient at the input, from that at the output.

        Writes the gradients of the parameters. needs_input: False if the gradient at the input is not needed.
        """


class Join(Operation, ABC):
    """An operation with any number of inputs."""

    @abstractmethod
    def forward(self, *inputs: Array) -> Array:
        """The output."""

    @abstractmethod
    def backward(self, grad: Array, needs_input: bool) -> Sequence[Array | None]:
        """The gradients at the inputs, from that at the output. Those of several inputs may share memory."""


class Linear(Layer):
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


class PatchConvolution(Layer):
    """Convolution in the layout (C, H, W, B), without bias.

    The input is copied once for each column of the kernel, line by line. In this copy the values that a line of the
    output depends on are contiguous, so each line is one small product, forward and for the gradient of the weights.
    """

    def __init__(self, weight: Array, grad_weight: Array, stride: tuple[int, int], padding: tuple[int, int]):
        super().__init__()
        self.stride, self.padding = stride, padding
        self.weight, self.rows = weight.transpose(0, 2, 1, 3), weight.transpose(2, 1, 3, 0)
        self.grad_rows = grad_weight.transpose(2, 1, 3, 0)
        # contiguous: (O, kernel height, C, kernel width) and, for gradients, (kernel height, C, kernel width, O)
        self.matrix, self.row_matrices = (torch.empty(w.shape).numpy() for w in (self.weight, self.rows))
        self.patches: dict[tuple[int, ...], Patches] = {}  # by shape of the input

    def forward(self, x: Array) -> Array:
        if x.shape not in self.patches:
            if len(self.patches) == _KEPT_SHAPES:
                self.patches.clear()
            self.patches[x.shape] = Patches(self, x.shape)
        self.latest = patches = self.patches[x.shape]
        patches.copy(x)
        np.copyto(self.matrix, self.weight)
        np.matmul(self.matrix.reshape(len(self.matrix), -1), patches.lines, out=patches.out_lines)
        return patches.out

    def backward(self, grad: Array, needs_input: bool) -> Array:
        patches = self.latest
        if not grad.flags.c_contiguous:
            np.copyto(patches.out, grad)  # the output is not needed any more
            grad = patches.out
        np.copyto(self.grad_rows, patches.grad_weight(grad))
        if not needs_input:
            return grad
        np.copyto(self.row_matrices, self.rows)
        return patches.grad(self.row_matrices, grad)


class Patches:
    """The arrays of a `PatchConvolution` for one shape (C, H, W, B) of its input, which may be padded.

    The copies are (H, C, kernel width, out width, B). A line of them has C x kernel width rows of out width x B values.
    """

    def __init__(self, layer: PatchConvolution, shape: tuple[int, ...]):
        (channels, height, width, batch), (rows, columns) = shape, layer.padding
        self.inside = (slice(None), slice(rows, rows + height), slice(columns, columns + width))
        height, width = height + 2 * rows, width + 2 * columns
        self.padded_shape, self.is_padded = (channels, height, width, batch), rows + columns > 0
        (self.down, self.right), self.buffers = layer.stride, layer.buffers
        self.kernel = kernel_height, _, kernel_width, outputs = layer.rows.shape
        out_height = (height - kernel_height) // self.down + 1
        out_width = (width - kernel_width) // self.right + 1
        self.shape = (height, channels, kernel_width, out_width, batch)
        self.line_rows, self.values = channels * kernel_width, out_width * batch
        self.copies = self.buffers.get("copies", self.shape)
        self.out = self.buffers.get("out", (outputs, out_height, out_width, batch))
        # for each line of the output, in parts: (out height, parts, kernel height x C x kernel width, values of a part)
        part = _part(self.values, layer.weight.size)
        line = self.line_rows * self.values * self.copies.itemsize
        strides = self.down * line, part * self.copies.itemsize, line // self.line_rows, self.copies.itemsize
        lines = out_height, self.values // part, kernel_height * self.line_rows, part
        self.lines, self.out_lines = as_strided(self.copies, lines, strides), self.lines_of(self.out, part)
        self.source: Array | None = None  # of the latest copy

    def lines_of(self, out: Array, part: int) -> Array:
        """A view (out height, parts of a line, O, values of a part) of the output, or of the gradient there."""
        return out.reshape(*out.shape[:2], -1, part).transpose(1, 2, 0, 3)

    def windows(self, padded: Array) -> Array:
        """A view of the padded input with the shape of the copies."""
        c, h, w, b = padded.strides
        return as_strided(padded, self.shape, (h, c, w, w * self.right, b))

    def copy(self, x: Array) -> None:
        """Fills the copies."""
        if self.is_padded:
            padded = self.buffers.get("padded", self.padded_shape)
            padded.fill(0)
            padded[self.inside] = x
            x = padded
        if x is not self.source:
            self.source, self.view = x, self.windows(x)
        np.copyto(self.copies, self.view)

    def grad_weight(self, grad_out: Array) -> Array:
        """The gradient of the weights, (kernel height, C, kernel width, O)."""
        grad_lines = self.lines_of(grad_out, self.lines.shape[-1]).swapaxes(2, 3)
        parts = self.buffers.get("grad weights", (*self.lines.shape[:3], self.kernel[-1]))
        np.matmul(self.lines, grad_lines, out=parts)
        return np.add.reduce(parts.reshape(-1, *self.kernel), 0)

    @cached_property
    def grads(self) -> "GradPatches":
        """The arrays for gradients at the input."""
        copies, padded = self.buffers.get("grad copies", self.shape), self.buffers.get("grad", self.padded_shape)
        windows = self.windows(padded)
        lines, out_height = copies.reshape(len(copies), self.line_rows, -1), self.out.shape[1]
        products = self.buffers.get("grad products", (out_height, *lines.shape[1:]))
        part = _part(self.values, self.line_rows * self.kernel[-1])
        return GradPatches(
            part,
            products,
            products.reshape(*products.shape[:2], -1, part).swapaxes(1, 2),
            [lines[i : i + self.down * out_height : self.down] for i in range(self.kernel[0])],
            [(windows[:, :, j], copies[:, :, j]) for j in range(self.kernel[2])],
            copies,
            padded,
        )

    def grad(self, row_matrices: Array, grad_out: Array) -> Array:
        """The gradient at the input, from that at the output and the weights (kernel height, C, kernel width, O)."""
        grads = self.grads
        grad_lines = self.lines_of(grad_out, grads.part)
        grads.copies.fill(0)
        for matrix, lines in zip(row_matrices, grads.kernel_rows, strict=True):
            np.matmul(matrix.reshape(self.line_rows, -1), grad_lines, out=grads.product_parts)
            np.add(lines, grads.products, out=lines)
        grads.padded.fill(0)
        for total, column in grads.columns:
            np.add(total, column, out=total)
        return grads.padded[self.inside]


@dataclass(frozen=True)
class GradPatches:
    """The arrays of `Patches` for the gradient at the input.

    part:           values of a line that are multiplied at once.
    products:       (out height, C x kernel width, out width x B) of one row of the kernel; `product_parts` is a view
                    (out height, parts of a line, C x kernel width, part).
    kernel_rows:    for each row of the kernel the lines of `copies` to which its products are added.
    columns:        for each column of the kernel what is added to which values of the padded input.
    copies, padded: gradients at the copies and at the padded input.
    """

    part: int
    products: Array
    product_parts: Array
    kernel_rows: list[Array]
    columns: list[tuple[Array, Array]]
    copies: Array
    padded: Array


def _part(values: int, weights: int) -> int:
    """How many values of a line are multiplied at once with so many weights: a divisor of those of the line."""
    fitting = [part for part in range(_LEAST_PART, values + 1) if values % part == 0 and part * weights <= _SMALL]
    return fitting[-1] if fitting else values


class ChannelsLastConvolution(Layer):
    """Convolution by PyTorch in the layout (B, H, W, C), without bias."""

    def __init__(self, weight: Array, grad_weight: Array, stride: tuple[int, int], padding: tuple[int, int]):
        super().__init__()
        self.weight, self.grad_weight = torch.from_numpy(weight), torch.from_numpy(grad_weight)
        self.weight_last = torch.empty_like(self.weight, memory_format=torch.channels_last)
        self.stride, self.padding = list(stride), list(padding)

    def forward(self, x: Array) -> Array:
        self.x = tensor_of(x, wide=True)
        self.weight_last.copy_(self.weight)
        out = torch.conv2d(self.x, self.weight_last, None, self.stride, self.padding)
        return array_of(out, wide=True)

    def backward(self, grad: Array, needs_input: bool) -> Array:
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            tensor_of(grad, wide=True),
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
        return array_of(grad_x, wide=True) if needs_input else grad


class Bias(Layer):
    """Adds a bias along one axis, in place."""

    returns_input = returns_grad = True

    def __init__(self, bias: Array, grad_bias: Array, axis: int):
        super().__init__()
        self.bias, self.grad_bias, self.axis = bias, grad_bias, axis

    def forward(self, x: Array) -> Array:
        x += self.bias if self.axis else self.bias.reshape(-1, *[1] * (x.ndim - 1))
        return x

    def backward(self, grad: Array, needs_input: bool) -> Array:
        channels = len(self.bias)
        flat = grad.reshape(-1, channels) if self.axis else grad.reshape(channels, -1).T
        ones = self.buffers.get("ones", (len(flat),))
        ones.fill(1)
        np.matmul(ones, flat, out=self.grad_bias)  # faster than a sum over an axis
        return grad


class Activation(Layer):
    """ReLU, tanh or the logistic function. in_place: whether the output overwrites the input."""

    uses_output = overwrites_grad = returns_grad = True

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.in_place = kind, False

    def forward(self, x: Array) -> Array:
        out = x if self.in_place else self.buffers.get("out", x.shape)
        if self.kind == "relu" and x.size > _MANY:
            torch.clamp_min(torch.from_numpy(x), 0, out=torch.from_numpy(out))
        elif self.kind == "relu":
            np.maximum(x, 0, out=out)
        elif self.kind == "tanh":
            np.tanh(x, out=out)
        else:
            np.negative(x, out=out)
            np.exp(out, out=out)
            out += 1
            np.reciprocal(out, out=out)
        self.out = out
        return out

    def backward(self, grad: Array, needs_input: bool) -> Array:
        if self.kind == "relu" and grad.size > _MANY:
            grad_x = torch.from_numpy(grad)
            torch.ops.aten.threshold_backward.grad_input(grad_x, torch.from_numpy(self.out), 0, grad_input=grad_x)
            return grad
        if self.kind == "relu":
            grad *= self.out > 0
            return grad
        slope = self.buffers.get("slope", grad.shape)
        if self.kind == "tanh":
            np.multiply(self.out, self.out, out=slope)
            np.subtract(1, slope, out=slope)
        else:
            np.subtract(1, self.out, out=slope)
            slope *= self.out
        grad *= slope
        return grad


class GroupNorm(Layer):
    """Group normalisation of images.

    The mean is subtracted first, so that variances of values far from zero keep their digits. Sums are over lines of an
    image, then over columns, and factors are repeated for each column, so that passes have long contiguous runs.

    weight, bias: each with its gradient; None: 1 and 0.
    wide: whether activations are images in the layout (B, H, W, C).
    in_place: whether the output of the operation before is overwritten.
    """

    def __init__(
        self, groups: int, weight: tuple[Array, Array] | None, bias: tuple[Array, Array] | None, eps: float, wide: bool
    ):
        super().__init__()
        self.groups, self.eps, self.wide, self.in_place = groups, np.float32(eps), wide, False
        self.trained = weight, bias
        self.weight = np.ones(1, np.float32) if weight is None else weight[0]
        self.bias = np.zeros(1, np.float32) if bias is None else bias[0]

    def forward(self, x: Array) -> Array:
        outer, height, width, inner = self.shape = x.shape
        self.count = np.float32(height * width * (inner if self.wide else outer) // self.groups)
        x = x.reshape(outer, height, width * inner)
        mean_BC = self._group_sums(self._sums(np.add.reduce(x, 1))) / self.count
        self.x = x if self.in_place else self.buffers.get("centred", x.shape)
        torch.sub(torch.from_numpy(x), torch.from_numpy(self._repeated("mean", mean_BC)), out=torch.from_numpy(self.x))
        variance_BC = self._group_sums(self._sums(_dots(self.x, self.x))) / self.count
        self.scale_BC = 1 / np.sqrt(variance_BC + self.eps)
        bias, factor = np.broadcast_to(self.bias, mean_BC.shape), self.scale_BC * self.weight
        self.factor, out = self._repeated("factor", factor), self.buffers.get("out", x.shape)
        _add_product(self._repeated("bias", bias), self.x, self.factor, out)
        return out.reshape(self.shape)

    def backward(self, grad: Array, needs_input: bool) -> Array:
        grad = grad.reshape(self.x.shape)
        sum_BC, dot_BC = self._sums(np.add.reduce(grad, 1)), self._sums(_dots(grad, self.x)) * self.scale_BC
        for pair, gradient_BC in zip(self.trained, (dot_BC, sum_BC), strict=True):
            if pair is not None:
                np.sum(gradient_BC, 0, out=pair[1])
        if not needs_input:
            return grad.reshape(self.shape)
        # scale (weight grad - its mean - x scale * the mean of weight grad * x scale), with x centred
        scale_BC = -self.scale_BC / self.count
        shift_BC = self._group_sums(sum_BC * self.weight) * scale_BC
        slope_BC = self._group_sums(dot_BC * self.weight) * scale_BC * self.scale_BC
        grad_x = torch.empty(self.x.shape).numpy()
        _add_product(self._repeated("shift", shift_BC), grad, self.factor, grad_x)
        _add_product(grad_x, self.x, self._repeated("slope", slope_BC), grad_x)
        return grad_x.reshape(self.shape)

    def _sums(self, columns: Array) -> Array:
        """(B, C) of sums of lines, (B, W x C) or (C, W x B)."""
        outer, _, width, inner = self.shape
        sums = np.add.reduce(columns.reshape(outer, width, inner), 1)
        return sums if self.wide else sums.T

    def _group_sums(self, values_BC: Array) -> Array:
        """The sums of each group, for each of its channels."""
        grouped = values_BC.reshape(len(values_BC), self.groups, -1)
        return np.repeat(np.add.reduce(grouped, 2), grouped.shape[2], 1)

    def _repeated(self, name: str, values_BC: Array) -> Array:
        """The values of samples and channels for each column: (B, 1, W x C) or (C, 1, W x B)."""
        outer, _, width, inner = self.shape
        repeated = self.buffers.get(name, (outer, 1, width * inner))
        np.copyto(repeated.reshape(outer, width, inner), (values_BC if self.wide else values_BC.T)[:, None])
        return repeated


def _dots(a: Array, b: Array) -> Array:
    """Sums of products over axis 1."""
    return np.einsum("ohi,ohi->oi", a, b)


def _add_product(a: Array, b: Array, c: Array, out: Array) -> None:
    """Sets out to a + b * c, in one pass."""
    torch.addcmul(torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(c), out=torch.from_numpy(out))


class MaxPool(Layer):
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
        """Assigns the gradient of each maximum to the first value if it is not smaller, otherwise to the second."""
        takes = torch.from_numpy(self.buffers.get("takes", tuple(grad.shape)))
        torch.ge(first, second, out=takes)  # as 0 and 1 in float32, which is faster than with bool
        torch.mul(grad, takes, out=grads[0])
        torch.sub(grad, grads[0], out=grads[1])


def _pair_of(x: Array, axis: int) -> tuple[Tensor, Tensor]:
    """The values at even and at odd places of an axis: tensors, because PyTorch is twice as fast on such views."""
    even, odd = (x[:, 0::2], x[:, 1::2]) if axis == 1 else (x[:, :, 0::2], x[:, :, 1::2])
    return torch.from_numpy(even), torch.from_numpy(odd)


class AvgPool(Layer):
    """Average pooling with kernel = stride along axes 1 and 2."""

    overwrites_grad = True

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


class Dropout(Layer):
    """Product with a mask in the layout of the activations, which is set before each pass.

    index: number of the dropout layer in `Network.dropouts`. wide: whether activations are images (B, H, W, C).
    """

    overwrites_grad = returns_grad = True
    mask: Array

    def __init__(self, index: int, wide: bool):
        super().__init__()
        self.index, self.wide = index, wide

    def forward(self, x: Array) -> Array:
        return np.multiply(x, self.mask, out=self.buffers.get("out", x.shape))

    def backward(self, grad: Array, needs_input: bool) -> Array:
        grad *= self.mask
        return grad


class Reshape(Layer):
    """Changes the shape of each sample, not the order of its values.

    wide, wide_out: whether the input and the output are images in the layout (B, H, W, C).
    """

    returns_grad = True

    def __init__(self, shape: tuple[int, ...], wide: bool, wide_out: bool):
        super().__init__()
        self.shape, self.wide, self.wide_out = shape, wide, wide_out
        self.returns_input = not wide and not wide_out

    def forward(self, x: Array) -> Array:
        self.in_shape = x.shape
        x = self._exchanged("out", x) if self.wide else x
        x = x.reshape(*self.shape, x.shape[-1])
        return self._exchanged("wide out", x) if self.wide_out else x

    def backward(self, grad: Array, needs_input: bool) -> Array:
        grad = self._exchanged("grad out", grad) if self.wide_out else grad
        if not self.wide:
            return grad.reshape(self.in_shape)
        batch, height, width, channels = self.in_shape
        return self._exchanged("grad", grad.reshape(channels, height, width, batch))

    def _exchanged(self, name: str, x: Array) -> Array:
        """(C, H, W, B) of (B, H, W, C), or the inverse."""
        exchanged = x.transpose(3, 1, 2, 0)
        out = self.buffers.get(name, exchanged.shape)
        np.copyto(out, exchanged)
        return out


class Add(Join):
    """Sum of two activations of equal shape. overwrites: the input that the output overwrites; None: neither."""

    returns_grad = True

    def __init__(self) -> None:
        super().__init__()
        self.overwrites: int | None = None

    def forward(self, *inputs: Array) -> Array:
        first, second = inputs
        out = self.buffers.get("out", first.shape) if self.overwrites is None else inputs[self.overwrites]
        return np.add(first, second, out=out)

    def backward(self, grad: Array, needs_input: bool) -> Sequence[Array | None]:
        return grad, grad


class Concatenation(Join):
    """Activations one after another along an axis."""

    returns_grad = True

    def __init__(self, axis: int):
        super().__init__()
        self.axis = axis

    def forward(self, *inputs: Array) -> Array:
        self.sizes = [x.shape[self.axis] for x in inputs]
        shape = list(inputs[0].shape)
        shape[self.axis] = sum(self.sizes)
        return np.concatenate(inputs, self.axis, out=self.buffers.get("out", tuple(shape)))

    def backward(self, grad: Array, needs_input: bool) -> Sequence[Array | None]:
        return np.split(grad, np.cumsum(self.sizes)[:-1].tolist(), self.axis)


class Differentiated(Join):
    """Any other function of PyTorch, differentiated by autograd.

    function:   takes the activations, then the trained tensors.
    wide:       for each input whether it is an image in the layout (B, H, W, C); None: the function is elementwise, so
                the layout does not matter.
    needs:      for each input whether its gradient is needed.
    parameters: trained tensors, each with its gradient.
    """

    uses_output = returns_grad = True

    def __init__(
        self,
        function: Callable[..., Tensor],
        wide: tuple[bool, ...] | None,
        wide_out: bool,
        needs: tuple[bool, ...],
        parameters: Sequence[tuple[Array, Array]],
    ):
        super().__init__()
        self.function, self.wide, self.wide_out, self.needs = function, wide, wide_out, needs
        self.parameters = [torch.from_numpy(w).requires_grad_() for w, _ in parameters]
        self.grads = [torch.from_numpy(g) for _, g in parameters]

    def forward(self, *inputs: Array) -> Array:
        with torch.enable_grad():
            tensors = [
                (torch.from_numpy(x) if self.wide is None else tensor_of(x, self.wide[i])).requires_grad_(self.needs[i])
                for i, x in enumerate(inputs)
            ]
            self.leaves = [tensor for tensor, needs in zip(tensors, self.needs, strict=True) if needs]
            self.out = self.function(*tensors, *self.parameters)
        out = self.out.detach()
        array = out.numpy() if self.wide is None else array_of(out, self.wide_out)
        shared = any(np.may_share_memory(array, x) for x in inputs)
        return array.copy() if shared else array

    def backward(self, grad: Array, needs_input: bool) -> Sequence[Array | None]:
        upstream = torch.from_numpy(grad) if self.wide is None else tensor_of(grad, self.wide_out)
        all_grads = torch.autograd.grad(self.out, [*self.leaves, *self.parameters], upstream, materialize_grads=True)
        del self.out
        for into, grad_w in zip(self.grads, all_grads[len(self.leaves) :], strict=True):
            into.copy_(grad_w)
        grads = iter(all_grads)
        return [self._array(next(grads), i) if needs else None for i, needs in enumerate(self.needs)]

    def _array(self, grad: Tensor, index: int) -> Array:
        return grad.contiguous().numpy() if self.wide is None else array_of(grad, self.wide[index])


def tensor_of(x: Array, wide: bool) -> Tensor:
    """An activation in PyTorch's layout (B, ...), as a view."""
    return torch.from_numpy(x.transpose(0, 3, 1, 2) if wide else np.moveaxis(x, -1, 0))


def array_of(x: Tensor, wide: bool) -> Array:
    """An activation (B, ...) in the layout of this module: without a copy if its memory is in that order."""
    return (x.permute(0, 2, 3, 1) if wide else x.movedim(0, -1)).contiguous().numpy()


def mean_cross_entropy(logits_CB: Array, y_B: Array, weight_B: Array | None = None) -> tuple[np.floating, Array]:
    """The mean cross-entropy and its gradient (C, B), which overwrites the logits.

    weight_B: weights of the samples in the mean; None: 1 for all.
    """
    chosen = (y_B, np.arange(len(y_B)))
    logits_CB -= np.maximum.reduce(logits_CB, 0)
    target_B = logits_CB[chosen]
    p_CB = np.exp(logits_CB, out=logits_CB)
    total_B = np.add.reduce(p_CB, 0)
    p_CB /= total_B
    p_CB[chosen] -= 1
    p_CB *= np.float32(1 / len(y_B))
    loss_B = np.log(total_B) - target_B
    if weight_B is not None:
        loss_B *= weight_B
        p_CB *= weight_B
    return np.add.reduce(loss_B) / np.float32(len(y_B)), p_CB  # as `mean`, whose Python code takes longer
