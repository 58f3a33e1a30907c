import itertools

import numpy as np
import pytest
import torch
from closeness import close
from torch.nn.functional import normalize

from cfl_ray.clustering.merging import cluster_means, merge_similar, merges, most_similar


def cosines(signature_SF: torch.Tensor, cluster_S: np.ndarray) -> np.ndarray:
    unit = normalize(cluster_means(signature_SF, cluster_S, int(cluster_S.max()) + 1)[0], dim=1)
    return (unit @ unit.T).double().numpy()


def merged_by_definition(similarity_KK: np.ndarray, count_K: np.ndarray, threshold: float) -> dict[int, list[int]]:
    """StoCFL's rule: in the order of decreasing cosine, every pair at or above the threshold is merged.

    Returns the old clusters in each remaining one.
    """
    group = {k: [k] for k in range(len(count_K))}
    pairs = [
        (-similarity_KK[a, b], a, b)
        for a, b in itertools.combinations(range(len(count_K)), 2)
        if similarity_KK[a, b] >= threshold
    ]
    for _, *pair in sorted(pairs):
        a, b = (next(k for k, parts in group.items() if old in parts) for old in pair)
        if a != b:
            keep, drop = sorted((a, b), key=lambda k: (-count_K[group[k]].sum(), k))
            group[keep] += group.pop(drop)
    return group


def test_means_of_members():
    means, count = cluster_means(torch.tensor([[2.0, 0], [4, 2], [1, 1]]), np.array([2, 2, 0]), 4)
    assert means.tolist() == [[1, 1], [0, 0], [3, 1], [0, 0]] and count.tolist() == [1, 0, 2, 0]


def test_merging_follows_the_papers_rule():
    """Partition, kept clusters and members, for random signatures with several members per cluster."""
    for seed in range(30):
        draw = np.random.default_rng(seed)
        clusters = int(draw.integers(2, 12))
        cluster_S = np.concatenate([np.arange(clusters), draw.integers(0, clusters, 10)])
        signature_SF = torch.from_numpy(draw.standard_normal((len(cluster_S), 3))).float()
        threshold = float(draw.uniform(-0.5, 0.95))
        expected = merged_by_definition(cosines(signature_SF, cluster_S), np.bincount(cluster_S), threshold)
        merged = merge_similar(signature_SF, cluster_S, clusters, threshold)
        found = {parts[0]: sorted(parts) for parts in merged.parts}
        assert found == {kept: sorted(parts) for kept, parts in expected.items()}, seed
        for number, parts in enumerate(merged.parts):
            assert set(cluster_S[merged.number_K[cluster_S] == number]) == set(parts), seed


def test_merging_is_transitive():
    """Clusters 0 and 1, and 1 and 2, are at 45 degrees, 0 and 2 at 90: cos 45 = 0.7071 merges all three."""
    signature_SF = torch.tensor([[1.0, 0], [1, 1], [0, 1]])
    assert merge_similar(signature_SF, np.arange(3), 3, 0.7).parts == [[0, 1, 2]]
    assert merge_similar(signature_SF, np.arange(3), 3, 0.71).parts == [[0], [1], [2]]


def test_the_larger_side_is_kept_and_the_lower_number_on_ties():
    similarity = np.array([[1, 0.9, 0.0], [0.9, 1, 0.8], [0.0, 0.8, 1]])
    assert merges(similarity, np.array([1, 3, 2]), 0.5) == [(1, 0), (1, 2)]
    assert merges(similarity, np.array([1, 1, 2]), 0.5) == [(0, 1), (0, 2)], "two against two: the lower number"
    assert merges(similarity, np.array([1, 1, 3]), 0.5) == [(0, 1), (2, 0)], "the most similar pair first"


def test_identical_signatures_are_one_cluster():
    """Cosine 1, for which a distance of 1 - cosine = 0 would be no edge of the tree."""
    merged = merge_similar(torch.tensor([[0.6, 0.8]] * 4 + [[-0.8, 0.6]]), np.arange(5), 5, 0.99)
    assert merged.number_K.tolist() == [0, 0, 0, 0, 1]


def test_a_threshold_of_minus_one_merges_opposites_too():
    """The cosine of two opposite vectors in float32 may be a little below -1."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        vector = torch.from_numpy(draw.standard_normal(50)).float()
        assert merge_similar(torch.stack([vector, -vector]), np.arange(2), 2, -1.0).parts == [[0, 1]]


@pytest.mark.parametrize("cluster_S, clusters", [([], 0), ([0], 1), ([2], 3), ([], 2)])
def test_nothing_to_merge(cluster_S, clusters):
    """Also where clusters have no members."""
    merged = merge_similar(torch.ones(len(cluster_S), 3), np.array(cluster_S, np.int64), clusters, 0.5)
    assert merged.number_K.tolist() == list(range(clusters)) and merged.parts == [[k] for k in range(clusters)]
    models_KP = torch.zeros(clusters, 4)
    assert all(merged.models(models_KP, average) is models_KP for average in (False, True))


def test_only_clusters_of_active_clients_are_compared():
    signature_SF = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1]])
    active_S = np.array([True, False, True, False])
    assert merge_similar(signature_SF, np.arange(4), 4, 0.5, active_S).parts == [[0, 2], [1], [3]]
    assert merge_similar(signature_SF, np.arange(4), 4, 0.5, np.zeros(4, bool)).parts == [[0], [1], [2], [3]]


def test_means_are_over_active_clients_and_the_larger_cluster_is_by_all_its_members():
    """Cluster 0 has one active client at 45 degrees and two others at 90; cluster 1 is at 0 degrees."""
    signature_SF = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    cluster_S, cosine = np.array([0, 1, 0, 0]), 0.5**0.5
    active_S = np.array([True, True, False, False])
    for threshold, parts in ((cosine - 1e-6, [[0, 1]]), (cosine + 1e-6, [[0], [1]])):
        assert merge_similar(signature_SF, cluster_S, 2, threshold, active_S).parts == parts
    mean_cosine = 1 / 10**0.5  # between (1, 3) / 3 and (1, 0)
    assert merge_similar(signature_SF, cluster_S, 2, mean_cosine + 0.01).parts == [[0], [1]]


def test_the_closest_old_cluster_in_the_same_and_in_another_new_cluster():
    """0, 1, 2, at 0, 20, 60 degrees, are merged above cos 45; 3, at 120, and 4, without an active client, stay."""
    angle_S = torch.deg2rad(torch.tensor([0.0, 20, 60, 120, 0]))
    signature_SF = torch.stack([angle_S.cos(), angle_S.sin()], dim=1)
    merged = merge_similar(signature_SF, np.arange(5), 5, np.cos(np.pi / 4), np.arange(5) < 4)
    assert merged.parts == [[0, 1, 2], [3], [4]]
    inside = [merged.closest_merged(old) for old in range(5)]
    assert np.allclose(inside, np.cos(np.deg2rad([20, 20, 40, np.nan, np.nan])), equal_nan=True)
    apart = [merged.closest_apart(olds) for olds in ([0], [1], [0, 2], [3], [4], [3, 4])]
    assert np.allclose(apart, np.cos(np.deg2rad([120, 100, 60, 60, np.nan, 60])), equal_nan=True)


class TestModels:
    MODELS = torch.tensor([[1.0, 1], [2, 2], [3, 3], [9, 9]])
    SIGNATURES = torch.tensor([[1.0, 0], [1, 0], [0, 1], [1, 0], [0, 1]])

    def test_of_the_larger_cluster(self):
        merged = merge_similar(self.SIGNATURES, np.array([0, 1, 2, 1, 3]), 4, 0.5)  # 1 has two members
        assert merged.models(self.MODELS, average=False).tolist() == [[2, 2], [3, 3]]

    def test_mean_weighted_by_members(self):
        """(1 * 1 + 2 * 2) / 3 and (1 * 3 + 1 * 9) / 2."""
        merged = merge_similar(self.SIGNATURES, np.array([0, 1, 2, 1, 3]), 4, 0.5)
        found = merged.models(self.MODELS, average=True)
        assert close(found, torch.tensor([[5 / 3, 5 / 3], [6, 6]]), 1e-6)

    def test_of_clusters_without_members_stay(self):
        merged = merge_similar(self.SIGNATURES[:2], np.array([0, 2]), 3, 0.5)
        assert merged.number_K.tolist() == [0, 1, 0]
        assert merged.models(self.MODELS[:3], average=False).tolist() == [[1, 1], [2, 2]]

    def test_of_two_equally_large_clusters_the_older_one_s_stays(self):
        """Cluster 0 is new: it has the place of one that was empty."""
        for founded, kept in (((), 0), ([0], 1)):
            merged = merge_similar(self.SIGNATURES[:2], np.arange(2), 2, 0.5, founded=np.array(founded, int))
            assert merged.parts == [[kept, 1 - kept]] and merged.merged_rows(np.array(founded)) == [0][len(founded) :]

    def test_without_a_merge_are_the_same_tensor(self):
        merged = merge_similar(self.SIGNATURES[:3], np.arange(3), 3, 1.1)
        assert merged.models(models := self.MODELS[:3], average=False) is models


class TestMostSimilar:
    def test_cluster_and_its_cosine(self):
        best, cosine = most_similar(torch.tensor([[3.0, 4], [-1, 0]]), torch.tensor([[1.0, 0], [0, 3]]))
        assert best.tolist() == [1, 1] and np.allclose(cosine, [0.8, 0.0])

    def test_without_clusters_the_cosine_is_below_any_threshold(self):
        best, cosine = most_similar(torch.ones(2, 3), torch.zeros(0, 3))
        assert best.tolist() == [-1, -1] and (cosine < -1).all()

    def test_of_no_features(self):
        """Without a valid signature there may be no columns either."""
        assert [len(found) for found in most_similar(torch.zeros(0, 0), torch.ones(2, 3))] == [0, 0]
