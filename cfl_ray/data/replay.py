"""Data of earlier rounds. Changes are functions of the first data, so nothing is stored: they are computed again."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from cfl_ray.data.federation import Federation, FederationView, TensorSamples

Rounds = tuple[int, ...]


def distinct_rounds(
    federation: Federation, round: int, ids_M: np.ndarray, rounds_M: Sequence[Sequence[int]]
) -> tuple[tuple[Rounds, ...], np.ndarray]:
    """The rounds of each client in which its data differ, and its number of samples in these rounds, int64 (M,).

    If several rounds have equal data, only the latest is returned, or `round` if these are the present data.
    Raises ValueError for rounds outside 0 .. round.
    """
    distinct, size_M = [], np.zeros(len(ids_M), np.int64)
    for position, (client, rounds) in enumerate(zip(ids_M.tolist(), rounds_M, strict=True)):
        if bad := [past for past in rounds if not 0 <= past <= round]:
            raise ValueError(f"client {client} can replay data of rounds 0 .. {round}, got round {bad[0]}")
        round_of = {federation.at(past).data_version(client): past for past in sorted(rounds)}
        present = federation.at(round).data_version(client)
        distinct.append(tuple(round if version == present else past for version, past in round_of.items()))
        size_M[position] = sum(int(federation.at(past).num_samples_N[client]) for past in distinct[-1])
    return tuple(distinct), size_M


class ReplayedFederation(FederationView):
    """The federation of `round`, in which clients have the union of their data of several rounds.

    rounds_of: the rounds of each of these clients. of_validation: whether the test data are the validation data.
    """

    def __init__(
        self, federation: Federation, round: int, rounds_of: Mapping[int, Rounds], of_validation: bool = False
    ):
        self._federation, self._rounds_of, self._of_validation = federation, rounds_of, of_validation
        super().__init__(self._at(round))
        self.num_samples_N, self.group_N, self._round = self._base.num_samples_N, self._base.group_N, round

    @cached_property
    def validation(self) -> Federation | None:
        if self._base.validation is None:
            return None
        return ReplayedFederation(self._federation, self._round, self._rounds_of, of_validation=True)

    def _at(self, round: int) -> Federation:
        federation = self._federation.at(round)
        part = federation.validation if self._of_validation else None
        return federation if part is None else part

    def _of(self, client: int) -> list[Federation]:
        rounds = self._rounds_of.get(client)
        return [self._base] if rounds is None else [self._at(round) for round in rounds]

    def data_version(self, client: int) -> Hashable:
        first, *others = (federation.data_version(client) for federation in self._of(client))
        return (first, *others) if others else first

    def train(self, client: int) -> TensorSamples:
        return _union([federation.train(client) for federation in self._of(client)])

    def holdout(self, client: int) -> TensorSamples:
        return _union([federation.holdout(client) for federation in self._of(client)])

    def num_test_samples(self, clients: np.ndarray) -> np.ndarray:
        parts = (
            [federation.num_test_samples(np.array([client])) for federation in self._of(client)] for client in clients
        )
        return np.array([np.sum(of_client) for of_client in parts], np.int64)

    def test(self, client: int, max_samples: int | None = None, seed: int = 0) -> TensorSamples:
        return _union([federation.test(client, max_samples, seed) for federation in self._of(client)])


def _union(parts: Sequence[TensorSamples]) -> TensorSamples:
    return parts[0] if len(parts) == 1 else (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
