"""Federations that grow: the clients of a federation, followed by the clients of further federations."""

import operator
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from cfl_ray.data.federation import Federation, GroupTransform, TensorSamples
from cfl_ray.data.split import SplitFederation
from cfl_ray.errors import DataError


class ChainedFederation(Federation):
    """The clients of the federations `parts`, in their order. Its pickle contains the pickles of the parts.

    A true group has the same number in all parts; the clients of a part without true groups are in group -1.
    """

    _latest: "ChainedFederation | None" = None  # the result of the last `at` in which a part had changed

    def __init__(self, parts: tuple[Federation, ...]) -> None:
        self.parts, first = parts, parts[0]
        self.shape, self.view = first.shape, first.view
        self.scale, self.normalize, self.share = first.scale, first.normalize, first.share
        self.recipe = {"chained": [part.recipe for part in parts]}
        # number of the first client, and of the first test set, of each part; the last entries are N and T
        self._first_client = np.cumsum([0, *(part.num_clients for part in parts)])
        self._first_test_set = np.cumsum([0, *(part.num_test_sets() for part in parts)])
        self.num_samples_N = np.concatenate([part.num_samples_N for part in parts])
        groups = [np.full(part.num_clients, -1, np.int32) if part.group_N is None else part.group_N for part in parts]
        self.group_N = None if all(part.group_N is None for part in parts) else np.concatenate(groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChainedFederation, (self.parts,)

    def at(self, round: int) -> Federation:
        parts = tuple(part.at(round) for part in self.parts)
        if all(map(operator.is_, parts, self.parts)):
            return self
        if self._latest is None or not all(map(operator.is_, parts, self._latest.parts)):
            self._latest = ChainedFederation(parts)
        return self._latest

    @cached_property
    def validation(self) -> Federation | None:
        parts = [part.validation for part in self.parts]
        known = tuple(part for part in parts if part is not None)
        return ChainedFederation(known) if len(known) == len(parts) else None

    @cached_property
    def changed_in(self) -> dict[int, np.ndarray]:
        changed: dict[int, np.ndarray] = {}
        for part, first in zip(self.parts, self._first_client[:-1], strict=True):
            for round, ids in part.changed_in.items():
                changed[round] = np.append(changed.get(round, ids[:0]), ids + first)
        return changed

    def group_transform(self, group: int) -> GroupTransform:
        return self.parts[0].group_transform(group)

    def client_name(self, client: int) -> str:
        part, id_in_part = self._locate(client)
        name = part.client_name(id_in_part)
        return str(client) if name == str(id_in_part) else name

    def data_version(self, client: int) -> Hashable:
        part, id_in_part = self._locate(client)
        return part.data_version(id_in_part)

    def train(self, client: int) -> TensorSamples:
        part, id_in_part = self._locate(client)
        return part.train(id_in_part)

    def num_test_sets(self) -> int:
        return int(self._first_test_set[-1])

    def test_set(self, index: int) -> TensorSamples:
        if not 0 <= index < self.num_test_sets():
            raise IndexError(f"test set {index} of {self.num_test_sets()}")
        number = int(np.searchsorted(self._first_test_set, index, "right")) - 1
        return self.parts[number].test_set(index - int(self._first_test_set[number]))

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        test_set_M = np.full(len(clients), -1, np.int32)
        for number, is_here_M, ids in self._by_part(clients):
            in_part = self.parts[number].test_set_of(ids)
            test_set_M[is_here_M] = np.where(in_part < 0, -1, in_part + self._first_test_set[number])
        return test_set_M

    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        if self.view != "label":
            return None
        labels_MC = np.ones((len(clients), self.shape.num_classes), bool)
        for number, is_here_M, ids in self._by_part(clients):
            labels = self.parts[number].labels_of(ids)
            labels_MC[is_here_M] = True if labels is None else labels
        return labels_MC

    def holdout(self, client: int) -> TensorSamples:
        part, id_in_part = self._locate(client)
        return part.holdout(id_in_part)

    def test(self, client: int, max_samples: int | None = None, seed: int = 0) -> TensorSamples:
        part, id_in_part = self._locate(client)
        return part.test(id_in_part, max_samples, seed)

    def _locate(self, client: int) -> tuple[Federation, int]:
        """The part with this client, and the client's id in this part."""
        number = int(np.searchsorted(self._first_client, client, "right")) - 1
        if not 0 <= number < len(self.parts):
            raise IndexError(f"client {client} of {self.num_clients}")
        return self.parts[number], int(client - self._first_client[number])

    def _by_part(self, clients: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields (number of a part, bool (M,): which of `clients` are in this part, the ids that these have in it)."""
        clients = np.asarray(clients, np.int64)
        number_M = np.searchsorted(self._first_client, clients, "right") - 1
        for number in np.unique(number_M).tolist():
            is_here_M = number_M == number
            yield number, is_here_M, clients[is_here_M] - self._first_client[number]


def grown(federation: Federation, added: Federation) -> ChainedFederation:
    """`federation` followed by the clients of `added`, which hold out validation data as those of `federation` do.

    Raises DataError if the two differ in shape, classes, test view or normalisation, or share a client.
    """
    if federation.share is not None:
        added = SplitFederation(added, federation.share)
    _check_compatible(federation, added)
    parts = _parts_of(federation)
    digests = [part.digest for part in parts]
    if added.digest is not None and added.digest in digests:
        first = sum(part.num_clients for part in parts[: digests.index(added.digest)])
        raise DataError(
            "same id twice: the clients of these shards are in the federation already, as clients "
            f"{first} .. {first + added.num_clients - 1}"
        )
    known = _names(federation)
    if twice := [name for name in _names(added) if name in known]:
        raise DataError(
            f"same id twice: client {twice[0]!r} is in the federation already ({len(twice)} of {added.num_clients} "
            "new clients are)"
        )
    return ChainedFederation((*parts, added))


def _check_compatible(federation: Federation, added: Federation) -> None:
    names = added.shape.class_names, federation.shape.class_names
    properties: dict[str, tuple[object, object]] = {
        "inputs of shape": (added.shape.input, federation.shape.input),
        "vocabulary": (added.shape.vocabulary, federation.shape.vocabulary),
        "targets": (added.shape.targets, federation.shape.targets),
        "targets of shape": (added.shape.target_shape, federation.shape.target_shape),
        "number of classes": (added.shape.num_classes, federation.shape.num_classes),
        "names of the classes": names if all(names) else ((), ()),  # not known of both
        "test view": (added.view, federation.view),
        "validation data": (_validation_view(added) if federation.validation else None, _validation_view(federation)),
        "normalisation": (_as_floats(added.normalize), _as_floats(federation.normalize)),
    }
    for what, (new, present) in properties.items():
        if new != present:
            raise DataError(
                f"{what}: the new clients have {new}, the federation has {present}; prepare their shards with the "
                "data section of this run"
            )


def _validation_view(federation: Federation) -> str | None:
    return None if federation.validation is None else federation.validation.view


def _parts_of(federation: Federation) -> tuple[Federation, ...]:
    return federation.parts if isinstance(federation, ChainedFederation) else (federation,)


def _names(federation: Federation) -> set[str]:
    """The names of clients in the data, without names that are only the client's number."""
    return {
        name
        for part in _parts_of(federation)
        for client in range(part.num_clients)
        if (name := part.client_name(client)) != str(client)
    }


def _as_floats(normalize: Sequence[Sequence[float]] | None) -> list[list[float]] | None:
    return None if normalize is None else [list(map(float, part)) for part in normalize]
