import numpy as np
import pytest
import torch

from cfl_ray.core import weights
from cfl_ray.core.weights import averages_of, cluster_weights


def test_every_client_has_its_weight_in_the_row_of_its_cluster():
    weight_KM = cluster_weights(np.array([1, -1, 0, 1]), np.array([5, 6, 7, 8]), 3)
    assert weight_KM.dtype == np.float64
    assert weight_KM.tolist() == [[0, 0, 7, 0], [5, 0, 0, 8], [0, 0, 0, 0]]


def test_a_cluster_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="cluster 2 is assigned, but there are 2 clusters"):
        cluster_weights(np.array([0, 2]), np.ones(2), 2)


def test_averages_of_models_are_computed_in_double_precision_block_by_block(monkeypatch):
    monkeypatch.setattr(weights, "_BLOCK", 12)  # four columns of three models
    weight_RM = np.array([[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    models_MP = torch.cat([torch.rand(3, 9), torch.tensor([[1e8], [1.0], [-1e8]])], 1)
    expected_RP = torch.from_numpy(weight_RM @ models_MP.double().numpy()).float()
    found_RP = averages_of(weight_RM, models_MP)
    assert found_RP.dtype == torch.float32 and torch.equal(found_RP, expected_RP)
    assert found_RP[1, -1].item() == pytest.approx(1 / 3)
