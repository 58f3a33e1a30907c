"""k-means of signatures, by scikit-learn. S is the number of clients with a signature."""

import warnings

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.clustering.agglomerative import by_lowest_member, nearest_centre, require_finite
from cfl_ray.system.threads import one_thread

ITERATIONS = 300  # most iterations of Lloyd's algorithm
RESTARTS = 10  # k-means++ starts, of which the best counts


def kmeans(
    feature_SF: Tensor,
    num_clusters: int,
    seed: int,
    *,
    weight_S: np.ndarray | None = None,
    centres_KF: Tensor | None = None,
    cosine: bool = False,
) -> tuple[np.ndarray, Tensor]:
    """The cluster of each row, int64 (S,), and the centres, float32 (K', F), by k-means.

    K' is K with `centres_KF`; otherwise it is less than K if there are fewer than K distinct rows. The number of
    threads has no effect on the result.

    feature_SF: float (S, F), finite.
    num_clusters: K, at least 1.
    seed: any integer, for k-means++.
    weight_S: weight of each row in its centre, (S,), at least 0 and not all 0; None: equal weights.
    centres_KF: initial centres (K, F). Clusters keep their numbers, a cluster that loses all members keeps its last
        centre, and the seed has no effect. None: the best of `RESTARTS` k-means++ starts, with clusters numbered in
        the order of their lowest members.
    cosine: scale rows and given centres to norm 1 first; rows of zeros are not changed. A centre is the mean of its
        members, so its norm is at most 1.

    Raises ValueError for values out of range, shapes that do not fit, or rows that are not finite.
    """
    weight_S = np.ones(len(feature_SF)) if weight_S is None else np.asarray(weight_S, np.float64)
    _check(feature_SF, num_clusters, weight_S, centres_KF)
    feature_SF = feature_SF.float()
    if cosine:
        feature_SF = normalize(feature_SF, dim=1)
    if centres_KF is None:
        return _plus_plus(feature_SF, weight_S, num_clusters, seed)
    centres_KF = centres_KF.float()
    return _from_centres(feature_SF, weight_S, normalize(centres_KF, dim=1) if cosine else centres_KF)


def _check(feature_SF: Tensor, num_clusters: int, weight_S: np.ndarray, centres_KF: Tensor | None) -> None:
    if num_clusters < 1:
        raise ValueError(f"num_clusters must be at least 1, got {num_clusters}")
    if weight_S.shape != (len(feature_SF),):
        raise ValueError(f"{len(feature_SF)} rows need as many weights, got shape {weight_S.shape}")
    if len(weight_S) and not (np.isfinite(weight_S).all() and weight_S.min() >= 0 and weight_S.max() > 0):
        raise ValueError(
            f"weights must be finite, at least 0 and not all 0; they are {weight_S.min()}..{weight_S.max()}"
        )
    expected = (num_clusters, feature_SF.shape[1])
    if centres_KF is not None and tuple(centres_KF.shape) != expected:
        raise ValueError(f"centres must have shape {expected} (clusters, features), got {tuple(centres_KF.shape)}")
    require_finite(feature_SF)


def _from_centres(feature_SF: Tensor, weight_S: np.ndarray, centre_KF: Tensor) -> tuple[np.ndarray, Tensor]:
    """Labels, int64 (S,), and centres, float32 (K, F), of Lloyd's algorithm from given centres.

    It replaces scikit-learn's, which moves the centre of an empty cluster to a distant row: the cluster's model would
    then serve clients that it was never trained for.
    """
    centre_KF = centre_KF.double()
    label_S = np.full(len(feature_SF), -1)
    for iteration in range(ITERATIONS):
        before_S, label_S = label_S, nearest_centre(feature_SF, centre_KF, "l2")[0]
        if iteration and np.array_equal(before_S, label_S):
            break
        centre_KF = centre_KF.clone()
        for k in np.unique(label_S[weight_S > 0]):
            members = np.flatnonzero(label_S == k)
            centre_KF[k] = torch.from_numpy(np.average(feature_SF[members].numpy(), axis=0, weights=weight_S[members]))
    return label_S, centre_KF.float()


def _plus_plus(feature_SF: Tensor, weight_S: np.ndarray, num_clusters: int, seed: int) -> tuple[np.ndarray, Tensor]:
    """Labels, int64 (S,), and centres, float32 (K', F), of the best of the k-means++ starts, by scikit-learn."""
    # Imported here because it takes a second: hosts start without it, and only the server clusters.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    rows = feature_SF.numpy() + 0.0  # turns -0.0, whose bytes differ, into 0.0
    distinct = len({row.tobytes() for row in rows})
    if not distinct:
        return np.empty(0, np.int64), feature_SF
    model = KMeans(min(num_clusters, distinct), n_init=RESTARTS, max_iter=ITERATIONS, random_state=seed % 2**32)
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # if rows differ by rounding only, there are fewer clusters
        own_label_S = model.fit(rows, sample_weight=weight_S).labels_
    label_S = by_lowest_member(own_label_S)
    _, first_K = np.unique(label_S, return_index=True)
    return label_S, torch.from_numpy(model.cluster_centers_[own_label_S[first_K]])


def renumbered(cluster_S: np.ndarray, before_S: np.ndarray, num_clusters: int) -> np.ndarray:
    """The clusters, renumbered so that as many clients as possible keep their number; -1 in `before_S`: none."""
    shared_KK = np.zeros((num_clusters, num_clusters))
    known = before_S >= 0
    np.add.at(shared_KK, (cluster_S[known], before_S[known]), 1)
    _, number_K = scipy.optimize.linear_sum_assignment(shared_KK, maximize=True)
    return number_K[cluster_S]
