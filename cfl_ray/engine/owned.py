"""What clients have where they are: what they own between rounds, and results of this round that are not mixed yet."""

import itertools
from collections.abc import Iterable, Iterator, KeysView, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.work import Own, OwnedKey, Work
from cfl_ray.engine.task import Trained


def owned_value(own: Own, trained: Trained) -> Tensor:
    """What a client keeps of a training: the columns it owns and, where that persists, its momentum buffer."""
    columns = trained.row_P if own.columns is None else own.columns.of(trained.row_P)
    return torch.cat([columns] if trained.velocity is None else [columns, trained.velocity]).cpu()


def with_owned(start_P: Tensor, own: Own | None, mine: Tensor | None) -> Tensor:
    """The start row with the columns that the client owns, if it owns any yet."""
    if own is None or mine is None:
        return start_P
    if own.columns is None:
        return mine[: len(start_P)]
    row_P = start_P.clone()
    own.columns.put(row_P, mine)
    return row_P


def owned_velocity(mine: Tensor | None, own: Own, start_P: Tensor) -> Tensor | None:
    """The momentum buffer that the client owns, if it owns one yet."""
    columns = len(start_P) if own.columns is None else own.columns.count
    return None if mine is None or len(mine) == columns else mine[columns:]


class Owned:
    """Values by (name, client), and which of them came, changed or went since that was last asked. A value is whatever the backend keeps."""

    def __init__(self):
        self._values: dict[OwnedKey, Any] = {}
        self._names: set[str] = set()
        self._changed: set[OwnedKey] = set()
        self._forgotten: set[OwnedKey] = set()
        self._pending: dict[int, dict[int, Any]] = {}  # by exchange of the present round, then client
        self._round: tuple | None = None

    def begin(self, work: Work) -> None:
        """Drops pending results of other rounds."""
        now = (work.address.round, work.address.exchange < 0)  # evaluation has exchanges of its own
        if now != self._round:
            self._round, self._pending = now, {}

    def of(self, work: Work) -> dict[int, Any]:
        """What clients bring to `work`, by their position among those that do."""
        ids = work.brought_by.tolist()
        if work.pending is not None:
            pending = self._pending[work.pending]
            return {i: pending[client] for i, client in enumerate(ids) if client in pending}
        if work.own is None:
            return {}
        return {i: self._values[work.own.name, client] for i, client in enumerate(ids) if (work.own.name, client) in self._values}

    def keep(self, work: Work, owned: Mapping[int, Any], pending: Mapping[int, Any]) -> None:
        """Takes what an exchange left behind, by client."""
        if work.own is not None:
            entries = {(work.own.name, client): value for client, value in owned.items()}
            self._values.update(entries)
            self._names.add(work.own.name)
            self._changed.update(entries)
            self._forgotten.difference_update(entries)
        if work.stays[1]:
            self._pending.setdefault(work.address.exchange, {}).update(pending)

    def forget(self, ids: np.ndarray) -> None:
        """Drops everything the clients `ids` own."""
        for key in itertools.product(self._names, np.asarray(ids).tolist()):
            if key in self._values:
                del self._values[key]
                self._changed.discard(key)
                self._forgotten.add(key)

    def __getitem__(self, key: OwnedKey) -> Any:
        return self._values[key]

    def keys(self) -> KeysView[OwnedKey]:
        return self._values.keys()

    def changed(self, everything: bool = False) -> Iterator[tuple[OwnedKey, Any]]:
        """What changed since the last call, or everything, in a fixed order."""
        changed, self._changed = sorted(self._values if everything else self._changed), set()
        return ((key, self._values[key]) for key in changed)

    def forgotten(self) -> set[OwnedKey]:
        """What is gone since the last call."""
        forgotten, self._forgotten = self._forgotten, set()
        return forgotten

    def restore(self, entries: Iterable[tuple[OwnedKey, Any]]) -> None:
        """Takes over what was owned when a checkpoint was written."""
        self._values, self._changed, self._forgotten = dict(entries), set(), set()
        self._names = {name for name, _ in self._values}
