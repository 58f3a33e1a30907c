"""Merging of clusters by the cosines of their mean signatures. S is the number of clients with a signature."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize


def cluster_means(signature_SF: Tensor, cluster_S: np.ndarray, num_clusters: int) -> tuple[Tensor, np.ndarray]:
    """Mean signature, float32 (K, F), and number of members, int64 (K,), of each cluster; zeros if it is empty."""
    count_K = np.bincount(cluster_S, minlength=num_clusters)
    index_S = torch.as_tensor(cluster_S, dtype=torch.long)
    sums_KF = torch.zeros(num_clusters, signature_SF.shape[1]).index_add_(0, index_S, signature_SF)
    return sums_KF / torch.from_numpy(np.maximum(count_K, 1)).float()[:, None], count_K


def means_of_emptied(row_EF: Tensor, group_E: np.ndarray, stay_E: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """The groups of which no row stays, ascending, and the mean of the rows that each of them had.

    row_EF, group_E: rows, and the group of each. stay_E: bool (E,), whether a row stays.
    """
    emptied = np.setdiff1d(group_E, group_E[stay_E])
    last_E = np.isin(group_E, emptied)
    positions = np.searchsorted(emptied, group_E[last_E])
    return emptied, cluster_means(row_EF[torch.from_numpy(last_E)], positions, len(emptied))[0]


def merges(similarity_KK: np.ndarray, count_K: np.ndarray, threshold: float) -> list[tuple[int, int]]:
    """The pairs (kept, absorbed) of merges that join all clusters of at least this similarity, by single linkage.

    similarity_KK: symmetric, float (K, K), in -1..1. count_K: number of members of each cluster.
    The most similar pair comes first. Of a pair, the larger cluster keeps its number; if sizes are equal, the cluster
    with the lower number.
    """
    if len(count_K) < 2:
        return []
    # 2 - similarity instead of 1 - similarity, so that no distance is 0
    distance = scipy.spatial.distance.squareform(2.0 - similarity_KK, checks=False)
    kept, size_K, pairs = list(range(len(count_K))), count_K.copy(), []
    for left, right, height, _ in scipy.cluster.hierarchy.linkage(distance, "single"):
        if 2.0 - height < threshold:
            break
        keep, drop = sorted((kept[int(left)], kept[int(right)]), key=lambda k: (-size_K[k], k))
        kept.append(keep)
        size_K[keep] += size_K[drop]
        pairs.append((keep, drop))
    return pairs


@dataclass(frozen=True)
class Merged:
    """Result of merging K clusters into K'."""

    number_K: np.ndarray  # int64: new number, 0 .. K' - 1, of each old cluster
    parts: list[list[int]]  # for each new cluster its old clusters; first the old cluster whose number was kept
    count_K: np.ndarray  # number of members of each old cluster
    compared_k: np.ndarray  # old clusters whose mean signatures were compared
    similarity_kk: np.ndarray  # cosines of the mean signatures of compared_k

    def closest_merged(self, old: int) -> float:
        """The highest cosine between an old cluster and those that it was merged with; NaN if there is none."""
        merged_k = (self.number_K[self.compared_k] == self.number_K[old]) & (self.compared_k != old)
        return self._highest_cosine(old, merged_k)

    def closest_apart(self, olds: list[int]) -> float:
        """The highest cosine between a cluster of `olds` and an old cluster in another new cluster; NaN if none is."""
        apart = (self._highest_cosine(old, self.number_K[self.compared_k] != self.number_K[old]) for old in olds)
        return float(np.fmax.reduce([np.nan, *apart]))

    def _highest_cosine(self, old: int, others_k: np.ndarray) -> float:
        """The highest cosine between an old cluster and these others; NaN if it or no other was compared."""
        cosines = self.similarity_kk[np.ix_(self.compared_k == old, others_k)]
        return float(cosines.max()) if cosines.size else np.nan

    def merged_rows(self, founded: np.ndarray) -> list[int]:
        """The new clusters formed of several old clusters, not counting the clusters `founded` in this round."""
        return [row for row, parts in enumerate(self.parts) if len(np.setdiff1d(parts, founded)) > 1]

    def models(self, models_KP: Tensor, average: bool) -> Tensor:
        """Models (K', P) of the new clusters.

        models_KP: models of the old clusters.
        average: take the mean of the merged clusters' models, weighted by their numbers of members; False: take the
            model of the cluster whose number was kept.
        """
        if self.parts == [[old] for old in range(len(models_KP))]:
            return models_KP
        rows: list[Tensor] = []
        for parts in self.parts:
            if not average or len(parts) == 1:
                rows.append(models_KP[parts[0]])
                continue
            share = self.count_K[parts] / max(self.count_K[parts].sum(), 1)
            weighted = [models_KP[old] * weight for old, weight in zip(parts, share.tolist(), strict=True)]
            rows.append(sum(weighted, start=torch.zeros(())))
        return torch.stack(rows)


def merge_similar(
    signature_SF: Tensor,
    cluster_S: np.ndarray,
    num_clusters: int,
    threshold: float,
    active_S: np.ndarray | None = None,
    founded: Sequence[int] | np.ndarray = (),
) -> Merged:
    """Merges clusters whose mean signatures have a cosine of at least `threshold`, transitively.

    signature_SF, cluster_S: signature and cluster of each client. Clusters without members are not merged.
    active_S: bool (S,), clients whose signatures form the means; clusters without such a client are not merged.
        None: all clients.
    founded: clusters that are new. Of two clusters with equal numbers of members, the older one keeps its number.
    """
    count_K = np.bincount(cluster_S, minlength=num_clusters)
    if active_S is None:
        mean_KF, active_K = cluster_means(signature_SF, cluster_S, num_clusters)
    else:
        mean_KF, active_K = cluster_means(signature_SF[torch.from_numpy(active_S)], cluster_S[active_S], num_clusters)
    compared = np.flatnonzero(active_K)
    compared = compared[np.argsort(np.isin(compared, founded), kind="stable")]
    unit_kF = normalize(mean_KF[compared], dim=1)
    parts = {k: [k] for k in range(num_clusters)}
    similarity_kk = (unit_kF @ unit_kF.T).clamp(-1, 1).double().numpy()
    for keep, drop in merges(similarity_kk, count_K[compared], threshold):
        parts[int(compared[keep])] += parts.pop(int(compared[drop]))
    alive = sorted(parts)
    number_K = np.zeros(num_clusters, np.int64)
    for number, old in enumerate(alive):
        number_K[parts[old]] = number
    return Merged(number_K, [parts[old] for old in alive], count_K, compared, similarity_kk)


def most_similar(feature_MF: Tensor, mean_KF: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """For each row of `feature_MF`, the cluster with the most similar mean, int64 (M,), and the cosine, (M,).

    Without clusters they are -1 and -inf.
    """
    if not len(mean_KF) or not len(feature_MF):
        return np.full(len(feature_MF), -1), np.full(len(feature_MF), -np.inf)
    best = (normalize(feature_MF, dim=1) @ normalize(mean_KF, dim=1).T).clamp(-1, 1).max(1)
    return best.indices.numpy(), best.values.numpy()
