import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from cfl_ray.core.grouping import agreement, by_cluster, everyone


def test_mixing_weights_put_every_client_in_the_row_of_its_cluster():
    weights = by_cluster(np.array([1, -1, 0, 1]), np.array([5, 6, 7, 8]), 3)
    assert weights.dtype == torch.float64
    assert weights.tolist() == [[0, 0, 7, 0], [5, 0, 0, 8], [0, 0, 0, 0]]
    assert everyone(np.array([5, 6])).tolist() == [[5, 6]]


def test_a_cluster_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="cluster 2 is assigned, but there are 2 clusters"):
        by_cluster(np.array([0, 2]), np.ones(2), 2)


def best_matching(true, found) -> int:
    """Clients in the right cluster, by trying every one-to-one matching of clusters with groups."""
    groups, clusters = np.unique(true), np.unique(found)
    names = list(groups) + [-100 - extra for extra in range(max(0, len(clusters) - len(groups)))]
    return max(sum(int(((true == group) & (found == cluster)).sum()) for group, cluster in zip(order, clusters)) for order in itertools.permutations(names, len(clusters)))


@pytest.mark.parametrize("groups, clusters", [(3, 3), (2, 5), (4, 2), (3, 1)])
def test_agreement_against_definitions(groups, clusters):
    draw = np.random.default_rng(groups * 10 + clusters)
    for _ in range(10):
        true, found = draw.integers(0, groups, 20), draw.integers(0, clusters, 20)
        result = agreement(true, found)
        purity = sum(np.bincount(true[found == cluster]).max() for cluster in np.unique(found)) / 20
        assert result == {
            "ari": adjusted_rand_score(true, found),
            "nmi": normalized_mutual_info_score(true, found),
            "purity": purity,
            "correct_clients": best_matching(true, found),
        }


def test_names_of_clusters_do_not_matter():
    assert agreement(np.array([0, 0, 1, 1, 2]), np.array([7, 7, 3, 3, 0])) == {"ari": 1, "nmi": 1, "purity": 1, "correct_clients": 5}
