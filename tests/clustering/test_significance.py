"""One cluster or several, by the test of Liu et al. for few vectors of many dimensions."""

import numpy as np
import pytest
import torch

from cfl_ray.clustering.agreement import agreement
from cfl_ray.clustering.significance import merge_insignificant, significant_parts, two_clusters

Q = 20


def groups(count, members, apart, seed=0):
    """Rows of `count` groups around directions at this distance from 0, with noise of norm 1."""
    draw = np.random.default_rng(seed)
    centre_KQ = draw.normal(size=(count, Q))
    centre_KQ *= apart / np.linalg.norm(centre_KQ, axis=1, keepdims=True)
    rows = np.repeat(centre_KQ, members, 0) + draw.normal(size=(count * members, Q)) / np.sqrt(Q)
    return torch.from_numpy(rows).float(), np.repeat(np.arange(count), members)


def draw(seed=0):
    return np.random.default_rng(seed)


def test_the_share_of_false_alarms_is_below_the_level():
    found = [two_clusters(groups(1, 15, 1.0, seed)[0], draw(seed))[0] for seed in range(40)]
    assert np.mean(np.array(found) <= 0.05) <= 0.05


@pytest.mark.parametrize("members", [5, 10, 25])
def test_two_groups_that_are_apart_are_two_clusters(members):
    for seed in range(5):
        rows, group = groups(2, members, 4.0, seed)
        p, half = two_clusters(rows, draw(seed))
        assert p == 0.01 and agreement(group, half)["ari"] == 1


def test_the_cluster_index_is_the_published_one():
    """Four points on a line: W of two centres is 0.5 + 0.5, of one centre 101; no Gaussian draw has less."""
    rows = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    p, half = two_clusters(rows, draw())
    null = draw().normal(size=(99, 4)) * rows.double().std(0, correction=0).numpy()

    def index(values):
        ordered = np.sort(values)
        cuts = [
            ((ordered[:at] - ordered[:at].mean()) ** 2).sum() + ((ordered[at:] - ordered[at:].mean()) ** 2).sum()
            for at in (1, 2, 3)
        ]
        return min(cuts) / ((values - values.mean()) ** 2).sum()

    assert half.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    exact = (1 + sum(index(sample) <= 1 / 101 for sample in null)) / 100
    assert p == pytest.approx(exact, abs=0.02), "2-means from the two sides of the mean may end beside the best cut"


def test_scale_place_and_rotation_do_not_matter():
    rows, _ = groups(2, 8, 1.5)
    turned = torch.linalg.qr(torch.from_numpy(draw(5).normal(size=(Q, Q))))[0].float()
    p = two_clusters(rows, draw())[0]
    assert two_clusters(1e3 * rows @ turned + 7, draw())[0] == pytest.approx(p, abs=0.011)


@pytest.mark.parametrize("rows", [torch.zeros(0, 3), torch.ones(2, 3), torch.ones(9, 3)])
def test_too_few_or_equal_rows_are_one_cluster(rows):
    p, half = two_clusters(rows, draw())
    assert p == 1.0 and half.tolist() == [0] * len(rows)
    part, p = significant_parts(rows, draw(), 0.05)
    assert part.tolist() == [0] * len(rows) and p == 1.0


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_number_of_groups_is_found(count):
    for seed in range(4):
        rows, group = groups(count, 10, 4.0, seed)
        part, p = significant_parts(rows, draw(seed), 0.05)
        assert np.array_equal(part, group) and (p == 1.0 if count == 1 else p <= 0.05)


def test_clusters_of_one_group_merge_and_others_stay():
    rows, group = groups(2, 12, 4.0)
    cluster = group * 2 + np.arange(24) % 2  # each group as two clusters
    merged, _ = merge_insignificant(rows, cluster, draw(), 0.05)
    assert merged.tolist() == [0] * 12 + [2] * 12


def test_rows_without_a_cluster_stay_without_and_small_pairs_are_not_merged():
    rows, _ = groups(1, 5, 1.0)
    merged, p = merge_insignificant(rows, np.array([-1, 0, 1, 2, -1]), draw(), 0.05)
    assert merged.tolist() == [-1, 0, 1, 2, -1] and p == 0.0
