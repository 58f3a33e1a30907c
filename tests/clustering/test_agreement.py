import itertools
import tracemalloc

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.state import State
from cfl_ray.runtime.evaluation import cluster_metrics


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


def test_many_clients_are_counted_in_blocks():
    """The same numbers as scikit-learn's, with a few bytes for each client beside the arrays themselves."""
    count, draw = 300_000, np.random.default_rng(0)
    group_N = draw.integers(0, 5, count, np.int32)
    assign_N = np.where(draw.random(count) < 0.7, group_N, draw.integers(-1, 7, count)).astype(np.int32)
    online = np.arange(count, dtype=np.int32)
    known = assign_N >= 0
    expected = {
        "num_clusters": 7.0,
        "largest_cluster_share": np.bincount(assign_N[known]).max() / known.sum(),
        "ari": adjusted_rand_score(group_N[known], assign_N[known]),
        "nmi": normalized_mutual_info_score(group_N[known], assign_N[known]),
    }
    found = cluster_metrics(State(torch.zeros(7, 1), assign_N), online, group_N)
    assert {name: found[name] for name in expected} == expected
    some = cluster_metrics(State(torch.zeros(7, 1), assign_N), online[::3], group_N)
    assert some["ari"] == adjusted_rand_score(group_N[::3][known[::3]], assign_N[::3][known[::3]])
    assign_N = np.maximum(assign_N, 0)
    tracemalloc.start()
    cluster_metrics(State(torch.zeros(7, 1), assign_N), online, group_N)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * count + 4 * (1 << 20), peak
