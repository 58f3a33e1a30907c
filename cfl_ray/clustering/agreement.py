"""Agreement of clusters with true groups."""

import functools

import numpy as np
import scipy


def agreement(true_M: np.ndarray, cluster_M: np.ndarray) -> dict[str, float]:
    """Agreement of a clustering of M clients with their true groups.

    true_M, cluster_M: group and cluster of each client, integers (M,). A cluster may have another number than the
        group that it matches.

    Returns "ari" (adjusted Rand index), "nmi" (normalised mutual information), "purity" (share of clients that belong
    to the largest group of their cluster, 0..1), and "correct_clients" (number of clients whose cluster is matched with
    their group, for the best one-to-one matching of clusters and groups).
    """
    return dict(_agreement(true_M.astype(np.int64).tobytes(), cluster_M.astype(np.int64).tobytes()))


@functools.lru_cache(maxsize=1)  # it takes milliseconds, and clusters rarely change between evaluations
def _agreement(true: bytes, clusters: bytes) -> dict[str, float]:
    # Imported here because it takes a second: hosts start without it, and only the server measures agreement.
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.metrics.cluster import contingency_matrix

    true_M, cluster_M = np.frombuffer(true, np.int64), np.frombuffer(clusters, np.int64)
    table = contingency_matrix(true_M, cluster_M)
    rows, columns = scipy.optimize.linear_sum_assignment(-table)
    return {
        "ari": float(adjusted_rand_score(true_M, cluster_M)),
        "nmi": float(normalized_mutual_info_score(true_M, cluster_M)),
        "purity": float(table.max(0).sum() / table.sum()),
        "correct_clients": float(table[rows, columns].sum()),
    }
