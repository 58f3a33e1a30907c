"""Places of values that clients keep (client states, deferred results): in the object store, or in files.

A large value is a separate object. The small values of a call are packed into one object, because Ray keeps objects
below 100 kB in the heap of their owner, the server. A pack stays as long as any of its values is in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import GetTimeoutError
from torch import Tensor

from cfl_ray.checkpoint.segments import entry_rows
from cfl_ray.core.backend import ClientStateKey, SavedEntry, SavedState
from cfl_ray.nn.shared import shared_tensor

PACKED_BYTES = 100_000  # a larger value is a separate object
_PACK_BYTES = 1 << 20  # size of a pack that the server writes
_FETCH_SECONDS = 600.0  # limit for an object of any size from another node: as long as Ray itself tries

Place = tuple[Any, int | None]  # an object's reference or an entry of a file, and the position in it


class Pack(NamedTuple):
    """Concatenated values; value i is `flat[end[i - 1] : end[i]]`, empty if absent."""

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
    """A value in the object store: an object, or a position in a pack."""

    ref: ray.ObjectRef[Any]
    position: int | None
    nbytes: int
    node: str = ""  # the node whose object store has it


def fetched(ref: ray.ObjectRef[Any]) -> Any:
    """The content of an object. Raises GetTimeoutError after `_FETCH_SECONDS`; the work may succeed on another host."""
    try:
        return ray.get(ref, timeout=_FETCH_SECONDS)
    except GetTimeoutError:
        raise GetTimeoutError(
            f"object {ref.hex()} (a model, or a client's state or result) was not fetched within {_FETCH_SECONDS:g} s: "
            "its node hangs or is out of reach; see `ray status`, remove that node, and `cfl-ray resume` the run"
        ) from None


def place_of(value: StoredValue | SavedState) -> Place:
    """The place of a value, in the form that is sent to another process."""
    return (value.entry, value.row) if isinstance(value, SavedState) else (value.ref, value.position)


def tensor_of(content: Any, position: int | None) -> Tensor:
    """A value from the content of its object, or its entry in a file, without a copy."""
    if isinstance(content, SavedEntry):
        assert position is not None, "an entry has the values of many clients"
        return entry_rows(content)[position]
    return shared_tensor(content if position is None else Pack(*content).value(position))


def tensors_at(places: Iterable[Place]) -> Iterator[Tensor]:
    """Yields the values at these places. An object with several consecutive values is fetched once."""
    last = content = None
    for source, position in places:
        if last is None or source != last:
            last, content = source, source if isinstance(source, SavedEntry) else fetched(source)
        yield tensor_of(content, position)


class LazyTensors(Sequence[Tensor]):
    """Tensors in the object store, each fetched when it is read."""

    def __init__(self, refs: list[ray.ObjectRef[Any]], places: Sequence[tuple[int, int | None]]):
        self.refs, self.places = refs, places

    def __len__(self) -> int:
        return len(self.places)

    # no slices: their tensors would be fetched together
    def __getitem__(self, number: int) -> Tensor:  # type: ignore[override]
        at, position = self.places[number]
        return tensor_of(fetched(self.refs[at]), position)


def put_all(entries: Iterable[tuple[ClientStateKey, Tensor]]) -> Iterator[tuple[ClientStateKey, StoredValue]]:
    """Puts values into the object store, small ones in packs of about a megabyte."""
    keys: list[ClientStateKey] = []
    values: list[Tensor] = []
    waiting = 0  # bytes
    for key, value in entries:
        if value.nbytes > PACKED_BYTES:
            yield key, StoredValue(ray.put(value.numpy()), None, value.nbytes)
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
    pairs = enumerate(zip(keys, values, strict=True))
    return ((key, StoredValue(ref, position, value.nbytes)) for position, (key, value) in pairs)
