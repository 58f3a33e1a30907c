"""The cut of a tree with the largest mean silhouette.

P. J. Rousseeuw. Silhouettes: A Graphical Aid to the Interpretation and Validation of Cluster Analysis. Journal of
Computational and Applied Mathematics 20, 1987. L. Kaufman, P. J. Rousseeuw. Finding Groups in Data. Wiley, 1990.
"""

import numpy as np
import scipy

from cfl_ray.clustering.agglomerative import cut_tree

NO_STRUCTURE = 0.25  # Kaufman and Rousseeuw, Table 4: up to this mean silhouette there is no substantial structure
MOST = 256  # most clusters of the cuts that are compared: time is O(S MOST^2), memory O(S^2)


def silhouettes(distance: np.ndarray, Z: np.ndarray, most: int = MOST) -> np.ndarray:
    """Mean silhouettes of cuts of a tree, float64: at index K of the cut into K clusters; NaN for K < 2.

    The silhouette of a signature is (b - a) / max(a, b). a is its mean distance to the other members of its cluster, b
    to the members of the nearest other cluster. The silhouette is 0 for the only signature of a cluster.

    distance: condensed distances of S signatures. Z: their tree of merges. most: the highest K, at most S - 1.
    """
    size = len(Z) + 1
    most = min(most, size - 1)
    mean_of = np.full(max(most + 1, 2), np.nan)
    if most < 2:
        return mean_of
    row_S, cluster_S, leaf = np.arange(size), cut_tree(Z, num_clusters=most), _leaves(Z)
    count_K = np.bincount(cluster_S)
    # sum of the distances of each signature to the members of each cluster
    sum_SK = scipy.spatial.distance.squareform(distance) @ np.eye(most)[cluster_S]
    for num_clusters in range(most, 1, -1):
        count_S = count_K[cluster_S]
        within_S = sum_SK[row_S, cluster_S] / np.maximum(count_S - 1, 1)  # a
        mean_SK = sum_SK / count_K
        mean_SK[row_S, cluster_S] = np.inf
        nearest_S = mean_SK.min(1)  # b
        larger_S = np.maximum(np.maximum(within_S, nearest_S), 1e-300)
        mean_of[num_clusters] = np.where(count_S > 1, (nearest_S - within_S) / larger_S, 0).mean()
        # the next merge
        keep, drop = np.sort(cluster_S[leaf[Z[size - num_clusters, :2].astype(int)]])
        sum_SK[:, keep] += sum_SK[:, drop]
        count_K[keep] += count_K[drop]
        sum_SK, count_K = np.delete(sum_SK, drop, 1), np.delete(count_K, drop)
        cluster_S = np.where(cluster_S == drop, keep, cluster_S - (cluster_S > drop))
    return mean_of


def _leaves(Z: np.ndarray) -> np.ndarray:
    """A signature below each node of the tree, int64 (2 S - 1,)."""
    leaf = np.arange(2 * len(Z) + 1)
    for row, node in enumerate(range(len(Z) + 1, len(leaf))):
        leaf[node] = leaf[int(Z[row, 0])]
    return leaf


def best_cut(distance: np.ndarray, Z: np.ndarray) -> int:
    """Number of clusters of the cut with the largest mean silhouette; 1 if no mean silhouette is above 0.25.

    If mean silhouettes are equal, the lower number of clusters. Arguments: as in `silhouettes`.
    """
    mean_of = np.nan_to_num(silhouettes(distance, Z), nan=-np.inf)
    return int(mean_of.argmax()) if mean_of.max() > NO_STRUCTURE else 1
