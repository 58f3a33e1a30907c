"""Clusters of clients at chosen rounds, from the recorded moves; matrices that a method has recorded."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RecordedMatrix:
    """A matrix that a method reported in a round: a row for each of some clients."""

    round: int
    client_S: np.ndarray
    values: np.ndarray  # (S, S) of pairs; (S, F) of signatures
    of_pairs: bool  # whether it is a similarity or distance of clients
    label_counts_SC: np.ndarray | None = None  # training samples of each class; NaN: not recorded; None: of no client


def snapshots(
    moves: Iterable[tuple[int, Sequence[Sequence[int]]]], rounds: Sequence[int]
) -> Iterator[tuple[int, dict[int, int]]]:
    """Yields each of the ascending `rounds` with the cluster of every client that is in one after it.

    The dictionary is the same object each time.
    """
    cluster_of: dict[int, int] = {}
    waiting = iter(moves)
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


def changes(moves: Iterable[tuple[int, Sequence[Sequence[int]]]]) -> Iterator[tuple[int, int, int, int]]:
    """Yields (round, client, from, to) of each client that goes from one cluster to another; the first is no change."""
    cluster_of: dict[int, int] = {}
    for round, moved in moves:
        for client, cluster in moved:
            if cluster < 0:
                cluster_of.pop(client, None)
                continue
            before = cluster_of.get(client)
            if before is not None and before != cluster:
                yield round, client, before, cluster
            cluster_of[client] = cluster


def evenly(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[place] for place in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]


def ranks(sizes: Mapping[int, int]) -> dict[int, int]:
    """Place of each cluster by size, 0 the largest; the lower number first where sizes are equal."""
    return {cluster: place for place, cluster in enumerate(sorted(sizes, key=lambda one: (-sizes[one], one)))}
