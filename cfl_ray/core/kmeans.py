"""k-means of signatures, on scikit-learn. S are the clients that have a signature."""

import warnings

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.core.hierarchy import by_lowest_member, nearest, require_finite
from cfl_ray.core.threads import one_thread

ITERATIONS = 300


def kmeans(
    feature_SF: Tensor,
    num_clusters: int,
    seed: int,
    *,
    weight_S: np.ndarray | None = None,
    centres_KF: Tensor | None = None,
    restarts: int = 10,
    cosine: bool = False,
) -> tuple[np.ndarray, Tensor]:
    """Cluster (S,) int64 of each row, and the centres (K', F) float32. The same for a seed, whatever the number of threads.

    weight_S: how much each row counts in its centre, at least 0; None: equally.
    centres_KF: start from these and keep their numbers, K' = num_clusters; a cluster that loses all its members keeps the centre it
        had, and nothing is drawn. None: the best of `restarts` k-means++ starts, clusters numbered in the order of their lowest
        members; K' < num_clusters where there are fewer distinct rows.
    cosine: rows, and the centres given, are scaled to norm 1 first; rows of zeros stay. A centre is the mean of its members, so shorter.
    Raises ValueError for values out of range, shapes that do not fit and rows that are not finite.
    """
    weight_S = np.ones(len(feature_SF)) if weight_S is None else np.asarray(weight_S, np.float64)
    _check(feature_SF, num_clusters, weight_S, centres_KF, restarts)
    feature_SF = feature_SF.float()
    if cosine:
        feature_SF = normalize(feature_SF, dim=1)
    if centres_KF is not None:
        return _from_centres(feature_SF, weight_S, normalize(centres_KF.float(), dim=1) if cosine else centres_KF.float())
    return _plus_plus(feature_SF, weight_S, num_clusters, seed, restarts)


def _check(feature_SF: Tensor, num_clusters: int, weight_S: np.ndarray, centres_KF: Tensor | None, restarts: int) -> None:
    if num_clusters < 1 or restarts < 1:
        raise ValueError(f"num_clusters and restarts must be at least 1, got {num_clusters} and {restarts}")
    if weight_S.shape != (len(feature_SF),):
        raise ValueError(f"{len(feature_SF)} rows need as many weights, got shape {weight_S.shape}")
    if len(weight_S) and not (np.isfinite(weight_S).all() and weight_S.min() >= 0 and weight_S.max() > 0):
        raise ValueError(f"weights must be finite, at least 0 and not all 0; they are {weight_S.min()}..{weight_S.max()}")
    expected = (num_clusters, feature_SF.shape[1])
    if centres_KF is not None and tuple(centres_KF.shape) != expected:
        raise ValueError(f"centres must have shape {expected} (clusters, features), got {tuple(centres_KF.shape)}")
    require_finite(feature_SF)


def _from_centres(feature_SF: Tensor, weight_S: np.ndarray, centre_KF: Tensor) -> tuple[np.ndarray, Tensor]:
    """Lloyd's iterations. Our own: scikit-learn moves an empty cluster to a far row, which would give a cluster's model to strangers."""
    centre_KF, label_S = centre_KF.double(), None
    for _ in range(ITERATIONS):
        before, (label_S, _) = label_S, nearest(feature_SF, centre_KF, "l2")
        if before is not None and np.array_equal(before, label_S):
            break
        centre_KF = centre_KF.clone()
        for k in np.unique(label_S[weight_S > 0]):
            members = np.flatnonzero(label_S == k)
            centre_KF[k] = torch.from_numpy(np.average(feature_SF[members].numpy(), axis=0, weights=weight_S[members]))
    return label_S, centre_KF.float()


def _plus_plus(feature_SF: Tensor, weight_S: np.ndarray, num_clusters: int, seed: int, restarts: int) -> tuple[np.ndarray, Tensor]:
    # Imported here: a second of every host's start, and only the server clusters.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    rows = feature_SF.numpy() + 0.0  # no -0.0, which would be a row of its own below
    distinct = len({row.tobytes() for row in rows})
    if not distinct:
        return np.empty(0, np.int64), feature_SF
    model = KMeans(min(num_clusters, distinct), n_init=restarts, max_iter=ITERATIONS, random_state=seed % 2**32)
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # rows that differ by rounding alone: fewer clusters, as documented
        found_S = model.fit(rows, sample_weight=weight_S).labels_
    label_S = by_lowest_member(found_S)
    _, first_K = np.unique(label_S, return_index=True)
    return label_S, torch.from_numpy(model.cluster_centers_[found_S[first_K]])
