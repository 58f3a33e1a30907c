"""A federation that has grown: the clients of one, followed by those of others."""

from collections.abc import Iterator

import numpy as np
import torch

from cfl_ray.core.errors import DataError
from cfl_ray.data.federation import Federation


class ChainedFederation(Federation):
    """The clients of `parts`, one federation after the other. Pickles as its parts do.

    A group has the same number in all of them; the clients of a part that knows no groups are in group -1.
    """

    _then: "ChainedFederation | None" = None  # what this was when it was last looked at in a round

    def __init__(self, parts: tuple[Federation, ...]):
        self.parts, first = parts, parts[0]
        self.shape, self.view, self.normalize = first.shape, first.view, first.normalize
        self.recipe = {"chained": [part.recipe for part in parts]}
        self._first = np.cumsum([0, *(part.num_clients for part in parts)])  # id of the first client of each part, and N
        self._first_set = np.cumsum([0, *(part.num_test_sets() for part in parts)])
        self.size_N = np.concatenate([part.size_N for part in parts])
        groups = [np.full(part.num_clients, -1, np.int32) if part.group_N is None else part.group_N for part in parts]
        self.group_N = None if all(part.group_N is None for part in parts) else np.concatenate(groups)

    def __reduce__(self):
        return ChainedFederation, (self.parts,)

    def at(self, round: int) -> Federation:
        parts = tuple(part.at(round) for part in self.parts)
        if all(new is old for new, old in zip(parts, self.parts)):
            return self
        if self._then is None or any(new is not old for new, old in zip(parts, self._then.parts)):
            self._then = ChainedFederation(parts)
        return self._then

    def changed(self, round: int) -> np.ndarray:
        return np.concatenate([part.changed(round) + first for part, first in zip(self.parts, self._first)])

    def place_of(self, group: int) -> tuple[int, int, int]:
        return self.parts[0].place_of(group)

    def client_name(self, client: int) -> str:
        part, own = self._place(client)
        return name if (name := part.client_name(own)) != str(own) else str(client)

    def train(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        part, own = self._place(client)
        return part.train(own)

    def num_test_sets(self) -> int:
        return int(self._first_set[-1])

    def test_set(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self.num_test_sets():
            raise IndexError(f"test set {index} of {self.num_test_sets()}")
        number = int(np.searchsorted(self._first_set, index, "right")) - 1
        return self.parts[number].test_set(index - int(self._first_set[number]))

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        found = np.full(len(clients), -1, np.int32)
        for number, here, own in self._split(clients):
            of_part = self.parts[number].test_set_of(own)
            found[here] = np.where(of_part < 0, -1, of_part + self._first_set[number])
        return found

    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        if self.view != "label":
            return None
        found = np.ones((len(clients), self.shape.num_classes), bool)
        for number, here, own in self._split(clients):
            labels = self.parts[number].labels_of(own)
            found[here] = True if labels is None else labels
        return found

    def holdout(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        part, own = self._place(client)
        return part.holdout(own)

    def test(self, client: int, max_images: int | None = None, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        part, own = self._place(client)
        return part.test(own, max_images, seed)

    def _place(self, client: int) -> tuple[Federation, int]:
        """The part that holds a client, and its id there."""
        number = int(np.searchsorted(self._first, client, "right")) - 1
        if not 0 <= number < len(self.parts):
            raise IndexError(f"client {client} of {self.num_clients}")
        return self.parts[number], int(client - self._first[number])

    def _split(self, clients: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(number of a part, bool (M,): which of `clients` it holds, their ids there)."""
        clients = np.asarray(clients, np.int64)
        number_M = np.searchsorted(self._first, clients, "right") - 1
        for number in np.unique(number_M).tolist():
            here = number_M == number
            yield number, here, clients[here] - self._first[number]


def grown(federation: Federation, added: Federation) -> ChainedFederation:
    """`federation` with the clients of `added` at its end. Raises DataError where the two do not fit, or share a client."""
    limits = {"inputs of shape": [one.shape.input for one in (added, federation)], "number of classes": [one.shape.num_classes for one in (added, federation)],
              "test view": [one.view for one in (added, federation)], "normalisation": [_plain(one.normalize) for one in (added, federation)]}  # fmt: skip
    for what, (new, there) in limits.items():
        if new != there:
            raise DataError(f"{what}: the new clients have {new}, the federation has {there}; prepare their shards with the data section of this run")
    parts = federation.parts if isinstance(federation, ChainedFederation) else (federation,)
    if added.digest is not None and added.digest in [part.digest for part in parts]:
        raise DataError("same id twice: the clients of these shards are in the federation already")
    there = _names(federation)
    if twice := [name for name in _names(added) if name in there]:
        raise DataError(f"same id twice: client {twice[0]!r} is in the federation already ({len(twice)} of {added.num_clients} new clients are)")
    return ChainedFederation((*parts, added))


def _names(federation: Federation) -> set[str]:
    """What the data call their clients; a number that is only a place in a list says nothing."""
    parts = federation.parts if isinstance(federation, ChainedFederation) else (federation,)
    return {name for part in parts for client in range(part.num_clients) if (name := part.client_name(client)) != str(client)}


def _plain(normalize) -> list[list[float]] | None:
    return None if normalize is None else [list(map(float, part)) for part in normalize]

