"""The partition `noniid1` of PACFL's official code, in which clients share labels; noniid1.yaml tries it."""

import math

import numpy as np


def noniid1(
    labels: np.ndarray, clients: int, draw: np.random.Generator, classes_per_client: int = 2
) -> list[np.ndarray]:
    """Each client's samples: of the labels that client 0 has, clients have many in two cases of three, else few.

    *Many* is 50 to 90 % of a client's labels, *few* 0 to a quarter, rounded up. A label is divided evenly among its
    owners.
    """
    kinds, n = np.unique(labels), classes_per_client
    common = draw.choice(len(kinds), n, replace=False)
    others = np.delete(np.arange(len(kinds)), common)
    owners: list[list[int]] = [[0] if kind in common else [] for kind in range(len(kinds))]
    for client in range(1, clients):
        case = draw.integers(3)
        low, high = (0, len(kinds) // 4 + 1) if case == 2 else (math.ceil(len(kinds) / 2), len(kinds))
        shared = math.ceil(draw.integers(low, high) / len(kinds) * n)
        if case == 0 and shared == n:
            shared -= math.ceil(0.05 * n)
        own = [*draw.choice(common, shared, replace=False), *draw.choice(others, n - shared, replace=False)]
        for kind in own:
            owners[kind].append(client)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for kind, owning in zip(kinds, owners):
        positions = draw.permutation(np.flatnonzero(labels == kind))
        for client, part in zip(owning, np.array_split(positions, max(len(owning), 1))):
            parts[client].append(part)
    return [np.concatenate(part) for part in parts]
