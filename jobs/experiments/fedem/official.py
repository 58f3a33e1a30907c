"""The label skew and the learning rate of FedEM's official code, for table2.yaml."""

import numpy as np


def by_components(
    labels: np.ndarray, clients: int, draw: np.random.Generator, components: int = 3, alpha: float = 0.4
) -> list[np.ndarray]:
    """Each client's samples: random classes are a component, divided among clients in Dirichlet(alpha) shares."""
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for classes in np.array_split(draw.permutation(np.unique(labels)), components):
        positions = draw.permutation(np.flatnonzero(np.isin(labels, classes)))
        cuts = np.cumsum(draw.dirichlet(np.full(clients, alpha)))[:-1] * len(positions)
        for part, own in zip(parts, np.split(positions, cuts.astype(int)), strict=True):
            part.append(own)
    return [np.concatenate(part) for part in parts]


def in_steps(round: int, rounds: int) -> float:
    """Factor of the learning rate: a tenth after half of the rounds, and again after three quarters."""
    return 0.1 ** ((round > rounds / 2) + (round > rounds * 3 / 4))
