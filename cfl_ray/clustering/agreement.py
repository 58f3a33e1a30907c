"""Agreement of clusters with true groups."""

import functools

import numpy as np
import scipy


def agreement(true_M: np.ndarray, found_M: np.ndarray) -> dict[str, float]:
    """Agreement of a clustering of M clients with their true groups.

    true_M, found_M: group and cluster of each client, integers (M,); which number stands for which does not matter.

    Returns "ari" (adjusted Rand index), "nmi" (normalised mutual information), "purity" (share of clients in the
    largest group of their cluster, 0..1), and "correct_clients" (number of clients in matching clusters, for the best
    one-to-one matching of clusters and groups).
    """
    return dict(_agreement(true_M.astype(np.int64).tobytes(), found_M.astype(np.int64).tobytes()))


@functools.lru_cache(maxsize=1)  # clusters rarely change once they are found, and this takes milliseconds
def _agreement(true: bytes, found: bytes) -> dict[str, float]:
    # Imported here because it takes a second: hosts start without it, and only the server measures agreement.
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.metrics.cluster import contingency_matrix

    true_M, found_M = np.frombuffer(true, np.int64), np.frombuffer(found, np.int64)
    table = contingency_matrix(true_M, found_M)
    rows, columns = scipy.optimize.linear_sum_assignment(-table)
    return {
        "ari": float(adjusted_rand_score(true_M, found_M)),
        "nmi": float(normalized_mutual_info_score(true_M, found_M)),
        "purity": float(table.max(0).sum() / table.sum()),
        "correct_clients": float(table[rows, columns].sum()),
    }
