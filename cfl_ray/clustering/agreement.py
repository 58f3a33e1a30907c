"""Agreement of clusters with true groups."""

import functools
import math

import numpy as np
import scipy

_BLOCK = 1 << 16  # clients that are counted at a time, to avoid temporary arrays of all clients


def agreement(true_M: np.ndarray, cluster_M: np.ndarray) -> dict[str, float]:
    """Agreement of a clustering of M clients with their true groups.

    true_M, cluster_M: group and cluster of each client, integers (M,). A cluster may have another number than the
        group that it matches.

    Returns "ari" (adjusted Rand index), "nmi" (normalised mutual information), "purity" (share of clients that belong
    to the largest group of their cluster, 0..1), and "correct_clients" (number of clients whose cluster is matched with
    their group, for the best one-to-one matching of clusters and groups). The first two equal scikit-learn's, bit for
    bit, which needs the labels of all clients: 44 bytes for each client, as much as all else that the server has of it,
    and 0.8 s for a million clients.
    """
    count_GK = _contingency(true_M, cluster_M)
    return dict(_agreement(count_GK.tobytes(), len(count_GK)))


@functools.lru_cache(maxsize=1)  # clusters rarely change between evaluations
def _agreement(counts: bytes, groups: int) -> dict[str, float]:
    count_GK = np.frombuffer(counts, np.int64).reshape(groups, -1)
    group_G, size_K = count_GK.sum(1), count_GK.sum(0)
    rows, columns = scipy.optimize.linear_sum_assignment(-count_GK)
    if count_GK.shape == (1, 1):
        nmi = 1.0  # as scikit-learn defines it
    else:
        information = _mutual_information(count_GK, group_G, size_K)
        nmi = float(information / np.mean([_entropy(group_G), _entropy(size_K)])) if information else 0.0
    return {
        "ari": _adjusted_rand_index(count_GK, group_G, size_K),
        "nmi": nmi,
        "purity": float(count_GK.max(0).sum() / count_GK.sum()),
        "correct_clients": float(count_GK[rows, columns].sum()),
    }


def _contingency(true_M: np.ndarray, cluster_M: np.ndarray) -> np.ndarray:
    """Number of clients of each group (a row) in each cluster (a column), int64 (G, K)."""
    blocks = [slice(at, at + _BLOCK) for at in range(0, len(true_M), _BLOCK)]
    group_G, cluster_K = (
        np.unique(np.concatenate([np.unique(array_M[block]) for block in blocks])) for array_M in (true_M, cluster_M)
    )
    count_GK = np.zeros((len(group_G), len(cluster_K)), np.int64)
    for block in blocks:
        row_m, column_m = np.searchsorted(group_G, true_M[block]), np.searchsorted(cluster_K, cluster_M[block])
        np.add.at(count_GK, (row_m, column_m), 1)
    return count_GK


def _adjusted_rand_index(count_GK: np.ndarray, group_G: np.ndarray, size_K: np.ndarray) -> float:
    """As `sklearn.metrics.adjusted_rand_score`, which needs the labels of all clients."""
    clients, squares = int(size_K.sum()), int((count_GK**2).sum())
    both = squares - clients  # pairs in both directions: in the same group and cluster,
    cluster_only = int(count_GK.dot(size_K).sum()) - squares  # in the same cluster of different groups
    group_only = int(count_GK.T.dot(group_G).sum()) - squares
    neither = clients**2 - both - cluster_only - group_only - clients
    if not cluster_only and not group_only:
        return 1.0
    chance = (both + group_only) * (group_only + neither) + (both + cluster_only) * (cluster_only + neither)
    return 2.0 * (both * neither - group_only * cluster_only) / chance


def _mutual_information(count_GK: np.ndarray, group_G: np.ndarray, size_K: np.ndarray) -> float:
    """As `sklearn.metrics.mutual_info_score`, in nats."""
    if 1 in count_GK.shape:
        return 0.0
    row, column = count_GK.nonzero()
    count, total = count_GK[row, column], math.log(count_GK.sum())
    share = count / count_GK.sum()
    by_chance = -np.log(group_G[row] * size_K[column]) + total + total
    terms = share * (np.log(count) - total) + share * by_chance
    terms[np.abs(terms) < np.finfo(float).eps] = 0.0
    return max(float(terms.sum()), 0.0)


def _entropy(size_C: np.ndarray) -> float:
    """As `sklearn.metrics.cluster.entropy`, from the sizes of at least two parts instead of the labels of clients."""
    total = size_C.sum()
    share_C = size_C / total
    return float(-np.sum(share_C * (np.log(size_C) - math.log(total))))
