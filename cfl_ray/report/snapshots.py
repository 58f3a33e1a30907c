"""Clusters of clients at chosen rounds, from the recorded reassignments; matrices that a method has recorded."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RecordedMatrix:
    """A matrix that a method reported in a round, with a row for each client of a sample."""

    round: int
    client_S: np.ndarray
    values: np.ndarray  # (S, S) for pairs of clients; (S, F) for signatures
    of_pairs: bool  # whether the values are similarities or distances of pairs of clients
    # each client's number of training samples of each class; NaN: not recorded for it; None: recorded for no client
    label_counts_SC: np.ndarray | None = None


def snapshots(
    reassignments: Iterable[tuple[int, Sequence[Sequence[int]]]], rounds: Sequence[int]
) -> Iterator[tuple[int, dict[int, int]]]:
    """Yields, for each of the ascending `rounds`, the round and the cluster of each client after it.

    Clients without a cluster are not in the dictionary. It is the same object each time.
    """
    cluster_of: dict[int, int] = {}
    waiting = iter(reassignments)
    upcoming = next(waiting, None)
    for round in rounds:
        while upcoming is not None and upcoming[0] <= round:
            for client, cluster in upcoming[1]:
                if cluster >= 0:
                    cluster_of[client] = cluster
                else:
                    cluster_of.pop(client, None)
            upcoming = next(waiting, None)
        yield round, cluster_of


def changes(reassignments: Iterable[tuple[int, Sequence[Sequence[int]]]]) -> Iterator[tuple[int, int, int, int]]:
    """Yields (round, client, from, to) when a client goes from one cluster to another, so not for its first cluster."""
    cluster_of: dict[int, int] = {}
    for round, changed in reassignments:
        for client, cluster in changed:
            if cluster < 0:
                cluster_of.pop(client, None)
                continue
            before = cluster_of.get(client)
            if before is not None and before != cluster:
                yield round, client, before, cluster
            cluster_of[client] = cluster


def evenly(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, evenly spread, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[place] for place in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]


def ranks(sizes: Mapping[int, int]) -> dict[int, int]:
    """The rank of each cluster by size: 0 for the largest. If sizes are equal, the lower cluster number comes first."""
    largest_first = sorted(sizes, key=lambda cluster: (-sizes[cluster], cluster))
    return {cluster: rank for rank, cluster in enumerate(largest_first)}
