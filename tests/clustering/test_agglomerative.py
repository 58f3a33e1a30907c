import numpy as np
import pytest
import torch
from closeness import close
from scipy.cluster.hierarchy import fcluster
from scipy.spatial.distance import pdist

from cfl_ray.clustering.agglomerative import (
    LINKAGES,
    METRICS,
    by_lowest_member,
    cut_tree,
    distances,
    linkage_tree,
    nearest_centre,
)

SCIPY = {"l1": "cityblock", "l2": "euclidean", "cosine": "cosine"}


def line(*places: float) -> np.ndarray:
    """Condensed distances of points on a line."""
    return pdist(np.array(places)[:, None])


def features(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns))).float()


class TestDistances:
    @pytest.mark.parametrize("metric", METRICS)
    @pytest.mark.parametrize("shape", [(2, 1), (7, 3), (40, 5000)])
    def test_are_scipys(self, metric, shape):
        feature_SF = features(*shape)
        expected = pdist(feature_SF.double().numpy(), SCIPY[metric])
        assert close(distances(feature_SF, metric), expected, 1e-9)

    @pytest.mark.parametrize("metric", METRICS)
    def test_keep_their_precision_far_from_the_origin(self, metric):
        """Rows 1e-3 apart at 1000: float32 products would lose all digits, as 1000^2 * 6e-8 > (1e-3)^2."""
        feature_SF = 1000 + 1e-3 * features(300, 20)
        expected = pdist(feature_SF.double().numpy(), SCIPY["l2" if metric == "cosine" else metric])
        if metric == "cosine":
            unit = feature_SF.double().numpy()
            unit /= np.linalg.norm(unit, axis=1, keepdims=True)
            expected = pdist(unit) ** 2 / 2
        np.testing.assert_allclose(distances(feature_SF, metric), expected, rtol=1e-6)

    @pytest.mark.parametrize("metric", METRICS)
    def test_of_rows_that_nearly_agree(self, metric):
        """More pairs than a block, 1e-5 apart, among rows at a distance of about 4; equal rows are at 0 exactly."""
        feature_SF = features(4, 8).repeat(300, 1) + 1e-5 * features(1200, 8, seed=1)
        feature_SF[700] = feature_SF[2]
        expected = pdist(feature_SF.double().numpy(), SCIPY["l2" if metric == "cosine" else metric])
        if metric == "cosine":
            unit = feature_SF.double().numpy()
            unit /= np.linalg.norm(unit, axis=1, keepdims=True)
            expected = pdist(unit, "sqeuclidean") / 2
        found = distances(feature_SF, metric)
        np.testing.assert_allclose(found, expected, rtol=1e-7)
        assert found[np.flatnonzero(expected == 0)].tolist() == [0]

    def test_by_cosine_a_row_of_zeros_is_at_1(self):
        assert distances(torch.tensor([[0.0, 0], [3, 0], [0, 0], [-2, 0]]), "cosine").tolist() == [1, 1, 1, 1, 2, 1]

    @pytest.mark.parametrize("metric", METRICS)
    @pytest.mark.parametrize("rows", [0, 1])
    def test_of_no_pair(self, metric, rows):
        assert distances(torch.ones(rows, 3), metric).shape == (0,)

    def test_errors(self):
        with pytest.raises(ValueError, match="metric must be one of l1, l2, cosine, got 'l3'"):
            distances(torch.ones(2, 2), "l3")
        with pytest.raises(ValueError, match="2 of 4 rows are not, the first is row 1"):
            distances(torch.tensor([[0.0], [torch.nan], [1], [torch.inf]]), "l2")


class TestTree:
    @pytest.mark.parametrize(
        ("linkage", "top"),
        [
            ("single", 6 - 2),  # 2 to 6
            ("complete", 7 - 0),  # 0 to 7
            ("average", (6 + 7 + 4 + 5) / 4),  # all four pairs
            ("weighted", ((6 + 7) / 2 + (4 + 5) / 2) / 2),
            ("ward", (2 * 2 * 2 / (2 + 2)) ** 0.5 * (6.5 - 1)),  # sqrt(2 |a| |b| / (|a| + |b|)) |mean(a) - mean(b)|
        ],
    )
    def test_heights(self, linkage, top):
        """Points 0, 2, 6, 7: 6 and 7 join at 1, 0 and 2 at 2, then the pairs."""
        np.testing.assert_allclose(linkage_tree(line(0, 2, 6, 7), linkage)[:, 2], [1, 2, top])

    @pytest.mark.parametrize(("linkage", "top"), [("average", (10 + 9 + 8) / 3), ("weighted", ((10 + 9) / 2 + 8) / 2)])
    def test_average_counts_members_and_weighted_does_not(self, linkage, top):
        """Four signatures: 0 and 1 merge at 1, then 2 at 2, and then 3, which is at 10, 9 and 8 from them."""
        np.testing.assert_allclose(linkage_tree(np.array([1.0, 2, 10, 2, 9, 8]), linkage)[:, 2], [1, 2, top])

    def test_errors(self):
        message = "linkage must be one of single, average, complete, weighted, ward, got 'centroid'"
        with pytest.raises(ValueError, match=message):
            linkage_tree(line(0, 1), "centroid")
        with pytest.raises(ValueError):
            linkage_tree(np.ones(2), "single")
        with pytest.raises(ValueError, match="finite"):
            linkage_tree(np.array([np.inf]), "single")


class TestCut:
    @pytest.mark.parametrize(
        ("threshold", "expected"),
        [
            (-1, [0, 1, 2, 3]),
            (0.99, [0, 1, 2, 3]),
            (1, [0, 1, 2, 2]),
            (2, [0, 0, 1, 1]),
            (3.99, [0, 0, 1, 1]),
            (np.inf, [0, 0, 0, 0]),
        ],
    )
    def test_at_a_threshold_that_counts_itself(self, threshold, expected):
        assert cut_tree(linkage_tree(line(0, 2, 6, 7), "single"), threshold=threshold).tolist() == expected

    def test_numbers_follow_the_lowest_member(self):
        """Points 7, 0, 6, 2: the cluster of client 0 has number 0, although its points are the upper ones."""
        labels = cut_tree(linkage_tree(line(7, 0, 6, 2), "single"), threshold=2)
        assert labels.tolist() == [0, 1, 0, 1] and labels.dtype == np.int64
        assert by_lowest_member(np.array([5, -1, 5, 9, 0, 9])).tolist() == [0, 1, 0, 2, 3, 2]

    @pytest.mark.parametrize("linkage", LINKAGES)
    def test_is_scipys(self, linkage):
        Z = linkage_tree(distances(features(60, 3), "l2"), linkage)
        for threshold in (0, *Z[::7, 2], Z[-1, 2]):
            expected = by_lowest_member(fcluster(Z, threshold, "distance"))
            assert cut_tree(Z, threshold=threshold).tolist() == expected.tolist()

    @pytest.mark.parametrize("linkage", LINKAGES)
    def test_gives_the_number_of_clusters_also_with_equal_heights(self, linkage):
        for places in (range(7), [0] * 7, [0, 0, 0, 1, 1, 1, 1]):
            Z = linkage_tree(line(*places), linkage)
            for number in range(1, 10):
                assert set(cut_tree(Z, num_clusters=number)) == set(range(min(number, 7)))

    @pytest.mark.parametrize(
        ("places", "gap", "expected"),
        [
            ((0, 1, 9, 10.5, 50), 20, [0, 0, 0, 0, 1]),  # heights 1, 1.5, 8, 39.5: steps 0.5, 6.5, 31.5
            ((0, 1, 9, 10.5, 18.5), 20, [0, 0, 1, 1, 2]),  # 1, 1.5, 8, 8: steps 0.5, 6.5, 0
            ((0, 1, 9, 10.5, 18.5), 2, [0, 0, 0, 0, 0]),  # the last two alone: no step
            ((0, 1, 4, 9), 3, [0, 0, 0, 1]),  # 1, 3, 5: equal steps, fewer clusters
            ((0, 0, 0), 5, [0, 0, 0]),
            ((0, 8), 5, [0, 0]),  # one merge
            ((0, 1, 2, 3), 5, [0, 0, 0, 0]),
        ],
    )
    def test_at_the_largest_gap(self, places, gap, expected):
        assert cut_tree(linkage_tree(line(*places), "single"), gap=gap).tolist() == expected

    def test_steps_of_rounding_are_no_gap(self):
        """Corners of a simplex, at equal distances except for rounding."""
        assert set(cut_tree(linkage_tree(1 + 1e-15 * np.arange(15), "single"), gap=5)) == {0}

    @pytest.mark.parametrize("rule", [{"threshold": 1.0}, {"num_clusters": 3}, {"gap": 20}])
    def test_of_one_signature_and_of_none(self, rule):
        Z = linkage_tree(distances(torch.ones(1, 3), "l2"), "average")
        assert cut_tree(Z, **rule).tolist() == [0]
        assert cut_tree(Z, **rule, size=1).tolist() == [0]
        none = cut_tree(Z, **rule, size=0)
        assert none.tolist() == [] and none.dtype == np.int64

    @pytest.mark.parametrize(
        ("rules", "message"),
        [
            ({}, "give one of threshold, num_clusters, gap; got None, None, None"),
            ({"threshold": 1.0, "gap": 3}, "give one of threshold, num_clusters, gap; got 1.0, None, 3"),
            ({"threshold": np.nan}, "threshold must be a number, got nan"),
            ({"num_clusters": 0}, "num_clusters must be at least 1, got 0"),
            ({"gap": 1}, "gap must be at least 2 merges, got 1"),
            ({"gap": 2, "size": 5}, "a tree of 5 signatures has 4 merges, got 2"),
        ],
    )
    def test_errors(self, rules, message):
        with pytest.raises(ValueError, match=message):
            cut_tree(linkage_tree(line(0, 1, 2), "single"), **rules)


class TestNearest:
    @pytest.mark.parametrize("metric", METRICS)
    def test_is_the_closest_by_the_same_distance(self, metric):
        """More rows than a block."""
        feature_MF, centre_KF = features(600, 9), features(5, 9, seed=1)
        index_M, distance_M = nearest_centre(feature_MF, centre_KF, metric)
        for m in range(0, 600, 37):
            to_each = distances(torch.cat([feature_MF[m : m + 1], centre_KF]), metric)[:5]  # the pairs of row 0
            assert index_M[m] == to_each.argmin()
            np.testing.assert_allclose(distance_M[m], to_each.min())

    def test_by_hand(self):
        """From (3, 4) to (0, 0) and (6, 8): 7 and 7 by l1, 5 and 5 by l2; to (4, 3) a cosine of 24 / 25."""
        row, centres = torch.tensor([[3.0, 4]]), torch.tensor([[6.0, 8], [0, 0]])
        assert [part.tolist() for part in nearest_centre(row, centres, "l1")] == [[0], [7]]
        assert [part.tolist() for part in nearest_centre(row, centres.flip(0), "l2")] == [[0], [5]]
        np.testing.assert_allclose(nearest_centre(row, torch.tensor([[4.0, 3]]), "cosine")[1], [1 - 24 / 25])

    @pytest.mark.parametrize("metric", METRICS)
    def test_the_lowest_of_equal_centres(self, metric):
        centre_KF = features(3, 700).repeat(5, 1)
        assert set(nearest_centre(features(300, 700, seed=1), centre_KF, metric)[0]) == {0, 1, 2}

    def test_by_cosine_zeros_are_at_1(self):
        index, distance = nearest_centre(torch.tensor([[0.0, 0], [-1, 0]]), torch.tensor([[1.0, 0], [0, 0]]), "cosine")
        assert index.tolist() == [0, 1] and distance.tolist() == [1, 1]

    def test_without_centres_and_without_rows(self):
        index, distance = nearest_centre(torch.ones(2, 3), torch.ones(0, 3), "l2")
        assert index.tolist() == [-1, -1] and distance.tolist() == [np.inf, np.inf]
        assert [part.tolist() for part in nearest_centre(torch.ones(0, 3), torch.ones(2, 3), "cosine")] == [[], []]

    def test_errors(self):
        with pytest.raises(ValueError, match="metric must be one of"):
            nearest_centre(torch.ones(1, 2), torch.ones(1, 2), "cos")
        with pytest.raises(ValueError, match="1 of 2 rows are not, the first is row 1"):
            nearest_centre(torch.ones(1, 1), torch.tensor([[0.0], [torch.nan]]), "l2")


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("metric", METRICS)
def test_planted_clusters_are_found_by_every_rule(metric, linkage):
    truth_S = np.random.default_rng(3).permutation(np.repeat(np.arange(4), 15))
    feature_SF = 10 * torch.eye(4, 30)[torch.from_numpy(truth_S)] + 0.02 * features(60, 30)
    Z = linkage_tree(distances(feature_SF, metric), linkage)
    expected = by_lowest_member(truth_S).tolist()
    assert cut_tree(Z, num_clusters=4).tolist() == expected
    assert cut_tree(Z, threshold=Z[-3, 2] * 0.9).tolist() == expected
    if linkage != "ward":  # its heights grow with the sizes of clusters
        assert cut_tree(Z, gap=20).tolist() == expected
