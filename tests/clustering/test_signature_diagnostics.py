"""Diagnostics of signatures against scipy and scikit-learn."""

import warnings

import numpy as np
import pytest
import torch
from closeness import close, negligible
from federations import Stage, linear, planted
from scipy.spatial.distance import cdist, pdist, squareform

from cfl_ray.clustering.signature_diagnostics import (
    principal_components,
    record_centre_distances,
    record_distance,
    record_signatures,
    record_similarity,
)


@pytest.fixture
def clients():
    return Stage(planted(6), linear).clients([0])


def signatures(count, features=20):
    return torch.from_numpy(np.random.default_rng(count).standard_normal((count, features)).astype(np.float32))


def test_as_defined(clients):
    ids, signature_SF, centre_KF = np.array([4, 0, 9]), signatures(3), signatures(2)
    record_signatures(clients, ids, signature_SF)
    record_similarity(clients, ids, signature_SF)
    record_distance(clients, ids, signature_SF)
    record_centre_distances(clients, ids, signature_SF, centre_KF)
    found = {name: clients.stats.diagnostics.array(name) for name in clients.stats.diagnostics.names}
    assert all(one.labels[0].tolist() == [4, 0, 9] for one in found.values())
    expected = 1 - squareform(pdist(signature_SF.double(), "cosine"))
    assert close(found["similarity"].value, expected, 1e-5)
    assert close(found["distance"].value, squareform(pdist(signature_SF.double())), 1e-5)
    distances = cdist(signature_SF.double(), centre_KF.double())
    assert close(found["centre_distance"].value, distances, 1e-5)
    assert found["centre_distance"].axes == ("clients", "clusters")
    # three points lie in a plane, so two components (and a third, which is 0) have their distances
    assert found["signatures"].value.shape == (3, 3) and negligible(found["signatures"].value[:, 2], signature_SF, 1e-5)
    assert close(pdist(found["signatures"].value[:, :2]), pdist(signature_SF.double()), 1e-5)


def test_of_many_clients_only_a_sample_is_looked_at(clients, monkeypatch):
    ids, seen = np.arange(2500), []
    monkeypatch.setattr(
        "cfl_ray.clustering.signature_diagnostics.principal_components",
        lambda signature_SF: seen.append(signature_SF) or signature_SF[:, :2],
    )
    record_signatures(clients, ids, torch.arange(2500.0)[:, None].repeat(1, 3))
    found = clients.stats.diagnostics.array("signatures")
    assert found.value.shape == (1000, 2) and len(seen[0]) == 1000
    assert np.array_equal(found.value[:, 0], found.labels[0])


def test_few_signatures():
    assert principal_components(signatures(1)).tolist() == [[0.0]]
    assert principal_components(signatures(30, 3)).shape == (30, 3)
    assert principal_components(signatures(30)).shape == (30, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert principal_components(torch.ones(5, 20)).tolist() == [[0.0] * 5] * 5
