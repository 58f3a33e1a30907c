"""Cache of clients' samples on the device, so that they are copied once and not in every round."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cfl_ray.nn.device_memory import DeviceMemory, copied_to

Samples = tuple[Tensor, Tensor]  # x (n, *shape), y (n,)

_SHARE = 0.3  # of the memory that is free when the first client is added


@dataclass(frozen=True, eq=False)
class Same:
    """Part of a key: equal only for the same object, which it keeps alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class SampleCache:
    """Samples by client and version of its data, and shared test sets.

    Beyond the limit, those used least recently are dropped.
    On a CPU, nothing is kept: the samples are used as they are read.

    limit: bytes; None: a share of the memory that is free when the first client is added.
    """

    def __init__(self, memory: DeviceMemory, limit: int | None = None):
        self.memory, self.limit = memory, limit
        self.used = 0  # bytes
        self._kept: OrderedDict[Hashable, tuple[Samples, int]] = OrderedDict()  # with the number of in-place changes
        memory.caches.append(self.clear)

    def get(self, key: Hashable) -> Samples | None:
        """The samples under this key; None if they are not kept."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        samples, version = self._kept[key]
        if samples[0]._version == version:
            return samples
        self._drop(key)  # changed by a network that begins with an in-place operation
        return None

    def add(self, key: Hashable, samples: Samples) -> Samples:
        """The samples: moved to the device and kept if they fit, otherwise unchanged."""
        if self.limit is None:
            self.limit = int(_SHARE * self.memory.free())
        x, y = samples
        size = x.nbytes + y.nbytes
        if size > self.limit:
            return samples
        while self._kept and self.used + size > self.limit:
            self._drop(next(iter(self._kept)))
        moved = copied_to(self.memory.device, x), copied_to(self.memory.device, y)
        self._kept[key] = moved, moved[0]._version
        self.used += size
        return moved

    def _drop(self, key: Hashable) -> None:
        (x, y), _ = self._kept.pop(key)
        self.used -= x.nbytes + y.nbytes

    def clear(self) -> None:
        """Drops all samples."""
        self._kept.clear()
        self.used = 0
