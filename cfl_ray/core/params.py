"""Models are rows.

The parameters of a model travel as one float32 row; K models are a matrix `(K, P)`, and a weighted mean of clients is
`weight_KM @ theta_MP`. Frozen parameters and float buffers (BatchNorm statistics) are further columns that are averaged but not
trained; integer buffers are not part of a row.

Axis letters, used as suffixes of names everywhere:
    N all clients    M clients of this round    K clusters    P columns of a row    C classes
    B batch          S shared test sets         F features of a signature          R output rows of a mix
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Columns:
    """A set of columns of a row, as (start, stop) ranges in ascending order."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def of(self, rows: Tensor) -> Tensor:
        """These columns of `rows` (..., P): a view when they are one range, a copy otherwise."""
        parts = [rows[..., start:stop] for start, stop in self.ranges] or [rows[..., :0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Writes `values` (..., count) into these columns of `rows` (..., P), in place."""
        at = 0
        for start, stop in self.ranges:
            rows[..., start:stop] = values[..., at : at + stop - start]
            at += stop - start


@dataclass(frozen=True)
class ParamSpec:
    """Which columns of a row belong to which tensor of the model. Parameters come first, then float buffers."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_params: int  # tensors that are trained; the rest are buffers

    @classmethod
    def of(cls, module: nn.Module) -> "ParamSpec":
        params = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
        frozen = [(name, tuple(p.shape)) for name, p in module.named_parameters() if not p.requires_grad]
        kept = module.state_dict().keys()  # buffers that are not persistent are working space
        buffers = [(name, tuple(b.shape)) for name, b in module.named_buffers() if b.is_floating_point() and name in kept]
        names, shapes = zip(*(params + frozen + buffers)) if params else ((), ())
        return cls(names, shapes, len(params))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        ends, at = [], 0
        for shape in self.shapes:
            at += torch.Size(shape).numel()
            ends.append(at)
        return tuple(ends)

    @property
    def size(self) -> int:
        """P, the columns of a row."""
        return self.ends[-1]

    @cached_property
    def trained(self) -> int:
        """Number of leading columns that are parameters."""
        return self.ends[self.num_params - 1]

    @property
    def all(self) -> Columns:
        return Columns(((0, self.size),))

    @cached_property
    def trainable(self) -> Columns:
        """All parameters that are trained: without buffers and frozen parts."""
        return Columns(((0, self.trained),))

    def columns(self, prefixes: Iterable[str]) -> Columns:
        """Columns of the tensors whose name starts with one of `prefixes`. Raises ValueError where a prefix fits none."""
        prefixes = tuple(prefixes)
        for prefix in prefixes:
            if not any(name.startswith(prefix) for name in self.names):
                raise ValueError(f"no parameter starts with {prefix!r}; the model has {', '.join(self.names)}")
        return self._ranges(lambda name: name.startswith(prefixes))

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Modules that have trained parameters of their own, from input to output."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.names[: self.num_params]))

    def top(self, count: int) -> Columns:
        """The last `count` layers, weights and biases (all columns where there are no more)."""
        if count >= len(self.layers):
            return self.all
        upper = set(self.layers[len(self.layers) - count :])
        return self._ranges(lambda name: name.rpartition(".")[0] in upper)

    def bottom(self, count: int) -> Columns:
        """Everything except the `count` last layers."""
        if count >= len(self.layers):
            return Columns(())
        upper = set(self.layers[len(self.layers) - count :])
        return self._ranges(lambda name: name.rpartition(".")[0] not in upper)

    @cached_property
    def head(self) -> Columns:
        """The final layer, weights and bias: the tensors of the last module that has parameters."""
        return self.top(1)

    @cached_property
    def base(self) -> Columns:
        """Everything except the head."""
        return self.bottom(1)

    @cached_property
    def linear(self) -> Columns:
        """The fully connected layers, weights and biases. All trained columns where there is none."""
        shape = dict(zip(self.names, self.shapes))
        modules = {layer for layer in self.layers if any(len(shape[n]) == 2 for n in self.names[: self.num_params] if n.rpartition(".")[0] == layer)}
        return self._ranges(lambda name: name.rpartition(".")[0] in modules) if modules else self.trainable

    def _ranges(self, wanted) -> Columns:
        ranges: list[tuple[int, int]] = []
        for name, start, stop in zip(self.names, (0, *self.ends), self.ends):
            if not wanted(name):
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return Columns(tuple(ranges))

    def tensors(self, rows: Tensor) -> dict[str, Tensor]:
        """Named views into `rows` (..., P), each (..., *shape); only the trained tensors where the rows are no longer than those."""
        starts, wanted = (0, *self.ends), self.num_params if rows.shape[-1] == self.trained else len(self.names)
        return {
            name: rows[..., start:stop].unflatten(-1, shape) if shape else rows[..., start]
            for name, shape, start, stop in zip(self.names[:wanted], self.shapes, starts, self.ends)
        }

    def row_of(self, module: nn.Module) -> Tensor:
        """The module's parameters and float buffers as one row (P,), a copy."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return torch.cat([tensors[name].detach().reshape(-1).float() for name in self.names])
