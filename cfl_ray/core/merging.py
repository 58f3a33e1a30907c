"""Merging clusters by the similarity of their mean signatures."""

from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize


def cluster_means(signature_SF: Tensor, cluster_S: np.ndarray, num_clusters: int) -> tuple[Tensor, np.ndarray]:
    """Mean signature (K, F) and number of members (K,) of each cluster; zeros where it has none."""
    count_K = np.bincount(cluster_S, minlength=num_clusters)
    sums_KF = torch.zeros(num_clusters, signature_SF.shape[1]).index_add_(0, torch.as_tensor(cluster_S, dtype=torch.long), signature_SF)
    return sums_KF / torch.from_numpy(np.maximum(count_K, 1)).float()[:, None], count_K


def merges(similarity_KK: np.ndarray, count_K: np.ndarray, threshold: float) -> list[tuple[int, int]]:
    """Unions (kept, absorbed) that join all pairs at or above `threshold`, most similar first and transitively: single linkage.

    The larger side keeps its number, the lower one on ties.
    """
    if len(count_K) < 2:
        return []
    tree = scipy.cluster.hierarchy.linkage(scipy.spatial.distance.squareform(2.0 - similarity_KK, checks=False), "single")
    kept, size, done = list(range(len(count_K))), count_K.copy(), []
    for left, right, distance, _ in tree:
        if 2.0 - distance < threshold:
            break
        keep, drop = sorted((kept[int(left)], kept[int(right)]), key=lambda k: (-size[k], k))
        kept.append(keep)
        size[keep] += size[drop]
        done.append((keep, drop))
    return done


@dataclass(frozen=True)
class Merged:
    """What became of K clusters. `number_K` is the number of each among the K' that are left, from 0; `parts[k]` are the old clusters in k, the
    kept one first.
    """

    number_K: np.ndarray
    parts: list[list[int]]
    count_K: np.ndarray  # members of each old cluster

    def models(self, models_KP: Tensor, first_P: Tensor, average: bool) -> Tensor:
        """Models (K', P): each that of the kept cluster, or with `average` the mean weighted by members.

        An old cluster beyond the rows of `models_KP` is new and has the model `first_P`.
        """
        if self.parts == [[old] for old in range(len(models_KP))]:
            return models_KP
        row = lambda old: models_KP[old] if old < len(models_KP) else first_P
        if not average:
            return torch.stack([row(parts[0]) for parts in self.parts])
        means = []
        for parts in self.parts:
            share = self.count_K[parts] / max(self.count_K[parts].sum(), 1)
            means.append(sum(row(old) * weight for old, weight in zip(parts, share.tolist())) if len(parts) > 1 else row(parts[0]))
        return torch.stack(means)


def merge_similar(signature_SF: Tensor, cluster_S: np.ndarray, num_clusters: int, threshold: float, active: np.ndarray | None = None) -> Merged:
    """Merges clusters of the S clients whose mean signatures have a cosine of at least `threshold`; those without members stay as they are.

    active: compare only these clusters; None: all that have members.
    """
    mean_KF, count_K = cluster_means(signature_SF, cluster_S, num_clusters)
    compared = np.flatnonzero(count_K) if active is None else np.asarray(active)
    unit_kF = normalize(mean_KF[compared], dim=1)
    parts = {k: [k] for k in range(num_clusters)}
    for keep, drop in merges((unit_kF @ unit_kF.T).clamp(-1, 1).double().numpy(), count_K[compared], threshold):
        parts[int(compared[keep])] += parts.pop(int(compared[drop]))
    alive = sorted(parts)
    number_K = np.zeros(num_clusters, np.int64)
    for number, old in enumerate(alive):
        number_K[parts[old]] = number
    return Merged(number_K, [parts[old] for old in alive], count_K)


def most_similar(feature_MF: Tensor, mean_KF: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Cluster (M,) whose mean signature is most similar to each feature, and that cosine (M,); -1 and -inf where there is no cluster."""
    if not len(mean_KF) or not len(feature_MF):
        return np.full(len(feature_MF), -1), np.full(len(feature_MF), -np.inf)
    best = (normalize(feature_MF, dim=1) @ normalize(mean_KF, dim=1).T).clamp(-1, 1).max(1)
    return best.indices.numpy(), best.values.numpy()
