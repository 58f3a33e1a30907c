"""Merging clusters by the similarity of their mean signatures."""

import numpy as np
import torch
from scipy.cluster.hierarchy import DisjointSet
from scipy.sparse.csgraph import minimum_spanning_tree
from torch import Tensor
from torch.nn.functional import normalize


def cluster_means(signature_SF: Tensor, cluster_S: np.ndarray, num_clusters: int) -> tuple[Tensor, np.ndarray]:
    """Mean signature (K, F) and number of members (K,) of each cluster; zeros where it has none."""
    count_K = np.bincount(cluster_S, minlength=num_clusters)
    sums_KF = torch.zeros(num_clusters, signature_SF.shape[1]).index_add_(0, torch.as_tensor(cluster_S, dtype=torch.long), signature_SF)
    return sums_KF / torch.from_numpy(np.maximum(count_K, 1)).float()[:, None], count_K


def merges(similarity_KK: np.ndarray, count_K: np.ndarray, threshold: float) -> list[tuple[int, int]]:
    """Unions (kept, absorbed) that join all pairs at or above `threshold`, most similar first and transitively.

    The larger side keeps its number, the lower one on ties. Only the edges of a maximum spanning tree can unite anything.
    """
    distance = 2.0 - similarity_KK  # never 0, which the spanning tree would take for no edge
    np.fill_diagonal(distance, 0)
    tree = minimum_spanning_tree(distance).tocoo()
    near = 2.0 - tree.data >= threshold
    left, right, length = tree.row[near], tree.col[near], tree.data[near]
    sets, kept, size, done = DisjointSet(range(len(count_K))), np.arange(len(count_K)), count_K.copy(), []
    for edge in np.lexsort((right, left, length)):
        a, b = kept[sets[int(left[edge])]], kept[sets[int(right[edge])]]
        keep, drop = sorted((int(a), int(b)), key=lambda k: (-size[k], k))
        sets.merge(int(left[edge]), int(right[edge]))
        kept[sets[int(left[edge])]] = keep
        size[keep] += size[drop]
        done.append((keep, drop))
    return done


def merge_similar(
    signature_SF: Tensor, cluster_S: np.ndarray, models_KP: Tensor, threshold: float, active: np.ndarray | None = None, average: bool = False
) -> tuple[np.ndarray, Tensor]:
    """Clusters (S,) and models (K', P) after merging; clusters that nobody belongs to are dropped.

    active:  compare only these clusters (None: all that have members).
    average: the merged model is the mean weighted by members, instead of the larger cluster's.
    """
    mean_KF, count_K = cluster_means(signature_SF, cluster_S, len(models_KP))
    compared = np.flatnonzero(count_K) if active is None else np.asarray(active)
    unit_kF = normalize(mean_KF[compared], dim=1)
    target_K = np.arange(len(models_KP))
    for keep, drop in merges((unit_kF @ unit_kF.T).double().numpy(), count_K[compared], threshold):
        keep, drop = compared[keep], compared[drop]
        if average:
            share = count_K[drop] / (count_K[keep] + count_K[drop])
            models_KP = models_KP.index_copy(0, torch.tensor([keep]), torch.lerp(models_KP[keep], models_KP[drop], share)[None])
        count_K[keep] += count_K[drop]
        target_K[target_K == target_K[drop]] = keep
    alive = np.unique(target_K[cluster_S])
    return np.searchsorted(alive, target_K[cluster_S]), models_KP if len(alive) == len(models_KP) else models_KP[alive]


def most_similar(feature_MF: Tensor, signature_SF: Tensor, cluster_S: np.ndarray, num_clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """Cluster (M,) whose mean signature is most similar to each feature, and that cosine (M,); -1 where there is no cluster."""
    mean_KF, count_K = cluster_means(signature_SF, cluster_S, num_clusters)
    if not count_K.any():
        return np.full(len(feature_MF), -1), np.full(len(feature_MF), -1.0)
    similarity_MK = normalize(feature_MF, dim=1) @ normalize(mean_KF, dim=1).T
    similarity_MK[:, torch.from_numpy(count_K == 0)] = -2
    best = similarity_MK.max(1)
    return best.indices.numpy(), best.values.numpy()
