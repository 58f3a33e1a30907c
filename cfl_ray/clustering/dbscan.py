"""DBSCAN of clients by their distances, and a distance up to which clients are neighbours."""

import numpy as np
import scipy

from cfl_ray.clustering.agglomerative import by_lowest_member


def row_gap(distance_MM: np.ndarray) -> float:
    """The median over rows of the midpoint of the largest gap between a row's sorted distances to other clients.

    A row without a gap contributes its largest distance. Returns 0 for fewer than two clients.
    """
    count = len(distance_MM)
    if count < 2:
        return 0.0
    middle_M = np.zeros(count)
    for m in range(count):
        others = np.sort(np.delete(distance_MM[m], m))
        gaps = np.diff(others)
        at = int(gaps.argmax()) if gaps.any() else -1
        middle_M[m] = others[-1] if at < 0 else (others[at] + others[at + 1]) / 2
    return float(np.median(middle_M))


def dbscan(distance_MM: np.ndarray, eps: float) -> np.ndarray:
    """Clusters by DBSCAN, int64 (M,), numbered by lowest member: the connected parts of the graph of d <= eps."""
    _, part_M = scipy.sparse.csgraph.connected_components(distance_MM <= eps, directed=False)
    return by_lowest_member(part_M)
