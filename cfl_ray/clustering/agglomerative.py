"""Agglomerative clustering and DBSCAN of signatures: distances, the tree of merges, and cuts of the tree.

Condensed distances list the pairs (0, 1), (0, 2), .., (S-2, S-1), as in SciPy. S is the number of clients with a
signature.
"""

from collections.abc import Iterator

import numpy as np
import scipy  # its subpackages load on first use, which saves half a second in processes that never cluster
import torch
from torch import Tensor

METRICS = ("l1", "l2", "cosine")
LINKAGES = ("single", "average", "complete", "weighted", "ward")

NEAR = 1e-8  # a squared distance below this share of the squared norms is computed again, from the rows' difference
ROWS, COLUMNS = 256, 4096  # size of the blocks that are converted to float64


def require_finite(feature_SF: Tensor) -> None:
    """Raises ValueError with the number of rows that contain NaN or infinity, and the first such row."""
    bad = np.flatnonzero(~torch.isfinite(feature_SF).all(1).numpy())
    if len(bad):
        raise ValueError(
            f"features must be finite; {len(bad)} of {len(feature_SF)} rows are not, the first is row {bad[0]}"
        )


def _require(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")


def _scale(feature_SF: Tensor, metric: str) -> np.ndarray:
    """Factor by which each row is scaled, float64 (S,): for "cosine" 1 / norm, or 0 for a row of zeros; else 1."""
    if metric != "cosine":
        return np.ones(len(feature_SF))
    norm_S = torch.linalg.vector_norm(feature_SF, dim=1, dtype=torch.float64).numpy()
    return np.divide(1, norm_S, out=np.zeros_like(norm_S), where=norm_S > 0)


def _gram(feature_SF: Tensor, scale_S: np.ndarray) -> np.ndarray:
    """Inner products, float64 (S, S), of the scaled, centred rows. Centring keeps distances and improves precision."""
    gram_SS = np.zeros((len(feature_SF), len(feature_SF)))
    for start in range(0, feature_SF.shape[1], COLUMNS):
        block = feature_SF[:, start : start + COLUMNS].double().numpy() * scale_S[:, None]
        block -= block.mean(0)
        gram_SS += block @ block.T
    return gram_SS


def _squares(feature_SF: Tensor, scale_S: np.ndarray) -> np.ndarray:
    """Condensed squared Euclidean distances of the scaled rows, with a relative error of 1e-8 even for close rows."""
    gram_SS, size = _gram(feature_SF, scale_S), len(feature_SF)
    norm_S, squares = gram_SS.diagonal(), np.empty(size * (size - 1) // 2)
    at = 0
    for i in range(size - 1):
        norms = norm_S[i] + norm_S[i + 1 :]
        row = squares[at : at + len(norms)]
        np.subtract(norms, 2 * gram_SS[i, i + 1 :], out=row)
        near = np.flatnonzero(row <= NEAR * norms)
        for block in np.split(near, range(ROWS, len(near), ROWS)):
            others = feature_SF[i + 1 + block].double().numpy() * scale_S[i + 1 + block, None]
            row[block] = ((others - feature_SF[i].double().numpy() * scale_S[i]) ** 2).sum(1)
        at += len(norms)
    return squares


def distances(feature_SF: Tensor, metric: str) -> np.ndarray:
    """Distances of all pairs of rows: condensed distances, float64 (S (S - 1) / 2,).

    feature_SF: float (S, F), finite.
    metric: "l1", "l2" or "cosine". "cosine" is 1 - cos (0..2); the distance of a row of zeros to any row is 1.

    Raises ValueError for another metric, or if rows are not finite.
    """
    _require("metric", metric, METRICS)
    require_finite(feature_SF)
    if len(feature_SF) < 2:
        return np.empty(0)
    if metric == "l1":
        return scipy.spatial.distance.pdist(feature_SF.double().numpy(), "cityblock")
    scale_S = _scale(feature_SF, metric)
    squares = _squares(feature_SF, scale_S)
    if metric == "l2":
        return np.sqrt(squares)
    squares /= 2  # 1 - cos = |u - v|^2 / 2 for unit vectors
    if not scale_S.all():
        left, right = np.triu_indices(len(scale_S), 1)
        squares[(scale_S[left] == 0) | (scale_S[right] == 0)] = 1
    return squares


def linkage_tree(distance: np.ndarray, linkage: str) -> np.ndarray:
    """The tree of merges of S signatures: merges (S - 1, 4) in SciPy's form, by ascending height.

    distance: condensed distances (S (S - 1) / 2,); empty for fewer than two signatures, which gives (0, 4).
    linkage: "single", "average" (UPGMA), "complete", "weighted" (WPGMA), or "ward", which is meant for "l2" only.

    Raises ValueError for another linkage, a number of distances that fits no S, or distances that are not finite.
    """
    _require("linkage", linkage, LINKAGES)
    return scipy.cluster.hierarchy.linkage(distance, linkage) if len(distance) else np.empty((0, 4))


def _below_gap(height: np.ndarray, gap: int) -> int:
    """Number of merges below the largest step between consecutive heights of the last `gap` merges.

    If steps are equal, the highest step counts. If no step exceeds rounding errors, all merges are counted.
    """
    last = height[-gap:]
    steps = np.diff(last)
    rounding = 1e-9 * height.max(initial=0)
    if steps.max(initial=0) <= rounding:
        return len(height)
    return len(height) - len(last) + 1 + int(np.flatnonzero(steps >= steps.max() - rounding)[-1])


def _merged(Z: np.ndarray, merges: int) -> np.ndarray:
    """Cluster of each signature, int64 (S,), after the first `merges`, numbered in the order of lowest members."""
    size = len(Z) + 1
    owner = np.arange(size + merges)
    for row in reversed(range(merges)):
        owner[Z[row, :2].astype(int)] = owner[size + row]
    return by_lowest_member(owner[:size])


def by_lowest_member(label_S: np.ndarray) -> np.ndarray:
    """The clusters of `label_S`, renumbered from 0 in the order of their lowest members, int64 (S,)."""
    _, first_K, label_S = np.unique(label_S, return_index=True, return_inverse=True)
    return first_K.argsort().argsort()[label_S].astype(np.int64)


def cut_tree(
    Z: np.ndarray,
    *,
    threshold: float | None = None,
    num_clusters: int | None = None,
    gap: int | None = None,
    size: int | None = None,
) -> np.ndarray:
    """The cluster of each signature, int64 (S,), after a cut of the tree. Give exactly one of the three rules.

    Clusters are numbered from 0 in the order of their lowest members.

    Z: merges (S - 1, 4), as `linkage_tree` returns them.
    threshold: merge up to this height, inclusive; inf gives a single cluster.
    num_clusters: at least 1; gives exactly min(num_clusters, S) clusters, even if heights are equal.
    gap: at least 2; cut at the largest step between consecutive heights of the last `gap` merges, which gives 2..gap
        clusters. If steps are equal, the highest step counts. Without a step, as for two signatures, the result is
        a single cluster.
    size: S; None: number of merges + 1. Needed if S can be 0, because the trees for S = 0 and S = 1 are both empty.

    Raises ValueError for no rule or several, a value out of range, or a size that does not fit the tree.
    """
    if sum(rule is not None for rule in (threshold, num_clusters, gap)) != 1:
        raise ValueError(f"give one of threshold, num_clusters, gap; got {threshold}, {num_clusters}, {gap}")
    height, size = Z[:, 2], len(Z) + 1 if size is None else size
    if len(Z) != max(size - 1, 0):
        raise ValueError(f"a tree of {size} signatures has {max(size - 1, 0)} merges, got {len(Z)}")
    if threshold is not None:
        if np.isnan(threshold):
            raise ValueError("threshold must be a number, got nan")
        merges = int(np.searchsorted(height, threshold, side="right"))
    elif num_clusters is not None:
        if num_clusters < 1:
            raise ValueError(f"num_clusters must be at least 1, got {num_clusters}")
        merges = max(size - num_clusters, 0)
    else:
        assert gap is not None
        if gap < 2:
            raise ValueError(f"gap must be at least 2 merges, got {gap}")
        merges = _below_gap(height, gap)
    return _merged(Z, merges) if size else np.empty(0, np.int64)


def _blocks(feature_MF: Tensor, scale_M: np.ndarray) -> Iterator[np.ndarray]:
    """Yields blocks of scaled rows, float64."""
    for start in range(0, len(feature_MF), ROWS):
        rows = slice(start, start + ROWS)
        yield feature_MF[rows].double().numpy() * scale_M[rows, None]


def nearest_centre(feature_MF: Tensor, centre_KF: Tensor, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """The index of each row's nearest centre, int64 (M,), and its distance, float64 (M,).

    feature_MF, centre_KF: float (M, F) and (K, F), finite.
    metric: as in `distances`.

    If centres are equally near, the lowest index is returned; without centres, -1 and inf. Raises ValueError for
    another metric, or if rows are not finite.
    """
    _require("metric", metric, METRICS)
    require_finite(feature_MF)
    require_finite(centre_KF)
    if not len(centre_KF) or not len(feature_MF):
        return np.full(len(feature_MF), -1), np.full(len(feature_MF), np.inf)
    distance_MK = centre_distances(feature_MF, centre_KF, metric)
    index_M = distance_MK.argmin(1)
    return index_M, distance_MK[np.arange(len(index_M)), index_M]


def centre_distances(feature_MF: Tensor, centre_KF: Tensor, metric: str) -> np.ndarray:
    """Distance of each row to each centre, float64 (M, K). M and K are at least 1; see `nearest_centre`."""
    scale_M, scale_K = _scale(feature_MF, metric), _scale(centre_KF, metric)
    centres = centre_KF.double().numpy() * scale_K[:, None]
    kind = {"l1": "cityblock", "l2": "euclidean", "cosine": "sqeuclidean"}[metric]
    distance_MK = np.concatenate(
        [scipy.spatial.distance.cdist(rows, centres, kind) for rows in _blocks(feature_MF, scale_M)]
    )
    if metric == "cosine":
        distance_MK /= 2
        distance_MK[(scale_M[:, None] == 0) | (scale_K == 0)] = 1
    return distance_MK


def mean_difference_of_cosines(delta_MF: Tensor) -> np.ndarray:
    """MADC, condensed: for each pair, the mean absolute difference of their cosines with each other client."""
    distance = distances(delta_MF, "cosine")
    cos_MM = 1 - scipy.spatial.distance.squareform(distance)
    # the terms for the clients i and j, whose cosines are 1 and cos_ij, are subtracted
    sums = scipy.spatial.distance.pdist(cos_MM, "cityblock") - 2 * np.abs(distance)
    return np.maximum(sums, 0) / max(len(cos_MM) - 2, 1)


def dbscan(distance_MM: np.ndarray, eps: float) -> np.ndarray:
    """Clusters by DBSCAN, int64 (M,), numbered by lowest member: the connected parts of the graph of d <= eps."""
    _, part_M = scipy.sparse.csgraph.connected_components(distance_MM <= eps, directed=False)
    return by_lowest_member(part_M)
