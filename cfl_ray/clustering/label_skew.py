"""The Wasserstein-adjusted score: how well clusters separate clients by the skew of their labels.

A. Licciardi, D. Leo, E. Fanì, B. Caputo, M. Ciccone. Interaction-Aware Gaussian Weighting for Clustered Federated
Learning. ICML 2025, arXiv:2502.03340. The official code does not contain it: the definition below
follows the paper's description, and its values were not compared with the authors'.
"""

import numpy as np


def wasserstein_adjusted_score(count_MC: np.ndarray, cluster_M: np.ndarray, score: str = "silhouette") -> float:
    """A clustering score of clients whose distance is that of their label frequencies in descending order.

    Client i has the vector x_i(1) >= .. >= x_i(C), the shares of its samples by label, sorted, and two clients the
    Euclidean distance of their vectors: up to a factor, which no score depends on, the 2-Wasserstein distance between
    the values of their frequencies. Equal numbers of labels count as alike, whichever labels these are.

    count_MC: samples of each client by label. score: "silhouette" (-1 .. 1, higher is better) or "davies_bouldin" (from
    0, lower is better). NaN unless there are from 2 to M - 1 clusters of the clients with samples. Raises ValueError
    for other shapes and scores.
    """
    from sklearn import metrics  # imported here because it takes a second, and hosts do not need it

    scores = {"silhouette": metrics.silhouette_score, "davies_bouldin": metrics.davies_bouldin_score}
    if score not in scores:
        raise ValueError(f"score must be {' or '.join(scores)}, got {score!r}")
    if count_MC.ndim != 2 or cluster_M.shape != count_MC.shape[:1]:
        raise ValueError(f"expected counts (M, C) and clusters (M,), got {count_MC.shape} and {cluster_M.shape}")
    total_M = count_MC.sum(1)
    sorted_mC = -np.sort(-count_MC[total_M > 0] / total_M[total_M > 0, None], axis=1)
    cluster_m = cluster_M[total_M > 0]
    if not 2 <= len(np.unique(cluster_m)) < len(cluster_m):
        return float("nan")
    return float(scores[score](sorted_mC, cluster_m))
