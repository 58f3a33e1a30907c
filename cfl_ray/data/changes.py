"""Clients whose data change during an experiment: rotated, relabelled, in another domain, or another client's."""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from cfl_ray.config.client_ids import clients_in_words
from cfl_ray.config.shift import SHIFT_KINDS
from cfl_ray.core.rng import stream
from cfl_ray.data.federation import Federation, FederationView, TensorSamples
from cfl_ray.data.indexed import Scaling
from cfl_ray.data.shifts import needed
from cfl_ray.errors import DataError


class Domain(NamedTuple):
    """A change of all pixel values."""

    kind: str  # one of `DOMAINS`
    amount: float
    seed: int = 0  # for the random draws of noise


@dataclass(frozen=True)
class DerivedData:
    """A client's present data: those that client `source` had in the first round, rotated, relabelled, in a domain."""

    source: int
    turns: int = 0  # quarter turns counter-clockwise, 0..3
    labels: tuple[int, ...] = ()  # label y becomes labels[y]; empty: unchanged
    domain: Domain | None = None  # after the rotation; None: the values are unchanged


@dataclass(frozen=True)
class DataChange:
    """A change of the data of clients `ids`, before `round`."""

    round: int
    ids: tuple[int, ...]
    turns: int = 0  # quarter turns, in addition to earlier turns
    offset: int = 0  # offset of the labels, in addition to earlier offsets
    data_of: tuple[int, ...] | None = None  # `ids` first get the present data of these clients; None: keep their own
    swap: tuple[int, int] | None = None  # two labels that are exchanged, after all other changes
    back_to: int | None = None  # `ids` first get the data that they had in this round; None: keep their present data
    domain: Domain | None = None  # the new domain, in place of an earlier one; None: keep it

    def apply(self, in_round: Callable[[int], dict[int, DerivedData]], num_classes: int) -> dict[int, DerivedData]:
        """The data, by client, of all clients whose data have changed so far, after this change.

        in_round: the same for the end of a round; for `self.round`, after the changes that precede this one.
        """
        derived, sources = in_round(self.round), self.data_of or self.ids
        given = derived if self.back_to is None else in_round(self.back_to)
        # a list, made before any client's data are replaced, so that two clients can swap their data
        present = [given.get(source, DerivedData(source)) for source in sources]
        changed = {
            client: replace(
                data,
                turns=(data.turns + self.turns) % 4,
                labels=self._relabelled(data.labels, num_classes),
                domain=self.domain or data.domain,
            )
            for client, data in zip(self.ids, present, strict=True)
        }
        return derived | changed

    @property
    def is_drift(self) -> bool:
        """Whether the data get a distribution that no client's data had before."""
        return bool(self.turns or self.offset or self.swap or self.domain)

    def _relabelled(self, labels: tuple[int, ...], num_classes: int) -> tuple[int, ...]:
        """The present label for each label of the first round, after this change; empty if all are unchanged."""
        same = tuple(range(num_classes))
        now = [(label + self.offset) % num_classes for label in labels or same]
        if self.swap is not None:
            first, second = self.swap
            now = [{first: second, second: first}.get(label, label) for label in now]
        return () if tuple(now) == same else tuple(now)


class ChangedFederation(FederationView):
    """`base` with other data for some clients.

    A client whose data no longer have the distribution of a group in `base` gets a new true group, which clients with
    the same distribution share. is_one_group: all clients of `base`, whose true groups are unknown, count as group 0.
    held_out: name of its held-out samples, a part of the random key of a domain's noise.
    """

    def __init__(
        self,
        base: Federation,
        derived: dict[int, DerivedData],
        is_one_group: bool = False,
        held_out: str = "hold-out",
    ) -> None:
        super().__init__(base)
        self._is_one_group, self._held_out = is_one_group, held_out
        self._test_labels: dict[int, np.ndarray] = {}  # of the test sets of `base` that are in another domain
        self._derived = {client: data for client, data in derived.items() if data != DerivedData(client)}
        self._ids = np.array(list(self._derived), np.int64)
        self._sources = np.array([data.source for data in self._derived.values()], np.int64)

    @cached_property
    def num_samples_N(self) -> np.ndarray:  # type: ignore[override]  # computed on first use, never assigned
        if (self._ids == self._sources).all():
            return self._base.num_samples_N
        num_samples_N = np.array(self._base.num_samples_N)
        num_samples_N[self._ids] = self._base.num_samples_N[self._sources]
        return num_samples_N

    @cached_property
    def group_N(self) -> np.ndarray | None:  # type: ignore[override]  # computed on first use, never assigned
        base_group_N = np.zeros(self.num_clients, np.int32) if self._is_one_group else self._base.group_N
        if base_group_N is None or not self._derived:
            return base_group_N
        group_N, unchanged = np.array(base_group_N), DerivedData(-1)
        number_of = {self._distribution(group, unchanged): group for group in range(int(group_N.max()) + 1)}
        for client, data in self._derived.items():
            group = int(base_group_N[data.source])
            group_N[client] = -1 if group < 0 else number_of.setdefault(self._distribution(group, data), len(number_of))
        return group_N

    def _distribution(self, group: int, data: DerivedData) -> DerivedData:
        """Family (as `source`), turns, labels and domain of the data of a group in `base` after a change."""
        family, turns, offset = self._base.group_transform(group)
        num_classes = self.shape.num_classes
        labels = [(label + offset) % num_classes for label in range(num_classes)]
        labels = [data.labels[label] for label in labels] if data.labels else labels
        return DerivedData(family, (turns + data.turns) % 4, tuple(labels), data.domain)

    @property
    def whole(self) -> Federation:
        base = self._base.whole
        return self if base is self._base else ChangedFederation(base, self._derived, self._is_one_group)

    @cached_property
    def validation(self) -> Federation | None:
        part = self._base.validation
        return None if part is None else ChangedFederation(part, self._derived, self._is_one_group, "validation")

    @property
    def uri(self) -> str | None:
        """The folder of the shards of `base`; None if it has none."""
        return getattr(self._base, "uri", None)

    def files_of(self, clients: np.ndarray) -> np.ndarray | None:
        return self._base.files_of(self._with_sources(clients))

    def fetch(self, clients: np.ndarray) -> None:
        self._base.fetch(self._with_sources(clients))

    def _with_sources(self, clients: np.ndarray) -> np.ndarray:
        """Returns, for each client, the client whose data it has."""
        source_M = np.array(clients)
        for position, data in self._changed_among(clients):
            source_M[position] = data.source
        return source_M

    def data_version(self, client: int) -> Hashable:
        data = self._derived.get(client)
        if data is None:
            return self._base.data_version(client)
        return self._base.data_version(data.source), data

    def train(self, client: int) -> TensorSamples:
        data = self._data(client)
        return self._transform(self._base.train(data.source), data, "train")

    def holdout(self, client: int) -> TensorSamples:
        data = self._data(client)
        return self._transform(self._base.holdout(data.source), data, self._held_out)

    def test(self, client: int, max_samples: int | None = None, seed: int = 0) -> TensorSamples:
        if self.view == "holdout":
            return self.holdout(client)
        data, one = self._data(client), np.array([client])
        if data.domain is None:
            return self._transform(self._base.test(data.source, max_samples, seed), data, "test")
        test_set = int(self._base.test_set_of(self._with_sources(one))[0])
        if test_set not in self._test_labels:
            self._test_labels[test_set] = self._base.test_set(test_set)[1].numpy()
        rows = self._base.test_rows(data.source, self._test_labels[test_set], max_samples, seed)
        samples = self._base.test(data.source, max_samples, seed)
        return self._transform(samples, replace(data, source=test_set), "test set", rows)

    def _data(self, client: int) -> DerivedData:
        return self._derived.get(client) or DerivedData(client)

    @cached_property
    def _new_test_sets(self) -> dict[DerivedData, int]:
        """The numbers of the test sets that `base` does not have, by their origin: a test set of `base` as `source`."""
        if self.view == "holdout":
            return {}
        test_set_of_source = self._base.test_set_of(self._sources).tolist()
        origins = {
            replace(data, source=test_set)
            for test_set, data in zip(test_set_of_source, self._derived.values(), strict=True)
            if replace(data, source=-1) != DerivedData(-1)
        }
        ordered = sorted(origins, key=lambda origin: (origin.source, origin.turns, origin.labels, origin.domain or ()))
        return {origin: self._base.num_test_sets() + number for number, origin in enumerate(ordered)}

    def num_test_sets(self) -> int:
        return self._base.num_test_sets() + len(self._new_test_sets)

    def test_set(self, index: int) -> TensorSamples:
        if index < self._base.num_test_sets():
            return self._base.test_set(index)
        if index >= self.num_test_sets():
            raise IndexError(f"test set {index} of {self.num_test_sets()}")
        origin = list(self._new_test_sets)[index - self._base.num_test_sets()]
        x, y = self._base.test_set(origin.source)
        return self._transform((x, y), origin, "test set", np.arange(len(y)))

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        test_set_M = np.array(self._base.test_set_of(self._with_sources(clients)))
        for position, data in self._changed_among(clients):
            test_set = int(test_set_M[position])
            test_set_M[position] = self._new_test_sets.get(replace(data, source=test_set), test_set)
        return test_set_M

    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        labels_MC = self._base.labels_of(self._with_sources(clients))
        if labels_MC is None:
            return None
        labels_MC = np.array(labels_MC)
        for position, data in self._changed_among(clients):
            if data.labels:
                labels_MC[position, data.labels] = labels_MC[position].copy()
        return labels_MC

    def _changed_among(self, clients: np.ndarray) -> list[tuple[int, DerivedData]]:
        """(position in `clients`, present data) of the clients whose data have changed."""
        positions = np.flatnonzero(np.isin(clients, self._ids))
        return [(int(position), self._derived[int(clients[position])]) for position in positions]

    def _transform(
        self, samples: TensorSamples, data: DerivedData, part: str, rows: np.ndarray | None = None
    ) -> TensorSamples:
        """The samples rotated, relabelled and in the domain of `data`; samples: of the client `data.source`.

        part: name of these samples, a part of the random key of a domain's noise. rows: of a test set, whose samples
            have separate draws, so that some of them can be drawn alone; None: one draw for all.
        """
        x, y = samples
        x = torch.rot90(x, data.turns, (-2, -1)).contiguous() if data.turns else x
        if data.domain is not None:
            kind, amount, seed = data.domain
            purpose = f"data/domain of {part}"
            draw = stream(seed, -1, -1, data.source, purpose) if rows is None else _RowDraws(seed, data.source, rows)
            scaling = Scaling(self.scale, self.normalize)
            stored = scaling.to_stored(x)
            code = SHIFT_KINDS.builtin[kind].load()
            changed, _ = code(stored, y.numpy(), 0, draw, amount=amount, scale=self.scale)
            x = scaling.to_tensor(changed)
        return x, torch.tensor(data.labels, dtype=y.dtype)[y.long()] if data.labels else y


@dataclass(frozen=True)
class _RowDraws:
    """Draws of some rows of a test set, each from a separate random key."""

    seed: int
    test_set: int
    rows: np.ndarray

    def standard_normal(self, shape: tuple[int, ...]) -> np.ndarray:
        """Standard normals (rows, ...)."""
        drawn = np.empty(shape)
        for values, row in zip(drawn, self.rows.tolist(), strict=True):
            draw = stream(self.seed, -1, row, self.test_set, "data/domain of test set")
            draw.standard_normal(out=values)
        return drawn


class ChangingFederation(ChangedFederation):
    """`base` with a schedule of changes: `at` returns the federation of a round; this object itself equals `base`.

    If the true groups of `base` are unknown and a change is a drift, the groups of a round are those of the drift:
    all clients are in group 0, and in new groups once their data have changed.
    """

    def __init__(self, base: Federation, changes: Sequence[DataChange]) -> None:
        super().__init__(base, {})
        self.changes = tuple(sorted(changes, key=lambda change: change.round))
        self._without_effect: list[DataChange] = []  # once `_timeline` is known
        self._drifts_alone = base.group_N is None and any(change.is_drift for change in self.changes)
        for change in self.changes:
            _check(change, base)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChangingFederation, (self._base, self.changes)

    @cached_property
    def _timeline(self) -> tuple[list[int], list[Federation]]:
        """The rounds with a change, ascending, and the federations before the first and from each of them on."""
        rounds: list[int] = []
        derived: list[dict[int, DerivedData]] = [{}]  # before the first change, then from each round on
        for change in self.changes:
            before = derived[-1]
            after = change.apply(lambda round: derived[bisect_right(rounds, round)], self.shape.num_classes)
            if all(after[client] == before.get(client, DerivedData(client)) for client in change.ids):
                self._without_effect.append(change)
            if rounds and rounds[-1] == change.round:
                derived.pop()
            else:
                rounds.append(change.round)
            derived.append(after)
        federations = [ChangedFederation(self._base, data, self._drifts_alone) for data in derived]
        return rounds, [federations[0] if self._drifts_alone else self._base, *federations[1:]]

    @property
    def warnings(self) -> list[str]:
        rounds, _ = self._timeline
        return self._base.warnings + [
            f"schedule, round {change.round}: the change of {clients_in_words(change.ids)} has no effect: the data are "
            "then as before"
            for change in self._without_effect
        ]

    def at(self, round: int) -> Federation:
        rounds, federations = self._timeline
        return federations[bisect_right(rounds, round)]

    @cached_property
    def changed_in(self) -> dict[int, np.ndarray]:
        changed: dict[int, list[int]] = {}
        for change in self.changes:
            changed.setdefault(change.round, []).extend(change.ids)
        return {round: np.unique(ids) for round, ids in changed.items()}


def _check(change: DataChange, base: Federation) -> None:
    """Raises DataError if the change is not possible with these data."""
    place, count = f"schedule, round {change.round}", base.num_clients
    for client in (*change.ids, *(change.data_of or ())):
        if not 0 <= client < count:
            raise DataError(f"{place}: client {client} does not exist; the federation has clients 0 .. {count - 1}")
    if len(set(change.ids)) < len(change.ids):
        raise DataError(f"{place}: change.clients names a client twice")
    if (change.offset or change.swap) and base.shape.targets != "class":
        raise DataError(
            f"{place}: relabel and swap need classes, the targets are {base.shape.targets!r}; use rotate or data_of"
        )
    if change.swap and max(change.swap) >= base.shape.num_classes:
        raise DataError(
            f"{place}: swap names label {max(change.swap)}, the labels are 0 .. {base.shape.num_classes - 1}"
        )
    if change.domain is not None and (lacking := needed(change.domain.kind, base.shape)):
        raise DataError(f"{place}: {change.domain.kind} needs {lacking}; use relabel or data_of")
    if not change.turns:
        return
    shape = base.shape.input
    needs_square = change.turns % 2 == 1
    if len(shape) != 3 or (needs_square and shape[1] != shape[2]):
        raise DataError(
            f"{place}: rotate by {90 * change.turns} degrees needs {'square ' if needs_square else ''}images "
            f"(channels, height, width), these samples have shape {tuple(shape)}; use relabel or data_of"
        )
