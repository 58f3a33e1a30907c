"""Models as rows of a matrix.

The parameters of a model are one float32 row (P,), K models are a matrix (K, P), and weighted means over clients are a
product `weight_KM @ theta_MP`. Buffers of float32 (BatchNorm statistics) are further columns; they are averaged but not
trained. Frozen parameters, equal for all clients, and buffers of other types are not part of a row.

Axis letters, used as suffixes of names in the whole package:
    N all clients    M clients of the round or exchange    K clusters                  P columns of a row    C classes
    B batch          S clients with a signature            F features of a signature   R rows of weighted means
    T test sets, or steps in time      V columns of a table of scores
    E entries of a list: of sparse weights, stored updates, rounds      I rows of a table that is read
Lower-case letters (m, n, k) are parts of these axes, X is any leading axis, and a module names further letters itself.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

# types of normalisation layers; their subclasses, such as lazy layers, are of these types, too
BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
OTHER_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Columns:
    """A set of columns of a row, as disjoint ranges (start, stop) in ascending order."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """Number of columns."""
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

    def within(self, first: int, stop: int) -> "Columns":
        """The columns of this set that are in first .. stop - 1."""
        cut = ((max(start, first), min(end, stop)) for start, end in self.ranges)
        return Columns(tuple((start, end) for start, end in cut if start < end))

    def joined(self, more: "Columns") -> "Columns":
        """The columns of this set and of another one."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self.ranges + more.ranges):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((start, stop))
        return Columns(tuple(joined))

    def others(self, size: int) -> "Columns":
        """All other columns of a row of this size."""
        edges = [0, *(edge for pair in self.ranges for edge in pair), size]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return Columns(tuple((start, stop) for start, stop in pairs if start < stop))


@dataclass(frozen=True)
class ParamSpec:
    """The tensors of a model in the order of their columns: trained parameters, float buffers."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_params: int  # number of trained tensors, which come first
    # float buffers that training does not change, such as statistics of layers that stay in evaluation mode
    constant: frozenset[str] = field(default=frozenset(), compare=False)
    # tensors of normalisation layers, by the type of their module: parameters, and statistics if the layer keeps them
    batch_norms: frozenset[str] = field(default=frozenset(), compare=False)
    other_norms: frozenset[str] = field(default=frozenset(), compare=False)
    # layers with a matrix as weight that do not multiply their inputs by it, as `nn.Linear` does
    not_linear: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def of(cls, module: nn.Module) -> "ParamSpec":
        """The layout of a module's rows."""
        params = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
        persistent = module.state_dict().keys()  # non-persistent buffers hold no state
        buffers = [
            (name, tuple(b.shape))
            for name, b in module.named_buffers()
            if b.dtype == torch.float32 and name in persistent
        ]
        tensors = params + buffers if params else []
        names = tuple(name for name, _ in tensors)
        modules = dict(module.named_modules())
        batch_norms, other_norms = (
            frozenset(name for name in names if _is_of(modules.get(layer_of(name)), kinds))
            for kinds in (BATCH_NORMS, OTHER_NORMS)
        )
        shapes = tuple(shape for _, shape in tensors)
        return cls(names, shapes, len(params), batch_norms=batch_norms, other_norms=other_norms)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Stop column of every tensor."""
        ends, at = [], 0
        for shape in self.shapes:
            at += torch.Size(shape).numel()
            ends.append(at)
        return tuple(ends)

    @property
    def size(self) -> int:
        """P, the number of columns of a row."""
        return self.ends[-1]

    @cached_property
    def trained(self) -> int:
        """Number of leading columns that are trained."""
        return self.ends[self.num_params - 1]

    @property
    def all(self) -> Columns:
        """All columns of a row."""
        return Columns(((0, self.size),))

    @cached_property
    def trainable(self) -> Columns:
        """All trained columns: without buffers."""
        return Columns(((0, self.trained),))

    def columns(self, prefixes: str | Iterable[str]) -> Columns:
        """Columns of the tensors whose name, or its part after a dot, starts with a prefix, or with one of several.

        Raises ValueError if a prefix matches no tensor.
        """
        prefixes = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
        for prefix in prefixes:
            if not any(f".{prefix}" in f".{name}" for name in self.names):
                raise ValueError(f"no parameter starts with {prefix!r}; the model has {', '.join(self.names)}")
        return self._ranges(lambda name: any(f".{prefix}" in f".{name}" for prefix in prefixes))

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Names of the modules that directly own trained parameters, in the order of the model (`layer_of`)."""
        return tuple(dict.fromkeys(map(layer_of, self.names[: self.num_params])))

    def top(self, count: int) -> Columns:
        """Columns of the last `count` layers: their weights, biases and statistics, never those of frozen layers."""
        upper = set(self.layers[max(len(self.layers) - count, 0) :])
        return self._ranges(lambda name: layer_of(name) in upper)

    def bottom(self, count: int) -> Columns:
        """All columns except those of the last `count` layers."""
        return self.top(count).others(self.size)

    def layer(self, number: int) -> Columns:
        """Columns of one layer, weights and bias, counted from 1 in the order of `layers`; the last is the head."""
        if not 1 <= number <= len(self.layers):
            raise ValueError(f"the model has layers 1 .. {len(self.layers)}, got {number}")
        if number == len(self.layers):
            return self.head
        return self._ranges(lambda name: layer_of(name) == self.layers[number - 1])

    @cached_property
    def head(self) -> Columns:
        """The last layer, weights and bias."""
        return self.top(1)

    @cached_property
    def base(self) -> Columns:
        """All columns except the head."""
        return self.bottom(1)

    def sent(self, columns: Columns | None = None) -> int:
        """Number of these columns that have to be sent: all but constant ones. None: of all columns."""
        columns = self.all if columns is None else columns
        constant = self._ranges(lambda name: name in self.constant)
        return columns.count - sum(columns.within(start, stop).count for start, stop in constant.ranges)

    def norms(self, every: bool = False) -> Columns:
        """The normalisation layers: parameters and statistics of BatchNorm and InstanceNorm.

        every: also those of GroupNorm, LayerNorm and RMSNorm, which keep no statistics.
        """
        wanted = self.batch_norms | self.other_norms if every else self.batch_norms
        return self._ranges(lambda name: name in wanted)

    @cached_property
    def linear(self) -> Columns:
        """The fully connected layers, weights and biases; all trained columns if the model has no such layer."""
        trained = zip(self.names[: self.num_params], self.shapes[: self.num_params], strict=True)
        modules = {layer_of(name) for name, shape in trained if len(shape) == 2}
        return self._ranges(lambda name: layer_of(name) in modules) if modules else self.trainable

    def _ranges(self, wanted: Callable[[str], bool]) -> Columns:
        """Columns of the tensors with a wanted name; neighbouring ranges are joined."""
        ranges: list[tuple[int, int]] = []
        for name, start, stop in zip(self.names, (0, *self.ends), self.ends, strict=False):
            if not wanted(name):
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return Columns(tuple(ranges))

    def require_whole(self, columns: Columns) -> None:
        """Raises ValueError for columns that cut a tensor."""
        if inside := [edge for pair in columns.ranges for edge in pair if edge not in (0, *self.ends)]:
            ends = ", ".join(map(str, self.ends))
            raise ValueError(f"columns must be of whole tensors, which end at {ends}; got an edge at {inside[0]}")

    def tensors(self, rows: Tensor) -> dict[str, Tensor]:
        """Views into `rows` (..., P) by name of the tensor, each of shape (..., *shape).

        Rows (..., trained) have the trained tensors alone.
        """
        wanted = self.num_params if rows.shape[-1] == self.trained else len(self.names)
        starts = (0, *self.ends)
        return {
            name: rows[..., start:stop].unflatten(-1, shape) if shape else rows[..., start]
            for name, shape, start, stop in zip(self.names[:wanted], self.shapes, starts, self.ends, strict=False)
        }

    def row_of(self, module: nn.Module) -> Tensor:
        """A module's trained parameters and float buffers as one float32 row (P,), a copy."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return torch.cat([tensors[name].detach().reshape(-1).float() for name in self.names])


def _is_of(module: nn.Module | None, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is of one of these types, also as TorchScript."""
    script = module.original_name if isinstance(module, torch.jit.ScriptModule) else ""
    return isinstance(module, kinds) or script in {kind.__name__ for kind in kinds}


def layer_of(name: str) -> str:
    """The name of the module that owns a tensor: of `2.parametrizations.weight.original0`, as weight_norm has it, 2."""
    path, parametrised, _ = f".{name}".partition(".parametrizations.")
    return path[1:] if parametrised else name.rpartition(".")[0]


def layer_name(layer: str) -> str:
    """The name of a layer of `ParamSpec.layers` in messages; the model itself is a layer if it owns parameters."""
    return repr(layer) if layer else "(the model itself, whose parameters are in no layer)"
