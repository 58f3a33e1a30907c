"""Values that clients keep (client states, deferred results) in the object store.

Large values are objects of their own. Small ones of one call are packed into one object: Ray keeps objects below 100 kB
in the heap of the process that owns them, which is the server. A pack stays until none of its values is in use; a pack
of which few are is written anew (`Compaction`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray
from torch import Tensor

from cfl_ray.core.work import ClientStateKey, SavedState
from cfl_ray.engine.client_state import ClientStateStore
from cfl_ray.nn.shared import shared_tensor

PACKED_BYTES = 100_000  # of one value, from which on it is an object of its own
_PACK_BYTES = 1 << 20  # of a pack that the server writes
_LEAST = 1024  # values written before compaction is worth a look


class Pack(NamedTuple):
    """Values side by side; value i is `flat[end[i - 1] : end[i]]`, and empty if there is none."""

    flat: np.ndarray  # float32
    end: np.ndarray  # int64

    @classmethod
    def of(cls, values: Mapping[int, Tensor], count: int) -> Pack:
        """The values at positions 0 .. count - 1."""
        parts = [values[i].numpy() if i in values else np.zeros(0, np.float32) for i in range(count)]
        return cls(np.concatenate(parts), np.cumsum([len(part) for part in parts]))

    def value(self, position: int) -> np.ndarray:
        return self.flat[self.end[position - 1] if position else 0 : self.end[position]]


class StoredValue(NamedTuple):
    """If a value is: an object, or a position in a pack."""

    ref: ray.ObjectRef[Any]
    position: int | None = None


def tensor_of(content: Any, position: int | None) -> Tensor:
    """A value from the content of its object, without a copy."""
    return shared_tensor(content if position is None else Pack(*content).value(position))


def value_at(place: StoredValue | SavedState) -> Tensor:
    """A value from the object store, or from a checkpoint."""
    return place.tensor() if isinstance(place, SavedState) else tensor_of(ray.get(place.ref), place.position)


class LazyTensors(Sequence[Tensor]):
    """Tensors in the object store, each fetched when it is read."""

    def __init__(self, refs: list[ray.ObjectRef[Any]], places: Sequence[tuple[int, int | None]]):
        self.refs, self.places = refs, places

    def __len__(self) -> int:
        return len(self.places)

    # no slices: their tensors would be fetched together
    def __getitem__(self, number: int) -> Tensor:  # type: ignore[override]
        at, position = self.places[number]
        return tensor_of(ray.get(self.refs[at]), position)


def put_all(entries: Iterable[tuple[ClientStateKey, Tensor]]) -> Iterator[tuple[ClientStateKey, StoredValue]]:
    """Puts values into the object store, small ones in packs of about a megabyte."""
    keys: list[ClientStateKey] = []
    values: list[Tensor] = []
    waiting = 0  # bytes
    for key, value in entries:
        if value.nbytes > PACKED_BYTES:
            yield key, StoredValue(ray.put(value.numpy()))
            continue
        keys.append(key)
        values.append(value)
        waiting += value.nbytes
        if waiting > _PACK_BYTES:
            yield from _put_pack(keys, values)
            keys, values, waiting = [], [], 0
    if keys:
        yield from _put_pack(keys, values)


def _put_pack(keys: list[ClientStateKey], values: list[Tensor]) -> Iterator[tuple[ClientStateKey, StoredValue]]:
    ref = ray.put(tuple(Pack.of(dict(enumerate(values)), len(values))))
    return ((key, StoredValue(ref, position)) for position, key in enumerate(keys))


@dataclass
class Compaction:
    """Writes packs anew of which at most half of the values are in use.

    It looks at all values after twice as many have been written, so that its cost per value written is constant.
    """

    written: int = 0  # values since the last look

    def after(self, written: int, states: ClientStateStore) -> None:
        """Takes note of `written` more values in packs, and compacts if it is time."""
        self.written += written
        if self.written > 2 * len(states.keys()) + _LEAST:
            self.written = 0
            self._compact(states)

    def _compact(self, states: ClientStateStore) -> None:
        used: dict[ray.ObjectRef[Any], list[ClientStateKey]] = defaultdict(list)
        for key in list(states.keys()):
            place = states[key]
            if isinstance(place, StoredValue) and place.position is not None:
                used[place.ref].append(key)
        few: list[ClientStateKey] = []
        for ref, of_pack in used.items():
            if 2 * len(of_pack) <= np.count_nonzero(np.diff(Pack(*ray.get(ref)).end, prepend=0)):
                few += of_pack
        states.move(dict(put_all((key, value_at(states[key])) for key in few)))
