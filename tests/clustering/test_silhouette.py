import numpy as np
import pytest
import torch
from closeness import close
from sklearn.metrics import silhouette_score

from cfl_ray.clustering.agglomerative import LINKAGES, cut_tree, distances, linkage_tree
from cfl_ray.clustering.tree_cut import best_cut, silhouettes


def rows(groups: int, apart: float, size: int = 40, features: int = 6, seed: int = 0) -> torch.Tensor:
    """Gaussian rows around `groups` centres."""
    draw = np.random.default_rng(seed)
    centre = apart * draw.standard_normal((groups, features))
    return torch.from_numpy(centre[np.arange(size) % groups] + draw.standard_normal((size, features)))


@pytest.mark.parametrize("linkage", LINKAGES)
def test_are_those_of_scikit_learn_for_every_cut(linkage):
    """Including clusters of one, whose silhouette is 0."""
    x = rows(3, 2.0)
    distance = distances(x, "l2")
    tree = linkage_tree(distance, linkage)
    found = silhouettes(distance, tree)
    expected = [silhouette_score(x.numpy(), cut_tree(tree, num_clusters=k)) for k in range(2, 40)]
    assert close(found[2:], expected, 1e-9) and np.isnan(found[:2]).all() and len(found) == 40
    assert close(silhouettes(distance, tree, most=7)[2:], expected[:6], 1e-9)


@pytest.mark.parametrize("groups, apart, expected", [(1, 0.0, 1), (2, 6.0, 2), (5, 6.0, 5)])
def test_best_cut_finds_the_groups_and_leaves_one_gaussian_whole(groups, apart, expected):
    for seed in range(5):
        distance = distances(rows(groups, apart, features=50, seed=seed), "l2")
        assert best_cut(distance, linkage_tree(distance, "average")) == expected


def test_of_few_signatures_and_of_equal_ones():
    for size in (1, 2):
        distance = distances(rows(1, 0.0, size=size), "l2")
        assert best_cut(distance, linkage_tree(distance, "average")) == 1
    distance = np.zeros(10)
    assert best_cut(distance, linkage_tree(distance, "average")) == 1, "five equal signatures"
