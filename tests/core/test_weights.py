import numpy as np
import pytest
import torch

from cfl_ray.core.weights import cluster_weights, global_weights


def test_every_client_has_its_weight_in_the_row_of_its_cluster():
    weights = cluster_weights(np.array([1, -1, 0, 1]), np.array([5, 6, 7, 8]), 3)
    assert weights.dtype == torch.float64
    assert weights.tolist() == [[0, 0, 7, 0], [5, 0, 0, 8], [0, 0, 0, 0]]
    assert global_weights(np.array([5, 6])).tolist() == [[5, 6]]


def test_a_cluster_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="cluster 2 is assigned, but there are 2 clusters"):
        cluster_weights(np.array([0, 2]), np.ones(2), 2)
