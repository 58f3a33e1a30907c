"""Clusters of clients over the rounds: arrays, against dictionaries that are filled one client at a time."""

import numpy as np
import pytest
from pages import per_client

from cfl_ray.core.reassigned import Reassigned
from cfl_ray.report.report_data import ClusterHistory, PerClient


def drawn(seed):
    """Reassignments of 20 clients to large cluster numbers in some of 30 rounds, and each client's cluster by round."""
    draw, cluster_of, by_round, recorded = np.random.default_rng(seed), {}, {}, []
    for round in range(1, 31):
        pairs = {}
        for client in draw.choice(100_000, 20, replace=False) % 20 * 1000 if round % 3 else ():
            pairs[int(client)] = int(draw.choice([-1, 5, 2**31 - 1, 7, 100]))
        pairs = {client: cluster for client, cluster in pairs.items() if cluster_of.get(client, -1) != cluster}
        if pairs:
            recorded.append((round, Reassigned.of(list(pairs.items()))))
        cluster_of |= pairs
        by_round[round] = dict(cluster_of)
    return recorded, by_round


@pytest.mark.parametrize("seed", range(5))
def test_it_is_that_of_dictionaries(seed):
    recorded, by_round = drawn(seed)
    history = ClusterHistory(recorded)
    assert {*history.client_M.tolist()} == {client for cluster_of in by_round.values() for client in cluster_of}
    rounds = [1, 2, 9, 10, 30]
    for round, size_K in zip(rounds, history.sizes(rounds), strict=True):
        clusters = [cluster for cluster in by_round[round].values() if cluster >= 0]
        assert dict(zip(history.cluster_K.tolist(), size_K.tolist(), strict=True)) == {
            cluster: clusters.count(cluster) for cluster in history.cluster_K.tolist()
        }
        at_S = history.clusters_at(round)[[0, 3000, 19_000, 12]]
        assert at_S.tolist() == [by_round[round].get(client, -1) for client in (0, 3000, 19_000, 12)]
    changes = {
        (round, client, before, after)
        for round in range(2, 31)
        for client, after in by_round[round].items()
        if after >= 0 and (before := by_round[round - 1].get(client, -1)) >= 0 and before != after
    }
    found = {
        (round, *one) for round, *arrays in history.changes() for one in zip(*(a.tolist() for a in arrays), strict=True)
    }
    assert found == changes and len(changes) > 50
    assert history.rounds_with_changes == sorted({round for round, *_ in changes})


def test_clients_that_leave_all_and_come_back_are_divided_again():
    recorded = [(1, [(0, 0), (1, 0)]), (2, [(0, -1), (1, -1)]), (3, [(0, 1)]), (4, [(1, 1)]), (5, [(1, 0)])]
    history = ClusterHistory([(round, Reassigned.of(pairs)) for round, pairs in recorded])
    assert history.rounds_with_changes == [3, 5]


def test_without_reassignments():
    history = ClusterHistory([])
    assert [size_K.tolist() for size_K in history.sizes([1, 2])] == [[], []] and not [*history.changes()]
    assert history.clusters_at(1)[[0, 1]].tolist() == [-1, -1] and history.rounds_with_changes == []


def test_numbers_of_clients():
    groups = per_client({3: 1, 1: 0, 7: 1})
    assert groups[[7, 0, 1, 9]].tolist() == [1, -1, 0, -1] and PerClient()[[1]].tolist() == [-1]
    both = groups.updated(per_client({1: 2, 8: 2}))
    assert both.client_M.tolist() == [1, 3, 7, 8] and both.value_M.tolist() == [2, 1, 1, 2]
    assert sorted(both.sizes.tolist()) == [2, 2] and len(both) == 4
