"""Cuts of the trees of agglomerative clustering: with the largest mean silhouette, and by the options of methods.

P. J. Rousseeuw. Silhouettes: A Graphical Aid to the Interpretation and Validation of Cluster Analysis. Journal of
Computational and Applied Mathematics 20, 1987. L. Kaufman, P. J. Rousseeuw. Finding Groups in Data. Wiley, 1990.
"""

from dataclasses import dataclass

import numpy as np
import scipy

from cfl_ray.clustering import agglomerative
from cfl_ray.core.method import option

CUTS = ("silhouette", "median", "gap")
_GAP = 20  # the largest gap is sought among the heights of this many last merges
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
    row_S, cluster_S, leaf = np.arange(size), agglomerative.cut_tree(Z, num_clusters=most), _leaves(Z)
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


@dataclass(frozen=True)
class Cut:
    """The clusters of S signatures after a cut of their tree."""

    cluster_S: np.ndarray  # int64, numbered from 0 in the order of their lowest members
    height: float | None  # up to which clusters merged; None: another rule decided, or there are no distances
    because: dict[str, float]  # the numbers that decided it: heights of its last merge and the next, and options


@dataclass(frozen=True)
class TreeCut:
    """A mixin for methods that cluster signatures agglomeratively: its fields become options of the method.

    It comes before `Method` among the bases: `class FLHC(TreeCut, Method[CentreState], name="fl_hc")`. Raises
    ValueError if both `threshold` and `num_clusters` are given.
    """

    linkage: str = option(
        "average",
        "distance between clusters: average is UPGMA, weighted is WPGMA",
        source="ours: the papers mention several",
        choices=("single", "average", "complete", "weighted", "ward"),
    )
    threshold: float | None = option(
        None,
        "clusters further apart than this stay apart (lambda, beta); null: num_clusters or cut decide",
        source="ours: no paper prints a threshold for all data",
        low=0,
    )
    num_clusters: int | None = option(
        None, "K, exactly so many clusters; null: threshold or cut decide", source="ours", low=1
    )
    cut: str = option(
        "silhouette",
        "without threshold and num_clusters: where the mean silhouette is largest (a single cluster if none is above "
        "0.25), at half the median distance, or in the largest gap of the last 20 merge heights",
        source="ours: no paper prints a threshold for all data",
        choices=CUTS,
    )

    def __post_init__(self) -> None:
        check_options = getattr(super(), "__post_init__", None)  # of the method's class
        if check_options is not None:
            check_options()
        if self.threshold is not None and self.num_clusters is not None:
            raise ValueError(
                f"give threshold or num_clusters, not both; got {self.threshold:g} and {self.num_clusters}"
            )

    def cut_tree(self, distance: np.ndarray, size: int) -> Cut:
        """The clusters of S signatures by the method's options.

        distance: condensed distances (S (S - 1) / 2,). size: S.
        """
        tree = agglomerative.linkage_tree(distance, self.linkage)
        height, num_clusters = self._height(distance, tree), self.num_clusters
        if height is not None:
            cluster_S = agglomerative.cut_tree(tree, threshold=height, size=size)
        elif num_clusters is not None:
            cluster_S = agglomerative.cut_tree(tree, num_clusters=num_clusters, size=size)
        else:
            cluster_S = agglomerative.cut_tree(tree, gap=_GAP, size=size)
        merges = size - 1 - int(cluster_S.max(initial=-1))  # number of merges up to the cut
        because: dict[str, float] = {"clients": size}
        because |= {"highest_merge": tree[merges - 1, 2]} if merges else {}
        because |= {"next_merge": tree[merges, 2]} if merges < len(tree) else {}
        given = {"threshold": self.threshold, "num_clusters": num_clusters}
        because |= {name: value for name, value in given.items() if value is not None}
        return Cut(cluster_S, height, because)

    def _height(self, distance: np.ndarray, tree: np.ndarray) -> float | None:
        """`Cut.height`: for the cut by silhouettes, the height of the last merge."""
        if self.threshold is not None:
            return self.threshold
        if self.num_clusters is not None or self.cut == "gap" or not len(distance):
            return None
        if self.cut == "median":
            return float(np.median(distance)) / 2
        return float(tree[len(tree) - best_cut(distance, tree), 2])
