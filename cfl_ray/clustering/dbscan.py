"""DBSCAN of clients by their distances, and a distance up to which clients are neighbours."""

import numpy as np

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
    """Clusters by DBSCAN, int64 (M,), numbered by lowest member. A client without neighbours is a cluster."""
    from sklearn.cluster import DBSCAN  # imported here: loading it takes a second, and hosts do not need it

    label_M = DBSCAN(eps=max(eps, 1e-300), min_samples=2, metric="precomputed").fit_predict(distance_MM)
    return by_lowest_member(np.where(label_M < 0, len(label_M) + np.arange(len(label_M)), label_M))
