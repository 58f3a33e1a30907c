"""What clients own between rounds: personal models, private heads."""

from collections.abc import Iterable, Iterator, KeysView, Mapping
from typing import Any

import numpy as np

from cfl_ray.core.work import Own, OwnedKey


class Owned:
    """Values by (name, client), and which of them changed since they were last asked for. A value is whatever the backend keeps."""

    def __init__(self):
        self._values: dict[OwnedKey, Any] = {}
        self._changed: set[OwnedKey] = set()

    def of(self, own: Own | None, ids: Iterable[int]) -> dict[int, Any]:
        """Values by position in `ids`, of the clients that own something under this name."""
        if own is None:
            return {}
        return {i: self._values[own.name, client] for i, client in enumerate(ids) if (own.name, client) in self._values}

    def update(self, own: Own, values: Mapping[int, Any]) -> None:
        """Takes new values by client."""
        entries = {(own.name, client): value for client, value in values.items()}
        self._values.update(entries)
        self._changed.update(entries)

    def forget(self, ids: np.ndarray) -> None:
        """Drops everything the clients `ids` own."""
        gone = set(np.asarray(ids).tolist())
        for key in [key for key in self._values if key[1] in gone]:
            del self._values[key]
            self._changed.discard(key)

    def keys(self) -> KeysView[OwnedKey]:
        return self._values.keys()

    def changed(self) -> Iterator[tuple[OwnedKey, Any]]:
        """What changed since the last call, in a fixed order."""
        changed, self._changed = sorted(self._changed), set()
        return ((key, self._values[key]) for key in changed)

    def restore(self, entries: Iterable[tuple[OwnedKey, Any]]) -> None:
        """Takes over what was owned when a checkpoint was written."""
        self._values, self._changed = dict(entries), set()
