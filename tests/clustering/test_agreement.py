import itertools

import numpy as np
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from cfl_ray.clustering.agreement import agreement


def best_matching(true, found) -> int:
    """Number of clients in matching clusters, over every one-to-one matching of clusters with groups."""
    groups, clusters = np.unique(true), np.unique(found)
    names = list(groups) + [-100 - extra for extra in range(max(0, len(clusters) - len(groups)))]
    return max(
        sum(int(((true == group) & (found == cluster)).sum()) for group, cluster in zip(order, clusters))
        for order in itertools.permutations(names, len(clusters))
    )


def test_against_definitions():
    for groups, clusters in ((3, 3), (2, 5), (4, 2), (3, 1)):
        draw = np.random.default_rng(groups * 10 + clusters)
        for _ in range(10):
            true, found = draw.integers(0, groups, 20), draw.integers(0, clusters, 20)
            purity = sum(np.bincount(true[found == cluster]).max() for cluster in np.unique(found)) / 20
            assert agreement(true, found) == {
                "ari": adjusted_rand_score(true, found),
                "nmi": normalized_mutual_info_score(true, found),
                "purity": purity,
                "correct_clients": best_matching(true, found),
            }


def test_numbers_of_clusters_do_not_matter():
    expected = {"ari": 1, "nmi": 1, "purity": 1, "correct_clients": 5}
    assert agreement(np.array([0, 0, 1, 1, 2]), np.array([7, 7, 3, 3, 0])) == expected
