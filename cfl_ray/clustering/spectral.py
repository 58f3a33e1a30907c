"""Coordinates of clients on leading singular vectors, and spectral clustering by interactions. S: number of clients."""

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.clustering.agglomerative import by_lowest_member
from cfl_ray.system.threads import one_thread


def affinities(interaction_SS: np.ndarray, gamma: float) -> np.ndarray:
    """exp(-gamma ||A_.i - A_.j||^2) without the entries i and j, float64 (S, S), of A scaled to 0 .. 1; diagonal 0."""
    low, high = interaction_SS.min(), interaction_SS.max()
    row_SS = (interaction_SS.T - low) / max(high - low, 1e-8)
    square_SS = scipy.spatial.distance.squareform(scipy.spatial.distance.pdist(row_SS, "sqeuclidean"))
    own_S = row_SS.diagonal()
    square_SS -= (own_S[:, None] - row_SS.T) ** 2 + (row_SS - own_S) ** 2  # the entries i and j
    return np.exp(-gamma * np.maximum(square_SS, 0)) * (1 - np.eye(len(row_SS)))


def best_parts(affinity_SS: np.ndarray, most: int, seed: int) -> tuple[np.ndarray | None, float]:
    """The clusters, int64 (S,), with the least Davies-Bouldin index, and the index; None if no index is below 1.

    Clusters are numbered in the order of their lowest members.
    """
    from sklearn.cluster import SpectralClustering  # imported here because it takes a second, and hosts do not need it
    from sklearn.manifold import SpectralEmbedding
    from sklearn.metrics import davies_bouldin_score

    best: tuple[np.ndarray | None, float] = (None, 1.0)
    for parts in range(2, min(most, len(affinity_SS) - 2) + 1):
        shared = {"n_components": parts, "affinity": "precomputed", "random_state": seed % 2**32}
        with one_thread():
            embedding = SpectralEmbedding(**shared).fit_transform(affinity_SS)
            part_S = SpectralClustering(parts, assign_labels="cluster_qr", **shared).fit_predict(affinity_SS)
        if len(np.unique(part_S)) == parts and (index := davies_bouldin_score(embedding, part_S)) < best[1]:
            best = by_lowest_member(part_S), float(index)
    return best


def leading_coordinates(profile_SF: Tensor, components: int) -> Tensor:
    """y_i (S, K'): coordinates of profiles on the K' = min(K, rank) leading left singular vectors of G."""
    profile_SF = profile_SF.double()
    u_KF = torch.linalg.svd(profile_SF, full_matrices=False).Vh[:components]
    return (profile_SF @ u_KF.T).float()


def decomposed_cosines(delta_MF: Tensor, components: int) -> Tensor:
    """e_i (M, K'): cosines of updates with the K' = min(K, rank) leading singular directions of all updates."""
    delta_MF = delta_MF.double()
    v_KF = torch.linalg.svd(delta_MF, full_matrices=False).Vh[:components]
    return (normalize(delta_MF, dim=1) @ v_KF.T).float()
