"""Weights of averages over the clients of a round."""

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 20  # values of a block in float64


def cluster_weights(assign_M: np.ndarray, weight_M: np.ndarray, num_clusters: int) -> np.ndarray:
    """Weights (K, M) of one average per cluster, float64 and not normalised: `weight_M` of the members in row k.

    assign_M: cluster of each client; UNASSIGNED (-1): the client is in no average.
    weight_M: weight of each client, such as its number of samples.
    Raises ValueError for a cluster beyond `num_clusters`.
    """
    assign_M = np.asarray(assign_M)
    if len(assign_M) and assign_M.max() >= num_clusters:
        raise ValueError(f"cluster {assign_M.max()} is assigned, but there are {num_clusters} clusters")
    weight_KM = np.zeros((num_clusters, len(assign_M)))
    known = np.flatnonzero(assign_M >= 0)
    weight_KM[assign_M[known], known] = np.asarray(weight_M)[known]
    return weight_KM


def averages_of(weight_RM: np.ndarray, models_MP: Tensor) -> Tensor:
    """Averages (R, P) of models that the server has, float32; the weights of a row add up to 1.

    For methods with an average for each client, whose server reads all models: sums on hosts would have R rows each.
    """
    weights = torch.from_numpy(weight_RM)
    averages_RP = torch.empty(len(weight_RM), models_MP.shape[1])
    width = max(1, _BLOCK // max(1, len(models_MP)))
    for block, part in zip(averages_RP.split(width, 1), models_MP.split(width, 1), strict=True):
        block.copy_(weights @ part.double())
    return averages_RP
