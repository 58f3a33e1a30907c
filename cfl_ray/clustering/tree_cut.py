"""The options of agglomerative clustering that several methods share."""

from dataclasses import dataclass

import numpy as np

from cfl_ray.clustering import agglomerative
from cfl_ray.clustering.silhouette import best_cut
from cfl_ray.core.method import option

CUTS = ("silhouette", "median", "gap")
_GAP = 20  # the largest gap is sought among the heights of this many last merges


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

    def height(self, distance: np.ndarray) -> float | None:
        """The height up to which clusters merge; None if another rule decides, or without distances.

        For the cut by silhouettes, it is the height of the last merge. distance: condensed distances.
        """
        if self.threshold is not None:
            return self.threshold
        if self.num_clusters is not None or self.cut == "gap" or not len(distance):
            return None
        if self.cut == "median":
            return float(np.median(distance)) / 2
        tree = agglomerative.linkage_tree(distance, self.linkage)
        return float(tree[len(tree) - best_cut(distance, tree), 2])

    def clusters(self, distance: np.ndarray, size: int) -> np.ndarray:
        """The cluster of each signature, int64 (S,), by the method's options.

        Clusters are numbered from 0 in the order of their lowest members.
        distance: condensed distances (S (S - 1) / 2,). size: S.
        """
        tree = agglomerative.linkage_tree(distance, self.linkage)
        height, num_clusters = self.height(distance), self.num_clusters
        if height is not None:
            return agglomerative.cut_tree(tree, threshold=height, size=size)
        if num_clusters is not None:
            return agglomerative.cut_tree(tree, num_clusters=num_clusters, size=size)
        return agglomerative.cut_tree(tree, gap=_GAP, size=size)

    def cut_figures(self, distance: np.ndarray, cluster_S: np.ndarray) -> dict[str, float]:
        """The numbers that decided a cut: the heights of its last merge and of the next merge, and the options set."""
        tree = agglomerative.linkage_tree(distance, self.linkage)
        merges = len(cluster_S) - 1 - int(cluster_S.max())  # number of merges up to the cut
        figures: dict[str, float] = {"clients": len(cluster_S)}
        figures |= {"highest_merge": tree[merges - 1, 2]} if merges else {}
        figures |= {"next_merge": tree[merges, 2]} if merges < len(tree) else {}
        given = {"threshold": self.threshold, "num_clusters": self.num_clusters}
        return figures | {name: value for name, value in given.items() if value is not None}
