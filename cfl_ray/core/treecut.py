"""Where to cut a tree of merges: the options that methods with agglomerative clustering share."""

from dataclasses import dataclass

import numpy as np

from cfl_ray.core import hierarchy
from cfl_ray.core.method import option

_GAP = 20  # last merges among which the largest gap is looked for


@dataclass(frozen=True)
class TreeCut:
    """Agglomerative clustering of signatures. Mixed into a method, so that its fields are options of the method."""

    linkage: str = option("average", "distance between clusters: average is UPGMA, weighted is WPGMA", source="ours: the papers mention several", choices=("single", "average", "complete", "weighted", "ward"))
    threshold: float | None = option(None, "clusters further apart than this stay apart (lambda, beta); null: num_clusters or cut decide", source="ours: no paper prints one for all data", low=0)
    num_clusters: int | None = option(None, "K, exactly so many clusters; null: threshold or cut decide", source="ours", low=1)
    cut: str = option("median", "without threshold and num_clusters: at half the median distance, or in the largest gap of the last 20 merge heights", source="ours: half the median was best on Fashion-MNIST", choices=("median", "gap"))

    def __post_init__(self):
        if hasattr(super(), "__post_init__"):
            super().__post_init__()  # the method's own checks
        if self.threshold is not None and self.num_clusters is not None:
            raise ValueError(f"give threshold or num_clusters, not both; got {self.threshold:g} and {self.num_clusters}")

    def height(self, distance: np.ndarray) -> float | None:
        """The merge height up to which clusters merge; None where another rule decides."""
        if self.threshold is not None:
            return self.threshold
        return float(np.median(distance)) / 2 if self.num_clusters is None and self.cut == "median" and len(distance) else None

    def clusters(self, distance: np.ndarray, size: int) -> np.ndarray:
        """Clusters (S,) of S signatures from their condensed distances, numbered in the order of their lowest members."""
        tree, height = hierarchy.tree(distance, self.linkage), self.height(distance)
        if height is not None:
            return hierarchy.cut(tree, threshold=height, size=size)
        if self.num_clusters is not None:
            return hierarchy.cut(tree, num_clusters=self.num_clusters, size=size)
        return hierarchy.cut(tree, gap=_GAP, size=size)
