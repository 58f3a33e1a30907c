"""From assignments to mixing weights, and from assignments to their agreement with the truth."""

import numpy as np
import scipy
import torch
from torch import Tensor


def by_cluster(assign_M: np.ndarray, weight_M: np.ndarray, num_clusters: int) -> Tensor:
    """Mixing weights (K, M): row k holds the weights of the clients of cluster k. Cluster UNKNOWN (-1) belongs to no row."""
    assign_M = np.asarray(assign_M)
    if len(assign_M) and assign_M.max() >= num_clusters:
        raise ValueError(f"cluster {assign_M.max()} is assigned, but there are {num_clusters} clusters")
    weight_KM = torch.zeros(num_clusters, len(assign_M), dtype=torch.float64)
    known = np.flatnonzero(assign_M >= 0)
    weight_KM[assign_M[known], known] = torch.as_tensor(np.asarray(weight_M)[known], dtype=torch.float64)
    return weight_KM


def everyone(weight_M: np.ndarray) -> Tensor:
    """Mixing weights (1, M) of one average over all clients of the round."""
    return torch.as_tensor(np.asarray(weight_M), dtype=torch.float64)[None]


def agreement(true_M: np.ndarray, found_M: np.ndarray) -> dict[str, float]:
    """ARI, NMI, purity (0..1) and correct_clients (best one-to-one matching of clusters and groups; a count) of M clients."""
    # Imported here: a second of every host's start, and only the server measures agreement.
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.metrics.cluster import contingency_matrix

    table = contingency_matrix(true_M, found_M)
    rows, columns = scipy.optimize.linear_sum_assignment(-table)
    return {
        "ari": float(adjusted_rand_score(true_M, found_M)),
        "nmi": float(normalized_mutual_info_score(true_M, found_M)),
        "purity": float(table.max(0).sum() / table.sum()),
        "correct_clients": float(table[rows, columns].sum()),
    }
