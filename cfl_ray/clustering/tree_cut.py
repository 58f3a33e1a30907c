"""The options of agglomerative clustering that several methods share."""

from dataclasses import dataclass

import numpy as np

from cfl_ray.clustering import agglomerative
from cfl_ray.clustering.silhouette import best_cut
from cfl_ray.core.method import option

CUTS = ("silhouette", "median", "gap")
_GAP = 20  # the largest gap is sought among the heights of this many last merges


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
