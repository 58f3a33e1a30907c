"""Clients of scikit-learn's digits, whose images belong to one client each; the sources of field.yaml.

The division is the same for all seeds of an experiment, so that a client is the same client in each of its runs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from cfl_ray.config.partition import DirichletConfig
from cfl_ray.data.partition import divide

# The 1,797 images are the test part of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak,
# 1998), in the order of the forms on which they were written: 14 forms with the same digits in the same order, of which
# some are missing. Every form begins with 0 .. 9 three times, which is how the places here were found.
FIRST = (0, 130, 256, 386, 516, 646, 776, 906, 1029, 1157, 1287, 1415, 1545, 1667)  # image of each form


def by_writer() -> dict[str, Any]:
    """A client for each form; no groups."""
    x, y = _images()
    return {"x": x, "y": y, "clients": np.searchsorted(FIRST, np.arange(len(y)), side="right") - 1}


def by_group(
    clients: int, angles: Sequence[int], label_sets: Sequence[Sequence[int]] = (tuple(range(10)),)
) -> dict[str, Any]:
    """Clients in a group for each angle and set of labels, equally many in each group, which follow one another.

    The images of a set of labels are divided at random among the clients that have it; those of a client are turned by
    its angle, a multiple of 90 degrees.
    """
    x, y = _images()
    draw = np.random.default_rng(0)
    client = np.empty(len(y), int)
    of_group = clients // (len(angles) * len(label_sets))
    group_of_client = np.arange(clients) // of_group  # angle by angle, each with all sets of labels
    for number, labels in enumerate(label_sets):
        rows = draw.permutation(np.flatnonzero(np.isin(y, labels)))
        owners = np.flatnonzero(group_of_client % len(label_sets) == number)
        client[rows] = owners[np.arange(len(rows)) % len(owners)]
    group = group_of_client[client]
    for number, angle in enumerate(angles):
        turned = group // len(label_sets) == number
        x[turned] = np.rot90(x[turned], angle // 90, (-2, -1))
    return {"x": x, "y": y, "clients": client, "groups": group}


def by_label(clients: int, alpha: float, min_samples: int) -> dict[str, Any]:
    """Clients with shares of each digit from a Dirichlet distribution; no groups. min_samples: fewest of a client."""
    x, y = _images()
    client = np.empty(len(y), int)
    config = DirichletConfig(kind="dirichlet", alpha=alpha, clients=clients)
    for number, rows in enumerate(divide(y, clients, config, min_samples, np.random.default_rng(0))):
        client[rows] = number
    return {"x": x, "y": y, "clients": client}


def _images() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 1, 8, 8) from 0 to 1, and digits."""
    digits = load_digits()
    return (digits.images[:, None] / 16).astype(np.float32), digits.target
