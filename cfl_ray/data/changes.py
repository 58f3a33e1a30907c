"""Clients whose data change in the course of an experiment: rotated, relabelled, or taken over from others."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from cfl_ray.core.errors import DataError
from cfl_ray.data.federation import Federation

Samples = tuple[torch.Tensor, torch.Tensor]  # x, y


@dataclass(frozen=True)
class Held:
    """What a client holds: the data of client `source` as they were at first, turned and relabelled."""

    source: int
    turns: int = 0  # quarter turns counter-clockwise, 0..3
    offset: int = 0  # s in y -> (y + s) mod C


@dataclass(frozen=True)
class DataChange:
    """One change, before `round`."""

    round: int
    ids: tuple[int, ...]
    turns: int = 0
    offset: int = 0
    data_of: tuple[int, ...] | None = None  # clients whose present data `ids` take over first

    def apply(self, held: dict[int, Held], num_classes: int) -> dict[int, Held]:
        """What everybody who ever changed holds afterwards."""
        sources = self.data_of or self.ids
        took = [held.get(source, Held(source)) for source in sources]  # as they are before this change: lists crosswise swap
        changed = {i: replace(one, turns=(one.turns + self.turns) % 4, offset=(one.offset + self.offset) % num_classes) for i, one in zip(self.ids, took)}
        return held | changed


class ChangedFederation(Federation):
    """`base`, some of whose clients hold something else. A change makes a new true group, unless another group is like that already."""

    def __init__(self, base: Federation, held: dict[int, Held]):
        self._base, self._held = base, {client: one for client, one in held.items() if one != Held(client)}
        self.shape, self.view, self.recipe, self.normalize = base.shape, base.view, base.recipe, base.normalize

    @property
    def _ids(self) -> np.ndarray:
        return np.fromiter(self._held, np.int64, len(self._held))

    @property
    def _sources(self) -> np.ndarray:
        return np.fromiter((one.source for one in self._held.values()), np.int64, len(self._held))

    @cached_property
    def size_N(self) -> np.ndarray:
        if (self._ids == self._sources).all():
            return self._base.size_N
        size_N = np.array(self._base.size_N)
        size_N[self._ids] = self._base.size_N[self._sources]
        return size_N

    @cached_property
    def group_N(self) -> np.ndarray | None:
        if self._base.group_N is None or not self._held:
            return self._base.group_N
        group_N = np.array(self._base.group_N)
        number = {self._base.place_of(group): group for group in range(int(group_N.max()) + 1)}
        for client, one in self._held.items():
            group = int(self._base.group_N[one.source])
            family, turns, offset = self._base.place_of(group)
            place = (family, (turns + one.turns) % 4, (offset + one.offset) % self.shape.num_classes)
            group_N[client] = -1 if group < 0 else number.setdefault(place, len(number))
        return group_N

    @property
    def uri(self) -> str | None:
        """Where the shards underneath are; None where there are none."""
        return getattr(self._base, "uri", None)

    @property
    def digest(self) -> str | None:
        return self._base.digest

    def place_of(self, group: int) -> tuple[int, int, int]:
        return self._base.place_of(group)

    def client_name(self, client: int) -> str:
        return self._base.client_name(client)

    def train(self, client: int) -> Samples:
        one = self._held.get(client)
        return self._base.train(client) if one is None else self._changed(self._base.train(one.source), one)

    def holdout(self, client: int) -> Samples:
        one = self._held.get(client)
        return self._base.holdout(client) if one is None else self._changed(self._base.holdout(one.source), one)

    def test(self, client: int, max_images: int | None = None, seed: int = 0) -> Samples:
        one = self._held.get(client)
        return self._base.test(client, max_images, seed) if one is None else self._changed(self._base.test(one.source, max_images, seed), one)

    @cached_property
    def _variants(self) -> dict[tuple[int, int, int], int]:
        """Number of each further test set by (test set of the base, turns, offset)."""
        if self.view == "holdout":
            return {}
        of = self._base.test_set_of(self._sources).tolist()
        keys = sorted({(test_set, one.turns, one.offset) for test_set, one in zip(of, self._held.values()) if one.turns or one.offset})
        return {key: self._base.num_test_sets() + number for number, key in enumerate(keys)}

    def num_test_sets(self) -> int:
        return self._base.num_test_sets() + len(self._variants)

    def test_set(self, index: int) -> Samples:
        if index < self._base.num_test_sets():
            return self._base.test_set(index)
        for (test_set, turns, offset), number in self._variants.items():
            if number == index:
                return self._changed(self._base.test_set(test_set), Held(-1, turns, offset))
        raise IndexError(f"test set {index} of {self.num_test_sets()}")

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        found_M = np.array(self._base.test_set_of(clients))
        for at, one in self._among(clients):
            test_set = int(self._base.test_set_of(np.array([one.source]))[0])
            found_M[at] = self._variants.get((test_set, one.turns, one.offset), test_set)
        return found_M

    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        labels_MC = self._base.labels_of(clients)
        if labels_MC is None:
            return None
        labels_MC = np.array(labels_MC)
        for at, one in self._among(clients):
            labels_MC[at] = np.roll(self._base.labels_of(np.array([one.source]))[0], one.offset)
        return labels_MC

    def _among(self, clients: np.ndarray) -> list[tuple[int, Held]]:
        """Position and data of those of `clients` that changed."""
        at_M = np.flatnonzero(np.isin(clients, self._ids))
        return [(int(at), self._held[int(clients[at])]) for at in at_M]

    def _changed(self, samples: Samples, one: Held) -> Samples:
        x, y = samples
        x = torch.rot90(x, one.turns, (-2, -1)).contiguous() if one.turns else x
        return x, (y + one.offset) % self.shape.num_classes if one.offset else y


class ChangingFederation(ChangedFederation):
    """A federation with a schedule of changes: `at(round)` is what it is then, and it is itself what it is before the first."""

    def __init__(self, base: Federation, changes: Sequence[DataChange]):
        super().__init__(base, {})
        self.changes = tuple(sorted(changes, key=lambda change: change.round))
        for change in self.changes:
            _check(change, base)

    def __reduce__(self):
        return ChangingFederation, (self._base, self.changes)

    @cached_property
    def _epochs(self) -> tuple[list[int], list[Federation]]:
        """Rounds of change, and the federation from each on."""
        rounds, views, held = [], [], {}
        for change in self.changes:
            held = change.apply(held, self.shape.num_classes)
            if rounds and rounds[-1] == change.round:
                views.pop()
            else:
                rounds.append(change.round)
            views.append(ChangedFederation(self._base, held))
        return rounds, views

    def at(self, round: int) -> Federation:
        rounds, views = self._epochs
        number = bisect_right(rounds, round)
        return views[number - 1] if number else self._base

    def changed(self, round: int) -> np.ndarray:
        return np.unique(np.array([client for change in self.changes if change.round == round for client in change.ids], np.int64))


def _check(change: DataChange, base: Federation) -> None:
    """Raises DataError where the change is not possible with these data."""
    where, count = f"schedule, round {change.round}", base.num_clients
    for client in (*change.ids, *(change.data_of or ())):
        if not 0 <= client < count:
            raise DataError(f"{where}: client {client} does not exist; the federation has clients 0 .. {count - 1}")
    if len(set(change.ids)) < len(change.ids):
        raise DataError(f"{where}: change.clients names a client twice")
    if change.turns:
        shape = base.shape.input
        if len(shape) != 3 or (change.turns % 2 and shape[1] != shape[2]):
            raise DataError(f"{where}: rotate by {90 * change.turns} degrees needs {'square ' * (change.turns % 2)}images (channels, height, width), "
                            f"these samples have shape {tuple(shape)}; use relabel or data_of")  # fmt: skip
