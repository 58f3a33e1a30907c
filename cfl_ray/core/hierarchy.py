"""Agglomerative clustering of signatures: distances, the tree of merges, and where to cut it.

Condensed distances list the pairs (0, 1), (0, 2), .., (S-2, S-1), as in scipy. S are the clients that have a signature.
"""

from collections.abc import Iterator

import numpy as np
import scipy  # loads its parts on first use: half a second of the start of every process that never clusters
import torch
from torch import Tensor

METRICS = ("l1", "l2", "cosine")
LINKAGES = ("single", "average", "complete", "weighted", "ward")

NEAR = 1e-8  # squared distances below this share of the squared norms are computed from the difference of the rows
ROWS, COLUMNS = 256, 4096  # what is widened to float64 at a time


def require_finite(feature_SF: Tensor) -> None:
    """Raises ValueError with the number of rows that hold NaN or infinity, and the first of them."""
    bad = np.flatnonzero(~torch.isfinite(feature_SF).all(1).numpy())
    if len(bad):
        raise ValueError(f"features must be finite; {len(bad)} of {len(feature_SF)} rows are not, the first is row {bad[0]}")


def _require(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")


def _scale(feature_SF: Tensor, metric: str) -> np.ndarray:
    """Factor (S,) of each row: 1, or for cosine one over its norm (0 for a row of zeros)."""
    if metric != "cosine":
        return np.ones(len(feature_SF))
    norm_S = torch.linalg.vector_norm(feature_SF, dim=1, dtype=torch.float64).numpy()
    return np.divide(1, norm_S, out=np.zeros_like(norm_S), where=norm_S > 0)


def _gram(feature_SF: Tensor, scale_S: np.ndarray) -> np.ndarray:
    """Inner products (S, S) of the scaled and centred rows. Centring changes no distance and keeps their digits."""
    gram_SS = np.zeros((len(feature_SF), len(feature_SF)))
    for start in range(0, feature_SF.shape[1], COLUMNS):
        part = feature_SF[:, start : start + COLUMNS].double().numpy() * scale_S[:, None]
        part -= part.mean(0)
        gram_SS += part @ part.T
    return gram_SS


def _squares(feature_SF: Tensor, scale_S: np.ndarray) -> np.ndarray:
    """Condensed squared Euclidean distances of the scaled rows, to a relative 1e-8 also between rows that nearly agree."""
    gram_SS, size = _gram(feature_SF, scale_S), len(feature_SF)
    norm_S, squares, at = gram_SS.diagonal(), np.empty(size * (size - 1) // 2), 0
    for i in range(size - 1):
        norms = norm_S[i] + norm_S[i + 1 :]
        row = squares[at : at + len(norms)]
        np.subtract(norms, 2 * gram_SS[i, i + 1 :], out=row)
        near = np.flatnonzero(row <= NEAR * norms)
        for part in np.split(near, range(ROWS, len(near), ROWS)):
            others = feature_SF[i + 1 + part].double().numpy() * scale_S[i + 1 + part, None]
            row[part] = ((others - feature_SF[i].double().numpy() * scale_S[i]) ** 2).sum(1)
        at += len(norms)
    return squares


def distances(feature_SF: Tensor, metric: str) -> np.ndarray:
    """Condensed distances (S (S - 1) / 2,) float64 between the rows: l1, l2, or cosine = 1 - cos (0..2).

    By cosine a row of zeros is at distance 1 from every row. Raises ValueError for another metric and for rows that are not finite.
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


def tree(distance: np.ndarray, linkage: str) -> np.ndarray:
    """Merges (S - 1, 4) in scipy's form, in the order of their heights, from condensed distances.

    linkage: "average" is UPGMA, "weighted" is WPGMA; "ward" is meant for l2 alone. No distances give no merges: one signature, or none.
    Raises ValueError for another linkage, a number of distances that fits no S, and distances that are not finite.
    """
    _require("linkage", linkage, LINKAGES)
    return scipy.cluster.hierarchy.linkage(distance, linkage) if len(distance) else np.empty((0, 4))


def _below_gap(height: np.ndarray, gap: int) -> int:
    """Number of merges below the largest step between consecutive heights of the last `gap` merges, the upper one of equal steps.

    All merges where no step exceeds rounding.
    """
    last = height[-gap:]
    steps = np.diff(last)
    rounding = 1e-9 * height.max(initial=0)
    if steps.max(initial=0) <= rounding:
        return len(height)
    return len(height) - len(last) + 1 + int(np.flatnonzero(steps >= steps.max() - rounding)[-1])


def _merged(Z: np.ndarray, merges: int) -> np.ndarray:
    """Clusters (S,) after the first merges, numbered in the order of their lowest members."""
    size = len(Z) + 1
    owner = np.arange(size + merges)
    for row in reversed(range(merges)):
        owner[Z[row, :2].astype(int)] = owner[size + row]
    return by_lowest_member(owner[:size])


def by_lowest_member(label_S: np.ndarray) -> np.ndarray:
    """The same clusters (S,) int64, numbered from 0 in the order of their lowest members."""
    _, first_K, label_S = np.unique(label_S, return_index=True, return_inverse=True)
    return first_K.argsort().argsort()[label_S].astype(np.int64)


def cut(Z: np.ndarray, *, threshold: float | None = None, num_clusters: int | None = None, gap: int | None = None, size: int | None = None) -> np.ndarray:
    """Clusters (S,) int64 of a tree, numbered from 0 in the order of their lowest members. Exactly one rule is given.

    threshold: merges at or below this height are done; inf gives one cluster.
    num_clusters: exactly min(num_clusters, S) clusters, also where heights are equal.
    gap: cut in the largest step between consecutive heights among the last `gap` (>= 2) merges, so 2..gap clusters; of equal steps in
        the one that leaves fewer clusters; one cluster where there is no step, as between two signatures.
    size: S; None: merges + 1. Needed where there may be none: the trees of no signature and of one are both empty.
    Raises ValueError for no rule or several, a rule out of range, and a size that does not fit the tree.
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
        if gap < 2:
            raise ValueError(f"gap must be at least 2 merges, got {gap}")
        merges = _below_gap(height, gap)
    return _merged(Z, merges) if size else np.empty(0, np.int64)


def _blocks(feature_MF: Tensor, scale_M: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(feature_MF), ROWS):
        rows = slice(start, start + ROWS)
        yield feature_MF[rows].double().numpy() * scale_M[rows, None]


def nearest(feature_MF: Tensor, centre_KF: Tensor, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """The nearest centre (M,) int64 of each row, the lowest number on ties, and its distance (M,) float64, as `distances` has it.

    -1 and inf where there is no centre. Raises ValueError as `distances` does.
    """
    _require("metric", metric, METRICS)
    require_finite(feature_MF)
    require_finite(centre_KF)
    if not len(centre_KF) or not len(feature_MF):
        return np.full(len(feature_MF), -1), np.full(len(feature_MF), np.inf)
    scale_M, scale_K = _scale(feature_MF, metric), _scale(centre_KF, metric)
    centres = centre_KF.double().numpy() * scale_K[:, None]
    kind = {"l1": "cityblock", "l2": "euclidean", "cosine": "sqeuclidean"}[metric]
    distance_MK = np.concatenate([scipy.spatial.distance.cdist(rows, centres, kind) for rows in _blocks(feature_MF, scale_M)])
    if metric == "cosine":
        distance_MK /= 2
        distance_MK[(scale_M[:, None] == 0) | (scale_K == 0)] = 1
    index_M = distance_MK.argmin(1)
    return index_M, distance_MK[np.arange(len(index_M)), index_M]
